"""Policies and grids: their settings, and the refusals, by name."""

import pytest

from ackstate.analysis.replay.grid import policies_of, read_grid
from ackstate.analysis.replay.policy import Policy, PolicyError
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.formats import Format


@pytest.mark.parametrize(("texts", "settings"), [
    ({"flush-interval-ms": "5000", "format": "pulsar", "range_count_max": "none"},
     {"flush_interval_ms": 5_000, "format": Format.PULSAR, "range_count_max": None}),
    # Times are durations.
    ({"flush_interval_ms": "5s", "ledger-rollover-ms": "4h", "become_old_ack_record_seconds": "5m"},
     {"flush_interval_ms": 5_000, "ledger_rollover_ms": 14_400_000, "become_old_ack_record_seconds": 300}),
    ({"become_old_ack_record_seconds": "2", "mark_delete_rate_limit": " 0.5 ", "batch_index_acks": "False"},
     {"become_old_ack_record_seconds": 2, "mark_delete_rate_limit": 0.5, "batch_index_acks": False}),
])  # fmt: skip
def test_a_policy_is_made_of_texts(texts, settings):
    policy = Policy.from_mapping(texts)
    assert policy == Policy(CursorConfig(**settings)) == Policy.from_mapping(settings)
    assert Policy.from_mapping(policy.to_mapping()) == policy


@pytest.mark.parametrize(
    "own",
    [
        {"tick_ms": 7}, {"become_old_ack_record_seconds": 1}, {"max_unpersisted_ack_record_bytes": 5_000},
        {"format": "NATIVE"}, {"timing": "INTERVAL"},
    ],
)  # fmt: skip
def test_a_policy_that_pulsar_cannot_follow_is_not_paced_by_it(own):
    of_pulsar = {"timing": "PULSAR", "format": "PULSAR"}
    assert Policy.from_mapping(of_pulsar).is_paced_by_pulsar
    assert not Policy.from_mapping(of_pulsar | own).is_paced_by_pulsar


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"flush_interval": "1"}, "unknown key 'flush_interval'"),
        ({"flush_interval_ms": "soon"}, "flush_interval_ms must be a duration such as 500ms, 5s, 1m or 1h, got 'soon'"),
        ({"flush_interval_ms": -1}, "flush_interval_ms must be at least 0, got -1"),
        ({"flush_interval_ms": True}, "flush_interval_ms must not be a boolean, got True"),
        ({"become_old_ack_record_seconds": "500ms"}, "must be a whole number of seconds, got 500ms"),
        ({"keep": "BEST"}, "keep must be one of LOWEST, WIDEST, got 'BEST'"),
        ({"become_old_ack_record_seconds": "AUTO"}, "become_old_ack_record_seconds must be a duration .*, got 'AUTO'"),
        ({"ledger_writable": "maybe"}, "ledger_writable must be one of true, false"),
        ({"ledger_writable": 1}, "ledger_writable must be true or false"),
        ({"tick_ms": 0}, "tick_ms must be at least 1, got 0"),
        ({"max_unpersisted_ack_record_bytes": 5}, "max_unpersisted_ack_record_bytes .* is 5: below 1024"),
        ({"mark_delete_rate_limit": "nan"}, "mark_delete_rate_limit must be a finite number, got nan"),
        ({"mark_delete_rate_limit": -1}, "mark_delete_rate_limit must not be negative, got -1"),
    ],
)
def test_what_is_wrong_is_named(settings, named):
    with pytest.raises(PolicyError, match=named):
        Policy.from_mapping(settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"flush_interval_ms": range(1_000_000)}, "must be at most 10,000, got 1,000,000"),
        ({"flush_interval_ms": [5, "5"]}, "'flush_interval_ms=5' occurs twice"),
        ({"flush_interval_ms": []}, "flush_interval_ms must have at least one value"),
        ({"flush_interval_ms": 5}, "flush_interval_ms must be a list"),
    ],
)
def test_a_grid_that_is_none_is_refused(settings, named):
    with pytest.raises(PolicyError, match=named):
        policies_of(settings)


@pytest.mark.parametrize("text", ["[", "[1]", "7", '{"x": 1}', "[" * 100_000])
def test_a_file_that_is_no_grid_is_named(tmp_path, text):
    file = tmp_path / "grid.json"
    file.write_text(text)
    with pytest.raises(PolicyError, match=r"grid\.json"):
        read_grid(file)
