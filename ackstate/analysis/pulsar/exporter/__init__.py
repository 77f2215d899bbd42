"""Exports bounds on the redelivery of live subscriptions to Prometheus."""
