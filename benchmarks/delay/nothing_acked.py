"""A subscription that has read all messages and acked none, as the delay benchmarks attach it to a view."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate import Position
from ackstate.position_set import PositionSet

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pyroaring import BitMap

    from ackstate.delay import SubscriptionDelayView
    from benchmarks.delayed_messages import LedgerOfMessages


@final
class NothingAcked:
    """An `AckedAndSent` that has acked nothing; it keeps track of the messages that it has sent."""

    def __init__(self, messages: Iterable[tuple[int, BitMap]]) -> None:
        self._unsent = PositionSet()
        for ledger_id, entry_ids in messages:
            self._unsent.update_entries(ledger_id, entry_ids)

    @property
    def unsent_count(self) -> int:
        """How many messages were not sent."""
        return len(self._unsent)

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        """See `AckedAndSent`."""

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        """See `AckedAndSent`."""
        unsent = PositionSet()
        unsent.update_between(self._unsent, first=first, end=end)
        return unsent

    def send(self, due: Iterable[tuple[int, BitMap]]) -> int:
        """Note that messages are in flight, and return their number."""
        count = 0
        for ledger_id, entry_ids in due:
            self._unsent.discard_entries(ledger_id, entry_ids)
            count += len(entry_ids)
        return count


def pass_all(view: SubscriptionDelayView, ledgers: Sequence[LedgerOfMessages], *, now_ms: int = 0) -> None:
    """Let the reader of a view pass messages that its index holds: all from the first to the last."""
    for ledger, at in ((ledgers[0], 0), (ledgers[-1], -1)):
        assert view.skip(Position(ledger.ledger_id, int(ledger.entry_ids[at])), now_ms=now_ms)
