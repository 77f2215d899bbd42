"""`BatchIndexes` against a plain dict of position -> set of unacked indexes."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyroaring import BitMap

from ackstate import Position
from ackstate.batch_indexes import BatchIndexes
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
