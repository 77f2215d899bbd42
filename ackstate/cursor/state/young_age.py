"""Separates young acks, which are not persisted yet, from old ones: the setting, the ruler, and the age in force."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.cursor.state.auto_age import AgeChooser, AutoAge
from ackstate.cursor.state.unpersisted_acks import EVERYTHING
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyroaring import BitMap

_NOTHING_DELIVERED = Position(0, -1)


@final
class YoungAge:
    """Separates young acks from old ones, by the time since their messages were certainly delivered.

    Args:
        setting: The age in seconds, 0 for none, or how it is chosen.
    """

    def __init__(self, setting: int | AutoAge) -> None:
        self.chooser = AgeChooser(setting) if isinstance(setting, AutoAge) else None
        """Chooses the age; None if it was set."""
        self._fixed_age_ms = 0 if isinstance(setting, AutoAge) else setting * 1000
        self.ruler = DeliveryRuler()
        """The times of deliveries."""
        self.is_on = self.chooser is not None or self._fixed_age_ms > 0
        self.is_chosen = self.chooser is not None

    @property
    def age_ms(self) -> int:
        """The age in force."""
        return self._fixed_age_ms if self.chooser is None else self.chooser.choice.age_ms

    @property
    def reason(self) -> str:
        """Why that age; empty if it was set."""
        return "" if self.chooser is None else self.chooser.choice.reason

    def delivered(self, position: Position, *, now_ms: int) -> None:
        """Note that everything up to a position was sent by now."""
        if self.is_on:
            self._follow_clock(now_ms)
            self.ruler.record(position, now_ms)

    def acked(self, entries: Mapping[int, BitMap], *, now_ms: int) -> None:
        """Note that some entries were acked now."""
        if self.chooser is None:
            return
        self._follow_clock(now_ms)
        for ledger_id, bitmap in entries.items():
            for sent_ms, count in self.ruler.sent_counts(ledger_id, bitmap):
                self.chooser.observe(now_ms - sent_ms, count)

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
