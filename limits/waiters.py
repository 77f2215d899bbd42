"""Who is to be told when messages may be sent again?"""

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
        # Each with its number, by which they came, and its consumer. Held are those whose consumer was closed when
        # they were last looked at: until it is released they are not looked at again, however many they are.
        self._waiting: list[tuple[int, str, Waiter]] = []
        self._held: dict[str, list[tuple[int, str, Waiter]]] = {}

    def add(self, waiter: Waiter, consumer: str) -> None:
        """Let one wait; one that is added twice is taken twice."""
        self._waiting.append((next(self._numbers), consumer, waiter))

    def forget(self, waiter: Waiter) -> None:
        """Let one wait no longer, however often it was added."""
        self._waiting = [each for each in self._waiting if each[2] != waiter]
        kept = {name: [each for each in held if each[2] != waiter] for name, held in self._held.items()}
        self._held = {name: held for name, held in kept.items() if held}

    def release(self, consumer: str) -> None:
        """Take note that a consumer is not closed any more."""
        self._waiting += self._held.pop(consumer, ())

    def take(self, *, closed_consumers: Container[str]) -> list[Waiter]:
        """Return those whose consumer is not closed, the longest waiting first; they wait no longer.

        Complexity: O(n log n) in those that came, or were released, since the last call.
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
        """Return all, the longest waiting first; they wait no longer."""
        for consumer in tuple(self._held):
            self.release(consumer)
        return self.take(closed_consumers=())


def call_all(waiters: Iterable[Waiter]) -> None:
    """Call all; what one raises is logged, and keeps neither the others nor the caller from going on."""
    for waiter in waiters:
        try:
            waiter()
        except Exception:
            _LOG.exception("a waiter failed that was told that messages may be sent: %r", waiter)
