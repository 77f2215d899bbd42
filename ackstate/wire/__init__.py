"""The bytes: what a cursor's state looks like on a disk."""
