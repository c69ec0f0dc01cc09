"""Tensor operations, each with a plain reference."""
