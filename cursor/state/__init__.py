"""What a cursor has in memory: acks, which of them are durable, and their ages."""
