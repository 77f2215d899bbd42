"""A whole broker in plain sets: what a subscription should hold, and schedules that compare the real one with it."""
