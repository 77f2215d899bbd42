"""What the range store costs, in nanoseconds and bytes, beside the naive ways to keep the same ranges."""
