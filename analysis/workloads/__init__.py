"""Seeded workloads: what programs and consumers do that use cursors, and which entries that leaves acked."""
