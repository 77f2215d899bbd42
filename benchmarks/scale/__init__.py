"""The time and memory of the Spark estimate by the size of the trace, compared with DuckDB and an idle Spark."""
