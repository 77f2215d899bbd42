"""Where a subscription starts: at the first message, after the last one, at a position, or at a time."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ackstate.integers import integer
from ackstate.position import Position, check_position

if TYPE_CHECKING:
    from ackstate.topic.message_log import MessageLog


class Start(Enum):
    """An end of the message log, by Pulsar's name."""

    EARLIEST = "Earliest"
    """The first message that the log still has."""

    LATEST = "Latest"
    """The next message to be published."""


class StartTime(NamedTuple):
    """The first message that was published at a time or later.

    Attributes:
        time_ms: The time, as in `Message.publish_time_ms`.
    """

    time_ms: int


def start_position(log: MessageLog, start: Start | StartTime | Position) -> Position:
    """Return the position that is read first. It need not be in the log: the next entry that is takes its place.

    A time is found by bisection, so publish times should rise along the log. Where they do not, as with producers whose
    clocks differ, the result is a message at or after the time that follows one before it; messages at or after the
    time may come before it, and earlier ones after it.

    Raises:
        TypeError: It is none of these.
        ValueError: An id is out of range.
        StoreError, CorruptStateError: A message cannot be read.

    Complexity: O(1); for a time, reading O(log entries) messages.

    Source: ``PersistentSubscription.resetCursor`` and ``PersistentMessageFinder`` of Apache Pulsar, which starts after
    the newest message before the time.
    """
    ledgers = log.ledgers
    if start is Start.EARLIEST:
        return ledgers.next_valid(ledgers.first_position)
    if start is Start.LATEST:
        return ledgers.next_valid(ledgers.last_confirmed)
    if isinstance(start, StartTime):
        return _first_published(log, integer("time_ms", start.time_ms))
    return check_position(start)


def _first_published(log: MessageLog, time_ms: int) -> Position:
    ledgers = log.ledgers
    before = ledgers.first_position
    low, high = 0, ledgers.count_between(before, ledgers.last_confirmed)
    while low < high:
        middle = (low + high) // 2
        (message,) = log.read([ledgers.position_after(before, middle + 1)])
        low, high = (middle + 1, high) if message.publish_time_ms < time_ms else (low, middle)
    return ledgers.next_valid(ledgers.position_after(before, low))
