"""The acks of one chunk by itself, sorted once, against an accumulator that receives the chunk."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from ackstate.analysis.replay.acked import AckAccumulator, EventChunk, acks_alone, by_position
from ackstate.analysis.trace.events import EventKind

KINDS = st.sampled_from([EventKind.ACK, EventKind.ACK, EventKind.MARK_DELETE, EventKind.DELIVER, EventKind.PUBLISH])
EVENTS = st.lists(st.tuples(KINDS, st.integers(1, 2), st.integers(0, 20), st.integers(0, 80)), max_size=30)


@given(EVENTS)
@example([])
@example([(EventKind.ACK, 1, 5, 0), (EventKind.ACK, 1, 5, 0), (EventKind.ACK, 1, 4, 2)])
@example([(EventKind.ACK, 2, 0, 0), (EventKind.ACK, 1, 0, 63), (EventKind.ACK, 2, 0, 1)])
@example([(EventKind.ACK, 1, 0, 64), (EventKind.ACK, 1, 3, 0)])
def test_they_are_those_of_an_accumulator(events):
    rows = [(number, kind, ledger, first, first + more) for number, (kind, ledger, first, more) in enumerate(events)]
    chunk = EventChunk(*np.array(rows, np.int64).reshape(-1, 5).T)
    fold = AckAccumulator()
    expected = by_position(fold.take(chunk))
    acked, runs = acks_alone(chunk)
    assert acked == fold.acked
    assert [column.tolist() for column in runs] == [column.tolist() for column in expected]
