"""Chooses the topics to poll next, so that a broker that does not answer delays no others."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

_BROKER_SHARE = 4


@final
class PollQueue:
    """Topics in the order in which they are due.

    A broker has at most a quarter of the polls under way once several brokers are known: polls of a dead one wait for
    their timeouts. Topics whose broker is unknown may have half of them.

    Args:
        at_once: The most polls under way.
        broker_of: Returns the broker that probably has a topic; empty if unknown.

    Complexity: O(log topics) a poll, and O(brokers) a call.
    """

    def __init__(self, at_once: int, broker_of: Callable[[str], str]) -> None:
        self._at_once = at_once
        self._broker_of = broker_of
        self._waiting: list[tuple[float, str]] = []
        self._due: dict[str, deque[tuple[float, str]]] = {}
        self._under_way: Counter[str] = Counter()
        self._brokers: set[str] = set()

    def put(self, topic: str, due_s: float) -> None:
        """Poll a topic when it is due; the topic must not be in the queue."""
        heapq.heappush(self._waiting, (due_s, topic))

    def take(self, now_s: float) -> list[tuple[str, str]]:
        """Return the topics to poll now, each with its broker, for `done`."""
        while self._waiting and self._waiting[0][0] <= now_s:
            due = heapq.heappop(self._waiting)
            broker = self._broker_of(due[1])
            self._brokers.add(broker)
            self._due.setdefault(broker, deque()).append(due)
        taken = []
        while self._under_way.total() < self._at_once:
            free = [each for each in self._due if self._under_way[each] < self._most(each)]
            if not free:
                break
            broker = min(free, key=lambda each: self._due[each][0])
            taken.append((self._due[broker].popleft()[1], broker))
            self._under_way[broker] += 1
            if not self._due[broker]:
                del self._due[broker]
        return taken

    def done(self, broker: str) -> None:
        """Note that the poll of a topic of this broker has ended."""
        self._under_way[broker] -= 1

    def _most(self, broker: str) -> int:
        if not broker:
            return max(self._at_once // 2, 1)
        return self._at_once if len(self._brokers - {""}) < 2 else max(self._at_once // _BROKER_SHARE, 1)
