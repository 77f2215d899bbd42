"""Turns a trace into totals, curves and a recommendation: one job, one pass over each slice of a subscription."""
