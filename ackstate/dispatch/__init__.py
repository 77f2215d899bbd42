"""The parts of a `Subscription`: messages in flight, queued and delayed, and the choice of the next message to send."""
