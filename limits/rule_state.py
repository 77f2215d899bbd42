"""Is a rule closed, and how many of the messages asked for does it have room for?"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.limits.rules import Rule, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

# Stands in for the limit of a rule that is off: above every number that a running broker can count to.
NO_LIMIT = 2**63

_COUNTS_MESSAGES = frozenset({Rule.UNACKED_MESSAGES, Rule.CONSUMER_UNACKED_MESSAGES})


@final
class RuleState:
    """A rule's limit, and whether it is closed.

    An entry is dispatched whole. If it alone holds more messages than a limit on messages, it goes out when there
    is nothing else unacked: otherwise it never would.
    """

    __slots__ = ("_has_lone_pass", "_mark", "blocked_count", "is_closed", "limit", "released_at", "rule", "since_ms")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._has_lone_pass = rule in _COUNTS_MESSAGES
        self.limit = NO_LIMIT
        self._mark = NO_LIMIT
        self.is_closed = False
        # While closed: at this use it opens, and has room for the message that it closed on.
        self.released_at = NO_LIMIT
        self.since_ms: int | None = None
        self.blocked_count = 0

    def change(self, limit: int, *, mark: int) -> None:
        """Take another limit, below 1 meaning none; a closed rule stays closed unless it is off now."""
        is_on = limit >= 1
        self.limit = limit if is_on else NO_LIMIT
        self._mark = max(0, mark) if is_on else NO_LIMIT
        self.released_at = self._mark
        if not is_on:
            self._open()

    def admits(self, needed: int, *, used: int, now_ms: int) -> bool:
        """Open if the use has fallen, close if there is no room, and say whether the rule is open now."""
        if self.is_closed and used > self.released_at:
            return False
        if used + needed <= self.limit or (self._has_lone_pass and not used):
            self._open()
        else:
            self._close(needed, now_ms)
        return not self.is_closed

    def open_at(self, used: int) -> None:
        """Open if the use has fallen so far."""
        if self.is_closed and used <= self.released_at:
            self._open()

    def fitting(self, costs: Sequence[int] | None, count: int, *, used: int) -> int:
        """Return how many of the first messages the limit, closed or not, has room for."""
        fitting = fitting_count(costs, count, room=self.limit - used)
        return max(fitting, 1) if self._has_lone_pass and not used else fitting

    def verdict(self, used: int, *, granted: int = 0) -> Verdict:
        """Answer that this rule keeps the rest back."""
        return Verdict(granted, self.rule, used, self.limit, self.released_at, self.since_ms)

    def _open(self) -> None:
        self.is_closed = False
        self.since_ms = None
        self.released_at = self._mark

    def _close(self, needed: int, now_ms: int) -> None:
        # Not closed twice when it opens and shuts in one call: in between it was open to nobody.
        if not self.is_closed:
            self.is_closed = True
            self.since_ms = now_ms
            self.blocked_count += 1
        self.released_at = max(0, min(self._mark, self.limit - needed))


class GateRequest(NamedTuple):
    """What each of the messages that a dispatcher asks for costs at worst; None where each costs 1."""

    record_bytes: Sequence[int]
    ranges: Sequence[int] | None
    weights: Sequence[int] | None


def check(wanted: GateRequest) -> None:
    """Refuse costs that make no sense.

    Raises:
        ValueError: A cost is negative, a weight is not positive, or there are not as many of them as messages.
    """
    record_bytes, ranges, weights = wanted
    for name, costs, least in (
        ("worst case in bytes", record_bytes, 0),
        ("range cost", ranges, 0),
        ("weight", weights, 1),
    ):
        if costs is None:
            continue
        if len(costs) != len(record_bytes):
            raise ValueError(f"{len(record_bytes)} messages and {len(costs)} of {name}: each has one")
        if min(costs) < least:
            index = next(index for index, cost in enumerate(costs) if cost < least)
            raise ValueError(f"{name} of message {index} is {costs[index]}: it cannot be below {least}")


def fitting_count(costs: Sequence[int] | None, count: int, *, room: int) -> int:
    """Return how many of the first messages fit; those that cost nothing fit also where there is less than no room.

    Args:
        costs: What each costs, 0 or more, for as many as are asked for or more; None if each costs 1.
        count: How many are asked for.
        room: What all of them together may cost.

    Complexity: O(count) with costs.
    """
    room = max(room, 0)
    return min(count, room) if costs is None else bisect_right(list(accumulate(costs[:count])), room)


def total_of(costs: Sequence[int] | None, count: int) -> int:
    """Return what the first so many messages cost together."""
    return count if costs is None else sum(costs[:count])
