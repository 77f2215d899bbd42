"""What belongs to a topic: its message log, publisher, policies and delay buckets."""
