"""`ackstate sweep` and `ackstate redelivery` under a policy, from the outside."""

import json

import pytest

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
