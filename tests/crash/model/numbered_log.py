"""The entries of a message log by number, and the size of ranges counted byte by byte with no code of the product."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

from ackstate.position import Position


class NumberRun(NamedTuple):
    """Adjacent entries of one ledger by number, both ends inclusive."""

    first: int
    last: int


def varint_bytes(number):
    length = 1
    while number >= 128:
        number >>= 7
        length += 1
    return length


def range_bytes(ledger_id, first, last):
    """Return the size of one `MessageRange`, whose lower end is the entry before the first; -1 takes ten bytes."""
    lower = 2 + varint_bytes(ledger_id) + (varint_bytes(first - 1) if first else 10)
    upper = 2 + varint_bytes(ledger_id) + varint_bytes(last)
    return 2 + 2 + lower + 2 + upper


class NumberedLog:
    """The entries of a log, numbered in order from 0; the numbering may start at a later entry of the log.

    The log may have been trimmed: then it no longer has the first `trimmed_count` of them, or only until a trim whose
    outcome is unknown.
    """

    def __init__(self):
        self.trimmed_count = 0
        self.positions = []
        self.numbers = {}
        self.messages = []

    def __len__(self):
        return len(self.positions)

    @property
    def kept(self):
        """The numbers of the entries that were not trimmed."""
        return range(self.trimmed_count, len(self.positions))

    def append(self, positions, messages):
        """Number the next entries; an unknown message counts as plain and undelayed."""
        for position in positions:
            self.numbers[position] = len(self.positions)
            self.positions.append(position)
        self.messages += messages

    def isolated_bytes(self, number):
        ledger_id, entry_id = self.positions[number]
        return range_bytes(ledger_id, entry_id, entry_id)

    def message_count(self, number):
        message = self.messages[number]
        return 1 if message is None else message.message_count

    def runs(self, numbers):
        runs = []
        for number in numbers:
            if runs and number == runs[-1].last + 1 and self.positions[number].entry_id:
                runs[-1] = NumberRun(runs[-1].first, number)
            else:
                runs.append(NumberRun(number, number))
        return runs

    def record_bytes(self, runs):
        total = 0
        for first, last in runs:
            ledger_id, first_id = self.positions[first]
            total += range_bytes(ledger_id, first_id, first_id + last - first)
        return total

    def count_up_to(self, position):
        return bisect_right(self.positions, position)

    def held_by(self, content):
        held = set(range(self.count_up_to(content.mark_delete)))
        for ledger_id, first, end in content.deleted.runs():
            runs = (self.numbers.get(Position(ledger_id, entry_id)) for entry_id in range(first, end))
            held.update(number for number in runs if number is not None)  # The log may have lost some.
        return held

    def lose(self, lost):
        """Number the entries again without some, and return the numbers of the others: before -> from now on."""
        kept = [number for number, position in enumerate(self.positions) if position not in lost]
        self.messages = [self.messages[number] for number in kept]
        self.positions = [self.positions[number] for number in kept]
        self.numbers = {position: number for number, position in enumerate(self.positions)}
        return {before: number for number, before in enumerate(kept)}

    def text(self, numbers):
        """Return entries as text: ``"1:0 1:4-9"``; a set is sorted, other collections keep their order."""
        texts = []
        for first, last in self.runs(sorted(numbers) if isinstance(numbers, set | frozenset) else numbers):
            ledger_id, entry_id = self.positions[first]
            texts.append(f"{ledger_id}:{entry_id}" + (f"-{entry_id + last - first}" if last > first else ""))
        return " ".join(texts) or "nothing"


def indexes(words):
    return {64 * word + bit for word, bits in enumerate(words) for bit in range(64) if bits >> bit & 1}


def words_of(left):
    words = [sum(1 << index % 64 for index in left if index // 64 == word) for word in range(2)]
    return [word - 2**64 if word >> 63 else word for word in words]
