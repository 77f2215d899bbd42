"""The unacked messages of partly acked batches.

An entry of the message log may be a batch of messages, each acked by its index. The entry itself is acked once all of
its messages are, so its state is stored here only between the first of these acks and the last.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, insort
from collections.abc import Mapping
from itertools import takewhile
from operator import index
from typing import TYPE_CHECKING, NamedTuple, final

from pyroaring import BitMap

from ackstate.position import Position, check_position

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_WORD_BITS = 64
_WORD_MIN, _WORD_MAX = -(2**63), 2**63 - 1


class _LedgerBatches(NamedTuple):
    """The partly acked batches of one ledger: entry id -> unacked indexes as a mask, and the same ids in order."""

    unacked: dict[int, int]
    entry_ids: BitMap


@final
class BatchIndexes(Mapping[Position, tuple[int, ...]]):
    """Position of each partly acked batch -> its unacked indexes, as words of bits; a 1 is an unacked message.

    A mapping in order of position, whose words end with one that is not 0.

    >>> batches = BatchIndexes()
    >>> batches.ack(Position(3, 7), [0b0111]), batches.ack(Position(3, 7), [0b1101])
    (False, False)
    >>> batches[Position(3, 7)]
    (5,)
    >>> batches.ack(Position(3, 7), [0b1010]), len(batches)
    (True, 0)

    Bit j of word i is the message with index 64 * i + j. Words are signed 64-bit numbers as in Java's
    ``BitSet.toLongArray``: trailing zero words may be missing, and an empty list means that the whole batch is acked.
    The size of a batch is not known here, so the first ack of a batch is stored as given.

    Acks are never undone: every later ack is ANDed with the stored words. Apache Pulsar does so for individual acks; a
    cumulative ack there replaces the words if it acks more from the front, and so loses the individual acks behind.

    A refused call changes nothing. Not safe for concurrent mutation.
    """

    def __init__(self) -> None:
        # Invariant: ids rise and are the keys of by_ledger; every ledger has a batch; every mask has a bit.
        self._ledger_ids: list[int] = []
        self.by_ledger: dict[int, _LedgerBatches] = {}
        """To be read only. It is empty if there is no batch, which each ack checks without a call."""

    def __len__(self) -> int:
        return sum(len(ledger.unacked) for ledger in self.by_ledger.values())

    def __bool__(self) -> bool:
        return bool(self.by_ledger)  # five times as fast as counting them

    def __iter__(self) -> Iterator[Position]:
        for ledger_id in self._ledger_ids:
            for entry_id in self.by_ledger[ledger_id].entry_ids:
                yield Position(ledger_id, entry_id)

    def __getitem__(self, position: Position) -> tuple[int, ...]:
        mask = self._mask(*position)
        if not mask:
            raise KeyError(position)
        count = -(-mask.bit_length() // _WORD_BITS)
        return struct.unpack(f"<{count}q", mask.to_bytes(count * 8, "little"))

    def __contains__(self, position: object) -> bool:
        if not isinstance(position, tuple):
            return False
        ledger_id, entry_id = position
        return self._mask(ledger_id, entry_id) != 0

    def __eq__(self, other: object) -> bool:
        return self.by_ledger == other.by_ledger if isinstance(other, BatchIndexes) else super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<BatchIndexes of {len(self)} partly acked batches>"

    def ack(self, position: Position, unacked_words: Iterable[int]) -> bool:
        """Ack all messages of one batch but some, and return whether no message is left unacked.

        Then the batch is removed, and the caller must ack its entry, which must not have been acked as a whole before.

        Raises:
            ValueError: An id is out of range, the entry id is -1, or a word does not fit signed 64 bits.
            TypeError: An id or a word is not an integer.

        Complexity: O(words); plus O(log ledgers) for the first batch of a ledger.
        """
        ledger_id, entry_id = check_position(position, entry_id_min=0)
        words = [_checked(word) for word in unacked_words]
        unacked = int.from_bytes(struct.pack(f"<{len(words)}q", *words), "little")
        held = self._mask(ledger_id, entry_id)
        if held:
            unacked &= held
        if not unacked:
            self.discard(Position(ledger_id, entry_id))
            return True
        ledger = self.by_ledger.get(ledger_id)
        if ledger is None:
            insort(self._ledger_ids, ledger_id)
            ledger = self.by_ledger[ledger_id] = _LedgerBatches({}, BitMap())
        ledger.unacked[entry_id] = unacked
        ledger.entry_ids.add(entry_id)
        return False

    def discard(self, position: Position) -> None:
        """Remove one batch, if it is stored: its entry was acked as a whole."""
        if not self.by_ledger:
            return
        ledger_id, entry_id = position
        ledger = self.by_ledger.get(ledger_id)
        if ledger is None or entry_id not in ledger.unacked:
            return
        unacked, entry_ids = ledger
        del unacked[entry_id]
        entry_ids.remove(entry_id)
        if not unacked:
            at = bisect_left(self._ledger_ids, ledger_id)
            self._forget_ledgers(at, at + 1)

    def discard_entries(self, ledger_id: int, entry_ids: BitMap) -> None:
        """Remove the batches of one ledger that are among some entries, which were acked as wholes."""
        for position in self.among(ledger_id, entry_ids):
            self.discard(position)

    def among(self, ledger_id: int, entry_ids: BitMap) -> list[Position]:
        """Return those batches of one ledger that are among some entries, in order."""
        ledger = self.by_ledger.get(ledger_id)
        return [Position(ledger_id, entry_id) for entry_id in ledger.entry_ids & entry_ids] if ledger else []

    def remove_at_most(self, position: Position) -> int:
        """Remove every batch at or below a position and return their number; entry -1 removes only the ledgers below.

        Raises:
            ValueError: An id is out of range.
            TypeError: An id is not an integer.

        Complexity: O(removed batches), O(log ledgers) and one bitmap operation.
        """
        ledger_id, entry_id = check_position(position)
        below = bisect_left(self._ledger_ids, ledger_id)
        forgotten = self._forget_ledgers(0, below)
        if ledger_id not in self.by_ledger:
            return forgotten
        unacked, entry_ids = self.by_ledger[ledger_id]
        if entry_ids.max() <= entry_id:
            return forgotten + self._forget_ledgers(0, 1)
        for entry in takewhile(lambda entry: entry <= entry_id, entry_ids):
            del unacked[entry]
            forgotten += 1
        entry_ids.remove_range(0, entry_id + 1)
        return forgotten

    def copy(self) -> BatchIndexes:
        """Return an independent copy. Complexity: O(batches)."""
        twin = BatchIndexes()
        twin._ledger_ids = self._ledger_ids[:]
        twin.by_ledger = {
            ledger_id: _LedgerBatches(unacked.copy(), entry_ids.copy())
            for ledger_id, (unacked, entry_ids) in self.by_ledger.items()
        }
        return twin

    def _mask(self, ledger_id: int, entry_id: int) -> int:
        """Return the unacked indexes of a batch, or 0 if it is not stored."""
        ledger = self.by_ledger.get(ledger_id)
        return ledger.unacked.get(entry_id, 0) if ledger else 0

    def _forget_ledgers(self, first: int, end: int) -> int:
        ledger_ids = self._ledger_ids[first:end]
        del self._ledger_ids[first:end]
        return sum(len(self.by_ledger.pop(ledger_id).unacked) for ledger_id in ledger_ids)

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(batches)."""
        assert self._ledger_ids == sorted(self.by_ledger)
        for unacked, entry_ids in self.by_ledger.values():
            assert unacked
            assert list(entry_ids) == sorted(unacked)
            assert all(mask > 0 for mask in unacked.values())


def _checked(word: int) -> int:
    try:
        number = index(word)
    except TypeError:
        raise TypeError(f"words of unacked indexes must be integers, got {word!r}") from None
    if not _WORD_MIN <= number <= _WORD_MAX:
        raise ValueError(f"words of unacked indexes must fit signed 64 bits, got {number}")
    return number


NO_BATCHES = BatchIndexes()
"""No partly acked batch; must not be changed."""
