"""Time and memory of the range store, compared with naive implementations."""
