"""Made traces: each could have happened, and Spark only hands out the work."""

from collections import Counter

import numpy as np
import pytest

from ackstate.analysis.trace import generate
from ackstate.analysis.trace.events import CHUNK_EVENTS, EventKind, TraceError
from ackstate.analysis.trace.generate import ENTRIES_PER_LEDGER, TracePlan, joined, make_trace
from ackstate.analysis.trace.parquet import check_trace, trace_files
from ackstate.analysis.workloads.traffic import UNACKED_MAX, WORKLOADS
from trace_files import plan_of, read_rows


def rows_of(path):
    tables = [read_rows(file) for file in trace_files(path)]
    return sorted((row for table in tables for row in table), key=lambda row: tuple(row.values())[:3])


@pytest.mark.spark
@pytest.mark.slow
def test_the_number_of_cores_changes_nothing(spark, tmp_path, monkeypatch):
    plan = TracePlan("mixed_delays", 60_000, subscriptions=3, topics=2, flush_interval_ms=200)
    for cores in (1, 2):
        monkeypatch.setattr(generate, "_cores", lambda _, cores=cores: cores)
        monkeypatch.setattr(generate, "_FILES_PER_CORE", 1)
        made = make_trace(spark, plan, tmp_path / str(cores))
        assert (made.events, made.files) == (60_000, cores)
        check_trace(tmp_path / str(cores))
    rows = rows_of(tmp_path / "1")
    assert rows == rows_of(tmp_path / "2")
    assert sum(len(row["kind"]) for row in rows if row["subscription"]) == 60_000
    assert all(len(row["kind"]) == CHUNK_EVENTS for row in rows if row["chunk"] == 0 and row["subscription"])
    assert all(row["first_seq"] == CHUNK_EVENTS * row["chunk"] for row in rows)


@pytest.mark.spark
@pytest.mark.slow
def test_a_worker_that_fails_leaves_what_stood_there(spark, tmp_path, monkeypatch):
    from ackstate.analysis.spark.session import readable_failures

    plan = plan_of("in_order", 20_000)
    make_trace(spark, plan, tmp_path / "trace")
    before = rows_of(tmp_path / "trace")

    def fails(_batches, **_settings):
        raise OSError("no room")

    monkeypatch.setattr(generate, "_make", fails)
    with pytest.raises(TraceError, match=r"cannot write it.*no room"), readable_failures(tmp_path, work="write"):
        make_trace(spark, plan_of("in_order", 30_000), tmp_path / "trace")
    assert rows_of(tmp_path / "trace") == before
    assert [path.name for path in tmp_path.iterdir()] == ["trace"]


PUBLISH, DELIVER, ACK = EventKind.PUBLISH, EventKind.DELIVER, EventKind.ACK
EVENTS = 25_000


def events_of(plan):
    """The events of a subscription, and those of its topic."""
    return map(joined, zip(*plan.series_of(0).parts(plan.events_of(0)), strict=True))


def entries(columns, index):
    ledger = int(columns.ledger_id[index])
    return [(ledger, entry) for entry in range(columns.first_entry[index], columns.last_entry[index] + 1)]


def check_possible(events, published):
    """Follow the events one by one, with sets: the slow, obvious judgement."""
    known = {}
    for index in range(len(published.kind)):
        for entry in entries(published, index):
            assert entry not in known, "published twice"
            known[entry] = max(int(published.ts_ms[index]), int(published.number[index]))
    delivered, acked, begun = set(), set(), None
    last_ms, persists = 0, 0
    for index, kind in enumerate(events.kind.tolist()):
        ts_ms, number = int(events.ts_ms[index]), int(events.number[index])
        assert ts_ms >= last_ms
        last_ms = ts_ms
        mine = set(entries(events, index)) if events.ledger_id[index] >= 0 else set()
        if kind == DELIVER:
            assert all(known[entry] <= ts_ms for entry in mine), "delivered before it was published or due"
            assert not mine & delivered, "delivered twice"
            delivered |= mine
        elif kind == ACK:
            assert mine <= delivered, "not delivered"
            assert not mine & acked, "acked twice"
            acked |= mine
        elif kind == EventKind.PERSIST_BEGUN:
            assert (begun, number) == (None, persists + 1), "persists overlap"
            begun = persists = number
        else:
            assert kind == EventKind.PERSIST_ENDED
            assert number == begun
            begun = None
    return acked, delivered


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_made_trace_could_have_happened(workload):
    plan = plan_of(workload, 12_000)
    events, published = events_of(plan)
    check_possible(events, published)
    kinds = Counter(events.kind.tolist())
    assert len(events.kind) == 12_000
    assert kinds[ACK] > 3_000
    assert kinds[EventKind.PERSIST_ENDED] >= 2


