"""Replays a recorded subscription under a policy. Imports neither Spark nor a file system."""
