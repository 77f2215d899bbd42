"""Seeded behaviour of the consumers of one subscription: the ledgers of its log, and the order of acks."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.subject import Operation, OperationKind
from ackstate.analysis.workloads.traffic import WORKLOADS, Traffic
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from random import Random

    Runs = Iterable[tuple[int, int, int]]

_AGAIN_SHARE = 0.03
_MARK_DELETE_SHARES = (0.0, 0.02, 0.1)
_PERSIST_SHARES = (0.02, 0.1, 0.3)


def ledgers(chance: Random) -> dict[int, int]:
    """Return the entry counts of a log's ledgers, by id in order: one to five, rarely an empty one among them."""
    ledger_id, counts = 0, {}
    for _ in range(chance.randint(1, 5)):
        ledger_id += chance.randint(1, 4)
        counts[ledger_id] = 0 if chance.random() < 0.1 else chance.randint(1, 120)
    return counts if any(counts.values()) else {**counts, ledger_id + 1: 1}


def operations(
    chance: Random, log: Mapping[int, int], *, length: int, known: Runs = (), shape: Traffic | None = None
) -> list[Operation]:
    """Return acks, mark-deletes and persists of one cursor.

    No mark-delete is below an earlier one, nor below the position that acks moved it to; some acks repeat.

    Args:
        chance: Decides all free choices.
        log: The number of entries of each ledger, by id in order; at least one entry.
        length: Number of operations.
        known: Runs of entries that are acked at the start, as ``(ledger_id, first, end)``.
        shape: The order in which consumers ack; None for any of `WORKLOADS`.
    """
    consumers = _Consumers(chance, log, known=known, shape=shape or chance.choice(list(WORKLOADS.values())))
    mark_delete_share, persist_share = chance.choice(_MARK_DELETE_SHARES), chance.choice(_PERSIST_SHARES)
    found = []
    for number in range(length):
        toss = chance.random()
        if toss < persist_share:
            found.append(Operation(number, OperationKind.PERSIST))
        elif toss < persist_share + mark_delete_share:
            found.append(Operation(number, OperationKind.MARK_DELETE, *consumers.mark_delete()))
        else:
            found.append(Operation(number, OperationKind.ACK, *consumers.ack()))
    return found


@final
class _Consumers:
    """Chooses the next entry; entries are numbered across the log."""

    def __init__(self, chance: Random, log: Mapping[int, int], *, known: Runs, shape: Traffic) -> None:
        self._chance = chance
        self._entries = [Position(ledger_id, entry_id) for ledger_id, count in log.items() for entry_id in range(count)]
        index_of: dict[tuple[int, int], int] = {entry: index for index, entry in enumerate(self._entries)}
        self._acked = {
            index_of[ledger_id, entry_id]
            for ledger_id, first, end in known
            for entry_id in range(first, end)
            if (ledger_id, entry_id) in index_of
        }
        # Invariant: every entry before it is acked.
        self._first_unacked = 0
        order = shape.ack_order(len(self._entries), chance)
        self._to_come = (index for index in order if index not in self._acked)

    def ack(self) -> Position:
        """Return the entry to ack next: sometimes one acked before, otherwise the next of the shape's order."""
        is_again = self._chance.random() < _AGAIN_SHARE
        index = self._any() if is_again else next(self._to_come, self._any())
        self._acked.add(index)
        return self._entries[index]

    def mark_delete(self) -> Position:
        """Return an entry at or above the first unacked one, which the mark-delete position cannot have reached."""
        index = min(self._first() + int(self._chance.expovariate(0.2)), len(self._entries) - 1)
        self._acked.update(range(self._first_unacked, index + 1))
        return self._entries[index]

    def _first(self) -> int:
        while self._first_unacked in self._acked:
            self._first_unacked += 1
        return self._first_unacked

    def _any(self) -> int:
        return self._chance.randrange(len(self._entries))
