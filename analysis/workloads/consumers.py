"""What the consumers of one subscription do, by seed: the ledgers of its log, and what is acked in which order.

The shapes of acking are named as in the benchmarks, after the situations that make them.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, final

from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from random import Random

    Runs = Iterable[tuple[int, int, int]]

_STUCK_EVERY = 10
_KEY_SHARED_CONSUMERS = 4
_AGAIN_SHARE = 0.03
_MARK_DELETE_SHARES = (0.0, 0.02, 0.1)
_PERSIST_SHARES = (0.02, 0.1, 0.3)


class Shape(Enum):
    """How consumers ack."""

    IN_ORDER = "one consumer acks as it reads"
    KEY_SHARED = "key-shared consumers of unequal speed, each in its own stretch of the log"
    ONE_STUCK_CONSUMER = "one consumer of ten never acks what it got"
    RANDOM = "any entry, in any order"


def ledgers(chance: Random) -> dict[int, int]:
    """Return the entry counts of a log's ledgers, by id in order: one to five, rarely an empty one among them."""
    ledger_id, counts = 0, {}
    for _ in range(chance.randint(1, 5)):
        ledger_id += chance.randint(1, 4)
        counts[ledger_id] = 0 if chance.random() < 0.1 else chance.randint(1, 120)
    return counts if any(counts.values()) else {**counts, ledger_id + 1: 1}


def steps(
    chance: Random, log: Mapping[int, int], *, length: int, known: Runs = (), shape: Shape | None = None
) -> list[Step]:
    """Return acks, mark-deletes and persists of one cursor.

    No mark-delete is below one that was before it, nor below what acks alone moved it to; some entries are acked again.

    Args:
        chance: Decides everything that is left open.
        log: The number of entries of each ledger, by id in order; at least one entry.
        length: How many steps.
        known: Runs of entries that are acked at first, as ``(ledger_id, first, end)``.
        shape: How consumers ack; None for any.
    """
    consumers = _Consumers(chance, log, known=known, shape=shape or chance.choice(list(Shape)))
    mark_delete_share, persist_share = chance.choice(_MARK_DELETE_SHARES), chance.choice(_PERSIST_SHARES)
    found = []
    for _ in range(length):
        toss = chance.random()
        if toss < persist_share:
            found.append(Step(StepKind.PERSIST))
        elif toss < persist_share + mark_delete_share:
            found.append(Step(StepKind.MARK_DELETE, position=consumers.mark_delete()))
        else:
            found.append(Step(StepKind.ACK, position=consumers.ack()))
    return found


@final
class _Consumers:
    """Choose the next entry; entries are numbered through the log."""

    def __init__(self, chance: Random, log: Mapping[int, int], *, known: Runs, shape: Shape) -> None:
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
        self._stretches = [len(self._entries) * number // _KEY_SHARED_CONSUMERS for number in range(4)]
        self._next_of_shape: Callable[[], int] = {
            Shape.IN_ORDER: self._in_order,
            Shape.KEY_SHARED: self._key_shared,
            Shape.ONE_STUCK_CONSUMER: self._not_stuck,
            Shape.RANDOM: self._any,
        }[shape]

    def ack(self) -> Position:
        index = self._any() if self._chance.random() < _AGAIN_SHARE else self._next_of_shape()
        self._acked.add(index)
        return self._entries[index]

    def mark_delete(self) -> Position:
        """Return an entry not below the first unacked one, where a cursor's mark-delete position cannot be yet."""
        index = min(self._first() + int(self._chance.expovariate(0.2)), len(self._entries) - 1)
        self._acked.update(range(self._first_unacked, index + 1))
        return self._entries[index]

    def _first(self) -> int:
        while self._first_unacked in self._acked:
            self._first_unacked += 1
        return self._first_unacked

    def _in_order(self) -> int:
        return min(self._first(), len(self._entries) - 1)

    def _key_shared(self) -> int:
        consumer = min(int(self._chance.expovariate(1)), _KEY_SHARED_CONSUMERS - 1)
        index = self._stretches[consumer]
        self._stretches[consumer] = (index + 1) % len(self._entries)
        return index

    def _not_stuck(self) -> int:
        start = self._first()
        for index in range(start, len(self._entries)):
            if index not in self._acked and index % _STUCK_EVERY:
                return index
        return self._any()

    def _any(self) -> int:
        return self._chance.randrange(len(self._entries))
