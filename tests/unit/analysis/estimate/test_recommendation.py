"""The recommendation: the gain of each setting, limits of a Pulsar broker, and the lines of its configuration."""

import pytest

from ackstate.analysis.estimate.current_policy import PULSAR_4_2
from ackstate.analysis.estimate.results import (
    CURRENT,
    RECOMMENDED,
    RECORDED,
    Estimate,
    SweepResult,
    Target,
    short_number,
)
from ackstate.analysis.estimate.settings import (
    admin_commands,
    broker_settings_of,
    policy_text,
    runs_on_pulsar,
    setting_text,
    varied_settings,
)
from ackstate.analysis.replay.grid import candidates
from ackstate.analysis.replay.policy import KEYS, Policy

MINUTE, NATIVE = {"flush_interval_ms": 60_000}, {"flush_interval_ms": 1_000}


def pulsar(**settings):
    return PULSAR_4_2 | settings


def estimate(expected, writes, blocked_ms=0):
    numbers = dict.fromkeys(Estimate.__dataclass_fields__, 0) | {"expected": expected, "write_count": writes}
    numbers |= dict.fromkeys(("max", "p99"), int(expected)) | {"bytes_written": writes, "blocked_ms": blocked_ms}
    return numbers | {"scope": "total", "namespace": "", "topic": "", "subscription": "", "duration_ms": 1_000}


def sweep(*points, recorded=(1_000, 3), current="", target=None):
    """A result of points, each of settings, redelivery per crash, and writes."""
    policies = [None, *(Policy.from_mapping(settings) for settings, *_ in points)]
    costs = [recorded, *(rest for _, *rest in points)]
    rows = [estimate(*each) | {"policy": index} for index, each in enumerate(costs)]
    return SweepResult.of_rows("t", policies, rows, crashes_per_day=1).compared_with(current, target=target)


def test_each_change_has_its_gain_and_one_that_gains_next_to_nothing_is_left_out():
    rate, ranges, flush = {"mark_delete_rate_limit": 5}, {"range_count_max": 100_000}, {"flush_interval_ms": 10_000}
    every = [
        (pulsar(**a, **b, **c), 1_000 - 700 * bool(a) - 200 * bool(b) - 9 * bool(c), 10)
        for a in ({}, rate) for b in ({}, ranges) for c in ({}, flush)
    ]  # fmt: skip
    result = sweep(*every)
    assert result.recommended is not None
    assert result.recommended.total.expected == 100
    assert [(each.key, each.before, each.after, each.gain) for each in result.advice.changes] == [
        ("mark_delete_rate_limit", "1", "5", 700), ("range_count_max", "10000", "100000", 200),
    ]  # fmt: skip
    assert [result.role_of(each) for each in result.policies].count("") == 6
    assert result.role_of(result.policies[0]) == RECORDED
    assert result.role_of(result.current) == CURRENT
    assert result.role_of(result.recommended) == RECOMMENDED


def test_a_change_that_gains_a_hundredth_is_kept():
    for gain, keys in ((9, ["mark_delete_rate_limit"]), (10, ["mark_delete_rate_limit", "flush_interval_ms"])):
        points = [
            (pulsar(mark_delete_rate_limit=rate, flush_interval_ms=flush), expected, 10)
            for rate, flush, expected in (
                (1, 60_000, 1_000), (5, 60_000, 300), (1, 10_000, 1_000 - gain), (5, 10_000, 300 - gain)
            )
        ]  # fmt: skip
        assert [each.key for each in sweep(*points).advice.changes] == keys


def test_the_gain_of_a_change_that_was_not_replayed_alone_is_unknown():
    result = sweep((pulsar(), 1_000, 10), (pulsar(mark_delete_rate_limit=5, range_count_max=20_000), 100, 10))
    assert {each.gain for each in result.advice.changes} == {None}


