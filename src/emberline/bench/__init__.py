"""Measuring servers from outside, over HTTP: any engine that speaks OpenAI's API, ours among them.

Nothing here imports the engine: what is measured is what a client sees.
"""
