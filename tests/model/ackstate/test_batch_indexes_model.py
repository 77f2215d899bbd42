"""`BatchIndexes` against a plain dict of position -> set of unacked indexes."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyroaring import BitMap

import ackstate.batch_indexes
from ackstate import Position
from ackstate.batch_indexes import BatchIndexes
from planted import assert_caught
from strategies import positions

# Few indexes, at the borders of words, so that acks of a batch meet and complete it.
index_sets = st.sets(st.sampled_from([0, 1, 62, 63, 64, 127, 128]))


def words_of(indexes):
    """Return the words of `BitSet.toLongArray`, bit by bit."""
    words = [0] * (max(indexes) // 64 + 1) if indexes else []
    for index in indexes:
        words[index // 64] += -(2**63) if index % 64 == 63 else 2 ** (index % 64)
    return tuple(words)


class BatchIndexesMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self):
        self.indexes = BatchIndexes()
        self.model = {}

    def model_ack(self, position, unacked):
        left = unacked & self.model.pop(position, unacked)
        if left:
            self.model[position] = left
        return not left

    @rule(position=positions, unacked=index_sets, zeros=st.integers(0, 2))
    def ack(self, position, unacked, zeros):
        words = [*words_of(unacked), *[0] * zeros]
        assert self.indexes.ack(position, words) == self.model_ack(position, unacked)

    @rule(position=positions, unacked=index_sets)
    def ack_cumulative(self, position, unacked):
        assert self.indexes.ack_cumulative(position, words_of(unacked)) == self.model_ack(position, unacked)
        self.model = {other: left for other, left in self.model.items() if other >= position}

    @rule(data=st.data(), unacked=index_sets)
    def ack_again(self, data, unacked):
        if self.model:
            position = data.draw(st.sampled_from(sorted(self.model)))
            assert self.indexes.ack(position, words_of(unacked)) == self.model_ack(position, unacked)

    @rule(position=positions)
    def discard(self, position):
        self.indexes.discard(position)
        self.model.pop(position, None)

    @rule(others=st.lists(positions, max_size=4), data=st.data())
    def discard_entries(self, others, data):
        if self.model:
            others.append(data.draw(st.sampled_from(sorted(self.model))))
        for ledger_id in {other.ledger_id for other in others}:
            entry_ids = [other.entry_id for other in others if other.ledger_id == ledger_id]
            self.indexes.discard_entries(ledger_id, BitMap(entry_ids))
        for other in others:
            self.model.pop(other, None)

    @rule(position=positions, before_the_first=st.booleans())
    def remove_at_most(self, position, before_the_first):
        if before_the_first:
            position = Position(position.ledger_id, -1)
        gone = [other for other in self.model if other <= position]
        assert self.indexes.remove_at_most(position) == len(gone)
        for other in gone:
            del self.model[other]

    @rule(data=st.data())
    def remove_one_that_is_held(self, data):
        if self.model:
            self.remove_at_most(data.draw(st.sampled_from(sorted(self.model))), before_the_first=False)

    @rule(position=positions)
    def look_up(self, position):
        assert (position in self.indexes) == (position in self.model)
        expected = words_of(self.model[position]) if position in self.model else None
        assert self.indexes.get(position) == expected

    @invariant()
    def agrees_with_the_dict(self):
        assert list(self.indexes.items()) == [
            (position, words_of(unacked)) for position, unacked in sorted(self.model.items())
        ]
        assert len(self.indexes) == len(self.model)
        assert self.indexes.copy() == self.indexes
        self.indexes._check()


TestBatchIndexesModel = pytest.mark.slow(BatchIndexesMachine.TestCase)


@pytest.mark.slow
def test_model_catches_an_ack_that_is_taken_back(monkeypatch):
    ack = BatchIndexes.ack

    def replace(self, position, words):
        self.discard(position)
        return ack(self, position, words)

    monkeypatch.setattr(BatchIndexes, "ack", replace)
    assert_caught(BatchIndexesMachine, by=AssertionError)


@pytest.mark.slow
def test_model_catches_a_completed_batch_that_is_kept(monkeypatch):
    monkeypatch.setattr(BatchIndexes, "discard", lambda self, position: None)
    assert_caught(BatchIndexesMachine, by=AssertionError)


@pytest.mark.slow
def test_model_catches_a_cumulative_ack_that_forgets_its_own_batch(monkeypatch):
    def forget_itself(self, position, words):
        complete = self.ack(position, words)
        self.remove_at_most(position)
        return complete

    monkeypatch.setattr(BatchIndexes, "ack_cumulative", forget_itself)
    assert_caught(BatchIndexesMachine, by=AssertionError)


@pytest.mark.slow
def test_model_catches_a_cumulative_ack_that_forgets_nothing(monkeypatch):
    monkeypatch.setattr(BatchIndexes, "ack_cumulative", BatchIndexes.ack)
    assert_caught(BatchIndexesMachine, by=AssertionError)


@pytest.mark.slow
def test_model_catches_a_removal_that_keeps_its_end(monkeypatch):
    remove = BatchIndexes.remove_at_most

    def remove_below(self, position):
        ledger_id, entry_id = position
        return remove(self, Position(ledger_id, max(entry_id - 1, -1)))

    monkeypatch.setattr(BatchIndexes, "remove_at_most", remove_below)
    assert_caught(BatchIndexesMachine, by=AssertionError)


@pytest.mark.slow
def test_model_catches_words_without_a_sign(monkeypatch):
    words_of_mask = ackstate.batch_indexes._words_of
    monkeypatch.setattr(
        ackstate.batch_indexes, "_words_of", lambda mask: tuple(word % 2**64 for word in words_of_mask(mask))
    )
    assert_caught(BatchIndexesMachine, by=AssertionError)


@pytest.mark.slow
def test_model_catches_a_second_ledger_that_is_out_of_order(monkeypatch):
    monkeypatch.setattr(ackstate.batch_indexes, "insort", list.append)
    assert_caught(BatchIndexesMachine, by=AssertionError)


@pytest.mark.slow
def test_model_catches_a_copy_that_lost_its_entries(monkeypatch):
    monkeypatch.setattr(BatchIndexes, "copy", lambda self: BatchIndexes())
    assert_caught(BatchIndexesMachine, by=AssertionError)


def hold_without_order(self, ledger_id, entry_id, mask):
    if ledger_id not in self.by_ledger:
        self._ledger_ids = sorted([*self._ledger_ids, ledger_id])
        self.by_ledger[ledger_id] = ackstate.batch_indexes._LedgerBatches({}, BitMap([entry_id]))
    self.by_ledger[ledger_id].unacked[entry_id] = mask


@pytest.mark.slow
def test_model_catches_an_order_of_entries_that_is_not_kept(monkeypatch):
    monkeypatch.setattr(BatchIndexes, "_hold", hold_without_order)
    assert_caught(BatchIndexesMachine, by=AssertionError)
