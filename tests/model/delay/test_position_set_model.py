"""The set of positions against a plain `set`, at the borders of roaring containers and of ledgers."""

from array import array

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import Position
from ackstate.position_set import PositionSet

ENTRY_IDS = [0, 1, 2, 2**16 - 1, 2**16, 2**16 + 1, 2**32 - 2, 2**32 - 1]
positions = st.builds(Position, st.sampled_from([0, 3, 4, 2**63 - 1]), st.sampled_from(ENTRY_IDS))
# An end may lie just behind the last entry that a ledger can have.
ends = positions | st.builds(Position, st.sampled_from([3, 2**63 - 1]), st.just(2**32))
groups = st.sets(positions, max_size=8)


def set_of(group: set[Position]) -> PositionSet:
    made = PositionSet()
    for position in group:
        made.add(position)
    return made


class PositionSetMachine(RuleBasedStateMachine):
    @initialize(group=groups)
    def open(self, group):
        self.held = set_of(group)
        self.expected = set(group)

    @rule(position=positions)
    def add(self, position):
        if position not in self.expected:
            self.held.add(position)
            self.expected.add(position)

    @rule(position=positions)
    def discard(self, position):
        self.held.discard(position)
        self.expected.discard(position)

    @rule(first=positions)
    def at_least(self, first):
        assert list(self.held.at_least(first)) == sorted(position for position in self.expected if position >= first)

    @rule(first=positions, end=ends)
    def lowest_and_highest_in_a_ledger(self, first, end):
        ledger_id = first.ledger_id
        there = [each for each in self.expected if each.ledger_id == ledger_id]
        there = [each for each in there if first.entry_id <= each.entry_id < end.entry_id]
        assert self.held.lowest_in(ledger_id, first.entry_id, end.entry_id) == min(there, default=None)
        assert self.held.highest_in(ledger_id, first.entry_id, end.entry_id) == max(there, default=None)

    @rule(group=groups)
    def update(self, group):
        self.held.update(set_of(group))
        self.expected |= group

    @rule(group=groups, first=positions, end=ends)
    def update_between(self, group, first, end):
        other = set_of(group)
        self.held.update_between(other, first=first, end=end)
        self.expected |= {position for position in group if first <= position < end}
        assert list(other) == sorted(group), "the other set is only read"

    @rule(group=groups, first=positions, end=ends)
    def update_between_with_a_set_that_is_given_up(self, group, first, end):
        self.held.update_between(set_of(group), first=first, end=end, is_given_up=True)
        self.expected |= {position for position in group if first <= position < end}

    @rule(group=groups, ledger_id=st.sampled_from([0, 3]))
    def update_entries(self, group, ledger_id):
        entry_ids = {entry_id for _, entry_id in group}
        there = {Position(ledger_id, entry_id) for entry_id in entry_ids}
        assert self.held.update_entries(ledger_id, array("I", entry_ids)) == len(there - self.expected)
        self.expected |= there

    @rule(count=st.integers(0, 10))
    def take_lowest(self, count):
        taken = [Position(ledger_id, each) for ledger_id, entries in self.held.take_lowest(count) for each in entries]
        assert taken == sorted(self.expected)[:count]
        self.expected -= set(taken)

    @rule(group=groups)
    def difference_update(self, group):
        self.held.difference_update(set_of(group))
        self.expected -= group

    @rule(end=ends)
    def remove_below(self, end):
        self.held.remove_below(end)
        self.expected = {position for position in self.expected if position >= end}

    @rule()
    def clear(self):
        self.held.clear()
        self.expected.clear()

    @rule(first=positions, end=ends)
    def count_between(self, first, end):
        counted = self.held.count_between(first, end)
        assert counted == sum(first <= position < end for position in self.expected)

    @rule(position=positions)
    def contains(self, position):
        assert (position in self.held) == (position in self.expected)

    @invariant()
    def holds_the_same_in_order(self):
        self.held._check()
        assert list(self.held) == sorted(self.expected)
        assert len(self.held) == len(self.expected)


TestPositionSet = PositionSetMachine.TestCase


def test_two_sets_that_were_joined_stay_apart():
    one, other = set_of({Position(3, 1)}), PositionSet()
    other.update(one)
    other.add(Position(3, 2))
    assert list(one) == [Position(3, 1)]


def test_the_lowest_and_the_highest_of_a_part_of_a_ledger():
    held = set_of({Position(3, 1), Position(3, 2**16), Position(3, 2**32 - 1), Position(4, 0)})
    assert held.lowest_in(3, 0, 2**32) == Position(3, 1)
    assert held.highest_in(3, 0, 2**32) == Position(3, 2**32 - 1)
    assert held.lowest_in(3, 2, 2**32 - 1) == held.highest_in(3, 2, 2**32 - 1) == Position(3, 2**16)
    assert held.lowest_in(3, 2, 2**16) is held.lowest_in(5, 0, 9) is held.highest_in(4, 0, 0) is None
