"""Explains the ack holes of a running subscription, and where their messages are."""

from __future__ import annotations

import heapq
from collections import Counter
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ackstate.dispatch.hole_report import HoleReason, HoleReport, costliest, sample
from ackstate.errors import CorruptStateError
from ackstate.integers import check_count
from ackstate.stores.base import LedgerNotFoundError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.ack_hole import AckHole
    from ackstate.cursor.managed import ManagedCursor
    from ackstate.dispatch.deliveries import Deliveries
    from ackstate.dispatch.replay_queue import ReplayQueue
    from ackstate.position import Position
    from ackstate.topic.message_log import MessageLog


class HoleContext(NamedTuple):
    """The places where the messages of a subscription may be.

    Attributes:
        log: The topic's messages.
        cursor: The ack state.
        deliveries: The messages in flight.
        waiting: The messages that wait to be sent.
        has_delays: Whether messages are delayed at all.
        is_delayed: Returns whether all messages of a hole are delayed.
    """

    log: MessageLog
    cursor: ManagedCursor
    deliveries: Deliveries
    waiting: ReplayQueue
    has_delays: bool
    is_delayed: Callable[[AckHole], bool]


class _Look(NamedTuple):
    """The state of one message."""

    reason: HoleReason
    consumer: str = ""
    until_ms: int | None = None
    delivery_count: int = 0


def explain_holes(where: HoleContext, *, top: int, now_ms: int) -> list[HoleReport]:
    """Explain the hole that holds back the mark-delete position, then those that cost the most bytes of the ack record.

    Args:
        where: The places where the messages may be; nothing is changed.
        top: How many holes at most; 0 or more.
        now_ms: The present.

    Raises:
        ValueError: `top` is negative.

    Complexity: O(holes), and reading a few messages of each that is returned.
    """
    check_count("top", top, least=0)
    return [_report(hole, where, now_ms=now_ms) for hole in costliest(where.cursor.view.holes(), top)]


def releasing_holes(
    where: HoleContext, frees: Callable[[AckHole], int], *, top: int, now_ms: int
) -> list[tuple[HoleReport, int]]:
    """Explain the holes that free most of a rule's usage when filled, and return how much each of them frees.

    Complexity: O(holes).
    """
    counted = ((frees(hole), hole) for hole in where.cursor.view.holes())
    most = heapq.nlargest(top, (each for each in counted if each[0] > 0), key=itemgetter(0))
    return [(_report(hole, where, now_ms=now_ms), freed) for freed, hole in most]


def _report(hole: AckHole, where: HoleContext, *, now_ms: int) -> HoleReport:
    looks = [_look(position, where, now_ms=now_ms) for position in sample(hole)]
    reasons = Counter(look.reason for look in looks)
    why = max(reasons, key=lambda reason: reasons[reason])
    due_ms = [look.until_ms for look in looks if look.until_ms is not None and look.reason is HoleReason.DELAYED]
    consumers = {look.consumer for look in looks if look.consumer and look.reason is HoleReason.IN_FLIGHT}
    return HoleReport(
        first=hole.first_position,
        last=hole.last_position,
        entry_count=hole.entry_count,
        age_ms=_age_ms(hole, where.log, now_ms=now_ms),
        why=why,
        detail=_detail(why, looks, hole),
        consumers=tuple(sorted(consumers)),
        deliver_at_ms=max(due_ms, default=None),
        delivery_count=max(look.delivery_count for look in looks),
        cost_bytes=hole.cost_bytes,
        freed_bytes=hole.freed_bytes,
        freed_ranges=hole.freed_ranges,
        mark_delete_advance=hole.mark_delete_advance,
    )


def _look(position: Position, where: HoleContext, *, now_ms: int) -> _Look:
    """Return where an unacked message is."""
    sent = where.deliveries.get(position)
    if sent is not None:
        return _Look(HoleReason.IN_FLIGHT, sent.consumer, None, sent.delivery_count)
    waiting = where.waiting.get(position)
    try:
        (message,) = where.log.read([position])
    except (LedgerNotFoundError, CorruptStateError):
        return _Look(HoleReason.DATA_LOST)
    except StoreError:  # A store that fails now has not necessarily lost anything.
        reason = HoleReason.UNKNOWN if waiting is None else waiting.reason
        return _Look(reason, delivery_count=0 if waiting is None else waiting.delivery_count)
    if waiting is not None:
        is_due = waiting.reason is HoleReason.DELAYED
        reason = HoleReason.NEVER_DELIVERED if is_due else waiting.reason
        return _Look(reason, waiting.consumer, waiting.until_ms or None, waiting.delivery_count)
    if where.has_delays and message.deliver_at_ms > now_ms:
        return _Look(HoleReason.DELAYED, "", message.deliver_at_ms)
    return _Look(HoleReason.NEVER_DELIVERED)


def _age_ms(hole: AckHole, log: MessageLog, *, now_ms: int) -> int | None:
    """Return how long ago the first message of a hole was published; None if it cannot be read."""
    try:
        (first,) = log.read([hole.first_position])
    except (StoreError, CorruptStateError):
        return None
    return max(0, now_ms - first.publish_time_ms)


def _detail(why: HoleReason, looks: Sequence[_Look], hole: AckHole) -> str:
    """Return the consumers of the messages, or the cause why they wait, and their number if it is not all."""
    alike = [look for look in looks if look.reason is why]
    names = ", ".join(sorted({repr(look.consumer) for look in alike if look.consumer}))
    until = max((look.until_ms for look in alike if look.until_ms is not None), default=None)
    text = {
        HoleReason.IN_FLIGHT: f"in flight with {names}",
        HoleReason.NACKED: f"given back by {names}" + ("" if until is None else f", not to be sent before {until} ms"),
        HoleReason.OWNER_GONE: f"its consumer {names} is gone",
        HoleReason.DELAYED: f"delayed until {until} ms",
    }.get(why, why.value)
    if len(alike) == len(looks):
        return text
    of = f"{len(looks)}" if len(looks) == hole.entry_count else f"{len(looks)} looked at, of {hole.entry_count},"
    return f"{len(alike)} of {of} messages: {text}"
