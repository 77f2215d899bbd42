"""What delayed messages cost: ``make bench-delay``."""
