"""Codecs: the bytes of a cursor's state on a disk."""
