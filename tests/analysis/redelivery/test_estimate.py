"""The Spark estimate: literal rows in, literal rows out; and against plain sets on traces of every shape."""

from __future__ import annotations

import random

import pytest
from pyspark.sql import Row

from ackstate.analysis.redelivery import estimate
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Frame
from traces import last_state, replay, steps

pytestmark = [pytest.mark.spark, pytest.mark.slow]

BEGUN, ENDED, FAILED = EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED


def ack(ts_ms, first, last=None):
    return Event(ts_ms, EventKind.ACK, 3, first, first if last is None else last)


def trace_of(spark, tmp_path, **events_of):
    frames = [Frame("t", name, [event]) for name, events in events_of.items() for event in events]
    parquet.write_trace(frames, tmp_path / "trace")
    return spark.read.parquet(str(tmp_path / "trace"))


def rows(frame, *columns):
    return sorted(tuple(row[column] for column in columns) for row in frame.collect())


def test_steps_of_a_small_trace(spark, tmp_path):
    trace = trace_of(
        spark,
        tmp_path,
        s=[ack(10, 0), ack(10, 1), Event(12, BEGUN), ack(13, 2), Event(15, ENDED), Event(20, EventKind.CRASH)],
    )
    found = rows(estimate.curve(trace), "ts_ms", "until_ms", "redelivery", "redelivery_max", "at_crash")
    assert found == [
        (10, 12, 2, 2, None),
        (12, 13, 2, 2, None),
        (13, 15, 3, 3, None),
        (15, 20, 1, 1, None),
        (20, 20, 1, 1, 1),
    ]


def test_summary_weighs_by_time(spark, tmp_path):
    # 2 for 10 ms, 4 for 89 ms, 5 for 1 ms.
    trace = trace_of(spark, tmp_path, s=[ack(0, 0, 1), ack(10, 2, 3), ack(99, 4), Event(100, BEGUN), Event(100, ENDED)])
    (row,) = estimate.summary(estimate.curve(trace)).collect()
    assert row == Row(topic="t", subscription="s", expected=(20 + 356 + 5) / 100, p50=4, p99=4, max=5)


def test_a_peak_within_a_millisecond_counts_for_the_max_and_weighs_nothing(spark, tmp_path):
    trace = trace_of(
        spark, tmp_path, s=[ack(0, 0, 99), Event(0, BEGUN), Event(0, ENDED), ack(50, 100), Event(100, EventKind.CRASH)]
    )
    (row,) = estimate.summary(estimate.curve(trace)).collect()
    assert (row["max"], row["p99"], row["expected"]) == (100, 1, 0.5)


def test_a_trace_of_one_instant_has_a_max_and_no_mean(spark, tmp_path):
    (row,) = estimate.summary(estimate.curve(trace_of(spark, tmp_path, s=[ack(7, 0, 2)]))).collect()
    assert (row["expected"], row["p50"], row["p99"], row["max"]) == (None, None, None, 3)


def test_the_time_between_a_crash_and_a_recovery_weighs_nothing(spark, tmp_path):
    trace = trace_of(
        spark,
        tmp_path,
        s=[
            ack(0, 0, 1), Event(10, EventKind.CRASH), Event(1_000, EventKind.RECOVER),
            Event(1_000, EventKind.REDELIVER, 3, 0, 1), ack(1_010, 0), Event(1_020, EventKind.CRASH),
        ],
    )  # fmt: skip
    curve = estimate.curve(trace)
    (row,) = estimate.summary(curve).collect()
    assert row["expected"] == (2 * 10 + 0 * 10 + 1 * 10) / 30
    assert rows(estimate.crashes(curve), "ts_ms", "at_crash") == [(10, 2), (1_020, 1)]


