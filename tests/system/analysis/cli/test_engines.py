"""`--engine local` answers without Java, and as Spark does, to the last digit."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import montecarlo
from ackstate.analysis.estimate import estimates as estimation
from ackstate.analysis.estimate.engine import LocalSource
from ackstate.analysis.estimate.estimates import estimates
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace import chunks as trace_chunks
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recording import Frame
from command_line import assert_one_line, run, run_apart, status_of
from trace_files import empty_kinds

TOPIC = "persistent://a/b/t"
POLICIES = [
    None,
    *(Policy.from_mapping(each) for each in (
        {"flush_interval_ms": 70}, {"range_count_max": 1, "flush_interval_ms": 30},
        {"become_old_ack_record_seconds": 1}, {"format": "PULSAR", "range_count_max": 2},
        {"max_unpersisted_ack_record_bytes": 1_024},
    )),
]  # fmt: skip


@pytest.fixture
def trace(tmp_path):
    acks = [Event(1_000 + 10 * entry, EventKind.ACK, 1, entry ^ 3, entry ^ 3) for entry in range(40)]
    acks[20:20] = [Event(1_195, EventKind.PERSIST_BEGUN, number=1), Event(1_196, EventKind.PERSIST_ENDED, number=1)]
    died = [Event(1_500, EventKind.CRASH), Event(1_600, EventKind.RECOVER)]
    parquet.write_trace([Frame(TOPIC, "s", [*acks, *died]), Frame(TOPIC, "r", acks)], tmp_path / "trace")
    return tmp_path / "trace"


def test_options_do_not_change_the_numbers(trace, capsys):
    plain, rated = (
        json.loads(run(capsys, "redelivery", trace, "--engine", "local", "--json", *words).out)
        for words in ([], ["--crashes-per-day", "1"])
    )
    subscriptions = plain.pop("subscriptions")
    assert plain == rated
    by_name = {row["subscription"]: row for row in plain["policies"][0]["estimates"] if row["scope"] == "subscription"}
    for row in subscriptions:
        same = by_name[row["subscription"]]
        assert {name: same[name] for name in ("expected", "p50", "p99", "max")}.items() <= row.items()
    crashes = {row["subscription"]: [each["at_crash"] for each in row["crashes"]] for row in subscriptions}
    assert crashes == {"r": [], "s": [20]}


@pytest.mark.parametrize("words", [
    ["redelivery"], ["redelivery", "--policy", "flush_interval_ms=70"],
    ["sweep", "--set", "flush_interval_ms=10,100", "--set", "range_count_max=0,1"],
])  # fmt: skip
def test_a_report_costs_no_second_replay(trace, tmp_path, monkeypatch, capsys, words):
    def replays(*more):
        begun = []
        with monkeypatch.context() as patch:
            real = estimation.SubscriptionReplay

            def counted(policies, log, **options):
                begun.append(len(policies))
                return real(policies, log, **options)

            patch.setattr(estimation, "SubscriptionReplay", counted)
            assert run(capsys, words[0], trace, *words[1:], "--engine", "local", *more).status == 0
        return sorted(begun)

    without = replays()
    policies = 1 if words[0] == "redelivery" else 5
    # Each of two subscriptions under each policy once, the counted ones together.
    assert sum(without) == 2 * policies
    assert replays("--report", tmp_path / "report.html") == without


def test_it_needs_neither_java_nor_spark(trace, tmp_path):
    for name in ("pyspark", "pandas", "py4j"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('Spark was imported')\n")
    words = ["sweep", trace, "--engine", "local", "--set", "flush_interval_ms=10,100",
             "--report", tmp_path / "report.html"]  # fmt: skip
    outcome = run_apart(*words, "--json", env={"PATH": "", "PYTHONPATH": str(tmp_path), "JAVA_HOME": "/nowhere"})
    assert (outcome.status, outcome.err) == (0, "")
    assert len(json.loads(outcome.out)["policies"]) == 3
    assert "Java" not in (tmp_path / "report.html").read_text().split("<h2>")[-1]


def test_a_refused_trace_is_one_line(trace, capsys):
    empty_kinds(trace / parquet.FIRST_FILE)
    outcome = run(capsys, "redelivery", trace, "--engine", "local")
    assert_one_line(outcome, f"ackstate: {trace}: not a trace, damaged chunk 0 of ")


@pytest.mark.spark
@pytest.mark.slow
def test_all_answer_the_same(spark, tmp_path_factory):
    from ackstate.analysis.spark.source import SparkSource, one_task_source

    @settings(max_examples=2, suppress_health_check=list(HealthCheck), deadline=None)
    @given(st.lists(montecarlo.small_traces(), min_size=4, max_size=8), st.permutations(POLICIES), st.integers(3, 200))
    def check(traces, policies, chunk_events):
        place = tmp_path_factory.mktemp("trace")
        topics = [TOPIC, f"{TOPIC}2", "persistent://a/c/t", "plain"]
        frames = [Frame(topics[number % 4], f"s{number // 2}", events) for number, (events, _) in enumerate(traces)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trace_chunks, "CHUNK_EVENTS", chunk_events)
            patch.setattr(trace_chunks, "_CHUNKS_PER_ROW_GROUP", 2)
            # Some recover from a death that nobody saw.
            patch.setattr(trace_chunks.EventOrder, "judge_lives", lambda _, events: events.kind < 0)
            parquet.write_trace([frame for frame in frames if frame.events], place / "trace")
        here, there = LocalSource.of(place / "trace"), SparkSource.of(spark, place / "trace")
        rows = [
            sorted(estimates(each, policies[:3], crashes_per_day=3, is_plotted=True).collect(), key=json.dumps)
            for each in (here, there, one_task_source(spark, here.span))
        ]
        assert rows[0] == rows[1] == rows[2]

    check()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize(("size_bytes_max", "task_count"), [(2**21, 1), (1, None)])
def test_a_small_trace_is_one_task_a_job(spark, trace, monkeypatch, size_bytes_max, task_count):
    monkeypatch.setattr("ackstate.analysis.cli.estimates._ONE_TASK_BYTES_MAX", size_bytes_max)
    store = spark.sparkContext._jsc.sc().statusStore()
    before = store.jobsList(None).size()
    assert status_of("redelivery", trace) == 0
    jobs = store.jobsList(None)
    counts = [jobs.apply(number).numTasks() for number in range(jobs.size() - before)]
    assert len(counts) > 2 if task_count is None else sum(counts) == task_count
