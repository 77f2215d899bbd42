"""Proves for a given time that the promises hold, and writes one status page: `make proof BUDGET=1h`."""
