"""A model of a whole broker in plain sets, and schedules that compare the real broker with it."""
