"""Seeded workloads: what programs and consumers do that use cursors."""
