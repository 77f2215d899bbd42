"""The estimate: literal events in, literal numbers out; against plain sets and plain sums on traces of every shape."""

import json
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import (
    ESTIMATE,
    Part,
    ThinnedCurve,
    badness,
    batches_of,
    estimates,
    put_together,
)
from ackstate.analysis.estimate.results import SweepResult
from ackstate.analysis.replay.curves import Histogram, weight_of
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace import chunks as trace_chunks
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.chunks import WALL_CLOCK_MS
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recording import Frame
from montecarlo import replayed
from trace_files import crashes_of, subscriptions_of

BEGUN, ENDED, FAILED = EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED
CRASH, RECOVER = EventKind.CRASH, EventKind.RECOVER


def ack(ts_ms, first, last=None):
    return Event(ts_ms, EventKind.ACK, 3, first, first if last is None else last)


def estimates_of(tmp_path, **events_of):
    """Return the row of each subscription, with its curve."""
    frames = [Frame("t", name, [event]) for name, events in events_of.items() for event in events]
    parquet.write_trace(frames, tmp_path / "trace")
    return {row["subscription"]: row for row in subscriptions_of(tmp_path / "trace", is_plotted=True)}


PERSISTED_AT_0 = [ack(0, 0, 99), Event(0, BEGUN), Event(0, ENDED), ack(50, 100), Event(100, CRASH)]
LIVES = [
    ack(0, 0, 1), Event(10, CRASH), Event(1_000, RECOVER), Event(1_000, EventKind.REDELIVER, 3, 0, 1), ack(1_010, 0),
    Event(1_020, CRASH),
]  # fmt: skip
# Events, and numbers of their estimate; of crashes when, what is redelivered, the same if written, and if one was.
STORIES = {
    "an estimate weighs by time": (
        # 2 for 10 ms, 4 for 89 ms, 5 for 1 ms.
        [ack(0, 0, 1), ack(10, 2, 3), ack(99, 4), Event(100, BEGUN), Event(100, ENDED)],
        {"expected": (20 + 356 + 5) / 100, "p50": 4, "p99": 4, "max": 5},
    ),
    "a peak within a millisecond counts for the max and weighs nothing": (
        PERSISTED_AT_0, {"expected": 0.5, "p99": 1, "max": 100},
    ),
    "a trace of one instant has a max and no mean": (
        [ack(7, 0, 2)], {"expected": None, "p50": None, "p99": None, "max": 3},
    ),
    "nothing comes back of a process that is dead": (
        LIVES, {"expected": (2 * 10 + 0 * 1_000 + 1 * 10) / 1_020, "crashes": [(10, (2, 2, 0)), (1_020, (1, 1, 0))]},
    ),
    "a crash inside a persist has two answers": (
        [ack(1, 0, 4), Event(5, BEGUN), ack(6, 5), Event(9, CRASH)], {"crashes": [(9, (6, 1, 1))]},
    ),
    "a persist that failed may have been written": (
        [ack(1, 0, 4), Event(5, BEGUN), ack(6, 5), Event(8, FAILED), Event(9, CRASH)], {"crashes": [(9, (6, 1, 1))]},
    ),
    "of crashes in one millisecond the last counts": (
        [ack(1, 0, 4), Event(9, CRASH), Event(9, RECOVER), ack(9, 7), Event(9, CRASH)], {"crashes": [(9, (1, 1, 0))]},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("events", "numbers"), STORIES.values(), ids=STORIES)
def test_each_story_has_its_numbers(tmp_path, events, numbers):
    """Events of the topic itself are no subscription."""
    found = estimates_of(tmp_path, **{"": [Event(events[0].ts_ms, EventKind.PUBLISH, 3, 0, 200)], "s": events})
    assert [*found] == ["s"]
    row = found["s"] | {"crashes": crashes_of(found["s"])}
    assert {name: row[name] for name in numbers} == numbers


# --- Sums

TOPICS = ("persistent://a/b/t", "persistent://a/b/u", "persistent://a/c/t", "plain")


def flushed_events(seed):
    chance = random.Random(seed)
    ts_ms, events = 1_000 + seed, []
    for entry in range(chance.choice((3, 60, 300))):
        ts_ms += chance.choice((0, 1, 9))
        events.append(ack(ts_ms, entry ^ 5))
        if not entry % 40:
            events += [Event(ts_ms, BEGUN), Event(ts_ms, ENDED)]
    return events


def test_every_scope_is_the_sum_of_its_subscriptions_at_every_instant(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_chunks, "CHUNK_EVENTS", 50)
    monkeypatch.setattr("ackstate.analysis.estimate.estimates.CHUNKS_PER_SLICE", 3)
    # A subscription of one name on every topic.
    keys = [(topic, name) for topic in TOPICS for name in ("s", f"only {topic[-1]}")]
    named = {key: flushed_events(number) for number, key in enumerate(keys)}
    parquet.write_trace([Frame(*key, events) for key, events in named.items()], tmp_path / "trace")
    settings = [{"flush_interval_ms": 70}, {"range_count_max": 0}, {"become_old_ack_record_seconds": 1}]
    policies = [None, *map(Policy.from_mapping, settings)]
    rows = estimates(LocalSource.of(tmp_path / "trace"), policies, crashes_per_day=2).collect()
    begin_ms = min(events[0].ts_ms for events in named.values())
    end_ms = max(events[-1].ts_ms for events in named.values())
    curves = {}
    for key, events in named.items():
        found, _ = replayed(events, policies, {3: 310}, end_ms=end_ms)
        curves[key] = [np.array([0] * (events[0].ts_ms - begin_ms) + list(curve.values())) for curve in found]
    assert len(rows) == len(policies) * (len(named) + len(TOPICS) + 3 + 1)
    for row in rows:
        values = sum(
            found[row["policy"]] for (topic, name), found in curves.items()
            if row["topic"] in {"", topic} and row["subscription"] in {"", name}
            and (row["scope"] == "total" or row["namespace"] == "/".join(topic.split("/")[2:4]))
        )  # fmt: skip
        lasting = values[:-1]
        assert row["expected"] == pytest.approx(lasting.mean()), row
        assert row["duplicates_per_day"] == 2 * row["expected"]
        ordered = np.sort(lasting)
        for share in (50, 90, 99):
            assert row[f"p{share}"] == ordered[-(-len(ordered) * share // 100) - 1], row
        if row["scope"] != "subscription":
            peak_ms = begin_ms + values.argmax() if values.any() else None
            assert (row["max"], row["max_ts_ms"]) == (values.max(), peak_ms), row
        causes = [row[name] for name in ("not_flushed", "young", "cut_by_ranges", "cut_by_bytes", "cut_by_route")]
        assert sum(causes) == pytest.approx(row["expected"])
    result = SweepResult.of_rows("trace", policies, rows, crashes_per_day=2)
    labels = [f"{key}={value}" for each in settings for key, value in each.items()]
    assert [each.label for each in result.policies] == ["recorded", *labels]


def test_the_curve_of_all_has_the_peak_within_a_slice(tmp_path):
    events = [ack(0, 0), ack(10, 1), ack(11, 2, 9), Event(12, BEGUN), Event(12, ENDED), ack(100_000, 10)]
    parquet.write_trace([Frame("t", "s", events)], tmp_path / "trace")
    rows = estimates(LocalSource.of(tmp_path / "trace"), [None], is_plotted=True).collect()
    (total,) = [row for row in rows if row["scope"] == "total"]
    assert (total["curve_ms"], total["curve"][:4]) == ([11, 12, 100_000, 100_000], [10, 0, 1, 1])


def test_a_persist_begun_within_another_is_of_another_cursor(tmp_path):
    with pytest.raises(TraceError, match="two cursors under one name, seen at 3 ms"):
        estimates_of(tmp_path, s=[ack(1, 0), Event(2, BEGUN), Event(3, BEGUN)])


def test_subscriptions_with_most_redelivery_come_first():
    numbers = ((2.0, 2), (0.5, 3), (0.5, 1), (0.0, 7), (None, 3))
    rows = [{"expected": mean, "max": most, "topic": "t", "subscription": "s"} for mean, most in numbers]
    assert sorted([*rows[2:], *rows[:2]], key=badness) == rows


def test_time_without_events_counts_in_every_scope(tmp_path):
    """One cursor is idle for an hour, then its process dies; another one is idle for two."""
    hour = 3_600_000
    acks = [ack(0, entry) for entry in range(1, 200, 2)]
    again = [Event(hour + hour // 2, EventKind.REDELIVER, 3, entry, entry) for entry in range(1, 200, 2)]
    dies = [*acks, Event(hour, CRASH), Event(hour + hour // 2, RECOVER), *again]
    lives = [*acks, Event(2 * hour, BEGUN), Event(2 * hour, ENDED)]
    parquet.write_trace([Frame(TOPICS[0], "dies", dies), Frame(TOPICS[1], "lives", lives)], tmp_path / "trace")
    policies = [None, Policy.from_mapping({"flush_interval_ms": hour // 2})]
    rows = estimates(LocalSource.of(tmp_path / "trace"), policies).collect()
    expected = {(row["policy"], row["scope"], row["topic"]): row["expected"] for row in rows}
    for policy, dead, alive in ((0, 50, 100), (1, 25, 25)):
        assert expected[policy, "subscription", TOPICS[0]] == pytest.approx(dead, abs=0.01)
        assert expected[policy, "topic", TOPICS[1]] == pytest.approx(alive, abs=0.01)
        assert expected[policy, "total", ""] == pytest.approx(dead + alive, abs=0.01)


def test_values_times_durations_are_exact_beyond_64_bits():
    chance = np.random.default_rng(7)
    for bits in (10, 31, 40, 62):
        values, durations = chance.integers(0, 2**bits, 50), chance.integers(0, 2**36, 50)
        exact = sum(value * ms for value, ms in zip(values.tolist(), durations.tolist(), strict=True))
        assert weight_of(values, durations) == exact
    assert weight_of(values, durations) > 2**63


def test_an_estimate_of_a_century_does_not_wrap():
    century_ms = WALL_CLOCK_MS.stop - WALL_CLOCK_MS.start
    lost, young = 4 * 2**32, 3 * 2**32
    sums = [lost, 5, young * century_ms, 0, 7, 0, 1, 2, 3, 4, 5]
    names = ("total", "", "", "")
    parts = [Part(0, -1, *names, np.empty(0, np.int64), np.array([lost]), np.array([century_ms]), sums)]
    rows = put_together(batches_of(parts), duration_ms=century_ms, crashes_per_day=1)
    (row,) = [row for batch in rows for row in batch.to_pylist()]
    assert json.dumps(row["expected"]) == json.dumps(float(lost))
    assert row["young"] == pytest.approx(young)
    assert row["not_flushed"] == pytest.approx(lost - young)
    assert list(row) == ESTIMATE.names


def test_a_histogram_with_many_values_asks_to_be_written_down():
    histogram, values = Histogram(), np.arange(65_536)
    for each in (values, values, values[:1] + 10**9, values):
        assert not histogram.is_large
        histogram.add(each, np.ones_like(each))
    assert histogram.is_large
    value, duration_ms = histogram.columns()
    assert (len(value), duration_ms.sum(), duration_ms[0]) == (65_537, 3 * 65_536 + 1, 3)


# --- A thinned curve is bounded, and does not depend on how it came

BEGIN_MS = 100
STEPS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, 1)), min_size=1, max_size=80)


def arrays(steps):
    ts_ms = BEGIN_MS + np.cumsum([gap for gap, _, _ in steps])
    return ts_ms, np.array([[value, cause] for _, value, cause in steps]).T


def thinned(steps, cuts, *, slices_max=8):
    ts_ms, values = arrays(steps)
    curve = ThinnedCurve(BEGIN_MS, int(ts_ms[-1]), slices_max=slices_max)
    bounds = [0, *sorted(cuts), len(steps)]
    for low, high in pairwise(bounds):
        curve.add(ts_ms[low:high], values[:, low:high])
    return curve


def points_of(curve):
    ts_ms, values = curve.points(2)
    return ts_ms.tolist(), values.tolist()


def slowly(steps, width_ms):
    """Say of each slice the first peak and the last change, one point after another."""
    times, values_of = arrays(steps)
    at_end = dict(zip(times.tolist(), values_of.T.tolist(), strict=True))
    before, slices = [0, 0], {}
    for ts_ms, values in at_end.items():
        if values != before:
            slices.setdefault((ts_ms - BEGIN_MS) // width_ms, []).append((ts_ms, values))
        before = values
    kept = []
    for changes in slices.values():
        peak = max(changes, key=lambda change: (change[1][0], -change[0]))
        kept += [peak] if peak == changes[-1] else [peak, changes[-1]]
    return [ts_ms for ts_ms, _ in kept], [[values[row] for _, values in kept] for row in range(2)]


@given(STEPS, st.lists(st.integers(0, 80), max_size=6))
def test_however_it_is_cut_the_peak_and_the_end_of_each_slice_stay(steps, cuts):
    curve = thinned(steps, [min(cut, len(steps)) for cut in cuts])
    assert points_of(curve) == slowly(steps, curve.width_ms)
    last_ms = max(points_of(curve)[0], default=BEGIN_MS)
    assert (last_ms - BEGIN_MS) // curve.width_ms < 8
