"""How well drafts are accepted: prompt sets through an engine, figures, tables, pictures.

Sees engines, never checkpoints; what it reports is what the engine counted.
"""
