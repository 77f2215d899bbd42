"""Day by day is the same as all days at once; and what stands in the way of that is said in a line."""

from __future__ import annotations

import importlib.util
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from analysis.redelivery import estimates as at_once
from analysis.redelivery import incremental
from analysis.redelivery.acked import AckedFold, Chunk
from analysis.redelivery.checkpoint_codec import CheckpointError, decoded, encoded
from analysis.redelivery.mark_delete import MarkDeleteFold
from analysis.redelivery.policy import Policy, PolicyError
from analysis.redelivery.schedule import Schedule
from analysis.redelivery.slices import Slices
from analysis.redelivery.subscription_replay import SubscriptionReplay
from analysis.trace import parquet
from analysis.trace.events import Event, EventKind, TraceError
from analysis.trace.recorder import Frame
from traces import traces

_SPEC = importlib.util.spec_from_file_location("montecarlo", Path(__file__).with_name("montecarlo.py"))
montecarlo = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(montecarlo)

GRIDS = st.lists(
    st.builds(
        lambda flush, tick, rate: Policy.from_mapping(
            {"flush_interval_ms": flush, "tick_ms": tick, "mark_delete_rate_limit": rate, "compaction_bytes_min": 100}
        ),
        st.sampled_from((0, 1, 5, 30, 400)), st.sampled_from((1, 7, 50)), st.sampled_from((0, 0, 1, 20)),
    ),
    max_size=2,
).map(lambda policies: [None, *policies])  # fmt: skip


def chunk_of(events):
    return Chunk(*(np.array([getattr(event, name) for event in events], np.int64) for name in Chunk._fields))


def row_of(key, first_seq, *, events=None, state=None, log=None, is_published=False):
    arrays = {name: None if events is None else getattr(chunk_of(events), name) for name in Chunk._fields}
    pairs = None if log is None else [{"ledger_id": each, "entry_count": count} for each, count in log.items()]
    names = {"topic": key[0], "subscription": key[1], "first_seq": first_seq}
    return names | arrays | {"state": state, "log": pairs, "is_published": is_published}


_ROW = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("first_seq", pa.int64()),
    *((name, pa.list_(pa.int64())) for name in Chunk._fields), ("state", pa.string()),
    ("log", pa.list_(pa.struct([("ledger_id", pa.int64()), ("entry_count", pa.int64())]))),
    ("is_published", pa.bool_()),
])  # fmt: skip


def batches_of(rows):
    ordered = sorted(rows, key=lambda row: (row["topic"], row["subscription"], row["first_seq"]))
    return [pa.RecordBatch.from_pylist([row], _ROW) for row in ordered]


def summed(parts, slices, before):
    """Return the results as batches, as the job's later steps make them."""
    order = sorted(parts, key=lambda part: (part.policy, part.slice, part.namespace, part.topic))
    found = [*at_once._parts(at_once._sum(at_once._batches(order), slices=slices)), *before]
    found.sort(key=lambda part: tuple(getattr(part, name) for name in incremental._RESULT_KEY))
    return list(at_once._parts(incremental._merge(at_once._batches(found))))


def answers(results, duration_ms):
    rows = [
        row for batch in at_once._put_together(at_once._batches(results), duration_ms=duration_ms)
        for row in batch.to_pylist()
    ]  # fmt: skip
    return sorted(rows, key=str)


def run_at_once(events_of, logs, policies):
    begin_ms, end_ms = span(events_of)
    slices = Slices.of(begin_ms, end_ms, 3)
    rows = [row_of(key, 0, events=events, log=logs[key]) for key, events in events_of.items() if events]
    parts = list(at_once._parts(at_once._replay(batches_of(rows), policies=policies, slices=slices)))
    return answers(summed(parts, slices, []), end_ms - begin_ms)


