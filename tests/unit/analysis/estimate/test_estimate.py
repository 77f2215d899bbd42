"""The estimate as recorded: literal events in, literal numbers out; and against plain sets on traces of every shape."""

from __future__ import annotations

import random

import pytest

from ackstate.analysis.estimate import parts
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Frame
from trace_files import crashes_of, subscriptions_of
from traces import last_state, replay, steps

BEGUN, ENDED, FAILED = EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.PERSIST_FAILED


def ack(ts_ms, first, last=None):
    return Event(ts_ms, EventKind.ACK, 3, first, first if last is None else last)


def estimates_of(tmp_path, **events_of):
    """Return the row of each subscription, with its curve."""
    frames = [Frame("t", name, [event]) for name, events in events_of.items() for event in events]
    parquet.write_trace(frames, tmp_path / "trace")
    return {row["subscription"]: row for row in subscriptions_of(tmp_path / "trace", is_plotted=True)}


def test_the_curve_of_a_small_trace(tmp_path):
    events = [ack(10, 0), ack(10, 1), Event(12, BEGUN), ack(13, 2), Event(15, ENDED), Event(20, EventKind.CRASH)]
    row = estimates_of(tmp_path, s=events)["s"]
    assert row["curve_ms"] == [10, 13, 15, 20]
    assert row["curve"][:4] == [2, 3, 1, 0]
    assert crashes_of(row) == [(20, (1, 1, 0))]


def test_an_estimate_weighs_by_time(tmp_path):
    # 2 for 10 ms, 4 for 89 ms, 5 for 1 ms.
    row = estimates_of(tmp_path, s=[ack(0, 0, 1), ack(10, 2, 3), ack(99, 4), Event(100, BEGUN), Event(100, ENDED)])["s"]
    assert (row["expected"], row["p50"], row["p99"], row["max"]) == ((20 + 356 + 5) / 100, 4, 4, 5)


def test_a_peak_within_a_millisecond_counts_for_the_max_and_weighs_nothing(tmp_path):
    events = [ack(0, 0, 99), Event(0, BEGUN), Event(0, ENDED), ack(50, 100), Event(100, EventKind.CRASH)]
    row = estimates_of(tmp_path, s=events)["s"]
    assert (row["max"], row["p99"], row["expected"]) == (100, 1, 0.5)


def test_a_trace_of_one_instant_has_a_max_and_no_mean(tmp_path):
    row = estimates_of(tmp_path, s=[ack(7, 0, 2)])["s"]
    assert (row["expected"], row["p50"], row["p99"], row["max"]) == (None, None, None, 3)


def test_the_time_between_a_crash_and_a_recovery_weighs_nothing(tmp_path):
    row = estimates_of(
        tmp_path,
        s=[
            ack(0, 0, 1), Event(10, EventKind.CRASH), Event(1_000, EventKind.RECOVER),
            Event(1_000, EventKind.REDELIVER, 3, 0, 1), ack(1_010, 0), Event(1_020, EventKind.CRASH),
        ],
    )["s"]  # fmt: skip
    # Nothing comes back of a process that is dead.
    assert row["expected"] == (2 * 10 + 0 * 1_000 + 1 * 10) / 1_020
    assert crashes_of(row) == [(10, (2, 2, 0)), (1_020, (1, 1, 0))]


@pytest.mark.parametrize("end", [[], [Event(8, FAILED)]])
def test_a_crash_inside_a_persist_has_two_answers(tmp_path, end):
    row = estimates_of(tmp_path, s=[ack(1, 0, 4), Event(5, BEGUN), ack(6, 5), *end, Event(9, EventKind.CRASH)])["s"]
    assert crashes_of(row) == [(9, (6, 1, 1))]


def test_of_crashes_in_one_millisecond_the_last_counts(tmp_path):
    died, opened = Event(9, EventKind.CRASH), Event(9, EventKind.RECOVER)
    row = estimates_of(tmp_path, s=[ack(1, 0, 4), died, opened, ack(9, 7), died])["s"]
    assert crashes_of(row) == [(9, (1, 1, 0))]


def test_events_of_the_topic_itself_are_no_subscription(tmp_path):
    assert [*estimates_of(tmp_path, **{"": [Event(1, EventKind.PUBLISH, 3, 0, 9)], "s": [ack(2, 0)]})] == ["s"]


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


def test_every_instant_agrees_with_plain_sets(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CHUNK_EVENTS", 50)
    monkeypatch.setattr(parts, "CURVE_COUNT_MAX", 20)
    events_of = {f"s{seed}": random_events(seed) for seed in range(20)}
    found = estimates_of(tmp_path, **events_of)
    for name, events in events_of.items():
        expected = steps(events)
        row = found[name]
        lasting = [step for step in expected if step[1] > step[0]]
        weighted = [(step[2], step[1] - step[0]) for step in lasting]
        weighted.append((0, row["duration_ms"] - sum(weight for _, weight in weighted)))
        assert row["max"] == max(step[3] for step in expected)
        mean = sum(value * weight for value, weight in weighted) / row["duration_ms"]
        assert row["expected"] == pytest.approx(mean, abs=1e-9)
        assert (row["p50"], row["p99"]) == (quantile(weighted, 0.50), quantile(weighted, 0.99))
        number_from = {ts_ms: number for ts_ms, _, number, _ in lasting}
        drawn = dict(zip(row["curve_ms"] or (), row["curve"] or (), strict=False))
        # Each drawn value is true, and the thinned curve has its highest value.
        assert all(number_from.get(ts_ms, number) == number for ts_ms, number in drawn.items())
        assert max(drawn.values(), default=0) == max(number_from.values(), default=0)
        end = replay(events)[-1]
        assert end == last_state(events)
        assert crashes_of(row)[-1][1] == (end.redelivery, end.if_written, end.persisting)
