"""Waiting in a test for an effect of another thread or process."""

import threading
import time


def wait_until(condition, *, timeout_s=30.0):
    """Look again and again until a condition holds; fail when it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s"
        pause.wait(0.005)
