"""Kill a live broker, recover what it left, and compare sets."""
