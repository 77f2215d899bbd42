"""The array replay against the obvious one, whatever the chunks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.replay.curves import RedeliveryFold
from ackstate.analysis.trace.events import Event, EventKind
from chunks import chunk_of
from traces import StateAfterEvent, replay, traces


def folded_states(events, sizes):
    fold, states, begin = RedeliveryFold(), [], 0
    for size in [*sizes, len(events)]:
        folded = fold.fold(chunk_of(events[begin : begin + size]))
        states += [
            StateAfterEvent(*values)
            for values in zip(
                folded.redelivery.tolist(),
                folded.if_written.tolist(),
                folded.persisting.tolist(),
                folded.alive.tolist(),
                strict=True,
            )
        ]
        begin += size
    return states


def assert_agreement(events, sizes):
    assert folded_states(events, sizes) == replay(events)


SIZES = st.lists(st.integers(0, 20), max_size=5)
test_every_instant_agrees_with_sets = given(traces(), SIZES)(assert_agreement)


def test_an_ack_counts_once():
    ack = Event(1, EventKind.ACK, 3, 7, 7)
    again = [ack, ack, Event(2, EventKind.MARK_DELETE, 3, 0, 9), ack, Event(3, EventKind.ACK, 4, 7, 7)]
    assert [state.redelivery for state in folded_states(again, [2])] == [1, 1, 10, 10, 11]


def test_a_persist_covers_what_was_acked_before_it_began():
    events = [
        Event(1, EventKind.ACK, 3, 0, 0),
        Event(2, EventKind.PERSIST_BEGUN),
        Event(3, EventKind.ACK, 3, 1, 1),
        Event(4, EventKind.PERSIST_ENDED),
    ]
    states = folded_states(events, [])
    assert [state.redelivery for state in states] == [1, 1, 2, 1]
    assert [state.if_written for state in states] == [1, 0, 1, 1]
    assert [state.persisting for state in states] == [False, True, True, False]


def test_a_recording_of_a_very_long_run_is_not_spelled_out():
    events = [Event(1, EventKind.MARK_DELETE, 3, 0, 2**32 - 1), Event(2, EventKind.ACK, 3, 5, 5)]
    assert [state.redelivery for state in folded_states(events, [])] == [2**32, 2**32]


def causes_of(events, sizes):
    fold, found, begin = RedeliveryFold(), [], 0
    for size in [*sizes, len(events)]:
        part = events[begin : begin + size]
        causes = fold.fold(chunk_of(part)).causes
        found += [(0, 0)] * len(part) if causes is None else list(zip(*causes[:2].tolist(), strict=True))
        begin += size
    return found


@pytest.mark.parametrize("sizes", [[], [1] * 11, [4, 2]])
def test_what_a_recorded_persist_left_out_has_its_cause(sizes):
    events = [
        Event(1, EventKind.ACK, 3, 0, 9),
        Event(2, EventKind.PERSIST_BEGUN),
        Event(2, EventKind.HELD_BACK, 3, 5, 6),
        Event(2, EventKind.CUT_OFF, 3, 8, 8),
        Event(3, EventKind.PERSIST_ENDED),
        Event(4, EventKind.PERSIST_BEGUN),
        Event(4, EventKind.DISPLACED, 3, 0, 2),
        Event(4, EventKind.CUT_OFF, 3, 8, 8),
        Event(5, EventKind.PERSIST_FAILED),
        Event(6, EventKind.CRASH),
        Event(7, EventKind.RECOVER),
    ]
    # Displaced acks are lost from there on, also if the persist fails.
    assert causes_of(events, sizes) == [(0, 0)] * 4 + [(2, 1)] * 2 + [(2, 4)] * 3 + [(0, 0)] * 2
    assert [state.redelivery for state in folded_states(events, sizes)] == [10] * 4 + [3] * 2 + [6] * 3 + [6, 0]
