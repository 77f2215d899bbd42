"""Ends a block of the main thread at SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stopped(BaseException):
    """One of the signals has come."""


@contextmanager
def until_stopped() -> Iterator[None]:
    """Leave the block at once when one of the signals comes; in another thread, ignore them.

    The handlers of before are restored at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: object) -> None:
        raise _Stopped

    try:
        before = {number: signal.signal(number, stop) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    except _Stopped:
        return
