"""Reports one ack hole: the consumers that have its messages, since when, and its cost."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate.ack_hole import AckHole

SAMPLE_COUNT_MAX = 64
"""At most this many messages of a hole are examined; in a larger hole they are evenly spread."""


class HoleReason(StrEnum):
    """Why the entries of a hole are not acked."""

    IN_FLIGHT = "in flight"
    """A consumer has them."""

    DELAYED = "delayed"
    """They are not due yet."""

    NACKED = "nacked"
    """A consumer gave them back."""

    NEVER_DELIVERED = "never delivered"
    OWNER_GONE = "owner gone"
    """The consumer that had them closed."""

    DATA_LOST = "data lost"
    """The message log cannot read them: no one will ever ack them."""

    UNKNOWN = "not acked"
    """Only the running broker has the reason."""


@dataclass(frozen=True, slots=True)
class HoleReport:
    """One ack hole.

    Attributes:
        first: Its first entry (included).
        last: Its last entry (included).
        entry_count: How many entries it has.
        age_ms: How long ago its first message was published; None if that is not known.
        why: The cause, as far as it can be seen; if it differs among the messages, `detail` has the numbers.
        detail: A text for people: the consumers, the times, and the numbers of messages.
        consumers: The consumers that have messages of it, each once, sorted.
        deliver_at_ms: When the last of its messages that are delayed is due; None if none is known to be.
        delivery_count: How often the most delivered of its messages was sent; None if that is not known.
        cost_bytes: How many bytes of the ack record exist because of it.
        freed_bytes: How many acking the whole of it frees; below 0 it adds some.
        freed_ranges: The same in ranges.
        mark_delete_advance: How many entries the mark-delete position would move over, acked ones included.
    """

    first: Position
    last: Position
    entry_count: int
    age_ms: int | None
    why: HoleReason
    detail: str
    consumers: tuple[str, ...]
    deliver_at_ms: int | None
    delivery_count: int | None
    cost_bytes: int
    freed_bytes: int
    freed_ranges: int
    mark_delete_advance: int


def costliest(found: Iterable[AckHole], top: int) -> list[AckHole]:
    """Return the hole that holds back the mark-delete position, then those that cost most, ties by position.

    Args:
        found: All holes, in order of position. All are consumed, so that they can be counted, if `top` is above 0.
        top: The most holes to return; 0 or more.
    """
    if top < 1:
        return []
    lowest: list[AckHole] = []

    def others() -> Iterator[AckHole]:
        """Yield all holes but the one that holds back the mark-delete position."""
        for hole in found:
            if not lowest and hole.mark_delete_advance:
                lowest.append(hole)
            else:
                yield hole

    most = heapq.nlargest(top, others(), key=lambda hole: hole.cost_bytes)
    return [*lowest, *most][:top]


def sample(hole: AckHole) -> list[Position]:
    """Return the positions to examine, in order, the first and the last of the hole among them."""
    count = min(hole.entry_count, SAMPLE_COUNT_MAX)
    numbers = (number * (hole.entry_count - 1) // max(1, count - 1) for number in range(count))
    return [Position(hole.ledger_id, hole.first + number) for number in numbers]
