"""Day by day is the same as all days at once; anything that prevents that is reported in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import montecarlo
from ackstate.analysis.estimate import estimates as at_once
from ackstate.analysis.estimate import incremental
from ackstate.analysis.estimate.checkpoint import Checkpoint
from ackstate.analysis.estimate.daily_state import decoded
from ackstate.analysis.estimate.results import Estimate
from ackstate.analysis.estimate.slices import Slices
from ackstate.analysis.estimate.subscription_parts import RequestedParts
from ackstate.analysis.estimate.trace_source import LocalEngine
from ackstate.analysis.replay.curve_sum import SERIES
from ackstate.analysis.replay.persistable import persistable
from ackstate.analysis.replay.policy import Policy, PolicyError
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recorder import Frame
from daily_runs import drawn, replayed, rows_of, run_at_once, run_by_days, span
from strategies import few
from traces import traces


@pytest.mark.parametrize("before", [None, "a checkpoint"])
def test_days_of_different_clocks_are_refused(before):
    own, wall = parquet.Span(0, 9_000, 1), parquet.Span(1_700_000_000_000, 1_700_000_009_000, 1)
    spans = [("day-1", own), ("day-2", wall)]
    checkpoint = None
    if before:
        checkpoint = Checkpoint(Path("1"), (None,), 1, {"day-1": ""}, own.begin_ms, own.end_ms, "", {})
        del spans[0]
    with pytest.raises(TraceError, match=r"day-2: all days must have times of the same clock, .* after day-1 ended"):
        incremental._covered(spans, checkpoint, Path("days"))
    following = parquet.Span(9_001, 10_000, 1)
    spans[-1] = ("day-2", following)
    assert incremental._covered(spans, checkpoint, Path("days")) == (own.begin_ms, following.end_ms)


def gated(policy, limit):
    """Return a policy, with a gate if there is a limit; both if they can be replayed."""
    found = replace(policy, max_unpersisted_ack_record_bytes=limit)
    try:
        persistable([found])
    except PolicyError:
        assume(False)
    return found


GRIDS = st.lists(
    st.builds(gated, montecarlo.POLICIES, st.sampled_from((0, 0, 0, 1_024, 1_500))), max_size=2
).map(lambda policies: [None, *policies])  # fmt: skip


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
    """Return the entries published by the time of the last of some events: those they name, and those before them."""
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


# Each example is several replays of several days.
a_third = settings(max_examples=max(1, few.max_examples // 3))


@pytest.mark.slow
@a_third
@given(days(), GRIDS)
def test_day_by_day_is_the_same_as_all_days_at_once(traced, policies):
    events_of, logs, cuts = traced
    days_of = cut(events_of, cuts)
    until_now = [
        {key: published_log(logs[key], until(days_of, number, key)) for key in events_of}
        for number in range(len(days_of))
    ]
    # A day has the entries published on it and those it names, and no more.
    logs_of = [
        {key: named_log(day[key]) | {each: count for each, count in now[key].items() if each not in before[key]}
         for key in now}
        for before, now, day in zip([{key: {} for key in events_of}, *until_now[:-1]], until_now, days_of, strict=True)
    ]  # fmt: skip
    try:
        found, *kept = run_by_days(days_of, logs_of, policies, is_published=True)
    except TraceError:
        # A reset to a forgotten position: another test checks its error.
        assume(False)
    log_of = {key: published_log(logs[key], events_of[key]) for key in logs}
    assert sorted(map(str, found)) == sorted(map(str, run_at_once(events_of, log_of, policies)))
    _, *kept_at_once = run_by_days([events_of], [log_of], policies, is_published=True)
    assert str(drawn(*kept, policies)) == str(drawn(*kept_at_once, policies))


@pytest.mark.slow
@a_third
@given(days(), GRIDS)
def test_without_publishes_it_is_the_same_or_refused(traced, policies):
    events_of, _, cuts = traced
    days_of = cut(events_of, cuts)
    logs_of = [{key: named_log(day[key]) for key in events_of} for day in days_of]
    try:
        found, _, _ = run_by_days(days_of, logs_of, policies, is_published=False)
    except TraceError:
        # A ledger grew that had been left behind, or a reset came before any ledger: other tests check the messages.
        assume(False)
    together = run_at_once(events_of, {key: named_log(events) for key, events in events_of.items()}, policies)
    assert str(found) == str(together)


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


def both_ways(*, days_count=4, policies=POLICIES):
    events_of = story()
    first, last = span(events_of)
    days_of = cut(events_of, [first + (last - first) * number // days_count for number in range(1, days_count)])
    logs = {key: dict.fromkeys(range(1, 7), 20) for key in events_of}
    logs_of = [
        {key: published_log(logs[key], until(days_of, number, KEY)) for key in events_of}
        for number in range(len(days_of))
    ]
    found, _, _ = run_by_days(days_of, logs_of, policies, is_published=True)
    return found, run_at_once(events_of, logs, policies)


def test_a_hot_subscription_is_the_same():
    by_days, together = both_ways()
    assert by_days == together
    assert all(row["max"] for row in together if row["subscription"] == "s")


CURSORS = [None, *(Policy.from_mapping({"flush_interval_ms": 3_100, **each}) for each in (
    {"range_count_max": 2}, {"become_old_ack_record_seconds": 1}, {"format": "PULSAR"},
))]  # fmt: skip


def test_a_hot_subscription_is_the_same_under_policies_that_need_the_cursor():
    by_days, together = both_ways(policies=CURSORS)
    assert by_days == together


def sizes_by_day(*, is_published, days_count=60):
    """Return the length of the state after each day on which everything was acked but the last message."""
    state, sizes = None, []
    for number in range(days_count):
        events = [Event(number * 10_000 + entry, EventKind.ACK, number, entry, entry) for entry in range(100)]
        if number:
            events.insert(0, Event(number * 10_000, EventKind.ACK, number - 1, 100, 100))
        slices = Slices.of(0, number * 10_000 + 99, 1, from_ms=max(0, number * 10_000 - 5_000))
        wanted = RequestedParts(POLICIES, range(len(POLICIES)), 0, slices, is_plotted=True, keeps_states=True)
        rows = rows_of(KEY, events=events, state=state, log={number: 101}, is_published=is_published)
        state = replayed(rows, wanted)["state"].drop_null()[0].as_py()
        sizes.append(len(json.dumps(json.loads(state)["replay"])))
        assert all(len(curve.points(SERIES)[0]) <= 2 * 250 for curve in decoded(state, POLICIES).curves)
    return sizes


def test_a_state_is_as_large_as_what_is_acked_beyond_the_mark_delete_position_whatever_the_days():
    sizes = sizes_by_day(is_published=True)
    # The times in it become longer.
    assert sizes[-1] - sizes[4] < 60
    unbounded = sizes_by_day(is_published=False)
    assert unbounded[-1] - unbounded[4] > 55 * 20


def test_a_ledger_that_grows_after_it_was_left_behind_is_refused():
    with pytest.raises(TraceError, match=r"subscription 's' of .*: ledger 1 has grown from 1 to 2 .* PUBLISH"):
        run_by_days(
            [{KEY: [Event(1, EventKind.ACK, 1, 0, 0), Event(2, EventKind.ACK, 2, 0, 0)]},
             {KEY: [Event(9, EventKind.ACK, 1, 1, 1)]}],
            [{KEY: {1: 1, 2: 1}}, {KEY: {1: 2}}], POLICIES, is_published=False,
        )  # fmt: skip


def test_a_reset_to_a_ledger_that_was_left_behind_is_refused():
    early = [Event(1, EventKind.ACK, 1, 0, 9), Event(2, EventKind.ACK, 2, 0, 3)]
    late = [Event(9, EventKind.RESET), Event(9, EventKind.REDELIVER, 1, 5, 9), Event(9, EventKind.REDELIVER, 2, 0, 3)]
    policies = [None, Policy.from_mapping({"flush_interval_ms": 0})]
    logs = [{KEY: {1: 10, 2: 10}}] * 2
    with pytest.raises(TraceError, match=r"subscription 's' of .*: it is reset to ledger 1, whose state was dropped"):
        run_by_days([{KEY: early}, {KEY: late}], logs, policies, is_published=True)


def test_a_reset_before_any_ledger_is_named_is_refused():
    """Where the mark-delete position stands then, only the ledgers of a later day say."""
    later = [
        Event(1, EventKind.DELIVER, 128, 0, 0),
        Event(1, EventKind.DELIVER, 129, 0, 59),
        Event(1, EventKind.ACK, 129, 3, 3),
    ]
    days_of = [{KEY: [Event(0, EventKind.RESET)]}, {KEY: later}]
    logs_of = [{KEY: {}}, {KEY: {128: 1, 129: 60}}]
    policies = [Policy.from_mapping({"flush_interval_ms": 0, "format": "PULSAR"})]
    with pytest.raises(
        TraceError, match=r"subscription 's' of .*: it is reset before any ledger .* join this day with"
    ):
        run_by_days(days_of, logs_of, policies, is_published=False)


def test_acks_that_a_recorded_persist_excludes_are_the_same_wherever_a_day_ends():
    events = [
        Event(0, EventKind.ACK, 1, 0, 9), Event(10, EventKind.PERSIST_BEGUN), Event(10, EventKind.HELD_BACK, 1, 5, 6),
        Event(10, EventKind.CUT_OFF, 1, 8, 8), Event(20, EventKind.PERSIST_ENDED), Event(30, EventKind.PERSIST_BEGUN),
        Event(30, EventKind.DISPLACED, 1, 0, 2), Event(30, EventKind.CUT_OFF, 1, 8, 8),
        Event(40, EventKind.PERSIST_FAILED), Event(50, EventKind.ACK, 1, 12, 12),
    ]  # fmt: skip
    log = {KEY: {1: 20}}
    together = run_at_once({KEY: events}, log, [None])
    assert all(row["young"] > 0 and row["cut_by_ranges"] > 0 for row in together)
    for end_ms in range(5, 50, 10):
        found, *_ = run_by_days(cut({KEY: events}, [end_ms]), [log, log], [None], is_published=True)
        assert sorted(map(str, found)) == sorted(map(str, together))


def test_times_that_go_back_within_a_chunk_are_refused():
    back = [Event(5, EventKind.ACK, 1, 0, 0), Event(4, EventKind.ACK, 1, 1, 1)]
    wanted = RequestedParts(POLICIES, range(len(POLICIES)), 4, Slices.of(4, 5, 1))
    with pytest.raises(TraceError, match=r"subscription 's' of .*: times go back within a chunk"):
        replayed(rows_of(KEY, events=back, log={1: 2}), wanted)


def write_days(directory, events_of, *, count=3):
    first, last = span(events_of)
    for number, day in enumerate(cut(events_of, [first + (last - first) * each // count for each in range(1, count)])):
        seen = {(ev.ledger_id, 0, 19) for ev in day[KEY] if ev.ledger_id > 0}
        publishes = [Event(min(ev.ts_ms for ev in day[KEY]), EventKind.PUBLISH, *run) for run in sorted(seen)]
        frames = [Frame(KEY[0], "", publishes), *(Frame(*key, events) for key, events in day.items() if events)]
        parquet.write_trace(frames, directory / f"day=2026-11-2{number}")


@pytest.fixture(params=["local", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.slow])])
def engine(request):
    if request.param == "local":
        return LocalEngine()
    from ackstate.analysis.spark.source import SparkEngine

    return SparkEngine(request.getfixturevalue("spark"))


def numbers(rows):
    """Return the estimates, without the curves and crashes that are kept elsewhere, and without low ends."""
    names = [name for name in Estimate.__dataclass_fields__ if name != "low"]
    return sorted(({name: row[name] for name in names} for row in rows), key=str)


def found(engine, directory, state, **options):
    with incremental.daily_estimates(engine, directory, state, POLICIES, **options) as estimates:
        return numbers(estimates.rows), estimates.days_read


def test_a_run_reads_the_new_day_only_and_finds_what_all_days_come_to(engine, tmp_path):
    write_days(tmp_path / "all", story(), count=2)
    directory, state = tmp_path / "days", tmp_path / "state"
    directory.mkdir()
    for number in range(2):
        for old in directory.iterdir():
            # An absent day cannot be read.
            shutil.rmtree(old)
        shutil.copytree(tmp_path / "all" / f"day=2026-11-2{number}", directory / f"day=2026-11-2{number}")
        by_days, days_read = found(engine, directory, state)
        assert days_read == (f"day=2026-11-2{number}",)
        assert [each.name for each in sorted(state.iterdir())] == [".lock", f"{number + 1:06}"]
    again, days_read = found(engine, directory, state)
    assert (again, days_read) == (by_days, ())
    parquet.write_trace([Frame(*key, events) for key, events in story().items()], tmp_path / "one")
    assert numbers(at_once.estimates(engine.trace(tmp_path / "one"), POLICIES).collect()) == by_days


@pytest.mark.parametrize(
    "engine",
    ["local", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.slow, pytest.mark.soak])],
    indirect=True,
)
def test_who_is_new_on_a_later_day_has_the_whole_log_before_it(engine, tmp_path):
    def published(ts_ms, ledger_id):
        return Frame("t", "", [Event(ts_ms, EventKind.PUBLISH, ledger_id, 0, 19)])

    def acked(name, ts_ms, ledger_id, *runs):
        return Frame("t", name, [Event(ts_ms + 100 * number, EventKind.ACK, ledger_id, *run)
                                 for number, run in enumerate(runs)])  # fmt: skip

    days = [
        [published(1_000, 1), acked("old", 1_100, 1, (0, 17), (19, 19))],
        [published(5_000, 2), acked("new", 5_100, 2, (0, 9), (12, 19)), acked("old", 8_000, 1, (18, 18))],
    ]
    policies = [Policy.from_mapping({"flush_interval_ms": 700, "range_count_max": 1})]
    for number, frames in enumerate(days, 1):
        parquet.write_trace(frames, tmp_path / "days" / f"{number}")
        with incremental.daily_estimates(engine, tmp_path / "days", tmp_path / "state [1]", policies) as found:
            rows = found.rows
    parquet.write_trace([*days[0], *days[1]], tmp_path / "one")
    assert numbers(rows) == numbers(at_once.estimates(engine.trace(tmp_path / "one"), policies).collect())
    assert any(row["cut_by_ranges"] for row in rows if row["subscription"] == "new")


def test_a_report_that_fails_leaves_the_state_as_it_was(engine, tmp_path):
    write_days(tmp_path / "days", story(), count=1)
    with (
        pytest.raises(ZeroDivisionError),
        incremental.daily_estimates(engine, tmp_path / "days", tmp_path / "state", POLICIES),
    ):
        raise ZeroDivisionError
    assert [each.name for each in (tmp_path / "state").iterdir()] == [".lock"]
