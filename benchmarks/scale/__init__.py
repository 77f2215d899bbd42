"""What the Spark estimate takes, by the size of the trace, beside DuckDB and beside Spark doing nothing."""
