"""Coverage-guided fuzzing of every decoder of foreign bytes: `python -P -m fuzz --help`."""
