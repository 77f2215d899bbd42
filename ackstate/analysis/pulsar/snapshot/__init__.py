"""Live subscriptions of Pulsar: their redelivery if the broker died now, and how close each limit is."""
