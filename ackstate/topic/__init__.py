"""The parts of a topic: its message log, publisher, policies and delay buckets."""
