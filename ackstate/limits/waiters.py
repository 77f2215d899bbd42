"""The waiters of a gate: callables that it calls when messages may be sent again."""

from __future__ import annotations

import logging
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    Waiter = Callable[[], object]

_LOG = logging.getLogger(__name__)


@final
class Waiters:
    """Callables that wait, each for one consumer; not safe for concurrent use."""

    def __init__(self) -> None:
        self._numbers = count()
        # Each with its number, in the order they came, and its consumer. _held has those whose consumer was closed when
        # they were last examined: until it is released they are not examined again.
        self._waiting: list[tuple[int, str, Waiter]] = []
        self._held: dict[str, list[tuple[int, str, Waiter]]] = {}

    def add(self, waiter: Waiter, consumer: str) -> None:
        """Add a waiter; one that is added twice is taken twice."""
        self._waiting.append((next(self._numbers), consumer, waiter))

    def forget(self, waiter: Waiter) -> None:
        """Remove a waiter, however often it was added."""
        self._waiting = [each for each in self._waiting if each[2] != waiter]
        kept = {name: [each for each in held if each[2] != waiter] for name, held in self._held.items()}
        self._held = {name: held for name, held in kept.items() if held}

    def release(self, consumer: str) -> None:
        """Note that a consumer is not closed any more."""
        self._waiting += self._held.pop(consumer, ())

    def take(self, *, closed_consumers: Container[str]) -> list[Waiter]:
        """Remove and return the waiters whose consumer is not closed, the longest waiting first.

        Complexity: O(n log n) in the waiters that were added or released since the last call.
        """
        if not self._waiting:
            return []
        waiting, self._waiting = sorted(self._waiting, key=itemgetter(0)), []
        ready = []
        for each in waiting:
            _, consumer, waiter = each
            if consumer in closed_consumers:
                self._held.setdefault(consumer, []).append(each)
            else:
                ready.append(waiter)
        return ready

    def take_all(self) -> list[Waiter]:
        """Remove and return all waiters, the longest waiting first."""
        for consumer in tuple(self._held):
            self.release(consumer)
        return self.take(closed_consumers=())


def call_all(waiters: Iterable[Waiter]) -> None:
    """Call all waiters; the exceptions of one are logged, and stop neither the others nor the caller."""
    for waiter in waiters:
        try:
            waiter()
        except Exception:
            _LOG.exception("a waiter failed that was called because messages may be sent: %r", waiter)
