"""The receipts of a cursor: checks that each is durable exactly if its ack is on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.promises import Promise, PromiseBrokenError, hold

if TYPE_CHECKING:
    from collections.abc import Collection

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.results import Receipt
    from crash.model.ack_model import AckModel
    from crash.model.numbered_log import NumberedLog


class _Given(NamedTuple):
    receipt: Receipt
    numbers: frozenset[int]
    left: frozenset[int] | None  # of the one batch that it is for, if it is not for whole entries


@final
class Receipts:
    """The receipts of one open cursor."""

    def __init__(self, log: NumberedLog) -> None:
        self._log = log
        self._given: list[_Given] = []
        self._pending: list[_Given] = []  # the receipts that were not durable at the last check

    def add(self, receipt: Receipt, numbers: Collection[int], *, left: Collection[int] | None = None) -> None:
        """Store a receipt.

        Args:
            receipt: The receipt of an ack.
            numbers: Numbers of the acked entries, or that of a batch of which only some messages are acked.
            left: The unacked messages of that batch.
        """
        given = _Given(receipt, frozenset(numbers), None if left is None else frozenset(left))
        self._given.append(given)
        self._pending.append(given)

    def check_none_lies(self, cursor: ManagedCursor, model: AckModel, *, count_max: int | None = None) -> None:
        """Check the receipts that may have become durable: all, or a number of the earliest and of the latest.

        The earliest pending ones are those that persists have skipped.

        Raises:
            PromiseBrokenError: A receipt is durable without being on the disk, or the other way round.
        """
        asked = self._pending
        if count_max is not None and len(asked) > 2 * count_max:
            asked = asked[:count_max] + asked[-count_max:]
        for given in asked:
            says_durable, is_durable = cursor.durable(given.receipt), _is_durable(given, model)
            is_late = is_durable and not says_durable and not cursor.view.is_dirty
            hold(Promise.I15, not is_late, f"a receipt is late: {self._log.text(given.numbers)} is on the disk")
            if says_durable and not is_durable:
                found = f"a receipt lied: {self._log.text(given.numbers)} counts as durable and is not on the disk"
                raise PromiseBrokenError(Promise.I2, found, entry_count=len(given.numbers - model.durable) or 1)
        if count_max is None:
            self._pending = [given for given in self._pending if not cursor.durable(given.receipt)]

    def check_survivors(self, cursor: ManagedCursor, model: AckModel) -> None:
        """Check all receipts, including durable ones, whose acks others may have displaced."""
        self._pending = list(self._given)
        self.check_none_lies(cursor, model)

    def check_void(self, cursor: ManagedCursor) -> None:
        """Check that no receipt counts after a reset, and remove all."""
        for given in self._given:
            found = f"a receipt from before the reset counts: {self._log.text(given.numbers)}"
            hold(Promise.I13, not cursor.durable(given.receipt), found)
        self._given.clear()
        self._pending.clear()


def _is_durable(given: _Given, model: AckModel) -> bool:
    if given.left is None:
        return model.is_durable(given.numbers)
    return all(model.is_part_durable(number, set(given.left)) for number in given.numbers)
