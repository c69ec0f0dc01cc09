"""The running engine: scheduling, steps, log-probabilities, text, threads."""
