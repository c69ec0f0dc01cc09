"""Target models: configurations, weights, the forward pass."""
