"""Triton versions of the ops, for a GPU. Nothing imports this folder where no GPU is used."""
