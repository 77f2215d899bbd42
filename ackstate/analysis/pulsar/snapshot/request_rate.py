"""Limits the requests per second to a cluster."""

from __future__ import annotations

import time
from threading import Lock
from typing import final


@final
class RequestRate:
    """Spaces requests evenly. Threads may share it.

    Args:
        per_second: The most requests per second; above 0.
    """

    def __init__(self, per_second: float) -> None:
        self._gap_s = 1 / per_second
        self._next_s = 0.0
        self._lock = Lock()
        self.count = 0

    def wait(self) -> None:
        """Wait until the next request may be sent, and count it."""
        with self._lock:
            now_s = time.monotonic()
            at_s = max(self._next_s, now_s)
            self._next_s = at_s + self._gap_s
            self.count += 1
        time.sleep(at_s - now_s)
