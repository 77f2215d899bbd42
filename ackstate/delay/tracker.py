"""The protocol between a dispatcher and its tracker of delayed messages."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Protocol

from ackstate.integers import integer
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position, check_position

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from pyroaring import BitMap

    from ackstate.delay.position_set import PositionSet
    from ackstate.delay.shared_index import SharedDelayIndex

# The latest time there is: Pulsar stores a time in signed 64 bits.
TIME_MS_MAX = 2**63 - 1


class AckedAndSent(Protocol):
    """The reports of a subscription to its tracker. A cursor with a dispatcher can."""

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """Remove the acked entries from a bitmap of entries of one ledger."""
        ...

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        """Return the unsent messages that the reader has passed, from `first` (included) to `end` (excluded).

        These are all entries below the read position that are not acked, not in flight and not queued for sending.
        """
        ...


class DelayedDeliveryTracker(Protocol):
    """The delayed messages of one subscription, from when the dispatcher meets them until it takes them.

    Derive your own tracker from this class: the methods that only some trackers need have defaults.

    All times are milliseconds since the epoch, 0 to 2**63 - 1. A clock may jump back: a tracker either keeps the latest
    time seen, or takes each time as it is given, and documents which. A message that was handed out is forgotten. The
    dispatcher checks that its own time has come, sends it, and follows it until it is acked.

    Source: ``DelayedDeliveryTracker`` of Apache Pulsar.
    """

    __slots__ = ()

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Return whether a message that the dispatcher has met must wait.

        Args:
            position: The message.
            deliver_at_ms: The time at which to deliver it, which the tracker may round; negative means no delay.
            now_ms: The time now.

        Returns:
            True if it must wait: skip it, `scheduled_messages` will hand it out. False if it is to be delivered now.

        Raises:
            ValueError: An id or a time is out of range.
            TypeError: An id or a time is not an integer.
        """
        ...

    def has_message_available(self, *, now_ms: int) -> bool:
        """Return whether `scheduled_messages` would hand out anything now."""
        ...

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out, and forget, positions that are due, at most `max_messages`, in position order.

        The tracker decides which ones if there are more, whether acked ones are omitted, and the meaning of a negative
        maximum.

        Raises:
            ValueError: A number is out of range.
            TypeError: A number is not an integer.
        """
        ...

    @property
    def delayed_message_count(self) -> int:
        """How many messages wait, including due ones that were not yet handed out."""
        ...

    @property
    def memory_bytes(self) -> int:
        """About how much memory the tracker takes."""
        ...

    @property
    def next_delivery_ms(self) -> int | None:
        """When to poll again: no message that waits is due before; None if none waits."""
        ...

    def clear(self) -> None:
        """Forget every message; the dispatcher restarts and will offer the unacked messages again."""
        ...

    def close(self) -> None:
        """Release everything. Any later call but `close` raises `ValueError`."""
        ...

    # The rest has a default, which suits a tracker of one subscription that starts empty.

    @property
    def shared_index(self) -> SharedDelayIndex | None:
        """The index that all subscriptions of the topic share, for the message log to feed; None if there is none."""
        return None

    def attach(self, subscription: AckedAndSent) -> None:  # noqa: ARG002
        """Register the subscription, which can report more than `is_acked` does."""
        return

    def skip(self, position: Position, *, now_ms: int) -> bool:  # noqa: ARG002
        """Return whether a message is known to wait: then it need not be read, nor offered.

        A message that is not known to wait must be read and offered.

        Raises:
            ValueError: An id or the time is out of range.
            TypeError: One of them is not an integer.
        """
        return False

    def unknown(self, positions: Sequence[Position], *, now_ms: int) -> Sequence[Position]:
        """Return those of the next messages that are not known to wait: those for which `skip` returns False.

        Raises:
            As `skip`.
        """
        return [position for position in positions if not self.skip(position, now_ms=now_ms)]

    def reading(self, first: Position) -> AbstractContextManager[object]:  # noqa: ARG002
        """Return a context in which to read and offer unread messages, the first of which is at a position.

        With a shared index, one subscription at a time reads messages that the index may lack, so that the
        subscriptions after it can skip them.
        """
        return nullcontext()

    def advance_mark_delete(self, position: Position) -> None:  # noqa: ARG002
        """Note that everything up to a position, included, is durably acked, until `clear`.

        Raises:
            ValueError: An id is out of range.
            TypeError: An id is not an integer.
        """
        return


def check_time(time_ms: int, *, name: str) -> int:
    """Return a time as a plain integer; refuse one outside 0 to 2**63 - 1.

    Raises:
        ValueError: The time is out of range.
        TypeError: The time is not an integer.
    """
    if type(time_ms) is not int:
        time_ms = integer(name, time_ms)
    if not 0 <= time_ms <= TIME_MS_MAX:
        raise ValueError(f"{name} must be in 0..{TIME_MS_MAX}, got {time_ms}")
    return time_ms


def check_message(position: Position, deliver_at_ms: int, now_ms: int) -> tuple[Position, int, int]:
    """Return a message that is added, its time and the time now, of plain integers; -1 is no delay.

    Raises:
        ValueError: An id or a time is out of range.
        TypeError: An id or a time is not an integer.
    """
    ledger_id, entry_id = position
    # Called for each message that is read: it calls no function for a valid message.
    if (
        type(position) is Position
        and type(ledger_id) is type(entry_id) is type(deliver_at_ms) is type(now_ms) is int
        and 0 <= ledger_id <= LEDGER_ID_MAX
        and 0 <= entry_id <= ENTRY_ID_MAX
        and -1 <= deliver_at_ms <= TIME_MS_MAX
        and 0 <= now_ms <= TIME_MS_MAX
    ):
        return position, deliver_at_ms, now_ms
    position = check_position(position, entry_id_min=0)
    return position, check_deliver_at(deliver_at_ms), check_time(now_ms, name="now_ms")


def check_deliver_at(deliver_at_ms: int) -> int:
    """Return when a message is to be delivered as a plain integer, -1 for one without a delay.

    Raises:
        ValueError: The time is above 2**63 - 1.
        TypeError: The time is not an integer.
    """
    if type(deliver_at_ms) is not int:
        deliver_at_ms = integer("deliver_at_ms", deliver_at_ms)
    return check_time(deliver_at_ms, name="deliver_at_ms") if deliver_at_ms >= 0 else -1
