"""Are the estimates true? Real cursors on real stores, really killed, beside what the trace alone predicts."""
