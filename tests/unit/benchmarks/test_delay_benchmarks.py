"""The measurements and pictures of the benchmarks of delayed messages, at a size where they are known beforehand."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from types import SimpleNamespace

import numpy as np
import pytest
from pyroaring import BitMap

from ackstate import Position
from ackstate.analysis.workloads.traffic import HOUR_MS
from ackstate.delay import InMemoryDelayTracker
from ackstate.delay.position_set import PositionSet
from benchmarks.delay import bench_bucketed, bench_index_memory, bench_isolation, bench_subscriptions, bench_throughput
from benchmarks.delay.chart import Mark, Panel, PanelAxis, PanelLine, drawn
from benchmarks.delay.footprint import Ruler, bitmap_bytes, bitmaps_of, growth, in_new_process, owned_bytes
from benchmarks.delay.isolation import BURDENS, DelayedTraffic, IsolatedTopic, SubscriberKind, now_ms
from benchmarks.delay.isolation_peers import ProposedTopic, TrackersTopic
from benchmarks.delay.nothing_acked import NothingAcked
from benchmarks.delay.pictures import PICTURES
from benchmarks.delayed_messages import mixed_delays
from benchmarks.measurement import RESULTS, TimedPart, timed

SVG = "{http://www.w3.org/2000/svg}"
SMALL = DelayedTraffic(rate=20, publish_ticks=40, delay_ticks=10, ledger_size=200)


class KeptRows:
    """Keeps the rows of a report."""

    def __init__(self):
        self.medians = {}

    def time(self, what, unit, spread, against=None):
        assert spread.low <= spread.median <= spread.high
        self.medians[what] = spread.median

    def count(self, what, unit, number, against=None):
        self.medians[what] = number


# Memory.


def test_a_bitmap_takes_its_containers_and_what_is_around_them():
    # Two containers of 2 bytes an entry and 27 bytes each, and 40 bytes for the bitmap; the third is of bits.
    assert bitmap_bytes(BitMap([1, 2, 3, 70_000])) == 40 + 2 * 27 + 4 * 2
    assert bitmap_bytes(BitMap(range(0, 20_000, 2))) == 40 + 27 + 8_192


def test_the_bitmaps_of_a_tracker_are_found():
    tracker = InMemoryDelayTracker(tick_time_ms=1_000)
    for at in range(6):
        tracker.add_message(Position(at % 2, at), deliver_at_ms=10_000 + 600 * at, now_ms=0)
    assert sorted(list(each) for each in bitmaps_of(tracker)) == [[0], [1], [2], [3], [4], [5]]


def test_what_is_owned_is_counted_once_and_what_is_outside_not_at_all():
    outside = SimpleNamespace(much=bytes(1_000_000))
    shared = [bytes(10_000)]
    owned = owned_bytes([shared, shared, {"to": outside}, BitMap(range(0, 20_000, 2))], outside=(SimpleNamespace,))
    assert 10_000 + 8_192 < owned < 10_000 + 8_192 + 1_000


def test_growth_is_what_was_built_by_either_ruler():
    assert 1_000_000 <= growth(lambda: [bytes(1_000), bytearray(1_000_000)], Ruler.TRACED) < 1_010_000
    assert growth(lambda: [BitMap(range(0, 20_000, 2))], Ruler.TRACED) >= 8_192
    assert 50e6 <= growth(lambda: bytearray(b"1") * 50_000_000, Ruler.RESIDENT) < 55e6


@pytest.mark.slow
def test_a_measurement_of_its_own_process_comes_back_as_numbers():
    taken, own = in_new_process("benchmarks.delay.bench_index_memory", "in bulk", 20_000, "traced")
    assert own == pytest.approx(taken, rel=0.2)


def test_messages_are_uniform_over_an_hour_in_ledgers():
    ledgers = list(mixed_delays(1_000, ledger_size=400))
    assert [(each.ledger_id, len(each.entry_ids), each.entry_ids[0]) for each in ledgers] == [
        (1, 400, 0), (2, 400, 0), (3, 200, 0),
    ]  # fmt: skip
    times = np.concatenate([each.deliver_at_ms for each in ledgers])
    assert 0 < times.min() < 0.01 * HOUR_MS
    assert 0.99 * HOUR_MS < times.max() <= HOUR_MS


@pytest.mark.slow
def test_trackers_add_up_and_views_do_not():
    def grown(design, count):
        return bench_subscriptions.grown(design, count, Ruler.TRACED, messages=500)

    one, ten = (grown(bench_subscriptions.PER_SUBSCRIPTION, count) for count in (1, 10))
    assert ten == pytest.approx(10 * one, rel=0.05)
    for design in (bench_subscriptions.SHARED, bench_subscriptions.BUCKETED, bench_subscriptions.PROPOSED):
        assert 0 < grown(design, 10) - grown(design, 1) < 9 * 1_000


def test_an_index_says_what_it_takes():
    taken, own = bench_index_memory.bytes_a_message("in bulk", 10_000, Ruler.TRACED)
    assert own == pytest.approx(taken, rel=0.2)
    assert 8 < taken < 16


# Time.


@pytest.mark.slow
def test_everything_is_timed_by_how_much_is_held():
    rows = KeptRows()
    bench_throughput.measure(rows, (300,), one_by_one=50)
    assert set(rows.medians) == {bench_throughput.row(300, what) for what in bench_throughput.AGAINST}
    assert min(rows.medians.values()) > 0


def test_a_drain_that_loses_the_messages_of_a_view_that_was_cut_off_fails(monkeypatch):
    drain = bench_throughput.drain_timings(10_000)["scheduled_messages each tick"]
    drain.thing(drain.fresh())
    monkeypatch.setattr(NothingAcked, "not_sent_between", lambda *_: PositionSet())
    with pytest.raises(AssertionError):
        drain.thing(drain.fresh())


def test_the_time_of_a_part_replaces_the_time_of_the_whole():
    assert timed(lambda _: TimedPart(700), lambda: None, runs=3, each=7) == (100, 100, 100, 3)


@pytest.mark.slow
def test_a_whole_ledger_is_sealed_and_found_again():
    rows = KeptRows()
    bench_bucketed.measure(rows, 50_001, runs=1)
    assert rows.medians["50,001: buckets"] == 1
    assert 12 < rows.medians["50,001: snapshots"] < 20
    assert rows.medians["50,001: seal of a bucket of 50,000"] > 0
    assert rows.medians["50,001: recovery from 1 buckets"] > 0


# Isolation.


def test_traffic_is_spread_over_ticks_and_ledgers():
    published = SMALL.published()
    assert len(published) == 40
    assert [(each.ledger_id, each.entry_ids[0], each.entry_ids[-1]) for each in published[9:11]] == [
        (1, 180, 199), (2, 0, 19),
    ]  # fmt: skip
    due_ticks = SMALL.due_ticks().reshape(40, 20)
    assert all(1 <= (due - tick).min() <= (due - tick).max() <= 10 for tick, due in enumerate(due_ticks))


def stepped(topic, ticks):
    for tick in range(ticks):
        topic.step(tick)
    return topic


def by_kind(topic):
    return {each.kind: each for each in topic.subscribers}


def test_the_burdens_are_what_they_are_called():
    topic = stepped(IsolatedTopic(SMALL, healthy=5, burdens=BURDENS), SMALL.ticks)
    every = 40 * 20
    kinds = by_kind(topic)
    assert [each.kind for each in topic.subscribers].count(SubscriberKind.HEALTHY) == 5
    assert topic.subscribers[0].kind is topic.subscribers[-1].kind is SubscriberKind.HEALTHY
    assert len(kinds[SubscriberKind.HEALTHY]._acked) == every
    assert len(kinds[SubscriberKind.STUCK]._acked) == 0
    assert len(kinds[SubscriberKind.SLOW]._acked) == 2 * 100  # at ticks 20 and 40; at 0 nothing was due
    assert len(kinds[SubscriberKind.HOLE]._acked) == every - 1
    assert len(kinds[SubscriberKind.CHURN]._acked) == every
    assert len(topic.index) == 0
    stuck = kinds[SubscriberKind.STUCK].view
    assert len(stuck.scheduled_messages(every + 1, now_ms=now_ms(SMALL.ticks))) == every


def test_one_that_is_handed_less_than_is_due_is_noticed():
    topic = stepped(IsolatedTopic(SMALL, healthy=2, burdens=()), 5)
    topic.publish(5)
    assert topic.subscribers[1].poll(5)
    with pytest.raises(AssertionError):
        topic.lags_ns(5)


def test_a_run_has_lags_and_memory_of_both_topics():
    outcome = bench_isolation.run(SMALL, healthy=3)
    assert set(outcome.lags_ms) == set(outcome.memory) == {bench_isolation.WITH, bench_isolation.WITHOUT}
    for lags in outcome.lags_ms.values():
        assert 0 < lags["p50"] <= lags["p99"] <= lags["max"]
    assert [tick for tick, _ in outcome.memory[bench_isolation.WITH]] == list(range(0, 60, 5))
    assert bench_isolation.quantiles_ms([1_000_000] * 99 + [3_000_000])["max"] == 3


def test_the_proposal_keeps_all_for_one_that_is_stuck_and_trackers_only_the_stuck_ones():
    proposed = stepped(ProposedTopic(SMALL, healthy=3), SMALL.ticks)
    assert len(proposed._manager) == 40 * 20
    trackers = stepped(TrackersTopic(SMALL, healthy=3), SMALL.ticks)
    counts = dict(zip(trackers._kinds, (each.delayed_message_count for each in trackers._trackers), strict=True))
    assert counts == {
        SubscriberKind.HEALTHY: 0,
        SubscriberKind.STUCK: 800,
        SubscriberKind.SLOW: 600,
        SubscriberKind.HOLE: 0,
        SubscriberKind.CHURN: 0,
    }


@pytest.mark.slow
def test_memory_is_measured_of_all_designs():
    rows = KeptRows()
    curves = bench_isolation.measure_memory(rows, SMALL, healthy=2)
    assert set(curves) == {
        "tracker a subscription, with the four", "PIP-448, with the four",
        "shared index, with the four", "shared index, without",
    }  # fmt: skip
    assert (
        rows.medians["2 others, PIP-448, with the four: memory at the end"] * 1e3
        == curves["PIP-448, with the four"][-1][1]
    )
    lags = KeptRows()
    bench_isolation.measure_lags(lags, SMALL, healthy=2, runs=2)
    for quantile in bench_isolation.QUANTILES:
        for name in (bench_isolation.WITH, bench_isolation.WITHOUT):
            assert lags.medians[bench_isolation.lag_row(quantile, name)] > 0


# Pictures.


def test_a_line_is_drawn_to_scale():
    log = PanelAxis("n", [(1, "1"), (100, "100")], is_log=True)
    panel = Panel(
        "<t>", log, PanelAxis("ms", [(0, "0"), (10, "10")]), [PanelLine("one", [(1, 0), (10, 5), (100, 20)], [(0, 10)])]
    )
    root = ET.fromstring(drawn("title", [panel]))
    assert [line.get("points") for line in root.iter(f"{SVG}polyline")] == ["0.0,230.0 200.0,115.0 400.0,0.0"]
    (spread,) = (line for line in root.iter(f"{SVG}line") if line.get("class") == "c0 spread")
    assert (spread.get("y1"), spread.get("y2")) == ("0.0", "230.0")
    assert {"title", "<t>", "one", "n", "ms"} <= {text.text for text in root.iter(f"{SVG}text")}


def test_a_mark_spans_its_figures_and_names_do_not_overlap():
    x, y = PanelAxis("n", [(0, "0"), (4, "4")]), PanelAxis("", [(0, "0"), (100, "100")])
    lines = [PanelLine(name, [(0, 0), (4, at)]) for name, at in (("low", 10), ("same", 10), ("high", 90))]
    root = ET.fromstring(drawn("", [Panel("", x, y, lines, [Mark("theirs", 2, 50, 100)])]))
    (mark,) = (line for line in root.iter(f"{SVG}line") if line.get("class") == "mark")
    assert (mark.get("x1"), mark.get("y1"), mark.get("y2")) == ("200.0", "0.0", "115.0")
    heights = {text.text: float(text.get("y")) for text in root.iter(f"{SVG}text")}
    assert heights["high"] < heights["low"] <= heights["same"] - 15


@pytest.mark.parametrize("name", PICTURES)
def test_what_is_committed_is_drawn_from_the_figures_committed(name):
    written = json.loads((RESULTS / f"{name}.json").read_text())
    picture = PICTURES[name](written)
    assert picture == (RESULTS / f"{name}.svg").read_text(), "python -m benchmarks.delay.draw"
    assert ET.fromstring(picture).tag == f"{SVG}svg"
