"""Deliveries and acks told many at once, against each told by itself; and that this comparison can fail."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate.analysis.replay.acked import AckAccumulator
from ackstate.analysis.replay.age_feed import AgeFeed
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.cursor.state.auto_age import AgeChooser, AutoAge
from ackstate.cursor.state.young_age import YoungAge
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.position import Position
from chunks import chunk_of
from strategies import few

POLICY = AutoAge(late_share_max=0.1, seconds_min=1, seconds_max=20)
LEDGER = 150  # entries


@pytest.fixture(autouse=True)
def _fades_soon(monkeypatch):
    monkeypatch.setattr("ackstate.cursor.state.auto_age._FADING_COUNT", 40)


def young_age(setting):
    young = YoungAge(setting)
    young.ruler = DeliveryRuler(marks_max=128)
    return young


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


def tell_each(young, events, news):
    """Tell every event as a cursor does."""
    for number, event in enumerate(events):
        if event.kind == EventKind.DELIVER:
            young.delivered(Position(event.ledger_id, event.last_entry), now_ms=event.ts_ms)
        elif event.kind == EventKind.ACK:
            for each, ledger_id, first, end in zip(*(column.tolist() for column in news), strict=True):
                if each == number:
                    young.acked({ledger_id: BitMap(range(first, end))}, now_ms=event.ts_ms)


def state_of(young):
    chosen = (young.chooser._weights, young.chooser.until_fading) if young.chooser else ()
    return young.ruler.marks(), chosen, young.reason


def assert_told_the_same(events, setting, cuts):
    one, many, fold = young_age(setting), young_age(setting), AckAccumulator()
    begin = 0
    for end in [*sorted(cut % len(events) for cut in cuts), len(events)]:
        part = events[begin:end]
        if not part:
            continue
        chunk = chunk_of(part)
        news = fold.take(chunk)
        tell_each(one, part, news)
        feed = AgeFeed(many, chunk, news)
        for last in (*feed.stops[:: max(len(feed.stops) // 3, 1)], len(part) - 1):
            feed.take(int((chunk.ts_ms <= chunk.ts_ms[last]).sum()))
        assert state_of(one) == state_of(many)
        begin = end


CUTS = st.lists(st.integers(0, 600), max_size=3)
SETTINGS = st.sampled_from((POLICY, POLICY, 5))
test_events_told_at_once_are_as_each_of_them = pytest.mark.slow(
    few(given(traces, SETTINGS, CUTS)(assert_told_the_same))
)


STORY = trace(Random(3), 800, (1, 3, 9, 300))


def test_the_story_is_told_the_same():
    assert_told_the_same(STORY, POLICY, [])


def test_it_catches_acks_that_ask_a_ruler_which_was_thinned_since(monkeypatch):
    monkeypatch.setattr(AgeFeed, "_thinned_at", lambda self: len(self._events.ts_ms))
    with pytest.raises(AssertionError):
        assert_told_the_same(STORY, POLICY, [])


def test_it_catches_acks_that_are_told_after_everything_faded(monkeypatch):
    monkeypatch.setattr(AgeChooser, "until_fading", property(lambda self: 2 * self._until_fading))
    with pytest.raises(AssertionError):
        assert_told_the_same(STORY, POLICY, [])


def test_it_catches_mark_deletes_that_count_as_late_acks(monkeypatch):
    built = AgeFeed.__init__

    def init(self, young, events, news):
        kind = events.kind.copy()
        kind[kind == EventKind.MARK_DELETE] = EventKind.ACK
        built(self, young, events._replace(kind=kind), news)

    monkeypatch.setattr(AgeFeed, "__init__", init)
    with pytest.raises(AssertionError):
        assert_told_the_same(STORY, POLICY, [])


def test_only_the_last_rise_of_a_millisecond_says_something_where_the_age_is_set():
    events = [
        Event(ts_ms, EventKind.DELIVER, 3, entry, entry)
        for ts_ms, entry in ((5, 0), (5, 7), (5, 6), (6, 2), (7, 8), (7, 9))
    ]
    young, chunk = young_age(5), chunk_of(events)
    feed = AgeFeed(young, chunk, AckAccumulator().take(chunk))
    assert feed.stops.tolist() == [1, 5]
    assert feed.take(6) == [5, 7]
    assert young.ruler.marks() == ([5, 7], [Position(3, 7), Position(3, 9)])
