"""Who is to be told when messages may be sent again?"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

    Waiter = Callable[[], object]


@final
class Waiters:
    """Callables that wait, each for one consumer; not safe for concurrent use."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, Waiter]] = []

    def add(self, waiter: Waiter, consumer: str) -> None:
        """Let one wait; one that is added twice is taken twice."""
        self._waiting.append((consumer, waiter))

    def forget(self, waiter: Waiter) -> None:
        """Let one wait no longer, however often it was added."""
        self._waiting = [waiting for waiting in self._waiting if waiting[1] != waiter]

    def take(self, *, closed_consumers: Container[str]) -> list[Waiter]:
        """Return those whose consumer is not closed, the longest waiting first; they wait no longer."""
        if not self._waiting:
            return []
        ready = [waiter for consumer, waiter in self._waiting if consumer not in closed_consumers]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] in closed_consumers]
        return ready


def call_all(waiters: Iterable[Waiter]) -> None:
    """Call all, also if one raises; then raise what the first raised."""
    errors = []
    for waiter in waiters:
        try:
            waiter()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
