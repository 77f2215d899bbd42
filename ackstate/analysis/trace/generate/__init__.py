"""Generates large traces: seeded, of realistic shapes, each chunk independently, so that a cluster can do it."""
