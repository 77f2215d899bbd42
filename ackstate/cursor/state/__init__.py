"""Holds a cursor's acks in memory: which are durable, how old they are, and views of them."""
