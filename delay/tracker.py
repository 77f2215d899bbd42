"""What does a dispatcher ask of delayed delivery, whoever answers?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ackstate import Position

# The longest time there is: what fits the signed 64 bits that Pulsar stores a time in.
TIME_MS_MAX = 2**63 - 1


class DelayedDeliveryTracker(Protocol):
    """The delayed messages of one subscription, from when the dispatcher meets them until it takes them.

    All times are milliseconds since the epoch, 0 to 2**63 - 1. Time never runs back: a `now_ms` below one
    seen before counts as that one. What was handed out is forgotten; that it is sent and acked is the
    dispatcher's care.

    Source: ``DelayedDeliveryTracker`` of Apache Pulsar.
    """

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Say whether a message that the dispatcher has met must wait.

        Args:
            position: The message.
            deliver_at_ms: Not before this time; negative means no delay.
            now_ms: The time now.

        Returns:
            True: it must wait, skip it; `scheduled_messages` will hand it out. False: deliver it now.

        Raises:
            ValueError: An id or a time is out of range.
            TypeError: An id or a time is not an integer.
        """
        ...

    def has_message_available(self, *, now_ms: int) -> bool:
        """Say whether `scheduled_messages` would hand out anything now."""
        ...

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out, and forget, the lowest due positions that are not acked, at most so many, in order.

        Raises:
            ValueError: `max_messages` is negative, or the time out of range.
        """
        ...

    @property
    def delayed_message_count(self) -> int:
        """How many messages wait, due ones that were not yet handed out among them."""
        ...

    @property
    def memory_bytes(self) -> int:
        """About how much memory the tracker takes."""
        ...

    def should_pause_all_deliveries(self, *, now_ms: int) -> bool:
        """Say whether reading on is in vain, since whatever comes next is due later than all that waits."""
        ...

    @property
    def next_delivery_ms(self) -> int | None:
        """When to ask again: no message that waits is due before; None if none waits."""
        ...

    def reset_tick_time(self, tick_time_ms: int) -> None:
        """Round the times of messages added from now on to another tick.

        Raises:
            ValueError: The tick is below 1 ms.
        """
        ...

    def clear(self) -> None:
        """Forget every message; the dispatcher begins to read anew and will offer again what is not acked."""
        ...

    def close(self) -> None:
        """Let go of everything. Any later call but `close` raises `ValueError`."""
        ...
