"""`ackstate sweep` and `ackstate redelivery` under a policy, from the outside."""

import json

import pytest

from ackstate.analysis.estimate.results import Estimate, SweepResult
from ackstate.analysis.replay.grid import replayable
from ackstate.analysis.replay.policy import Policy, PolicyError
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recording import Frame
from command_line import status_of


@pytest.fixture
def regular(tmp_path):
    """An ack each 10 ms for 30 s, persisted each second."""
    events = []
    for number in range(3_000):
        events.append(Event(number * 10, EventKind.ACK, 3, number, number))
        if number % 100 == 99:
            events += [Event(number * 10, EventKind.PERSIST_BEGUN), Event(number * 10, EventKind.PERSIST_ENDED)]
    parquet.write_trace([Frame("persistent://a/b/t", "s", [each]) for each in events], tmp_path / "regular")
    return tmp_path / "regular"


def swept(capsys, *words):
    assert status_of("sweep", *words, "--engine", "local", "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_without_a_grid_the_inferred_policy_is_compared_with_usual_ones(regular, tmp_path, capsys):
    report = tmp_path / "report.html"
    found = swept(capsys, regular, "--report", report)
    assert [each["label"] for each in found["policies"]] == ["recorded", "default", "flush_interval_ms=250"]
    assert (found["baseline"], found["warnings"]) == ("default", [])
    assert found["baseline_source"] == "inferred from 29 intervals between persists"
    assert found["recommendation"].startswith("flush every 0.25 s instead of 1 s: 5")
    assert "inferred from 29 intervals between persists" in report.read_text(encoding="utf-8")


def test_the_inferred_policy_joins_the_grid_and_is_the_reference_point(regular, capsys):
    found = swept(capsys, regular, "--flush-interval-ms", "60s,20s")
    assert [each["label"] for each in found["policies"]][1:] == [
        "default", "flush_interval_ms=60000", "flush_interval_ms=20000",
    ]  # fmt: skip
    assert found["recommended"] is None
    assert [each["never_flushed"] for each in found["policies"]] == [False, False, True, False]


def test_a_brokers_settings_are_those_that_do_not_vary(regular, tmp_path, capsys):
    (tmp_path / "broker.conf").write_text("managedLedgerDefaultMarkDeleteRateLimit=0.5\n")
    words = (regular, "--broker-conf", tmp_path / "broker.conf")
    found = swept(capsys, *words, "--set", "mark_delete_rate_limit=0.5,5")
    policies = [each["policy"] for each in found["policies"][1:]]
    assert [each.pop("mark_delete_rate_limit") for each in policies] == ["0.5", "5"]
    assert policies[0] == policies[1] == {
        "format": "PULSAR", "flush_interval_ms": "60000", "range_count_max": "10000", "range_limit_rule": "PULSAR_4_2",
        "timing": "PULSAR",
    }  # fmt: skip
    assert found["recommendation"].startswith("persist at an ack up to 5 times a second instead of 0.5")
    # A broker that writes each two seconds would not have persisted each second.
    assert found["warnings"][0].startswith("The recording does not match the current policy: it persists every 1 s")
    assert found["baseline_source"] == "read from broker.conf"


def estimate(expected, writes, blocked_ms=0):
    numbers = dict.fromkeys(Estimate.__dataclass_fields__, 0) | {"expected": expected, "write_count": writes}
    names = {"scope": "total", "namespace": "", "topic": "", "subscription": ""}
    return numbers | names | {"duration_ms": 1_000, "bytes_written": writes, "blocked_ms": blocked_ms}


def sweep_result(*points, recorded=(9, 0), baseline=""):
    """A result of points, each of settings, expected duplicates and writes."""
    policies = [None, *(Policy.from_mapping(settings) for settings, *_ in points)]
    costs = [recorded, *(rest for _, *rest in points)]
    rows = [estimate(*each) | {"policy": index} for index, each in enumerate(costs)]
    return SweepResult.of_rows("t", policies, rows, crashes_per_day=1).compared_with(baseline)


def flush(flush_interval_ms):
    return {"flush_interval_ms": flush_interval_ms}


def test_the_front_is_what_nothing_beats():
    points = [(flush(4), 50, 10), (flush(3), 6, 60), (flush(2), 5, 50), (flush(1), 1, 100)]
    result = sweep_result(*points)
    assert [each.is_on_front for each in result.policies] == [False, True, False, True, True]
    # 5/50 + 50/100 is less than 1/50 + 100/100.
    assert result.recommendation == (
        "flush every 0.002 s instead of 0.004 s: 50 -> 5 messages redelivered per broker crash, +40 writes/s, "
        "+40 bytes/s"
    )
    assert result.recommended is not None
    assert result.recommended.label == "flush_interval_ms=2"


def test_the_json_has_the_keys_that_scripts_read():
    found = sweep_result((flush(4), 50, 10), (flush(1), 1, 100)).to_json()
    assert set(found) == {
        "trace", "crashes_per_day", "baseline", "baseline_source", "recommendation", "recommended", "warnings",
        "refused", "policies", "rule",
    }  # fmt: skip
    policy = found["policies"][0]
    assert set(policy) == {"policy", "label", "is_on_front", "never_flushed", "estimates"}
    assert set(policy["estimates"][0]) == {
        "scope", "namespace", "topic", "subscription", "expected", "p50", "p90", "p99", "max", "max_ts_ms",
        "not_flushed", "young", "cut_by_ranges", "cut_by_bytes", "cut_by_route", "write_count", "bytes_written",
        "bytes_kept", "bytes_kept_max", "blocked_ms", "duration_ms", "duplicates_per_day",
    }  # fmt: skip


def test_time_blocked_is_a_price():
    points = [
        ({"max_unpersisted_ack_record_bytes": 5_000}, 5, 10, 3_000),
        ({"max_unpersisted_ack_record_bytes": 9_000}, 5, 10), ({}, 9, 10),
    ]  # fmt: skip
    result = sweep_result(*points, baseline="default")
    assert [each.is_on_front for each in result.policies] == [False, False, True, False]
    assert result.recommendation.startswith(
        "stop dispatch at 9,000 bytes not yet durable instead of never stop dispatch"
    )


@pytest.mark.parametrize(
    ("points", "baseline", "said"),
    [
        ([(flush(1_000), 1, 100), (flush(5_000), 5, 20)], "",
         "no policy of the grid is better than the current policy (flush every 1 s): 1 messages redelivered per broker "
         "crash"),
        ([(flush(1_000), 1, 100), (flush(5_000), 5, 20)], "flush_interval_ms=5000",
         "flush every 1 s instead of 5 s: 5 -> 1 messages redelivered per broker crash, +80 writes/s, +80 bytes/s"),
        # The bytes of a recording are not known, nor is the result without a persist.
        ([(flush(5_000), 5, 20)], "recorded",
         "flush every 5 s instead of recorded: 9 -> 5 messages redelivered per broker crash"),
        ([(flush(5_000), 50, 20)], "recorded",
         "no policy of the grid is better than the current policy (the recorded one): 9 messages redelivered per "
         "broker crash"),
        ([(flush(5_000), 5, 20)], "",
         "no policy of the grid is better than the current policy (flush every 5 s): 5 messages redelivered per broker "
         "crash"),
        ([({"range_count_max": 10, "keep": "LOWEST"}, 7, 20), ({"keep": "WIDEST"}, 3, 20)], "",
         "persist any number of ranges instead of 10 ranges; keep the widest ranges first instead of lowest ranges "
         "first: 7 -> 3 messages redelivered per broker crash, +0 writes/s, +0 bytes/s"),
        ([(flush(60_000) | {"become_old_ack_record_seconds": 9}, 41_000, 1), (flush(5_000), 3_400, 2)], "",
         "flush every 5 s instead of 60 s; hold acks back for 0 s instead of 9 s: 41,000 -> 3,400 "
         "messages redelivered per broker crash, +1 writes/s, +1 bytes/s"),
        ([], "", "no policy was compared"),
    ],
)  # fmt: skip
def test_what_is_recommended_is_said_in_words(points, baseline, said):
    assert sweep_result(*points, baseline=baseline).recommendation == said


def test_what_a_recording_does_not_say_is_null_and_not_zero():
    recorded = sweep_result(({}, 1, 2)).to_json()["policies"][0]["estimates"][0]
    unknown = {name for name, value in recorded.items() if value is None}
    assert unknown == {"write_count", "bytes_written", "bytes_kept", "bytes_kept_max", "blocked_ms"}
    counted = sweep_result(({}, 1, 2), recorded=(9, 7)).to_json()["policies"][0]["estimates"][0]
    assert counted["write_count"] == 7


def test_a_policy_that_no_broker_could_run_is_left_out_and_named(caplog):
    caplog.set_level("ERROR")
    impossible = Policy.from_mapping({"ledger_writable": "false", "metadata_bytes_max": 10})
    found, refused = replayable([None, impossible, Policy()])
    assert found == [None, Policy()]
    assert [label for label, _ in refused] == [impossible.label]
    assert refused[0][1].startswith("not even an empty cursor can be written: no ledger can be written")
    with pytest.raises(PolicyError, match=r"policy: metadata_bytes_max=10 ledger_writable=false: not even an empty"):
        replayable([None, impossible])


def test_policies_that_need_more_exact_times_than_polls_show_are_left_out_and_named():
    short, blocking = (
        Policy.from_mapping(each)
        for each in ({"flush_interval_ms": 4_999}, {"max_unpersisted_ack_record_bytes": 4_096})
    )
    enough = Policy.from_mapping({"flush_interval_ms": 5_000})
    found, refused = replayable([None, short, blocking, enough], poll_ms=1_000)
    assert found == [None, enough]
    assert dict(refused) == {
        short.label: "times are known to one poll of 1 s, so the flush interval must be at least 5 s, that of 5 polls",
        blocking.label: "a limit on dispatch cannot be replayed on a trace recorded by polls, which has no deliveries",
    }
    assert replayable([None, short, blocking, enough])[1] == []
