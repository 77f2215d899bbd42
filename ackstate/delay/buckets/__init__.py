"""The delay index that stores most of its messages on disk, in buckets."""
