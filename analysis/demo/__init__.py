"""The main job, end to end: a broker that is killed, its recovery, what Spark says of it, and where it is kept."""
