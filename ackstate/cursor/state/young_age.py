"""Separates young acks, which are not persisted yet, from old ones: the ruler, and the age in force."""

from __future__ import annotations

from typing import final

from ackstate.cursor.state.unpersisted_acks import EVERYTHING
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.position import Position

_NOTHING_DELIVERED = Position(0, -1)


@final
class YoungAge:
    """Separates young acks from old ones, by the time since their messages were certainly delivered.

    Args:
        seconds: The age; 0 for none.
    """

    def __init__(self, seconds: int) -> None:
        self.age_ms = seconds * 1000
        self.is_on = seconds > 0
        self.ruler = DeliveryRuler()
        """The times of deliveries."""

    def delivered(self, position: Position, *, now_ms: int) -> None:
        """Note that everything up to a position was sent by now."""
        if self.is_on:
            self._follow_clock(now_ms)
            self.ruler.record(position, now_ms)

    def persistable_up_to(self, *, now_ms: int) -> Position:
        """Return the position up to which acks are old enough to be persisted."""
        if not self.is_on:
            return EVERYTHING
        self._follow_clock(now_ms)
        return self.ruler.old_up_to(self.age_ms, now_ms) or _NOTHING_DELIVERED

    def clear(self) -> None:
        """Forget all deliveries, as after a reset of the cursor."""
        self.ruler.clear()

    def _follow_clock(self, now_ms: int) -> None:
        """Set the ruler back if the clock went back by more than the age.

        Messages sent so far are then old after an age; else they would be young until the clock is where it was.
        """
        times, _ = self.ruler.marks()
        if times and times[-1] - now_ms > self.age_ms:
            self.ruler.set_back(times[-1] - now_ms)
