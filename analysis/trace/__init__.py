"""Traces: what happened to subscriptions, recorded live, kept as Parquet."""
