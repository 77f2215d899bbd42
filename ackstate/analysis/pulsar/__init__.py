"""Real Pulsar brokers: estimates for live subscriptions, recordings of them, and moves of their ack states."""