def run_by_days(days_of, logs_of, policies, *, is_published):
    """Run day by day; each day is key -> events, each log what is known of it by then."""
    states, results, begin_ms, last_ms = {}, [], None, None
    for events_of, logs in zip(days_of, logs_of, strict=True):
        first_ms, end_ms = span(events_of)
        begin_ms = first_ms if begin_ms is None else begin_ms
        slices = Slices.of(begin_ms if last_ms is None else last_ms, end_ms, 2)
        rows = [row_of(key, -1, state=state, log=logs.get(key), is_published=is_published)
                for key, state in states.items()]  # fmt: skip
        rows += [row_of(key, 0, events=events, log=logs[key], is_published=is_published)
                 for key, events in events_of.items() if events]  # fmt: skip
        found = pa.Table.from_batches(
            list(incremental._replay(batches_of(rows), policies=policies, slices=slices)), incremental._RUN
        )
        is_state = found["state"].is_valid()
        states = {(row["topic"], row["subscription"]): row["state"] for row in found.filter(is_state).to_pylist()}
        parts = found.filter(found["state"].is_null()).drop_columns("state").to_batches()
        results, last_ms = summed(list(at_once._parts(parts)), slices, results), end_ms
    return answers(results, last_ms - begin_ms), states


def span(events_of):
    times = [event.ts_ms for events in events_of.values() for event in events]
    return min(times), max(times)


def cut(events_of, cuts):
    """Cut traces into days, each of which begins after a time; leave out days on which nothing happened."""
    bounds = [-1, *sorted(cuts), 10**9]
    days = [
        {key: [event for event in events if low < event.ts_ms <= high] for key, events in events_of.items()}
        for low, high in pairwise(bounds)
    ]
    return [day for day in days if any(day.values())]


def named_log(events):
    """Return ledger -> entry count as far as some events tell."""
    counts = {}
    for event in events:
        if event.ledger_id >= 0:
            counts[event.ledger_id] = max(counts.get(event.ledger_id, 0), event.last_entry + 1)
    return dict(sorted(counts.items()))


def published_log(log, events):
    """Return what was published by the time of the last of some events: what they name, and what comes before it."""
    last = max(named_log(events), default=-1)
    return {ledger_id: count for ledger_id, count in log.items() if ledger_id <= last}


@st.composite
def days(draw):
    """Some subscriptions, their message logs, and the ends of days."""
    events_of, logs = {}, {}
    for number in range(draw(st.integers(1, 3))):
        key = (f"persistent://p/n{number % 2}/t{number}", "s")
        if draw(st.booleans()):
            events_of[key], logs[key] = draw(montecarlo.small_traces())
        else:
            events_of[key], logs[key] = draw(traces()), {0: 300, 1: 300, 2: 300}
    first, last = span(events_of)
    return events_of, logs, draw(st.lists(st.integers(first, last), max_size=3))


def until(all_days, number, key):
    return [event for day in all_days[: number + 1] for event in day[key]]


@pytest.mark.slow
@given(days(), GRIDS)
def test_day_by_day_is_the_same_as_all_days_at_once(traced, policies):
    events_of, logs, cuts = traced
    days_of = cut(events_of, cuts)
    logs_of = [
        {key: published_log(logs[key], until(days_of, number, key)) for key in events_of}
        for number in range(len(days_of))
    ]
    found, _ = run_by_days(days_of, logs_of, policies, is_published=True)
    assert found == run_at_once(events_of, {key: published_log(logs[key], events_of[key]) for key in logs}, policies)


@pytest.mark.slow
@given(days(), GRIDS)
def test_without_publishes_it_is_the_same_or_refused(traced, policies):
    events_of, _, cuts = traced
    days_of = cut(events_of, cuts)
    logs_of = [{key: named_log(day[key]) for key in events_of} for day in days_of]
    try:
        found, _ = run_by_days(days_of, logs_of, policies, is_published=False)
    except TraceError:
        # A ledger grew that had been left behind: what is said of it is another test's.
        assume(False)
    assert found == run_at_once(events_of, {key: named_log(events) for key, events in events_of.items()}, policies)


KEY = ("persistent://p/n/t", "s")
LIMITED = Policy.from_mapping({"flush_interval_ms": 400, "mark_delete_rate_limit": 1, "compaction_bytes_min": 100})
RARE = Policy.from_mapping({"flush_interval_ms": 3_100, "mark_delete_rate_limit": 0, "compaction_bytes_min": 100})
POLICIES = [None, LIMITED, RARE]


