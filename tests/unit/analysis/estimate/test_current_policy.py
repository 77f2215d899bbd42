"""The policy in force: inferred from persists, read from a broker, or named; and doubts if the recording differs."""

import json

import pytest

from ackstate.analysis.estimate.current_policy import CurrentPolicy, PersistRhythm, read_broker_policy, recorded_rhythm
from ackstate.analysis.replay.policy import Policy, PolicyError
from ackstate.analysis.trace import chunks as trace_chunks
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recording import Frame

BEGUN, ENDED, CRASH = EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED, EventKind.CRASH


def persists(*times):
    """An ack and a persist at each time."""
    events = []
    for number, ts_ms in enumerate(times):
        events += [Event(ts_ms, EventKind.ACK, 3, number, number), Event(ts_ms, BEGUN), Event(ts_ms, ENDED)]
    return events


def rhythm_of(tmp_path, **events_of):
    frames = [Frame("t", name, [event]) for name, events in events_of.items() for event in events]
    parquet.write_trace(frames, tmp_path / "trace")
    return recorded_rhythm(tmp_path / "trace")


LIVES = [
    *persists(0, 5_000, 10_000), Event(10_500, CRASH), Event(10_600, EventKind.RECOVER),
    *persists(10_700, 15_700, 20_700),
]  # fmt: skip


@pytest.mark.parametrize(("events_of", "rhythm"), [
    # The interval is that of busy subscriptions.
    ({"busy": persists(*range(0, 200_000, 20_010)), "idle": persists(0, 130_000, 190_000)}, (20_000, 11, 9 / 11)),
    ({"s": LIVES}, (5_000, 4, 1.0)),
    ({"s": persists(*range(0, 10_000, 1_000))}, (1_000, 9, 1.0)),
    # An unusual interval has two digits.
    ({"s": persists(*range(0, 50_000, 7_344))}, (7_300, 6, 1.0)),
    ({"s": persists(0, 1_000)}, None),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [4, 1_000])
def test_the_interval_is_that_of_the_persists_of_one_life(tmp_path, monkeypatch, chunk, events_of, rhythm):
    monkeypatch.setattr(trace_chunks, "CHUNK_EVENTS", chunk)
    assert rhythm_of(tmp_path, **events_of) == (rhythm and PersistRhythm(*rhythm))


@pytest.mark.parametrize(
    ("settings", "interval_ms", "is_doubted"),
    [
        ({"flush_interval_ms": 5_000}, 20_000, True),
        ({"flush_interval_ms": 60_000}, 20_000, True),
        ({"flush_interval_ms": 20_000}, 20_500, False),
        ({"flush_interval_ms": 60_000, "mark_delete_rate_limit": 1}, 300, True),
        ({"flush_interval_ms": 60_000, "mark_delete_rate_limit": 1}, 1_000, False),
        # Writes that follow acks are as rare as the acks.
        ({"flush_interval_ms": 60_000, "mark_delete_rate_limit": 1}, 20_000, False),
        ({"flush_interval_ms": 0}, 20_000, False),
    ],
)
def test_a_recording_that_contradicts_the_named_policy_is_reported(settings, interval_ms, is_doubted):
    rhythm = PersistRhythm(interval_ms, 9, 1.0)
    found = CurrentPolicy.given(Policy.from_mapping(settings), "named", rhythm)
    assert [each.startswith("The recording does not match") for each in found.warnings] == [True] * is_doubted


def test_a_brokers_configuration_is_a_policy_of_pulsar(tmp_path):
    conf, runtime = tmp_path / "broker.conf", tmp_path / "runtime.json"
    conf.write_text("managedLedgerDefaultMarkDeleteRateLimit=2\nmanagedLedgerMaxUnackedRangesToPersist=500\n")
    runtime.write_text(
        json.dumps({
            "managedLedgerDefaultMarkDeleteRateLimit": "2.0", "managedLedgerMaxUnackedRangesToPersist": "500",
            "brokerServicePort": None,
        })
    )  # fmt: skip
    assert read_broker_policy(conf) == read_broker_policy(runtime)
    assert read_broker_policy(conf).to_mapping() == {
        "format": "PULSAR", "flush_interval_ms": "60000", "mark_delete_rate_limit": "2", "range_count_max": "500",
        "range_limit_rule": "PULSAR_4_2", "timing": "PULSAR",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["managedLedgerCursorPositionFlushSeconds=x", "{", "{}]", '{"a": ' * 20_000])
def test_a_bad_configuration_is_named(tmp_path, text):
    conf = tmp_path / "broker.conf"
    conf.write_text(text)
    with pytest.raises(PolicyError, match=r"broker\.conf: "):
        read_broker_policy(conf)
