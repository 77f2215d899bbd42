"""Events inferred from the polls of one cursor: acks, records, new ledgers, loads, crashes, seeks."""

from __future__ import annotations

import pytest

from ackstate import Position
from ackstate.analysis.pulsar.broker_settings import BrokerSettings
from ackstate.analysis.pulsar.cursor_follower import CursorFollower
from ackstate.analysis.pulsar.cursor_look import CursorLook
from ackstate.analysis.pulsar.internal_stats import RedeliveryReported
from ackstate.analysis.trace.events import EventKind
from ackstate.deleted_ranges import DeletedRanges

SETTINGS = BrokerSettings(flush_seconds=60, mark_delete_rate=1.0, range_count_max=10)
A, M, S, CUT = EventKind.ACK, EventKind.MARK_DELETE, EventKind.PERSIST_SEEN, EventKind.CUT_OFF
CRASH, RECOVER, RESET, AGAIN = EventKind.CRASH, EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER


def poll(second, *deleted, mark_delete=-1, ledger=7, last=1, **fields):
    """A poll of a topic with one ledger, 3, of 100 entries; asked at a second and answered 10 ms later."""
    ranges = DeletedRanges()
    for entry in deleted:
        ranges.add(Position(3, entry))
    begin_ms = second * 1_000
    fields = {"load": ("b", 1), "state": "Open" if ledger >= 0 else "NoLedger"} | fields
    return CursorLook(
        {3: 100}, Position(3, mark_delete), ranges, cursor_ledger=ledger, last_entry=last, asked_ms=begin_ms,
        answered_ms=begin_ms + 10, **fields,
    )  # fmt: skip


def told(*polls, settings=SETTINGS):
    """Return the events of the last of some polls, in short: kind, entries or number, and the interval in ms."""
    follower = CursorFollower(settings)
    for each in polls:
        events = follower.follow(each)
    return short(events)


def short(events):
    return [(event.kind, what_of(event), (event.ts_ms, event.until_ms)) for event in events]


def what_of(event):
    return event.number if event.ledger_id < 0 else (event.first_entry, event.last_entry)


def test_at_first_everything_is_acked_and_nothing_is_certain():
    assert told(poll(1, 5, mark_delete=1)) == [
        (A, (0, 1), (1_000, 1_010)), (A, (5, 5), (1_000, 1_010)),
        (S, 1_010, (1_000, 1_010)), (CUT, (0, 1), (1_000, 1_010)), (CUT, (5, 5), (1_000, 1_010)),
    ]  # fmt: skip


def test_a_mark_delete_that_was_loaded_is_durable():
    found = told(poll(1, 5, mark_delete=1, is_mark_delete_loaded=True))
    assert [each for each in found if each[0] == CUT] == [(CUT, (5, 5), (1_000, 1_010))]


def test_acks_without_ranges_are_cumulative():
    assert told(poll(1), poll(2, mark_delete=9)) == [(M, (0, 9), (1_000, 2_010))]


def test_nothing_new_is_no_event():
    assert told(poll(1, 4), poll(2, 4), poll(3, 4)) == []


def test_a_record_may_cover_every_ack_of_its_poll():
    assert told(poll(1), poll(2, 4), poll(3, 4, 6, last=2)) == [
        (S, -1, (1_500, 3_010)),  # under way at the poll before, and durable up to half a second before it
        (A, (6, 6), (2_000, 3_010)),
        (S, -1, (2_000, 3_010)),
    ]


def test_the_third_record_covers_the_acks_of_the_poll():
    """Two may have been under way when it was made."""
    polls = [poll(1), poll(2, 4), poll(3, 4, last=2), poll(4, 4, 6, last=3)]
    assert told(*polls)[-1] == (S, -1, (3_000, 4_010))
    assert told(*polls, poll(5, 4, 6, 8, last=4))[-1] == (S, 2_010, (4_000, 5_010))
    assert told(*polls, poll(5, 4, 6, 8, last=4), poll(6, 4, 6, 8, last=6))[-1] == (S, 4_010, (5_000, 6_010))


def test_beyond_the_limit_a_record_may_lack_ranges():
    many = tuple(range(1, 25, 2))
    found = told(poll(1), poll(2, *many[:-1]), poll(3, *many, last=4))
    assert (S, 2_010, (2_000, 3_010)) in found
    assert [each[1] for each in found if each[0] == CUT] == [(each, each) for each in many[:-1]]


def test_beyond_the_limit_a_record_may_lack_ranges_that_an_earlier_one_had():
    many = tuple(range(2, 26, 2))
    polls = [poll(1), poll(2, 2), poll(3, 2, last=4)]
    assert told(*polls)[-1] == (S, 2_010, (2_000, 3_010))
    assert told(*polls, poll(4, *many, last=5))[-2:] == [(S, 2_010, (3_000, 4_010)), (CUT, (2, 2), (3_000, 4_010))]


