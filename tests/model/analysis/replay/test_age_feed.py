"""Deliveries told many at once, against each told by itself; and that this comparison can fail."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.replay.cursor_replay import AgeFeed
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.position import Position
from chunks import chunk_of
from strategies import few

LEDGER = 150  # entries


def trace(chance, count, waits):
    """Far more deliveries than there may be marks, some not in order, and acks of runs, known or not."""
    ts_ms, events, sent = 1_000, [], 0
    for _ in range(count):
        ts_ms += chance.choice(waits)
        ledger_id, entry = divmod(max(0, sent - chance.choice((0, 0, 2, 40, 200))), LEDGER)
        if chance.random() < 0.6:
            events.append(Event(ts_ms, EventKind.DELIVER, ledger_id, entry, entry))
            sent += 1
            continue
        kind = chance.choice((EventKind.ACK,) * 9 + (EventKind.MARK_DELETE,))
        first = max(0, entry - chance.choice((0, 1, 30))) if kind == EventKind.ACK else 0
        events.append(Event(ts_ms, kind, ledger_id, first, entry + chance.choice((0, 0, 2))))
    return events


WAITS = ((0, 0, 1), (1, 3, 9, 300), (0, 1, 1, 1, 700))
traces = st.builds(trace, st.randoms(use_true_random=False), st.integers(1, 500), st.sampled_from(WAITS))


def assert_told_the_same(events, cuts):
    one, many = (DeliveryRuler(marks_max=128) for _ in range(2))
    begin = 0
    for end in [*sorted(cut % len(events) for cut in cuts), len(events)]:
        part = events[begin:end]
        if not part:
            continue
        for event in part:
            if event.kind == EventKind.DELIVER:
                one.record(Position(event.ledger_id, event.last_entry), event.ts_ms)
        chunk = chunk_of(part)
        feed = AgeFeed(many, chunk)
        for last in (*feed.stops[:: max(len(feed.stops) // 3, 1)], len(part) - 1):
            feed.take(int((chunk.ts_ms <= chunk.ts_ms[last]).sum()))
        assert one.marks() == many.marks()
        begin = end


CUTS = st.lists(st.integers(0, 600), max_size=3)
test_events_told_at_once_are_as_each_of_them = pytest.mark.slow(few(given(traces, CUTS)(assert_told_the_same)))


STORY = trace(Random(3), 800, (1, 3, 9, 300))


def test_the_story_is_told_the_same():
    assert_told_the_same(STORY, [100, 300])


def test_it_catches_a_delivery_that_is_left_out(monkeypatch):
    taken = AgeFeed.take
    monkeypatch.setattr(AgeFeed, "take", lambda self, end: taken(self, end - 1))
    with pytest.raises(AssertionError):
        assert_told_the_same(STORY, [100, 300])


def test_only_the_last_rise_of_a_millisecond_is_fed():
    events = [
        Event(ts_ms, EventKind.DELIVER, 3, entry, entry)
        for ts_ms, entry in ((5, 0), (5, 7), (5, 6), (6, 2), (7, 8), (7, 9))
    ]
    ruler = DeliveryRuler(marks_max=128)
    feed = AgeFeed(ruler, chunk_of(events))
    assert feed.stops.tolist() == [1, 5]
    assert feed.take(6) == [5, 7]
    assert ruler.marks() == ([5, 7], [Position(3, 7), Position(3, 9)])
