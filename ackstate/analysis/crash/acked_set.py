"""Sets of acked entries and messages as the bits of an integer. They share no code with the cursor that they judge."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LISTED_MAX = 8


@final
class Numbering:
    """The bits of the entries of a message log, and of the messages of their batches.

    Args:
        ledgers: The number of entries of each ledger, by id in order.
        batch_size: Messages of each entry; 0 where no entry is acked in parts.

    Attributes:
        entry_count: How many entries the log has.
        every_entry: Their bits.
        nothing: The empty set.
    """

    def __init__(self, ledgers: Mapping[int, int], *, batch_size: int = 0) -> None:
        self.ledgers, self.batch_size = ledgers, batch_size
        self.entry_count = 0
        self._first: dict[int, int] = {}
        for ledger_id, count in ledgers.items():
            self._first[ledger_id] = self.entry_count
            self.entry_count += count
        self.every_entry = (1 << self.entry_count) - 1
        self.nothing = AckedSet(self)

    def runs(self, runs: Iterable[Iterable[int]]) -> AckedSet:
        """Return the entries of runs ``(ledger_id, first, end)``, `end` excluded, with their messages."""
        found = self.nothing
        for ledger_id, first, end in runs:
            found |= self.run(ledger_id, first, end)
        return found

    def run(self, ledger_id: int, first: int, end: int) -> AckedSet:
        """Return one run, as `runs`; entries that the log does not have are part of it."""
        end_inside = max(first, min(end, self.ledgers.get(ledger_id, 0)))
        bits = self._bits(self._first[ledger_id] + first, end_inside - first) if end_inside > first else 0
        return AckedSet(self, bits, frozenset([(ledger_id, end_inside, end)] if end > end_inside else ()))

    def up_to(self, ledger_id: int, entry_id: int) -> AckedSet:
        """Return every entry up to one, included, those of lower ledgers too."""
        lower = [(lower_id, 0, count) for lower_id, count in self.ledgers.items() if lower_id < ledger_id]
        return self.runs([*lower, (ledger_id, 0, entry_id + 1)])

    def messages(self, ledger_id: int, entry_id: int, messages: int) -> AckedSet:
        """Return messages of an entry, one bit each, without the entry itself."""
        return AckedSet(self, messages << self._first_message(self._first[ledger_id] + entry_id))

    def runs_of(self, bits: int) -> Iterator[tuple[int, int, int]]:
        """Yield the runs of the entries among some bits, in order."""
        for ledger_id, count in self.ledgers.items():
            left, end = bits >> self._first[ledger_id] & (1 << count) - 1, 0
            while left:
                gap = (left & -left).bit_length() - 1
                left >>= gap
                length = (~left & left + 1).bit_length() - 1
                yield ledger_id, end + gap, end + gap + length
                left, end = left >> length, end + gap + length

    def _bits(self, first: int, count: int) -> int:
        messages = (1 << count * self.batch_size) - 1
        return ((1 << count) - 1 << first) | messages << self._first_message(first)

    def _first_message(self, number: int) -> int:
        return self.entry_count + number * self.batch_size


@final
@dataclass(frozen=True, slots=True)
class AckedSet:
    """A set of entries, and of messages of batches.

    Attributes:
        numbering: The meaning of the bits.
        bits: The entries and messages that the log has.
        elsewhere: Runs of entries that the log does not have.
    """

    numbering: Numbering = field(repr=False, compare=False)
    bits: int = 0
    elsewhere: frozenset[tuple[int, int, int]] = frozenset()

    def __or__(self, other: AckedSet) -> AckedSet:
        return AckedSet(self.numbering, self.bits | other.bits, self.elsewhere | other.elsewhere)

    def __sub__(self, other: AckedSet) -> AckedSet:
        return AckedSet(self.numbering, self.bits & ~other.bits, self.elsewhere - other.elsewhere)

    def __and__(self, other: AckedSet) -> AckedSet:
        return AckedSet(self.numbering, self.bits & other.bits, self.elsewhere & other.elsewhere)

    def __le__(self, other: AckedSet) -> bool:
        return not self.bits & ~other.bits and self.elsewhere <= other.elsewhere

    def __bool__(self) -> bool:
        return bool(self.bits or self.elsewhere)

    @property
    def entry_count(self) -> int:
        """How many entries are in it."""
        inside = (self.bits & self.numbering.every_entry).bit_count()
        return inside + sum(end - first for _, first, end in self.elsewhere) if self.elsewhere else inside

    @property
    def message_count(self) -> int:
        """How many messages of batches are in it."""
        return (self.bits >> self.numbering.entry_count).bit_count()

    def completed(self) -> AckedSet:
        """Return this with every entry of which it has all messages. Complexity: O(entries), O(1) without batches."""
        log, bits = self.numbering, self.bits
        if not log.batch_size:
            return self
        messages, whole = bits >> log.entry_count, (1 << log.batch_size) - 1
        for number in range(log.entry_count):
            bits |= (messages >> number * log.batch_size & whole == whole) << number
        return AckedSet(log, bits, self.elsewhere)

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the entries as ``(ledger_id, first, end)``, `end` excluded; those of the log first, in order."""
        yield from self.numbering.runs_of(self.bits)
        yield from sorted(self.elsewhere)

    def __str__(self) -> str:
        """Return half-open runs ``ledger:[first, end)``, the first few of many, and a count of other messages."""
        texts = [listed(self.runs())] if self.entry_count else []
        if (parts := self.message_count - self.numbering.batch_size * self.entry_count) > 0:
            texts.append(f"{parts} messages of batches")
        return " ".join(texts) or "nothing"


def listed(some: Iterable[tuple[int, int, int]]) -> str:
    """Return runs as text, the first few of many."""
    runs = [f"{ledger_id}:[{first}, {end})" for ledger_id, first, end in islice(some, _LISTED_MAX + 1)]
    return " ".join(runs[:_LISTED_MAX] + ["..."] * (len(runs) > _LISTED_MAX)) or "nothing"
