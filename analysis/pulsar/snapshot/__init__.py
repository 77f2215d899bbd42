"""Live subscriptions of Pulsar: what would come back if their broker died now, and how close is each limit?"""
