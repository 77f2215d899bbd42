"""Events of the polls of one cursor: acks, records, crashes, seeks, and the state that a recorder finds."""

import pytest
from pyroaring import BitMap

from ackstate.analysis.pulsar.recorder import CursorFollower, CursorPoll
from ackstate.analysis.trace.events import EventKind

A, CUT, OUT = EventKind.ACK, EventKind.CUT_OFF, EventKind.DISPLACED
BEGUN, ENDED = EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED
CRASH, RECOVER, RESET, AGAIN = EventKind.CRASH, EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER


def poll(second, acked, durable=(), *, version=1, cursor_ledger=7, published=100, **fields):
    """A poll of a topic with one ledger, 3, of 100 entries."""
    found = [{3: BitMap(each)} if each else {} for each in (acked, durable)]
    return CursorPoll(second * 1_000, {3: 100}, *found, (version,), cursor_ledger, published, **fields)


def told(*polls, follower=None):
    """Return the events of the last of some polls, in short: the kind, and the entries if there are some."""
    follower = follower or CursorFollower()
    for each in polls:
        events = follower.follow(each)
        assert {event.ts_ms for event in events} <= {each.ts_ms}
    return short(events)


def short(events):
    return [(event.kind, event.first_entry, event.last_entry) if event.ledger_id >= 0 else event.kind
            for event in events]  # fmt: skip


def test_a_record_leaves_out_acks_that_were_or_were_not_durable():
    found = told(poll(1, {0, 2, 4}, {0, 4}), poll(2, {0, 2, 4}, {0}, version=2))
    assert found == [BEGUN, (CUT, 2, 2), (OUT, 4, 4), ENDED]
    again = told(poll(1, {0, 2, 4}, {0, 4}), poll(2, {0, 2, 4}, {0}, version=2), poll(3, {0, 2, 4}, {0, 2}, version=3))
    assert again == [BEGUN, (CUT, 4, 4), ENDED]


@pytest.mark.parametrize("sign", [
    {"published": 3},  # since the load, fewer than before
    {"cursor_ledger": -1},  # nothing written since the load
    {"cursor_ledger": 9, "version": 2},
    {"is_after_failure": True},
])  # fmt: skip
def test_after_a_load_acks_that_were_not_durable_are_redelivered_by_a_crash(sign):
    first = poll(1, {0, 1, 5}, {0})
    assert told(first, poll(2, {0, 7}, {0}, **sign)) == [
        CRASH, RECOVER, (AGAIN, 1, 1), (AGAIN, 5, 5), (A, 7, 7),
    ]  # fmt: skip


def test_what_became_durable_before_a_crash_is_a_record_before_it():
    found = told(poll(1, {0, 1, 5}, {0}), poll(2, {0, 1}, {0, 1}, version=2, cursor_ledger=-1))
    assert found == [BEGUN, (CUT, 5, 5), ENDED, CRASH, RECOVER, (AGAIN, 5, 5)]


def test_acks_that_go_back_without_a_load_are_a_reset():
    first = poll(1, {0, 1, 5}, {0, 1})
    assert told(first, poll(2, {0}, {0}, version=2)) == [RESET, (AGAIN, 1, 1), (AGAIN, 5, 5), BEGUN, ENDED]
