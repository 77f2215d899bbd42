"""Real Pulsar brokers: what they redelivered, and what they would redeliver now."""
