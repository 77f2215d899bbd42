"""Prepares the process of a campaign: its standard descriptors and its signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def open_standard_descriptors() -> None:
    """Open closed standard descriptors: a pipe could otherwise get the number of one."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


@contextmanager
def terminated_as_interrupted() -> Iterator[Callable[[], None]]:
    """Make SIGTERM end the block as Ctrl-C does; neither signal interrupts the cleanup, nor does a second one.

    Yields a check to be called regularly: an exception that a signal raises in a callback of Python's own, such as
    those of a fork, is lost.
    """
    was_asked: list[int] = []
    # Only the main thread can handle signals.
    signals = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()

    def interrupt(number: int, _: object) -> None:
        """Ignore all further signals, and end the block."""
        was_asked.append(number)
        for each in signals:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    def check() -> None:
        if was_asked:
            raise KeyboardInterrupt

    def forget(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            unraisable(what)

    before = {number: signal.signal(number, interrupt) for number in signals}
    unraisable, sys.unraisablehook = sys.unraisablehook, forget
    try:
        yield check
    finally:
        sys.unraisablehook = unraisable
        for number, handler in before.items():
            signal.signal(number, handler)
