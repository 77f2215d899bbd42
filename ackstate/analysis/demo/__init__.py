"""The demo, end to end: a broker that is killed, its recovery, Spark's prediction, and the directory of the results."""
