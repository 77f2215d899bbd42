"""Traces of subscriptions: recorded live or generated, stored as Parquet."""
