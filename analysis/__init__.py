"""From traces to answers: record, crash, estimate with Spark, report. The only package that knows Spark."""
