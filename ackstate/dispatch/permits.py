"""How many messages each consumer may still receive, and whose turn it is."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Container


@final
class Permits:
    """The permits of the open consumers, in messages. The consumers with permits form one line for each priority.

    Attributes:
        total: The permits of all consumers that have some.

    Source: ``Consumer.messagePermits`` and ``AbstractDispatcherMultipleConsumers.getNextConsumer`` of Apache Pulsar.
    """

    def __init__(self) -> None:
        self.total = 0
        self._counts: dict[str, int] = {}
        self._priorities: dict[str, int] = {}
        # Invariant: each consumer with permits is in the line of its priority; the lines are sorted, and none is empty.
        self._lines: dict[int, OrderedDict[str, None]] = {}

    def of(self, name: str) -> int:
        """Return how many messages a consumer may still receive; below 0 if a batch was larger than its permits."""
        return self._counts.get(name, 0)

    def open(self, name: str, *, priority: int) -> None:
        """Add a consumer without permits."""
        self._counts[name] = 0
        self._priorities[name] = priority

    def close(self, name: str) -> None:
        """Remove a consumer with its permits."""
        self.add(name, -self._counts[name])
        del self._counts[name], self._priorities[name]

    def add(self, name: str, count: int) -> None:
        """Add permits, or take them if the number is below 0. A consumer that had none goes to the end of its line."""
        before = self._counts[name]
        after = self._counts[name] = before + count
        self.total += max(after, 0) - max(before, 0)
        if before <= 0 < after:
            self._line(self._priorities[name])[name] = None
        elif after <= 0 < before:
            priority = self._priorities[name]
            del self._lines[priority][name]
            if not self._lines[priority]:
                del self._lines[priority]

    def first(self, *, besides: Container[str] = ()) -> str | None:
        """Return the consumer with permits whose turn it is: the first in the line of the lowest priority number.

        Args:
            besides: Consumers that are passed over.

        Complexity: O(1), and O(consumers passed over).
        """
        for line in self._lines.values():
            for name in line:
                if name not in besides:
                    return name
        return None

    def in_turn(self) -> list[str]:
        """Return all consumers with permits in the order of their turns. Complexity: O(them)."""
        return [name for line in self._lines.values() for name in line]

    def peer_count(self, name: str) -> int:
        """Return how many consumers with permits have the priority of one of them, itself included."""
        return len(self._lines.get(self._priorities[name], ()))

    def turn_over(self, name: str) -> None:
        """Send a consumer to the end of its line, unless it has no permits left."""
        if self._counts.get(name, 0) > 0:
            self._lines[self._priorities[name]].move_to_end(name)

    def _line(self, priority: int) -> OrderedDict[str, None]:
        line = self._lines.get(priority)
        if line is None:
            line = self._lines[priority] = OrderedDict()
            self._lines = dict(sorted(self._lines.items()))
        return line

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(consumers)."""
        assert self.total == sum(max(count, 0) for count in self._counts.values())
        assert list(self._lines) == sorted(self._lines)
        assert all(self._lines.values())
        standing = {name: priority for priority, line in self._lines.items() for name in line}
        assert standing == {name: self._priorities[name] for name, count in self._counts.items() if count > 0}
