"""Generates the pages of the documentation site that are not written by hand, and adapts links."""
