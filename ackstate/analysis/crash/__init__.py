"""A crash harness: programs that hold acks are crashed in many ways, recovered, and judged by set difference."""
