"""Decides when a cursor persists, and does it: one write a round, one sync for many cursors."""
