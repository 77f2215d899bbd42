"""From traces to answers: record, crash, estimate with Spark, report. The only package that knows Spark."""

from ackstate.checkout import alias

if __name__ == "analysis":
    alias(__name__)
