"""A directory of daily traces has the answers of the trace that they make together, and nothing else is one."""

import json
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import montecarlo
from ackstate.analysis.estimate.engine import LocalSource, trace_of
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.spark.session import readable_failures
from ackstate.analysis.trace import chunks as trace_chunks
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.check import trace_hash
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.parquet import check_days, days_of, span_of
from ackstate.analysis.trace.recording import Frame
from command_line import assert_one_line, run
from strategies import few
from trace_files import empty_kinds

ACK, PUBLISH = EventKind.ACK, EventKind.PUBLISH
TOPIC = "persistent://p/n/t"
GRID = [
    None, *(Policy.from_mapping({"compaction_bytes_min": 100, **each}) for each in (
        {"flush_interval_ms": 400, "mark_delete_rate_limit": 1}, {"flush_interval_ms": 3_100, "range_count_max": 2},
        {"flush_interval_ms": 3_100, "become_old_ack_record_seconds": 1},
        {"flush_interval_ms": 700, "format": "PULSAR"},
        {"max_unpersisted_ack_record_bytes": 1_200},
    )),
]  # fmt: skip


def story():
    """Acks, some twice, every fifth much later; persists, a crash; "new" begins in the second half."""
    acks = [(1_000 + 130 * (entry if entry % 5 else entry + 40), entry) for entry in range(120)]
    acks = [Event(ts_ms, ACK, 1 + entry // 20, entry % 20, entry % 20) for ts_ms, entry in acks]
    persists = [Event(1_000 + 977 * number, kind) for number in range(15)
                for kind in (EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED)]  # fmt: skip
    died = [Event(9_001, EventKind.CRASH), Event(9_002, EventKind.RECOVER)]
    hot = sorted([*acks, *acks[1::3], *persists, *died], key=lambda event: (event.ts_ms, event.kind >= 5))
    published = [Event(950 + 2_600 * number, PUBLISH, 1 + number, 0, 19) for number in range(6)]
    cold = sorted(acks[::10], key=lambda event: event.ts_ms)
    return {"": published, "hot": hot, "cold": cold, "new": [each for each in hot[-60:] if each.kind == ACK]}


def write(path, events_of):
    """Write a trace, also one with a recovery from a death that nobody saw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_chunks.EventOrder, "judge_lives", lambda _, events: events.kind < 0)
        parquet.write_trace([Frame(TOPIC, name, events) for name, events in events_of.items() if events], path)


def write_days(directory, events_of, cuts):
    """Write a trace for each time between two cuts, if there is an event; return their number."""
    days = [
        {name: [event for event in events if low < event.ts_ms <= high] for name, events in events_of.items()}
        for low, high in pairwise([-1, *sorted(cuts), 10**9])
    ]
    happened = [day for day in days if any(day.values())]
    for number, day in enumerate(happened):
        write(directory / f"day=2026-11-{number + 1:02}", day)
    return len(happened)


def answer(engine, path, policies):
    with readable_failures(path):
        rows = estimates(trace_of(engine, check_days(path)), policies, is_plotted=True).collect()
    return sorted(json.dumps(row) for row in rows)


@pytest.fixture(params=["local", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.slow])])
def engine(request):
    if request.param == "local":
        return LocalSource
    from ackstate.analysis.spark.source import SparkSource

    return partial(SparkSource.checked, request.getfixturevalue("spark"))


def test_days_are_the_same_as_the_trace_that_they_make(engine, tmp_path, monkeypatch):
    policies = GRID if engine is LocalSource else GRID[:3]
    monkeypatch.setattr(trace_chunks, "CHUNK_EVENTS", 17)
    write(tmp_path / "one", story())
    assert write_days(tmp_path / "days", story(), [5_000, 9_001, 12_345]) == 4
    (tmp_path / "days" / "day=2026-11-05").mkdir()
    (tmp_path / "days" / "_notes").mkdir()
    (tmp_path / "days" / "README.txt").write_text("not a trace")
    assert answer(engine, tmp_path / "days", policies) == answer(engine, tmp_path / "one", policies)


@pytest.mark.slow
@settings(few, suppress_health_check=list(HealthCheck))
@given(st.lists(montecarlo.small_traces(), min_size=1, max_size=3), st.data())
def test_wherever_a_day_ends(tmp_path_factory, traced, data):
    events_of = {f"s{number}": events for number, (events, _) in enumerate(traced) if events}
    assume(events_of)
    times = [event.ts_ms for events in events_of.values() for event in events]
    cuts = data.draw(st.lists(st.integers(min(times), max(times)), max_size=3))
    place = tmp_path_factory.mktemp("days")
    write(place / "one", events_of)
    write_days(place / "days", events_of, cuts)
    policies = [None, *data.draw(st.lists(montecarlo.POLICIES, max_size=2))]
    assert answer(LocalSource, place / "days", policies) == answer(LocalSource, place / "one", policies)


def test_a_damaged_chunk_is_refused_with_the_name_of_its_day(engine, tmp_path):
    write_days(tmp_path / "days", {"s": [Event(10 * entry, ACK, 1, entry, entry) for entry in range(12)]}, [55])
    file = tmp_path / "days" / "day=2026-11-02" / "part-00000.parquet"
    empty_kinds(file)
    with pytest.raises(TraceError, match=r"day=2026-11-02: not a trace, damaged chunk 0 of s"):
        answer(engine, tmp_path / "days", [None])


@pytest.fixture
def days(tmp_path):
    """Return a directory with three days."""
    for number in range(3):
        write(tmp_path / "days" / f"day=2026-11-2{number}", {"s": [Event(10 * number, ACK, 1, number, number)]})
    return tmp_path / "days"


def refused(path, said):
    with pytest.raises(TraceError, match=said):
        check_days(path)


def test_a_missing_day_is_named_and_an_empty_one_is_none(days):
    write(days / "day=2026-11-24", {"s": [Event(100, ACK, 1, 9, 9)]})
    refused(days, r"the day 2026-11-23 is missing between day=2026-11-22 and day=2026-11-24; add it, as an empty dir")
    (days / "day=2026-11-23").mkdir()
    assert [day.path.name[-2:] for day in check_days(days)] == ["20", "21", "22", "24"]
    for each in days.iterdir():
        if each.name != "day=2026-11-23":
            (each / "part-00000.parquet").unlink()
    refused(days, f"{days}: no day has a trace")


@pytest.mark.parametrize(("event", "said"), [
    (Event(20, ACK, 1, 9, 9), r"it begins at 20 ms, and day=2026-11-22 ends at 20 ms: a day must begin after"),
    (Event(1_700_000_000_000, ACK, 1, 0, 0), r"all days must have times of the same clock, .* after day=2026-11-22"),
    (None, "no trace here"),
])  # fmt: skip
def test_a_day_that_does_not_follow_is_refused(days, event, said):
    day = days / "day=2026-11-23"
    if event is None:
        day.mkdir()
        (day / "photo.jpeg").write_bytes(b"")
    else:
        write(day, {"s": [event]})
    refused(days, f"day=2026-11-23: {said}")


def test_names_without_dates_are_in_their_order(tmp_path):
    for number, name in enumerate(("a", "b", "d")):
        write(tmp_path / name, {"s": [Event(number, ACK, 1, 0, 0)]})
    assert [day.name for day in days_of(tmp_path)] == ["a", "b", "d"]


def test_a_day_may_be_a_file_with_a_date(days, tmp_path):
    (tmp_path / "files").mkdir()
    for day in days.iterdir():
        (day / "part-00000.parquet").rename(tmp_path / "files" / f"{day.name[4:]}.parquet")
    assert span_of(check_days(tmp_path / "files")).days == tuple(f"2026-11-2{number}.parquet" for number in range(3))


def test_a_trace_beside_days_is_refused_and_a_directory_beside_a_trace_is_ignored(days):
    stranger = days / "part-00000.parquet"
    stranger.write_bytes((days / "day=2026-11-20" / stranger.name).read_bytes())
    refused(days, r"part-00000\.parquet is no day, unlike day=2026-11-20: keep the traces apart")
    trace = days / "day=2026-11-20"
    (trace / "notes").mkdir()
    assert days_of(trace) == [trace]


def test_the_hash_of_days_is_that_of_all_their_files(days):
    before = trace_hash(days)
    assert trace_hash(days.rename(days.with_name("elsewhere"))) == before
    (days.with_name("elsewhere") / "day=2026-11-22" / "part-00000.parquet").unlink()
    assert trace_hash(days.with_name("elsewhere")) != before


def test_every_command_that_replays_reads_days(tmp_path, capsys):
    write(tmp_path / "one", story())
    write_days(tmp_path / "days", story(), [5_000, 9_001])
    report = tmp_path / "report.html"
    for words in (
        ["redelivery"], ["redelivery", "--policy", "flush_interval_ms=700"],
        ["sweep", "--set", "flush_interval_ms=700,5000", "--current-policy", "recorded", "--report", report],
    ):  # fmt: skip
        one, apart = (
            json.loads(run(capsys, words[0], tmp_path / name, *words[1:], "--engine", "local", "--json").out)
            for name in ("one", "days")
        )
        assert apart == one | {"trace": str(tmp_path / "days")}
    page = report.read_text(encoding="utf-8")
    assert "Processes died at 1 moment" in page
    assert trace_hash(tmp_path / "days") in page
    (tmp_path / "days" / "day=2026-11-02").rename(tmp_path / "days" / "day=2026-11-09")
    assert_one_line(run(capsys, "sweep", tmp_path / "days", "--engine", "local"), "the day 2026-11-02 is missing")
