"""Seeded workloads: the steps of programs and consumers that use cursors, and the acked entries they leave."""
