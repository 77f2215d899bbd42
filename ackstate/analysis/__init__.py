"""Record traces, crash cursors, estimate redelivery with Spark, and report. The only package that uses Spark."""

if __name__ == "analysis":
    raise ImportError("analysis is a link to a folder of ackstate: import ackstate.analysis")
