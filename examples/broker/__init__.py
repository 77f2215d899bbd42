"""A broker that clients of Apache Pulsar can use: its binary protocol in front of `ackstate.cursor`."""
