"""The estimates of a grid through Spark: against curves in plain dictionaries, and sums against their parts."""

from __future__ import annotations

import random
from operator import itemgetter

import numpy as np
import pytest

from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.estimate.parts import RESULT_KEY
from ackstate.analysis.estimate.results import SweepResult
from ackstate.analysis.replay.acked import EventChunk
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.spark.source import SparkSource
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Frame

TOPICS = ("persistent://a/b/t", "persistent://a/b/u", "persistent://a/c/t", "plain")


def events_of(seed):
    chance = random.Random(seed)
    ts_ms, events = 1_000 + seed, []
    for entry in range(chance.choice((3, 60, 300))):
        ts_ms += chance.choice((0, 1, 9))
        events.append(Event(ts_ms, EventKind.ACK, 3, entry ^ 5, entry ^ 5))
        if not entry % 40:
            events += [Event(ts_ms, EventKind.PERSIST_BEGUN), Event(ts_ms, EventKind.PERSIST_ENDED)]
    return events


def curve(events, policy, begin_ms, end_ms):
    replay = SubscriptionReplay([policy], {3: 1 + max(event.last_entry for event in events)})
    chunk = EventChunk(*(np.array([getattr(event, name) for event in events], np.int64) for name in EventChunk._fields))
    points = [*replay.take(chunk), *replay.end(end_ms)]
    last = {
        ts_ms: value for each in points for ts_ms, value in zip(each.ts_ms.tolist(), each.value.tolist(), strict=True)
    }
    found, value = [], 0
    for now_ms in range(begin_ms, end_ms + 1):
        value = last.get(now_ms, value)
        found.append(value)
    return np.array(found)


@pytest.mark.spark
@pytest.mark.slow
def test_every_scope_is_the_sum_of_its_subscriptions_at_every_instant(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "CHUNK_EVENTS", 50)
    monkeypatch.setattr("ackstate.analysis.estimate.estimates.CHUNKS_PER_SLICE", 3)
    # A subscription of one name on every topic.
    named = {(topic, name): events_of(number) for number, (topic, name) in enumerate(
        (topic, name) for topic in TOPICS for name in ("s", f"only {topic[-1]}")
    )}  # fmt: skip
    parquet.write_trace([Frame(*key, events) for key, events in named.items()], tmp_path / "trace")
    policies = [None, Policy.from_mapping({"flush_interval_ms": 70}), Policy.from_mapping({"range_count_max": 0})]
    rows = estimates(SparkSource.of(spark, tmp_path / "trace"), policies, crashes_per_day=2).collect()
    by_place = itemgetter("policy", *RESULT_KEY[1:])
    here = estimates(LocalSource.of(tmp_path / "trace"), policies, crashes_per_day=2).collect()
    assert sorted(here, key=by_place) == sorted(rows, key=by_place)
    begin_ms = min(events[0].ts_ms for events in named.values())
    end_ms = max(events[-1].ts_ms for events in named.values())
    assert len(rows) == len(policies) * (len(named) + len(TOPICS) + 3 + 1)
    for row in rows:
        namespaces = {topic: "/".join(topic.split("/")[2:4]) for topic in TOPICS}
        mine = [
            events for (topic, name), events in named.items()
            if row["topic"] in {"", topic} and row["subscription"] in {"", name}
            and (row["scope"] == "total" or row["namespace"] == namespaces[topic])
        ]  # fmt: skip
        values = sum(curve(events, policies[row["policy"]], begin_ms, end_ms) for events in mine)
        lasting = values[:-1]
        assert row["expected"] == pytest.approx(lasting.mean()), row
        assert row["duplicates_per_day"] == 2 * row["expected"]
        ordered = np.sort(lasting)
        for share in (50, 90, 99):
            assert row[f"p{share}"] == ordered[-(-len(ordered) * share // 100) - 1], row
        if row["scope"] != "subscription":
            assert (row["max"], row["max_ts_ms"]) == (
                values.max(),
                begin_ms + values.argmax() if values.any() else None,
            ), row
        causes = [row[name] for name in ("not_flushed", "young", "cut_by_ranges", "cut_by_bytes", "cut_by_route")]
        assert sum(causes) == pytest.approx(row["expected"])
    result = SweepResult.of_rows("trace", policies, rows, crashes_per_day=2)
    assert [each["label"] for each in result.to_json()["policies"]] == [
        "recorded", "flush_interval_ms=70", "range_count_max=0",
    ]  # fmt: skip


@pytest.mark.spark
@pytest.mark.slow
def test_time_without_events_counts_in_every_scope(spark, tmp_path):
    """One cursor is idle for an hour, then its process dies; another one is idle for two."""
    hour = 3_600_000
    acks = [Event(0, EventKind.ACK, 3, entry, entry) for entry in range(1, 200, 2)]
    lives = [Event(hour, EventKind.CRASH), Event(hour + hour // 2, EventKind.RECOVER)]
    again = [Event(hour + hour // 2, EventKind.REDELIVER, 3, entry, entry) for entry in range(1, 200, 2)]
    persisted = [Event(2 * hour, EventKind.PERSIST_BEGUN), Event(2 * hour, EventKind.PERSIST_ENDED)]
    frames = [Frame(TOPICS[0], "dies", [*acks, *lives, *again]), Frame(TOPICS[1], "lives", [*acks, *persisted])]
    parquet.write_trace(frames, tmp_path / "trace")
    policies = [None, Policy.from_mapping({"flush_interval_ms": hour // 2})]
    sources = SparkSource.of(spark, tmp_path / "trace"), LocalSource.of(tmp_path / "trace")
    by_place = itemgetter("policy", *RESULT_KEY[1:])
    rows, here = (sorted(estimates(source, policies).collect(), key=by_place) for source in sources)
    assert rows == here
    expected = {(row["policy"], row["scope"], row["topic"]): row["expected"] for row in rows}
    for policy, dies, lives_on in ((0, 50, 100), (1, 25, 25)):
        assert expected[policy, "subscription", TOPICS[0]] == pytest.approx(dies, abs=0.01)
        assert expected[policy, "topic", TOPICS[1]] == pytest.approx(lives_on, abs=0.01)
        assert expected[policy, "total", ""] == pytest.approx(dies + lives_on, abs=0.01)
