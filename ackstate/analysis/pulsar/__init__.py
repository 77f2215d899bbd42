"""Real Pulsar brokers: predictions for recorded runs, and estimates for live subscriptions."""