@pytest.mark.parametrize("end", [[], [Event(8, FAILED)]])
def test_a_crash_inside_a_persist_has_two_answers(spark, tmp_path, end):
    trace = trace_of(
        spark,
        tmp_path,
        s=[ack(1, 0, 4), Event(5, BEGUN), ack(6, 5), *end, Event(9, EventKind.CRASH)],
    )
    crashes = estimate.crashes(estimate.curve(trace))
    assert rows(crashes, "at_crash", "at_crash_if_written", "persisting_at_crash") == [(6, 1, True)]


def test_events_of_the_topic_itself_are_no_subscription(spark, tmp_path):
    frames = [Frame("t", "", [Event(1, EventKind.PUBLISH, 3, 0, 9)]), Frame("t", "s", [ack(2, 0)])]
    parquet.write_trace(frames, tmp_path / "trace")
    curve = estimate.curve(spark.read.parquet(str(tmp_path / "trace")))
    assert rows(curve, "subscription") == [("s",)]


def test_the_timeline_keeps_the_highest_step_of_each_slice(spark, tmp_path):
    events = [ack(ts_ms, ts_ms) for ts_ms in range(100)]
    events[49:49] = [Event(49, BEGUN), Event(49, ENDED)]
    timeline = estimate.timeline(estimate.curve(trace_of(spark, tmp_path, s=events)), points=10)
    found = rows(timeline, "ts_ms", "redelivery", "redelivery_max")
    assert len(found) == 10
    assert found[4] == (40, 1, 49)
    assert found[9] == (90, 51, 51)


def random_events(seed):
    chance = random.Random(seed)
    ts_ms, events, is_persisting = 1_000, [], False
    for _ in range(chance.choice((1, 5, 60, 400))):
        ts_ms += chance.choice((0, 0, 0, 1, 2, 7))
        first = chance.randrange(300)
        kind = chance.choices((EventKind.ACK, EventKind.MARK_DELETE, BEGUN, ENDED, FAILED), (8, 2, 2, 2, 1))[0]
        if kind is BEGUN and is_persisting:
            kind = ENDED
        is_persisting = kind is BEGUN or (is_persisting and kind not in (ENDED, FAILED))
        run = (chance.randrange(3), first, first + chance.choice((0, 0, 3, 80)))
        events.append(
            Event(ts_ms, kind, *run) if kind in (EventKind.ACK, EventKind.MARK_DELETE) else Event(ts_ms, kind)
        )
    return [*events, Event(ts_ms + 3, EventKind.CRASH)]


def quantile(weighted, share):
    total, passed = sum(weight for _, weight in weighted), 0
    for value, weight in sorted(weighted):
        passed += weight
        if weight and passed >= share * total:
            return value
    return None


def test_every_instant_agrees_with_plain_sets(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CHUNK_EVENTS", 50)
    events_of = {f"s{seed}": random_events(seed) for seed in range(20)}
    curve = estimate.curve(trace_of(spark, tmp_path, **events_of)).cache()
    found, summaries, crashes = curve.collect(), estimate.summary(curve).collect(), estimate.crashes(curve).collect()
    for name, events in events_of.items():
        expected = steps(events)
        mine = [row for row in found if row["subscription"] == name]
        # Where a chunk ends within a millisecond its step comes in two parts, the first without duration.
        lasting = {(row["ts_ms"], row["until_ms"], row["redelivery"]) for row in mine if row["until_ms"] > row["ts_ms"]}
        assert lasting == {step[:3] for step in expected if step[1] > step[0]}
        (summary,) = [row for row in summaries if row["subscription"] == name]
        weighted = [(step[2], step[1] - step[0]) for step in expected]
        assert summary["max"] == max(step[3] for step in expected)
        mean = sum(value * weight for value, weight in weighted) / sum(weight for _, weight in weighted)
        assert summary["expected"] == pytest.approx(mean, abs=1e-9)
        assert (summary["p50"], summary["p99"]) == (quantile(weighted, 0.50), quantile(weighted, 0.99))
        (crash,) = [row for row in crashes if row["subscription"] == name]
        end = replay(events)[-1]
        assert end == last_state(events)
        assert tuple(crash)[3:] == (end.redelivery, end.if_written, end.persisting)
