"""When a cursor persists, and how: one write a round, one sync for many cursors."""
