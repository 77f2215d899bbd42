"""Record traces, crash cursors, estimate redelivery with Spark, and report. The only package that uses Spark."""

from ackstate.checkout import alias

if __name__ == "analysis":
    alias(__name__)
