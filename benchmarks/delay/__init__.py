"""Time and memory of delayed messages: ``make bench-delay``."""
