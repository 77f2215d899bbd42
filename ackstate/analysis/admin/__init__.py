"""Pulsar's admin REST interface, as far as it concerns delays and ack state. Needs the extra ``ackstate[admin]``."""
