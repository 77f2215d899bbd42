"""Records the subscriptions of a running cluster as a trace of polls, over its admin interface."""