def test_the_seed_decides():
    first, _ = events_of(plan_of(seed=1))
    again, _ = events_of(plan_of(seed=1))
    other, _ = events_of(plan_of(seed=2))
    assert np.array_equal(first.first_entry, again.first_entry)
    assert not np.array_equal(first.first_entry, other.first_entry)
    assert not np.array_equal(first.ts_ms, other.ts_ms)


def acked_and_delivered(workload, events=EVENTS, **settings):
    plan = plan_of(workload, events, **settings)
    columns, published = events_of(plan)
    return columns, *check_possible(columns, published)


def holes_of(acked):
    """Runs of unacked entries below the highest acked one."""
    ids = sorted((ledger - 1_000) * ENTRIES_PER_LEDGER + entry for ledger, entry in acked)
    return int((np.diff([-1, *ids]) > 1).sum())


def test_in_order_never_has_a_hole():
    events, _ = events_of(plan_of("in_order"))
    assert events.first_entry[events.kind == ACK].tolist() == list(range((events.kind == ACK).sum()))


def test_of_client_holes_one_message_in_128_stays():
    _, acked, _ = acked_and_delivered("client_holes", messages_per_second=1_000)
    # The youngest blocks are not acked yet.
    settled = {(ledger, entry) for ledger, entry in acked if entry < 20_480}
    assert holes_of(settled) == 20_480 / 128


def test_a_stuck_consumer_takes_until_it_may_hold_no_more(monkeypatch):
    assert UNACKED_MAX == 50_000
    monkeypatch.setattr(generate, "UNACKED_MAX", 300)
    columns, acked, delivered = acked_and_delivered("one_stuck_consumer")
    is_stuck = (columns.number == 0) & np.isin(columns.kind, (DELIVER, ACK))
    assert set(columns.kind[is_stuck].tolist()) == {DELIVER}
    assert is_stuck.sum() == 300
    assert 300 <= len(delivered) - len(acked) < 500


def test_events_and_topics_are_spread_over_the_subscriptions():
    plan = plan_of(events=1_000_007, subscriptions=4, topics=3)
    assert [plan.events_of(name) for name in range(4)] == [250_002, 250_002, 250_002, 250_001]
    assert [plan.topic_of(name) for name in range(4)] == [0, 1, 2, 0]


@pytest.mark.parametrize(
    ("settings", "naming"),
    [
        ({"workload": "in_oder"}, "the workload must be one of in_order"),
        ({"events": 0}, "events must be from 1 to"),
        ({"events": 10**13 + 1}, "got 10,000,000,000,001"),
        ({"subscriptions": 0}, "subscriptions must be from 1 to"),
        ({"topics": 2}, "topics must be from 1 to 1, got 2"),
        ({"messages_per_second": float("inf")}, "messages per second must be from"),
        ({"flush_interval_ms": 0}, "flush interval in ms must be from 1 to"),
        ({"events": 5, "subscriptions": 6}, "5 events are fewer than one for each of 6"),
        ({"events": 10**12, "messages_per_second": 1}, "100 years"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(settings, naming):
    with pytest.raises(ValueError, match=naming):
        plan_of(**settings)