@pytest.mark.parametrize(
    ("target", "chosen", "told"),
    [
        (Target(p99_at_most=400), 10_000, "flush every 10 s instead of 60 s: 1,000 -> 400 messages redelivered per "
         "broker crash, +10 writes/s, +10 bytes/s, p99 400"),
        (Target(p99_at_most=399), 5_000, "flush every 5 s instead of"),
        (Target(writes_at_most=40), 5_000, "flush every 5 s instead of"),
        (Target(400, 20), 10_000, "flush every 10 s instead of"),
        (Target(200, 20), None, "no policy of the grid has at most 200 messages per broker crash (p99) and 20 "
         "writes/s; the nearest: flush every 10 s (p99 400, 20 writes/s)"),
        (Target(0), None, "no policy of the grid has at most 0 messages per broker crash (p99); the nearest: flush "
         "every 1 s (p99 10, 200 writes/s)"),
        (Target(1_000), None, "no policy of the grid is cheaper with at most 1,000 messages per broker crash (p99) "
         "than the current policy (flush every 60 s): 1,000 messages redelivered per broker crash"),
        (Target(writes_at_most=10), None, "no policy of the grid is cheaper with at most 10 writes/s than"),
    ],
)  # fmt: skip
def test_the_cheapest_policy_that_keeps_to_the_target_is_recommended(target, chosen, told):
    intervals = ((60_000, 1_000, 10), (10_000, 400, 20), (5_000, 200, 40), (1_000, 10, 200))
    points = [({"flush_interval_ms": interval}, redelivery, writes) for interval, redelivery, writes in intervals]
    result = sweep(*points, target=target)
    found = result.recommended and result.recommended.policy.cursor.flush_interval_ms
    assert found == chosen
    assert result.recommendation.startswith(told)
    assert target.text in result.advice.rule


def test_a_pulsar_broker_is_recommended_no_other_journal_for_a_target_and_a_recording_never_wins_one():
    points = (pulsar(), 1_000, 10), (pulsar(mark_delete_rate_limit=5), 200, 40), (NATIVE, 100, 10)
    result = sweep(*points, target=Target(p99_at_most=150))
    assert (result.recommended, result.advice.native) == (None, None)
    assert "the nearest" in result.recommendation
    found = sweep((NATIVE, 100, 10), recorded=(100, None), current=RECORDED, target=Target(100))
    assert found.recommended.policy == Policy.from_mapping(NATIVE)


def test_the_headline_quotes_the_recording_unless_the_policy_in_force_is_known():
    result = sweep((MINUTE, 1_200, 3), recorded=(1_000, 3))
    assert (result.quoted, result.warnings) == (result.current, [])
    doubted = result.compared_with("", is_inferred=True)
    assert doubted.quoted is doubted.recorded
    assert doubted.warnings == [
        "The headline quotes the recording: 1,000 messages per broker crash. The inferred policy, replayed, has 1,200: "
        "it persists at its own times"
    ]
    assert not sweep((MINUTE, 1_040, 3), recorded=(1_000, 3)).compared_with("", is_inferred=True).warnings


def test_less_than_a_message_per_crash_is_not_worth_a_change():
    result = sweep((MINUTE, 0.5, 10), (NATIVE, 0.001, 11))
    assert result.recommended is None
    assert sweep((MINUTE, 1.5, 10), (NATIVE, 0.001, 11)).recommended is not None


def test_less_than_one_percent_is_not_worth_a_change():
    assert sweep((MINUTE, 1_000, 10), (NATIVE, 991, 10)).recommended is None
    assert sweep((MINUTE, 1_000, 10), (NATIVE, 989, 10)).recommended is not None


def test_a_pulsar_broker_is_recommended_its_own_settings_and_the_native_journal_is_named_apart():
    better = pulsar(mark_delete_rate_limit=5)
    impossible = pulsar(keep="WIDEST", range_limit_rule="EXACT")
    result = sweep((pulsar(), 1_000, 10), (better, 200, 40), (impossible, 10, 10), (NATIVE, 100, 10))
    assert result.recommended.policy == Policy.from_mapping(better)
    assert result.advice.native.policy == Policy.from_mapping(NATIVE)
    assert "200 messages redelivered per broker crash" in result.recommendation
    worse = sweep((pulsar(), 1_000, 10), (better, 200, 40), (NATIVE, 300, 10))
    assert worse.advice.native is None