def story(*, length=120, step_ms=130):
    """Two subscriptions, one with a tenth of the acks of the other; each ack comes twice, every fifth much later."""
    late = [Event(1_000 + step_ms * (entry + 40), EventKind.ACK, 1 + entry // 20, entry % 20, entry % 20)
            for entry in range(0, length, 5)]  # fmt: skip
    soon = [Event(1_000 + step_ms * entry, EventKind.ACK, 1 + entry // 20, entry % 20, entry % 20)
            for entry in range(length) if entry % 5]  # fmt: skip
    persists = [Event(1_000 + 977 * number, kind) for number in range(length * step_ms // 977)
                for kind in (EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED)]  # fmt: skip
    hot = sorted([*late, *soon, *soon[::3], *persists], key=lambda event: (event.ts_ms, event.kind >= 5))
    return {KEY: hot, ("persistent://p/n/t", "cold"): soon[::10]}


def both_ways(*, days_count=4):
    events_of = story()
    first, last = span(events_of)
    days_of = cut(events_of, [first + (last - first) * number // days_count for number in range(1, days_count)])
    logs = {key: dict.fromkeys(range(1, 7), 20) for key in events_of}
    logs_of = [
        {key: published_log(logs[key], until(days_of, number, KEY)) for key in events_of}
        for number in range(len(days_of))
    ]
    found, _ = run_by_days(days_of, logs_of, POLICIES, is_published=True)
    return found, run_at_once(events_of, logs, POLICIES)


def test_a_hot_subscription_is_the_same():
    by_days, together = both_ways()
    assert by_days == together
    assert all(row["max"] for row in together if row["subscription"] == "s")


def planted(monkeypatch, change):
    """Let every state that is gone on with be changed first."""

    def wrong(text, policies):
        replay = decoded(text, policies)
        for life in replay._lives:
            for each in life.replays.values():
                change(life, each)
        return replay

    monkeypatch.setattr(incremental, "decoded", wrong)


def forget_waiting(_life, replay):
    replay._schedule._waiting.clear()


def new_limiter(_life, replay):
    if replay._schedule._limiter:
        replay._schedule._limiter._paid_at = replay._schedule._permit_at = 0


def new_schedule(_life, replay):
    replay._schedule = Schedule(replay._policy, opened_ms=0)


def forget_acked(life, _replay):
    life._fold = AckedFold()


def forget_pending(_life, replay):
    replay._size._pending = {}


def forget_mark_delete(life, _replay):
    life._mark_delete = MarkDeleteFold(dict(zip(life._mark_delete._ledger_ids, life._mark_delete._counts, strict=True)))


@pytest.mark.parametrize(
    "change", [forget_waiting, new_limiter, new_schedule, forget_acked, forget_pending, forget_mark_delete]
)
def test_the_comparison_sees_a_state_that_is_wrong(monkeypatch, change):
    planted(monkeypatch, change)
    by_days, together = both_ways()
    assert by_days != together


def test_the_comparison_sees_a_sum_that_forgets_what_stood(monkeypatch):
    monkeypatch.setattr(incremental.SliceWriter, "go_on", lambda *_: None)
    by_days, together = both_ways()
    assert by_days != together


def sizes_by_day(*, is_published, days_count=60):
    """Return the length of the state after each day on which everything was acked but the last message."""
    state, sizes = None, []
    for number in range(days_count):
        events = [Event(number * 10_000 + entry, EventKind.ACK, number, entry, entry) for entry in range(100)]
        if number:
            events.insert(0, Event(number * 10_000, EventKind.ACK, number - 1, 100, 100))
        log = {number: 101}
        rows = [row_of(KEY, 0, events=events, log=log, is_published=is_published)]
        rows += [row_of(KEY, -1, state=state, log=log, is_published=is_published)] if state else []
        slices = Slices.of(max(0, number * 10_000 - 5_000), number * 10_000 + 99, 1)
        out = list(incremental._replay(batches_of(rows), policies=POLICIES, slices=slices))
        state = pa.Table.from_batches(out)["state"].drop_null()[0].as_py()
        sizes.append(len(state))
    return sizes


def test_a_state_is_as_large_as_what_is_acked_beyond_the_mark_delete_position_whatever_the_days():
    sizes = sizes_by_day(is_published=True)
    # The times in it become longer.
    assert sizes[-1] - sizes[4] < 60
    unbounded = sizes_by_day(is_published=False)
    assert unbounded[-1] - unbounded[4] > 55 * 20


def test_a_state_that_is_none_is_refused():
    text = encoded(SubscriptionReplay([None], {}), [None])
    assert isinstance(decoded(text, [None]), SubscriptionReplay)
    for wrong in ("", "[]", "{}", text[:-1], text.replace("SubscriptionReplay", "Popen"), '{"bitmap": "AAAA"}', "1"):
        with pytest.raises(CheckpointError, match="damaged"):
            decoded(wrong, [None])


def test_what_cannot_be_kept_is_refused():
    policy = Policy.from_mapping({"range_count_max": 5})
    with pytest.raises(PolicyError, match=r"range_count_max=5 cannot be gone on with .* without --state"):
        incremental.check_policies([None, policy])
    replay = SubscriptionReplay([policy], {1: 5})
    replay.take(chunk_of([Event(1, EventKind.ACK, 1, 0, 0)]))
    with pytest.raises(TypeError, match="CursorReplay cannot be kept"):
        encoded(replay, [policy])


def test_a_ledger_that_grows_after_it_was_left_behind_is_refused():
    with pytest.raises(TraceError, match=r"subscription 's' of .*: ledger 1 has grown from 1 to 2 .* PUBLISH"):
        run_by_days(
            [{KEY: [Event(1, EventKind.ACK, 1, 0, 0), Event(2, EventKind.ACK, 2, 0, 0)]},
             {KEY: [Event(9, EventKind.ACK, 1, 1, 1)]}],
            [{KEY: {1: 1, 2: 1}}, {KEY: {1: 2}}], POLICIES, is_published=False,
        )  # fmt: skip


def write_days(directory, events_of, *, count=3):
    first, last = span(events_of)
    for number, day in enumerate(cut(events_of, [first + (last - first) * each // count for each in range(1, count)])):
        seen = {(ev.ledger_id, 0, 19) for ev in day[KEY] if ev.ledger_id > 0}
        publishes = [Event(min(ev.ts_ms for ev in day[KEY]), EventKind.PUBLISH, *run) for run in sorted(seen)]
        frames = [Frame(KEY[0], "", publishes), *(Frame(*key, events) for key, events in day.items() if events)]
        parquet.write_trace(frames, directory / f"day=2026-11-2{number}")


def found(spark, directory, state, **options):
    with incremental.daily_estimates(spark, directory, state, POLICIES, **options) as estimates:
        return sorted(estimates.rows, key=str), estimates.days_read


@pytest.mark.spark
@pytest.mark.slow
def test_a_run_reads_the_new_day_only_and_finds_what_all_days_come_to(spark, tmp_path):
    from analysis.redelivery.spark import read_trace

    write_days(tmp_path / "all", story(), count=2)
    directory, state = tmp_path / "days", tmp_path / "state"
    directory.mkdir()
    for number in range(2):
        for old in directory.iterdir():
            # What is not there cannot be read.
            shutil.rmtree(old)
        shutil.copytree(tmp_path / "all" / f"day=2026-11-2{number}", directory / f"day=2026-11-2{number}")
        by_days, days_read = found(spark, directory, state)
        assert days_read == (f"day=2026-11-2{number}",)
        assert [each.name for each in sorted(state.iterdir())] == [".lock", f"{number + 1:06}"]
    again, days_read = found(spark, directory, state)
    assert (again, days_read) == (by_days, ())
    frames = [Frame(KEY[0], "", [Event(1, EventKind.PUBLISH, each, 0, 19) for each in range(1, 7)])]
    frames += [Frame(*key, events) for key, events in story().items()]
    parquet.write_trace(frames, tmp_path / "one")
    trace = read_trace(spark, tmp_path / "one").where("subscription <> ''")
    direct = sorted((row.asDict() for row in at_once.estimates(trace, POLICIES).collect()), key=str)
    assert direct == by_days


@pytest.mark.spark
@pytest.mark.slow
def test_a_report_that_fails_leaves_the_state_as_it_was(spark, tmp_path):
    write_days(tmp_path / "days", story(), count=1)
    with (
        pytest.raises(ZeroDivisionError),
        incremental.daily_estimates(spark, tmp_path / "days", tmp_path / "state", POLICIES),
    ):
        raise ZeroDivisionError
    assert [each.name for each in (tmp_path / "state").iterdir()] == [".lock"]
