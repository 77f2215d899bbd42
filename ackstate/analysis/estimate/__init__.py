"""Computes totals, curves and a recommendation from a trace: one job, one pass over each slice of a subscription."""
