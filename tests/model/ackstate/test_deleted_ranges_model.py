"""`DeletedRanges` against a plain set of positions.

Checked after every step: membership, runs, text, counters, and the record size against the bytes of the protobuf
runtime itself.
"""

from itertools import groupby

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyroaring import BitMap

from ackstate import DeletedRanges, Position, Run
from ackstate.wire.pulsar.cursor_state_pb2 import PositionInfo
from strategies import ENTRY_ID_MAX, entry_ids, ledger_ids, positions


def protobuf_bytes(runs):
    info = PositionInfo()
    for ledger_id, first, end in runs:
        interval = info.individual_deleted_messages.add()
        interval.lower_endpoint.ledger_id = interval.upper_endpoint.ledger_id = ledger_id
        interval.lower_endpoint.entry_id = first - 1
        interval.upper_endpoint.entry_id = end - 1
    return len(info.SerializePartialToString())


def runs_of(model):
    found = []
    for (ledger_id, _), members in groupby(
        enumerate(sorted(model)), key=lambda item: (item[1][0], item[1][1] - item[0])
    ):
        entries = [position[1] for _, position in members]
        found.append(Run(ledger_id, entries[0], entries[-1] + 1))
    return found


class DeletedRangesMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.ranges = DeletedRanges()
        self.model = set()

    @rule(position=positions)
    def add(self, position):
        assert self.ranges.add(position) == (position not in self.model)
        self.model.add(position)

    @rule(position=positions)
    def add_valid(self, position):
        assert self.ranges.add_valid(*position) == (position not in self.model)
        self.model.add(position)

    @rule(is_beside=st.booleans())
    def remove_lowest(self, is_beside):
        if not self.model:
            return
        ledger_id, first = min(self.model)
        end = next((run.end for run in runs_of(self.model) if run[:2] == (ledger_id, first)), None)
        if is_beside and first:
            assert self.ranges.remove_lowest(ledger_id, first - 1) == first - 1
        else:
            assert self.ranges.remove_lowest(ledger_id, first) == end
            self.model -= {Position(ledger_id, entry) for entry in range(first, end)}

    @rule(position=positions, length=st.integers(0, 9))
    def add_run(self, position, length):
        ledger_id, first = position
        end = min(first + length, ENTRY_ID_MAX + 1)
        new = {Position(ledger_id, entry) for entry in range(first, end)} - self.model
        assert self.ranges.add_run(ledger_id, first, end) == len(new)
        self.model |= new

    @rule(ledger_id=ledger_ids, entries=st.lists(entry_ids, max_size=8), as_bitmap=st.booleans())
    def add_entries(self, ledger_id, entries, as_bitmap):
        new = {Position(ledger_id, entry) for entry in entries} - self.model
        assert self.ranges.add_entries(ledger_id, BitMap(entries) if as_bitmap else entries) == len(new)
        self.model |= new

    @rule(ledger_id=ledger_ids, entries=st.lists(entry_ids, max_size=12))
    def add_missing(self, ledger_id, entries):
        new = {Position(ledger_id, entry) for entry in entries} - self.model
        if new:
            self.ranges.add_missing(ledger_id, BitMap([entry for _, entry in new]))
            self.model |= new

    @rule()
    def settle(self):
        assert self.ranges.settle() is self.ranges

    @rule(ledger_id=ledger_ids, first=entry_ids, length=st.integers(0, 9))
    def add_open_closed_in_one_ledger(self, ledger_id, first, length):
        upper = min(first + length, ENTRY_ID_MAX)
        new = {Position(ledger_id, entry) for entry in range(first + 1, upper + 1)} - self.model
        assert self.ranges.add_open_closed(Position(ledger_id, first), Position(ledger_id, upper)) == len(new)
        self.model |= new

    @rule(position=positions)
    def remove_at_most(self, position):
        gone = {other for other in self.model if other <= position}
        assert self.ranges.remove_at_most(position) == len(gone)
        self.model -= gone

    @rule(position=positions)
    def take_at_most(self, position):
        gone = {other for other in self.model if other <= position}
        taken = self.ranges.take_at_most(position)
        assert list(taken.runs()) == runs_of(gone)
        taken._check()
        self.model -= gone

    @rule(others=st.lists(positions, max_size=6))
    def update(self, others):
        other = DeletedRanges()
        for position in others:
            other.add(position)
        assert self.ranges.update(other) == len(set(others) - self.model)
        self.model |= set(others)

    @rule(others=st.lists(positions, max_size=6), data=st.data())
    def difference_update(self, others, data):
        if self.model:
            others += data.draw(st.lists(st.sampled_from(sorted(self.model)), max_size=6))
        other = DeletedRanges()
        for position in others:
            other.add(position)
        assert self.ranges.difference_update(other) == len(set(others) & self.model)
        self.model -= set(others)

    @rule(position=positions, other=positions)
    def look_up(self, position, other):
        first, last = sorted((position, other))
        assert self.ranges.cardinality(first, last) == sum(first <= member <= last for member in self.model)
        containing = [run for run in runs_of(self.model) if run[0] == position[0] and run[1] <= position[1] < run[2]]
        assert self.ranges.run_containing(position) == (containing[0] if containing else None)

    @invariant()
    def agrees_with_the_set(self):
        runs = runs_of(self.model)
        assert list(self.ranges.runs()) == runs
        assert len(self.ranges) == len(self.model)
        assert all(position in self.ranges for position in self.model)
        assert self.ranges.range_count == len(runs)
        assert self.ranges.record_bytes == protobuf_bytes(runs)
        assert str(self.ranges) == "[" + ",".join(f"({a}:{b - 1}..{a}:{c - 1}]" for a, b, c in runs) + "]"
        assert list(self.ranges) == sorted(self.model)
        assert self.ranges.copy() == DeletedRanges(self.model) == DeletedRanges(runs) == self.ranges
        assert DeletedRanges.from_bytes(self.ranges.to_bytes()) == self.ranges
        self.ranges._check()


TestDeletedRangesModel = pytest.mark.slow(DeletedRangesMachine.TestCase)
