"""Events of the polls of one cursor: acks, records, crashes, seeks, and the state that a recorder finds."""

from __future__ import annotations

import pytest
from pyroaring import BitMap

from ackstate import Position
from ackstate.analysis.pulsar.cursor_follower import CursorFollower, CursorPoll, existing_entries
from ackstate.analysis.pulsar.internal_stats import Acked
from ackstate.analysis.trace.events import EventKind
from ackstate.deleted_ranges import DeletedRanges

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


def test_the_first_poll_finds_what_is_durable_as_recovered_and_the_rest_as_acked():
    assert told(poll(1, {0, 1, 5, 8}, {0, 1, 8})) == [(RECOVER, 0, 1), (RECOVER, 8, 8), (A, 5, 5)]
    assert told(poll(1, {5})) == [(A, 5, 5)]
    assert told(poll(1, {})) == []


def test_without_a_change_there_is_no_event():
    assert told(poll(1, {5, 6}, {5}), poll(2, {5, 6}, {5})) == []


def test_acks_that_a_record_covers_come_before_it_and_others_after_it():
    found = told(poll(1, {0}), poll(2, {0, 4, 9}, {0, 4}, version=2))
    assert found == [(A, 4, 4), BEGUN, ENDED, (A, 9, 9)]
    assert told(poll(1, {0}), poll(2, {0, 9})) == [(A, 9, 9)]


def test_a_record_leaves_out_acks_that_were_or_were_not_durable():
    found = told(poll(1, {0, 2, 4}, {0, 4}), poll(2, {0, 2, 4}, {0}, version=2))
    assert found == [BEGUN, (CUT, 2, 2), (OUT, 4, 4), ENDED]
    again = told(poll(1, {0, 2, 4}, {0, 4}), poll(2, {0, 2, 4}, {0}, version=2), poll(3, {0, 2, 4}, {0, 2}, version=3))
    assert again == [BEGUN, (CUT, 4, 4), ENDED]


def test_an_entry_that_is_durable_before_memory_was_seen_to_have_it_is_acked():
    assert told(poll(1, {0}), poll(2, {0}, {0, 1}, version=2)) == [(A, 1, 1), BEGUN, ENDED]


def test_entries_of_a_deleted_ledger_are_not_redelivered():
    before = poll(1, {0, 1}, {0})
    after = CursorPoll(2_000, {4: 10}, {4: BitMap([2])}, {}, (2,), 7, 110)
    follower = CursorFollower()
    follower.follow(before)
    assert short(follower.follow(after)) == [BEGUN, ENDED, (A, 2, 2)]


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


def test_acks_that_were_lost_and_made_again_between_two_polls_are_redelivered():
    found = told(poll(1, {0, 1}, {0}), poll(2, {0, 1, 2}, {0}, cursor_ledger=-1))
    assert found == [CRASH, RECOVER, (AGAIN, 1, 1), (A, 1, 2)]


def test_a_load_that_loses_nothing_is_no_crash():
    assert told(poll(1, {0, 1}, {0}), poll(2, {0, 1}, {0, 1}, version=2, cursor_ledger=-1)) == [BEGUN, ENDED]


def test_acks_that_go_back_without_a_load_are_a_reset():
    first = poll(1, {0, 1, 5}, {0, 1})
    assert told(first, poll(2, {0}, {0}, version=2)) == [RESET, (AGAIN, 1, 1), (AGAIN, 5, 5), BEGUN, ENDED]


def test_acks_that_a_seek_took_back_are_not_acked_though_its_record_still_has_them():
    """A broker that dies then begins with them: those that are acked again are durable at once."""
    first, sought = poll(1, {0, 1, 5}, {0, 1}), poll(2, {}, {0, 1, 5}, version=2)
    assert told(first, sought) == [RESET, (AGAIN, 0, 1), BEGUN, ENDED], "the last has just become durable"
    assert told(first, sought, poll(3, {}, {0, 1, 5}, version=2)) == [RESET, (AGAIN, 5, 5)]
    sought = poll(2, {}, {0, 1}, version=2)
    assert told(first, sought) == [RESET, (AGAIN, 0, 1), (AGAIN, 5, 5), BEGUN, ENDED]
    assert told(first, sought, poll(3, {1, 7}, {0, 1}, version=2)) == [(A, 1, 1), BEGUN, ENDED, (A, 7, 7)]


def test_a_restarted_recorder_tells_the_state_anew():
    """Acks of the time between are not of the traffic: those that are durable were acked before."""
    follower = CursorFollower({3: BitMap([0, 1, 5])}, is_new=False)
    assert told(poll(9, {0, 1, 2, 8}, {0, 2}), follower=follower) == [
        (RESET, 2, 2), (AGAIN, 1, 1), (AGAIN, 5, 5), (A, 1, 1), (A, 8, 8),
    ]  # fmt: skip
    follower = CursorFollower({3: BitMap([0])}, is_new=False)
    assert told(poll(9, {0}, {0}), follower=follower) == [RESET]


def test_of_a_deleted_cursor_nothing_is_acked():
    follower = CursorFollower()
    follower.follow(poll(1, {0, 5}, {0}))
    assert short(follower.ended(2_000)) == [RESET, (AGAIN, 0, 0), (AGAIN, 5, 5)]
    assert CursorFollower({}, is_new=False).ended(2_000) == []


def test_only_entries_of_existing_ledgers_exist():
    deleted = DeletedRanges()
    for position in (Position(5, 2), Position(5, 60), Position(6, 0)):
        deleted.add(position)
    found = existing_entries({3: 2, 4: 10, 5: 50}, Acked(Position(4, 6), deleted))
    assert {each: list(bitmap) for each, bitmap in found.items()} == {3: [0, 1], 4: [*range(7)], 5: [2]}
    assert existing_entries({3: 0}, Acked(Position(9, -1), DeletedRanges())) == {}
