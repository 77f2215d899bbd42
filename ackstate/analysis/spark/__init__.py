"""Runs the estimate on Spark: session, cluster, source and the program that workers start."""
