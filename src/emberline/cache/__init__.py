"""KV memory: which pages there are, and the tensors behind them."""