def test_a_policy_that_never_flushed_is_marked_and_never_recommended():
    result = sweep((MINUTE, 1_000, 10), (NATIVE, 10, 0))
    assert [each.never_flushed for each in result.policies] == [False, False, True]
    assert result.recommended is None
    assert [each["never_flushed"] for each in result.to_json()["policies"]] == [False, False, True]
    assert not sweep((MINUTE, 0, 0)).policies[1].never_flushed


@pytest.mark.parametrize(
    ("recorded", "current", "said"),
    [
        ((1_000, 3), (1_200, 3), []),
        ((1_000, 3), (1_400, 3), ["The recording does not match the current policy: 1,000 messages"]),
        ((1_400, 3), (1_000, 3), ["The recording does not match the current policy: 1,400 messages"]),
        ((0, 3), (1.5, 3), ["The recording does not match the current policy: 0 messages"]),
        ((0, 3), (1, 3), []),
        ((1_000, 0), (1_400, 3), []),  # Without a persist, a recording says nothing.
        ((1_000, 3), (1_000, 0), ["The current policy never flushed in this trace"]),
    ],
)
def test_a_current_policy_that_does_not_fit_the_recording_is_a_warning(recorded, current, said):
    warnings = sweep((MINUTE, *current), (NATIVE, 1, 1), recorded=recorded).warnings
    assert len(warnings) == len(said)
    assert all(warning.startswith(text) for warning, text in zip(warnings, said, strict=True))


@pytest.mark.parametrize(
    ("settings", "is_possible"),
    [
        (pulsar(), True), (pulsar(mark_delete_rate_limit=0, flush_interval_ms=0), True), (pulsar(format="NATIVE",
         range_limit_rule="EXACT"), False), (pulsar(flush_interval_ms=1_500), False), (pulsar(mark_delete_rate_limit=0),
         False), (pulsar(become_old_ack_record_seconds=3), False), (pulsar(ledger_writable=False), False),
        (pulsar(max_unpersisted_ack_record_bytes=5_000), False), (NATIVE, False),
    ],
)  # fmt: skip
def test_a_broker_runs_what_its_settings_can_express(settings, is_possible):
    assert runs_on_pulsar(Policy.from_mapping(settings)) == is_possible


def test_settings_are_lines_of_broker_conf_and_commands_where_they_can_be():
    policy = Policy.from_mapping(pulsar(mark_delete_rate_limit=2.5, flush_interval_ms=10_000, range_form="LIST"))
    keys = ("mark_delete_rate_limit", "flush_interval_ms", "range_count_max", "range_form", "tick_ms")
    settings = broker_settings_of(policy, keys)
    assert [each.line for each in settings] == [
        "managedLedgerDefaultMarkDeleteRateLimit=2.5", "managedLedgerCursorPositionFlushSeconds=10",
        "managedLedgerMaxUnackedRangesToPersist=10000", "managedLedgerPersistIndividualAckAsLongArray=false",
    ]  # fmt: skip
    (command,) = admin_commands(settings, ["a/b"])
    assert command.endswith("--ml-mark-delete-max-rate 2.5 a/b")
    assert admin_commands([each._replace(is_dynamic=True) for each in settings[1:2]], ["a/b"]) == [
        "pulsar-admin brokers update-dynamic-config --config managedLedgerCursorPositionFlushSeconds --value 10"
    ]


def test_a_number_has_three_digits_or_all_before_the_point():
    numbers = (0.01249, 12.345, 999.4, 999.5, 13_312)
    assert [short_number(number) for number in numbers] == ["0.0125", "12.3", "999", "1,000", "13,312"]


