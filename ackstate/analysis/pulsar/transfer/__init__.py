"""Exports the ack states of Pulsar subscriptions to a file, and imports them into a topic or through a broker."""
