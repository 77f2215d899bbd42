"""Pulsar's own cursor, range set and delay tracker next to ours, on the same workloads, in alternating rounds."""
