"""Messages asked for, and what they cost."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Wanted(NamedTuple):
    """What each of the messages that a dispatcher asks for costs at worst; None where each costs 1."""

    record_bytes: Sequence[int]
    ranges: Sequence[int] | None
    weights: Sequence[int] | None


def check(wanted: Wanted) -> None:
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