def test_an_unlimited_rate_needs_no_interval():
    policy = Policy.from_mapping(pulsar(mark_delete_rate_limit=0, flush_interval_ms=0))
    found = broker_settings_of(policy, ("mark_delete_rate_limit", "flush_interval_ms"))
    assert [each.line for each in found] == ["managedLedgerDefaultMarkDeleteRateLimit=0"]


def test_candidates_begin_with_the_current_policy_and_a_pulsar_broker_can_run_all_but_the_native_one():
    for settings in (pulsar(), pulsar(range_count_max="none"), NATIVE, MINUTE, {"flush_interval_ms": 0}):
        current = Policy.from_mapping(settings)
        found = candidates(current)
        assert found[0] == current
        assert len({each.label for each in found}) == len(found)
        if "format" in settings:
            assert [runs_on_pulsar(each) for each in found] == [True] * (len(found) - 1) + [False]


@pytest.mark.parametrize(
    ("settings", "intervals_ms"),
    [
        (MINUTE, [1_000, 5_000, 20_000, 60_000]),
        (NATIVE, [250, 1_000]),
        # A native journal flushes as often as the current policy writes.
        (pulsar(mark_delete_rate_limit=0), [0, 10_000, 60_000]),
        (pulsar(mark_delete_rate_limit=0.5), [2_000, 10_000, 60_000]),
    ],
)
def test_candidates_flush_as_often_as_the_current_policy_or_more_often(settings, intervals_ms):
    found = candidates(Policy.from_mapping(settings))
    assert sorted({each.cursor.flush_interval_ms for each in found}) == intervals_ms


def test_of_many_candidates_only_those_of_a_pulsar_broker_have_a_rate():
    for settings in (MINUTE, pulsar()):
        found = candidates(Policy.from_mapping(settings), many=True)
        assert found[0] == Policy.from_mapping(settings)
        assert (len({each.cursor.mark_delete_rate_limit for each in found}) > 1) == ("format" in settings)


def test_a_policy_is_named_with_all_settings_that_vary():
    policies = [Policy.from_mapping(each) for each in (NATIVE, MINUTE | {"keep": "WIDEST"})]
    varied = varied_settings(policies)
    assert varied == ["flush_interval_ms", "keep"]
    assert policy_text(policies[0], varied) == "flush every 1 s, keep the lowest ranges first"
    assert all(setting_text(key, text) for key, text in policies[0].texts.items())
    assert set(KEYS) == policies[0].texts.keys()


def flush(flush_interval_ms):
    return {"flush_interval_ms": flush_interval_ms}


def test_the_front_is_what_nothing_beats():
    points = [(flush(4), 50, 10), (flush(3), 6, 60), (flush(2), 5, 50), (flush(1), 1, 100)]
    result = sweep(*points, recorded=(9, 0))
    assert [each.is_on_front for each in result.policies] == [False, True, False, True, True]
    # 5/50 + 50/100 is less than 1/50 + 100/100.
    assert result.recommendation == (
        "flush every 0.002 s instead of 0.004 s: 50 -> 5 messages redelivered per broker crash, +40 writes/s, "
        "+40 bytes/s"
    )
    assert result.recommended is not None
    assert result.recommended.label == "flush_interval_ms=2"


def test_the_json_has_the_keys_that_scripts_read():
    found = sweep((flush(4), 50, 10), (flush(1), 1, 100)).to_json()
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
    result = sweep(*points, recorded=(9, 0), current="default")
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
    assert sweep(*points, recorded=(9, 0), current=baseline).recommendation == said


def test_what_a_recording_does_not_say_is_null_and_not_zero():
    recorded = sweep(({}, 1, 2), recorded=(9, 0)).to_json()["policies"][0]["estimates"][0]
    unknown = {name for name, value in recorded.items() if value is None}
    assert unknown == {"write_count", "bytes_written", "bytes_kept", "bytes_kept_max", "blocked_ms"}
    counted = sweep(({}, 1, 2), recorded=(9, 7)).to_json()["policies"][0]["estimates"][0]
    assert counted["write_count"] == 7
