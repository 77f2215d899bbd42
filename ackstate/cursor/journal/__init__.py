"""The bytes of a cursor's state: formats, recovery, and holes that delay buckets hold."""