def test_a_long_silence_means_that_everything_is_written():
    polls = [poll(1), poll(2, 4), poll(30, 4, last=2)]
    assert told(*polls, poll(63, 4, last=2)) == []
    assert told(*polls, poll(65, 4, last=2)) == [(S, 2_010, (30_000, 65_010))]
    assert told(*polls, poll(65, 4, last=2), poll(66, 4, last=2)) == []
    assert told(poll(1, last=0), poll(2, 4, last=0), poll(70, 4, last=0)) == [], "the first entry may have no ranges"


def test_a_new_ledger_of_the_same_load_may_lack_ranges():
    before = [poll(1), poll(2, 4, mark_delete=1), poll(3, 4, mark_delete=1, last=5)]
    rolled = told(*before, poll(4, 4, mark_delete=1, ledger=9, last=0))
    assert rolled == [(S, 3_010, (3_000, 4_010)), (CUT, (4, 4), (3_000, 4_010))]
    rolled = told(*before, poll(4, 4, mark_delete=1, ledger=9, last=1))
    assert rolled == [(S, 3_010, (3_000, 4_010)), (CUT, (4, 4), (3_000, 4_010)), (S, 3_010, (3_000, 4_010))]


def test_a_cursor_without_a_ledger_may_be_written_at_any_time():
    assert told(poll(1, ledger=-1, last=-1), poll(2, 4, ledger=-1, last=-1)) == [
        (A, (4, 4), (1_000, 2_010)), (S, -1, (1_000, 2_010)),
    ]  # fmt: skip


def test_the_first_ledger_covers_what_was_acked_before_it_from_its_second_entry_on():
    assert told(poll(1, 4, ledger=-1, last=-1), poll(2, 4, last=0))[-2:] == [
        (S, 1_010, (1_000, 2_010)), (CUT, (4, 4), (1_000, 2_010)),
    ]  # fmt: skip
    assert told(poll(1, 4, ledger=-1, last=-1), poll(2, 4, last=1))[-1] == (S, 1_010, (1_000, 2_010))


@pytest.mark.parametrize(
    "after",
    [
        {"ledger": -1, "last": -1, "load": ("b", 2)},
        {"ledger": 9, "last": 1, "load": ("c", 1)},
        {"ledger": 9, "last": 1, "load": None},
        {"ledger": -1, "last": -1, "load": None},
        {"load": None, "is_after_failure": True},
    ],
)
def test_entries_that_are_lost_with_a_load_are_a_crash(after):
    found = told(poll(1), poll(2, 4, 6, 8), poll(3, 6, 9, **after))
    assert found == [
        (S, -1, (1_500, 3_010)),
        (CRASH, -1, (2_000, 3_010)), (RECOVER, -1, (2_000, 3_010)),
        (AGAIN, (4, 4), (2_000, 3_010)), (AGAIN, (8, 8), (2_000, 3_010)),
        (A, (9, 9), (2_000, 3_010)),
        (S, 3_010, (2_000, 3_010)), (CUT, (6, 6), (2_000, 3_010)), (CUT, (9, 9), (2_000, 3_010)),
    ]  # fmt: skip


def test_an_unload_that_loses_nothing_is_no_crash():
    found = told(poll(1), poll(2, 4), poll(3, 4, ledger=-1, last=-1, load=("b", 2)))
    assert {each[0] for each in found} == {S, CUT}


def test_entries_that_are_lost_without_a_load_are_a_seek():
    found = told(poll(1), poll(2, 4, 6), poll(3, 6, last=2))
    assert [each[0] for each in found] == [S, RESET, AGAIN, S, CUT]


def test_a_broker_that_counts_the_acks_itself_is_believed():
    durable = poll(2, 4, reported=RedeliveryReported(entries=0, batches=0))
    assert told(poll(1), durable) == [(A, (4, 4), (1_000, 2_010)), (S, 2_010, (1_000, 2_010))]


def test_a_deleted_cursor_redelivers_nothing():
    follower = CursorFollower(SETTINGS)
    assert follower.ended(500) == [], "it was never seen"
    follower.follow(poll(1, 4))
    assert short(follower.ended(9_000)) == [(RESET, -1, (1_000, 9_000)), (AGAIN, (4, 4), (1_000, 9_000))]


def test_polls_between_two_records_take_the_memory_of_one():
    follower = CursorFollower(SETTINGS)
    for second in range(1, 60):
        follower.follow(poll(second, *range(second), last=2 + second // 30))
    assert len(follower._history) == 2
    certain = [each[1] for each in short(follower.follow(poll(60, *range(59), last=5))) if each[0] == S]
    assert certain[-1] == 29_010, "the last poll before the record"


def test_a_continued_recording_covers_the_gap():
    first = CursorFollower(SETTINGS)
    first.follow(poll(1, 4))
    again = CursorFollower(SETTINGS, known=poll(1, 4).acked_entries(), last_ms=1_000)
    assert short(again.follow(poll(900, 4, 5))) == [
        (A, (5, 5), (1_000, 900_010)),
        (S, 900_010, (1_000, 900_010)), (CUT, (4, 5), (1_000, 900_010)),
    ]  # fmt: skip
