"""Two cursors under one name are seen while chunks are replayed, as event by event; one alone never is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.estimate.chunks import InterleavingCheck, compact, decode, encode
from ackstate.analysis.trace.check import EventOrder
from ackstate.analysis.trace.chunks import Events
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from chunks import chunk_of

KEY = ("persistent://p/n/t", "s")
KINDS = [kind for kind in EventKind if kind is not EventKind.PUBLISH]
# Some more often, or hardly a trace would be of one cursor alone.
LIKELY = [*KINDS, *3 * [EventKind.ACK, EventKind.DELIVER, EventKind.PERSIST_ENDED]]
TOLD = st.lists(st.tuples(st.sampled_from(LIKELY), st.integers(0, 2), st.booleans()), min_size=1, max_size=12)


def events_of(told):
    """Return events, each of an entry of its own, and where chunks end."""
    ts_ms = np.cumsum([step for _, step, _ in told]).tolist()
    events = [
        Event(at, kind, 1, number, number) for number, (at, (kind, _, _)) in enumerate(zip(ts_ms, told, strict=True))
    ]
    return events, [number for number, (_, _, is_end) in enumerate(told, 1) if is_end and number < len(told)]


def is_refused(events, ends, *, small=lambda chunk: chunk):
    one = InterleavingCheck(KEY)
    try:
        for begin, end in zip([0, *ends], [*ends, len(events)], strict=True):
            one.check(small(chunk_of(events[begin:end])))
    except TraceError:
        return True
    return False


def is_wrong(events):
    """Ask of every event, as if none were an ack: then no recovery comes unseen."""
    acks = (EventKind.ACK, EventKind.MARK_DELETE)
    kinds = [EventKind.DELIVER if each.kind in acks else each.kind for each in events]
    columns = zip(*((each.ts_ms, kind, -1, -1, -1, -1) for each, kind in zip(events, kinds, strict=True)), strict=True)
    return bool(EventOrder().judge_lives(Events(*(np.array(column) for column in columns))).any())


def assert_as_event_by_event(told):
    events, ends = events_of(told)
    expected = is_wrong(events)
    assert is_refused(events, ends) == expected
    assert is_refused(events, ends, small=lambda chunk: decode(memoryview(encode(compact(chunk))))) == expected


test_it_is_seen_as_event_by_event = given(TOLD)(assert_as_event_by_event)


def test_a_recovery_from_what_nobody_saw_is_none_of_two():
    InterleavingCheck(KEY).check(chunk_of([Event(5, EventKind.ACK, 1, 0, 0), Event(7, EventKind.RECOVER)]))


def test_it_is_named():
    died = [Event(5, EventKind.CRASH), Event(7, EventKind.ACK, 1, 0, 0)]
    with pytest.raises(
        TraceError, match=r"two cursors under one name, seen at 7 ms: subscription 's' of .*/n/t: .* own"
    ):
        InterleavingCheck(KEY).check(chunk_of(died))
