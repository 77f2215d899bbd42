"""A crash harness: whatever holds acks is crashed in many ways, recovered, and judged by set difference."""
