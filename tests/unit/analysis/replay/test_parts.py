"""The parts of a replay, each against the slow and obvious way, however its events are cut into chunks."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.estimate.chunks import compact
from ackstate.analysis.replay.acked import AckAccumulator
from ackstate.analysis.replay.cursor_replay import AgeFeed, PersistTicks
from ackstate.analysis.replay.curves import RedeliveryFold
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.position import Position
from montecarlo import chunk_of
from traces import StateAfterEvent, replay, traces

ACK, CRASH, RECOVER, DELIVER = EventKind.ACK, EventKind.CRASH, EventKind.RECOVER, EventKind.DELIVER


def chunks_of(events, sizes):
    begin = 0
    for size in [*sizes, len(events)]:
        yield chunk_of(events[begin : begin + size])
        begin += size


# --- As recorded


def folded_states(events, sizes=()):
    fold, states = RedeliveryFold(), []
    for chunk in chunks_of(events, sizes):
        states += zip(*(column.tolist() for column in fold.fold(chunk)[:4]), strict=True)
    return [StateAfterEvent(*values) for values in states]


@given(traces(), st.lists(st.integers(0, 20), max_size=5))
def test_every_instant_agrees_with_sets(events, sizes):
    assert folded_states(events, sizes) == replay(events)


@pytest.mark.parametrize("sizes", [[], [1] * 11, [4, 2]])
def test_what_a_recorded_persist_left_out_has_its_cause(sizes):
    events = [
        Event(1, ACK, 3, 0, 9), Event(2, EventKind.PERSIST_BEGUN), Event(2, EventKind.HELD_BACK, 3, 5, 6),
        Event(2, EventKind.CUT_OFF, 3, 8, 8), Event(3, EventKind.PERSIST_ENDED), Event(4, EventKind.PERSIST_BEGUN),
        Event(4, EventKind.DISPLACED, 3, 0, 2), Event(4, EventKind.CUT_OFF, 3, 8, 8),
        Event(5, EventKind.PERSIST_FAILED), Event(6, CRASH), Event(7, RECOVER),
    ]  # fmt: skip
    fold, found = RedeliveryFold(), []
    for chunk in chunks_of(events, sizes):
        causes = fold.fold(chunk).causes
        found += [(0, 0)] * len(chunk.kind) if causes is None else list(zip(*causes[:2].tolist(), strict=True))
    # Displaced acks are lost from there on, also if the persist fails.
    assert found == [(0, 0)] * 4 + [(2, 1)] * 2 + [(2, 4)] * 3 + [(0, 0)] * 2
    assert [state.redelivery for state in folded_states(events, sizes)] == [10] * 4 + [3] * 2 + [6] * 3 + [6, 0]


# --- Under a policy


def test_what_an_earlier_chunk_acked_is_not_new_in_a_compact_one():
    acks = AckAccumulator()
    acks.take(compact(chunk_of([Event(1, ACK, 3, 5, 6)])))
    news = acks.take(compact(chunk_of([Event(2, ACK, 3, 3, 9), Event(3, ACK, 3, 6, 10)])))
    assert list(zip(*(column.tolist() for column in news), strict=True)) == [
        (0, 3, 3, 5),
        (0, 3, 7, 10),
        (1, 3, 10, 11),
    ]


# --- When a cursor persists


def ticks_of(opened_ms=1_000, **found):
    return PersistTicks(Policy.from_mapping(found), opened_ms=opened_ms)


def test_the_flush_interval_starts_again_after_a_reset():
    ticks = ticks_of(0, flush_interval_ms=1_000)
    ticks.acked_at(100)
    ticks.settled(900)
    assert ticks.next_due() is None
    ticks.acked_at(950)
    assert ticks.next_due() == 1_900


@pytest.mark.parametrize("waits", [(0, 0, 1), (1, 3, 9, 300), (0, 1, 1, 1, 700)])
def test_deliveries_told_at_once_are_as_each_of_them(waits):
    """Far more deliveries than there may be marks, some not in order."""
    chance, events, ts_ms = Random(3), [], 1_000
    for sent in range(800):
        ts_ms += chance.choice(waits)
        ledger_id, entry = divmod(max(0, sent - chance.choice((0, 0, 2, 40, 200))), 150)
        events.append(Event(ts_ms, DELIVER if chance.random() < 0.7 else ACK, ledger_id, entry, entry))
    one, many = (DeliveryRuler(1_000) for _ in range(2))
    for event in events:
        if event.kind == DELIVER:
            one.record(Position(event.ledger_id, event.last_entry), event.ts_ms)
    moved = []
    for chunk in chunks_of(events, [100, 300]):
        feed = AgeFeed(many, chunk)
        for last in (*feed.stops[:: len(feed.stops) // 3], len(chunk.ts_ms) - 1):
            moved += feed.take(int((chunk.ts_ms <= chunk.ts_ms[last]).sum()))
    assert (one.times, one.positions) == (many.times, many.positions)
    assert moved == sorted(moved)


def test_only_the_last_rise_of_a_millisecond_is_fed():
    told = ((5, 0), (5, 7), (5, 6), (6, 2), (7, 8), (7, 9))
    ruler = DeliveryRuler(1_000)
    feed = AgeFeed(ruler, chunk_of([Event(ts_ms, DELIVER, 3, entry, entry) for ts_ms, entry in told]))
    assert (feed.stops.tolist(), feed.take(6)) == ([1, 5], [5, 7])
    assert (ruler.times, ruler.positions) == ([5, 7], [Position(3, 7), Position(3, 9)])
