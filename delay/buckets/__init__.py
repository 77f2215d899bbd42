"""The delay index that keeps most of its messages on disk, in buckets."""
