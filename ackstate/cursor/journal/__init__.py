"""The bytes of a cursor's state: formats and recovery."""
