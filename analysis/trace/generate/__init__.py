"""Big traces, made: seeded, of real shapes, each chunk by itself, so that a cluster makes them in parallel."""
