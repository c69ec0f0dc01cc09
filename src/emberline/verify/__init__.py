"""How much of each block is verified."""
