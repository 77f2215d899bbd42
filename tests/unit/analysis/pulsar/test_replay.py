"""The prediction equals the redelivery of real brokers, and with a policy that is wrong anywhere it does not."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from ackstate.analysis.pulsar.ack_commands import CursorMemory
from ackstate.analysis.pulsar.policy import PolicyName, broker_policy
from ackstate.analysis.pulsar.recorded_run import parse_run
from ackstate.analysis.pulsar.replay import CANDIDATE_COUNT_MAX, predict
from ackstate.analysis.pulsar.replay_table import judge_all, score_cells, summary_line
from ackstate.wire.pulsar import LimitRule, RangeForm
from command_line import assert_one_line, run

VECTORS = Path(__file__).parents[3] / "vectors" / "broker-redelivery.jsonl.gz"
MISSED = VECTORS.with_name("broker-redelivery-missed.jsonl.gz")
TYPED = VECTORS.with_name("broker-redelivery-typed.jsonl.gz")
MEASURED = {
    "memory_before", "durable_after", "n_acked", "n_redelivered", "n_redelivered_acked", "redelivered_acked",
    "lost_unacked", "duplicate_deliveries", "start_ms", "rss_mb", "note", "run", "pattern",
}  # fmt: skip


@pytest.fixture(scope="module")
def lines():
    with gzip.open(VECTORS, "rt") as opened:
        return opened.readlines()


@pytest.fixture(scope="module")
def verdicts():
    """Of each policy and each recorded run; it takes some seconds."""
    return judge_all(VECTORS, MISSED, TYPED)


def recorded(*commands, acked=None, entries=((3, 0, 9),), batch_sizes=None, end="kill", config=None, t_end_ms=100_000):
    """A run by hand: commands as [ms, [entries]] or with a type, each handled in the millisecond of its receipt."""
    rows = [[ms, ms, *acks] for ms, *acks in commands]
    entry_count = sum(last - first + 1 for _, first, last in entries)
    message_count = sum(batch_sizes or [1] * entry_count)
    return {
        "topic": "by-hand",
        "config": config or {},
        "end": end,
        "entries": [list(each) for each in entries],
        "batch_sizes": batch_sizes,
        "client_ack_order": list(range(message_count)) if acked is None else acked,
        "broker_acks_ms": rows,
        "cursor_opened_ms": [-500, -500],
        "broker_up_ms": [-600, -600],
        "cursor_ledger_ms": [rows[0][0]] * 2 if rows else None,
        "t_end_ms": t_end_ms,
    }


def predicted(fields, name=PolicyName.PULSAR_4):
    return predict(parse_run(json.dumps(fields)), name)


# The recordings


@pytest.mark.slow
def test_every_recorded_run_is_predicted(verdicts):
    found = verdicts[PolicyName.PULSAR_4]
    assert len(found) == 40
    assert [each.prediction.topic for each in found if not each.is_inside] == []
    assert [each.prediction.topic for each in found if not each.is_named] == []
    # Not because anything would do: the interval is a single number in most of them, and few sets are possible.
    assert sum(each.prediction.low == each.prediction.high for each in found[:20]) >= 12
    assert sum(each.prediction.low == each.prediction.high for each in found[24:]) >= 7
    assert max(each.prediction.high - each.prediction.low for each in found[20:24]) < 60
    assert max(len(each.prediction.candidates) for each in found) <= 9


@pytest.mark.slow
def test_each_wrong_policy_scores_visibly_worse(verdicts):
    named = {name: sum(each.is_named for each in found) for name, found in verdicts.items()}
    assert named.pop(PolicyName.PULSAR_4) == 40
    assert set(named) == {PolicyName.NO_STORED_PERMITS, PolicyName.NO_LIMITER, PolicyName.NO_RANGE_LIMIT}
    assert max(named.values()) <= 37
    inside = {name: sum(each.is_inside for each in found) for name, found in verdicts.items()}
    assert all(inside[name] < 40 for name in named)


@pytest.mark.slow
def test_a_shorter_creation_or_one_reading_alone_misses_recorded_runs():
    """The ledgers of two took 120 and 180 ms, the acks of the others were cumulative."""
    with gzip.open(MISSED, "rt") as opened:
        runs = [json.loads(line) for line in opened]
    assert [measured_is_named(run) for run in runs] == [True] * 4
    assert [measured_is_named(run, ledger_creation_ms=100) for run in runs] == [True, False, False, True]
    individual = [run | {"broker_acks_ms": [[*row, "Individual"] for row in run["broker_acks_ms"]]} for run in runs]
    assert [measured_is_named(run) for run in individual] == [False, True, True, False]


def measured_is_named(run, **more):
    return tuple(run["redelivered_acked"]) in predict(parse_run(json.dumps(run)), **more).candidates


@pytest.mark.slow
def test_predictions_are_well_formed(verdicts):
    for found in verdicts.values():
        for prediction, _ in found:
            sizes = [len(candidate) for candidate in prediction.candidates]
            assert prediction.low <= min(sizes)
            assert max(sizes) <= prediction.high
            assert len(set(prediction.candidates)) == len(sizes) <= CANDIDATE_COUNT_MAX
            assert all(list(candidate) == sorted(set(candidate)) for candidate in prediction.candidates)


@pytest.mark.slow
def test_the_scores_are_those_of_the_evidence(verdicts):
    page = (Path(__file__).parents[4] / "docs" / "evidence.md").read_text(encoding="utf-8")
    for name, found in verdicts.items():
        assert f"| {name.value} | {' | '.join(score_cells(found))} |" in page


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 6, 10])
def test_what_was_measured_is_never_looked_at(number, lines):
    fields = json.loads(lines[number])
    expected = predicted(fields)
    blind = {name: value for name, value in fields.items() if name not in MEASURED}
    assert predicted(blind) == expected
    lied = fields | dict.fromkeys(MEASURED & set(fields), "nonsense") | {"redelivered_acked": [0]}
    assert predicted(lied) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "change"),
    [
        (5, {"managedLedgerCursorPositionFlushSeconds": 600}),
        (4, {"acknowledgmentAtBatchIndexLevelEnabled": "false"}),
        (9, {"managedLedgerMaxUnackedRangesToPersist": 999}),
        (9, {"managedLedgerPersistIndividualAckAsLongArray": "true"}),
        (10, {"managedLedgerPersistIndividualAckAsLongArray": "false"}),
        (12, {"acknowledgmentAtBatchIndexLevelEnabled": "true"}),
        (13, {"acknowledgmentAtBatchIndexLevelEnabled": "true"}),
        (14, {"managedLedgerDefaultMarkDeleteRateLimit": 1}),
        (19, {"managedLedgerDefaultMarkDeleteRateLimit": 10}),
        (19, {"managedLedgerCursorPositionFlushSeconds": 1}),
    ],
)
def test_each_setting_counts(number, change, lines):
    """With a setting that the broker had not, the set that it redelivered is no longer predicted; but for run 12."""
    fields = json.loads(lines[number])
    measured = tuple(fields["redelivered_acked"])
    found = predicted(fields | {"config": fields["config"] | change})
    # Without index acks from the client no ack carries words, and the setting concerns nothing else.
    assert (measured in found.candidates) is (number == 12)


# The mechanism, by hand


def test_an_empty_run_redelivers_all_that_was_acked():
    assert predicted(recorded(acked=[4, 7])).candidates == ((4, 7),)


def test_only_written_commands_are_durable():
    """Half a permit is saved, so that the second write is due half a second after the first command."""
    fields = recorded((0, [1]), (300, [3]), (700, [5]), (900, [7]), acked=[1, 3, 5, 7])
    assert predicted(fields | {"t_end_ms": 1_400}).candidates == ((7,),)
    assert predicted(fields, PolicyName.NO_LIMITER).candidates == ((),)
    assert predicted(fields | {"t_end_ms": 1_400}, PolicyName.NO_STORED_PERMITS).candidates == ((3, 5, 7),)


def test_the_flush_timer_makes_the_rest_durable():
    fields = recorded((0, [1]), (300, [3]), acked=[1, 3])
    assert predicted(fields | {"t_end_ms": 59_000}).candidates == ((3,),)
    assert predicted(fields | {"t_end_ms": 60_000}).candidates == ((),)


def cumulative(*commands, batch_sizes, acked, t_end_ms=400, **more):
    """A run by hand of cumulative acks, at a cursor that is opened just before and is granted one write a second."""
    rows = [(ms, [ack], "Cumulative") for ms, ack in commands]
    entries = [(3, 0, len(batch_sizes) - 1)]
    run = recorded(*rows, entries=entries, batch_sizes=batch_sizes, acked=acked, t_end_ms=t_end_ms, **more)
    return run | {"cursor_opened_ms": [-1, -1]}


def test_a_cumulative_ack_inside_a_batch_is_written():
    fields = cumulative((0, [0, [0b1100]]), batch_sizes=[4, 4], acked=[0, 1])
    assert predicted(fields).candidates == ((),)
    fields["broker_acks_ms"][0][3] = "Individual"
    assert predicted(fields).candidates == ((0, 1),)


def test_a_first_write_of_cumulative_acks_holds_the_position_of_the_first_alone():
    """But it holds the batches of the moment at which its ledger is ready, even those that were acked meanwhile."""
    commands = [(0, [0, [0b1100]]), (50, [1, [0b1000]]), (90, 2)]
    fields = cumulative(*commands, batch_sizes=[4, 4, 4], acked=list(range(12)))
    # Ready between the second and the third: messages 2 and 3 are neither in a batch nor at the mark-delete position.
    waited = predicted(fields | {"cursor_ledger_ms": [70, 70]})
    assert (2, 3, 7, 8, 9, 10, 11) in waited.candidates
    # Rarely the cursor makes a second ledger at once, which begins with the position of now.
    assert set(waited.candidates) == {(2, 3, 7, 8, 9, 10, 11), (7, 8, 9, 10, 11)}
    # Ready after the third, which acked whole entries: they are in no range.
    assert (2, 3, 7, 8, 9, 10, 11) in predicted(fields | {"cursor_ledger_ms": [95, 95]}).candidates


def test_a_cumulative_ack_that_goes_back_is_refused_without_a_request():
    back = cumulative((0, 2), (1_000, 0), (1_001, 3), batch_sizes=[1] * 5, acked=[0, 1, 2, 3], t_end_ms=1_950)
    assert predicted(back).candidates == ((),)
    # One that stays where it is is not refused, and has the only write of that second.
    back["broker_acks_ms"][1][2] = [2]
    assert predicted(back).candidates == ((3,),)


def test_cumulative_acks_do_not_undo_individual_ones():
    fields = recorded(
        (0, [[2, [0b01]], 1], "Individual"), (1, [0], "Cumulative"), (2, [[2, [0b10]]], "Cumulative"),
        entries=[(3, 0, 3)], batch_sizes=[2] * 4, acked=[0, 1, 2, 3, 4, 5], t_end_ms=90_000,
    )  # fmt: skip
    memory = CursorMemory(parse_run(json.dumps(fields)), batch_index_acks=True)
    assert [memory.ack(command) for command in parse_run(json.dumps(fields)).commands] == [True, True, True]
    # Words that acked less from the start of the batch are replaced, as a broker does it.
    assert (str(memory.state.mark_delete), memory.state.batch[(3, 2)]) == ("3:1", (2,))


def test_without_index_acks_a_cumulative_ack_inside_a_batch_acks_what_is_before_it():
    config = {"acknowledgmentAtBatchIndexLevelEnabled": "false"}
    fields = cumulative((0, [1, [0b10]]), batch_sizes=[2, 2], acked=[0, 1, 2], config=config)
    assert predicted(fields).candidates == ((2,),)


def test_entries_before_that_of_a_cumulative_ack_may_be_listed():
    run = recorded((0, [0, 1, [2, [0b10]]], "Cumulative"), batch_sizes=[2] * 10)
    assert parse_run(json.dumps(run)).commands[0].acks == ((2, (0b10,)),)


def test_acks_without_types_are_read_in_both_ways_if_they_can_be():
    untyped = recorded((0, [[0, [0b10]]]), (500, [0, [1, [0b10]]]), (600, [1]), batch_sizes=[2] * 10)
    run = parse_run(json.dumps(untyped))
    assert not run.has_ack_types
    assert [command.acks[0].entry for command in run.cumulative_commands] == [0, 1, 1]
    for rows in (
        [[0, 0, [[0, [0b01]]]]],  # its second message, not its first
        [[0, 0, [1]]],  # not from the first entry on
        [[0, 0, [0, 2]]],
        [[0, 0, [[0, [0b10]], 1]]],
        [[0, 0, []]],
    ):
        assert parse_run(json.dumps(untyped | {"broker_acks_ms": rows})).cumulative_commands is None
    lone = untyped | {"broker_acks_ms": [[0, 0, [[0, [0b10]]]]], "client_ack_order": [0]}
    assert predicted(lone).candidates == ((0,), ())
    assert predicted(lone | {"broker_acks_ms": [[0, 0, [[0, [0b10]]], "Individual"]]}).candidates == ((0,),)


def test_lone_acks_of_parts_of_batches_are_neither_written_nor_due():
    fields = recorded(
        (0, [[0, [0b10]]]), (5_000, [[1, [0b01]]]), entries=[(3, 0, 3)], batch_sizes=[2] * 4, acked=[0, 3]
    )
    assert predicted(fields).candidates == ((0, 3),)
    # An entry acked above the mark-delete position makes the next write take them along.
    fields["broker_acks_ms"].append([9_000, 9_000, [2]])
    assert predicted(fields).candidates == ((),)


def test_the_last_message_of_a_batch_acks_its_entry():
    fields = recorded((0, [[0, [0b10]], [0, [0b01]]]), entries=[(3, 0, 0)], batch_sizes=[2])
    assert predicted(fields).candidates == ((),)


def test_more_than_the_limit_comes_back_by_the_rule_of_its_form():
    odd = list(range(1, 400, 2))
    config = {"managedLedgerMaxUnackedRangesToPersist": 10, "managedLedgerDefaultMarkDeleteRateLimit": 0}
    as_list = config | {"managedLedgerPersistIndividualAckAsLongArray": "false"}
    ledgers = [(3, 0, 99), (4, 0, 99), (5, 0, 99), (6, 0, 99)]
    fields = recorded((0, odd), entries=ledgers, acked=odd, config=config)
    # Words: the first ledger alone crosses the limit, and stays. List: the limit and one range more.
    assert predicted(fields).candidates == (tuple(odd[50:]),)
    assert predicted(fields | {"config": as_list}).candidates == (tuple(odd[11:]),)
    assert predicted(fields | {"config": as_list}, PolicyName.NO_RANGE_LIMIT).candidates == ((),)


def test_a_broker_that_closes_writes_all_but_parts_of_batches():
    fields = recorded(
        (0, [0, 2]), (1, [[5, [0b01]], 7]), entries=[(3, 0, 9)], batch_sizes=[2] * 10, acked=[0, 1, 11, 14]
    )
    assert predicted(fields | {"end": "term", "t_end_ms": 10}).candidates == ((11,),)


def test_a_broker_that_closes_with_many_ranges_may_have_its_ledger_or_not():
    odd = list(range(1, 20, 2))
    config = {"managedLedgerMaxUnackedRangesToPersist": 5, "managedLedgerMaxUnackedRangesToPersistInMetadataStore": 3}
    fields = recorded((0, odd), entries=[(3, 0, 19)], acked=odd, config=config, end="term")
    # The metadata store takes a list of one range over the limit, the ledger all words of its first message ledger.
    assert predicted(fields).candidates == (tuple(odd[6:]), ())
    assert (predicted(fields).low, predicted(fields).high) == (0, 4)
    few = fields | {"config": config | {"managedLedgerMaxUnackedRangesToPersistInMetadataStore": 10}}
    assert predicted(few).candidates == (tuple(odd[6:]),)


def test_the_mark_delete_position_crosses_the_ends_of_ledgers():
    fields = recorded((0, [2, 1, 0, 4]), (1, [3]), entries=[(3, 0, 1), (5, 0, 3)])
    memory = CursorMemory(parse_run(json.dumps(fields)), batch_index_acks=True)
    for command in parse_run(json.dumps(fields)).commands:
        memory.ack(command)
    assert str(memory.state.mark_delete) == "5:2"
    assert not memory.state.deleted


@pytest.mark.slow
def test_of_more_sets_than_are_kept_low_and_high_are_of_all():
    """A cursor opened some time in a second: the next write may be any of a hundred commands."""
    commands = [(10 * number, [number]) for number in range(101)]
    fields = recorded(*commands, entries=[(3, 0, 199)], acked=list(range(101)), t_end_ms=2_000)
    found = predicted(fields | {"cursor_opened_ms": [-1_000, -1]})
    assert len(found.candidates) == CANDIDATE_COUNT_MAX
    assert (found.low, found.high) == (0, 99)
    # In the middle of all are the predictions with clocks in the middle: opened 500 ms before, written again at 500 ms.
    assert len(found.candidates[0]) in range(48, 52)


def test_the_policy_of_a_broker_is_what_its_configuration_says():
    assert broker_policy({}).limits.rule is LimitRule.PULSAR_4_2
    assert broker_policy({"managedLedgerUnackedRangesOpenCacheSetEnabled": "false"}).range_form is RangeForm.LIST
    assert broker_policy({"managedLedgerDefaultMarkDeleteRateLimit": "-1"}).permit_ms == 0
    assert broker_policy({"managedLedgerCursorPositionFlushSeconds": "5"}).flush_ms == 5_000


# The command


@pytest.fixture
def file(tmp_path, lines):
    """Two quick runs, not compressed."""
    path = tmp_path / "runs.jsonl"
    path.write_text(lines[0] + lines[1] + "\n")
    return path


@pytest.mark.slow
def test_json_is_an_object_a_run_in_the_order_of_the_file(file, lines, capsys):
    outcome = run(capsys, "pulsar", "replay", file, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    objects = [json.loads(line) for line in outcome.out.splitlines()]
    assert objects == [json.loads(json.dumps(asdict(predict(parse_run(line))))) for line in lines[:2]]
    assert list(objects[0]) == ["topic", "low", "high", "candidates", "has_ack_types"]
    assert not objects[0]["has_ack_types"]


@pytest.mark.slow
def test_the_table_says_what_came_true(file, capsys):
    outcome = run(capsys, "pulsar", "replay", file)
    assert outcome.status == 0
    assert "burst-alternate" in outcome.out
    assert "Of 2 measured: 2 inside the interval, 2 with the exact set" in outcome.out
    wrong = run(capsys, "pulsar", "replay", file, "--policy", "no-limiter")
    assert wrong.status == 1
    assert "Of 2 measured: 1 inside the interval, 1 with the exact set" in wrong.out


def test_a_run_that_was_not_measured_is_predicted_all_the_same(tmp_path, capsys):
    path = tmp_path / "runs.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(recorded((0, [1]), acked=[1, 3])).encode()))
    outcome = run(capsys, "pulsar", "replay", path)
    assert outcome.status == 0
    assert "1 run, none of them measured" in outcome.out
    assert summary_line([]) == "0 runs, none of them measured"


def test_the_answer_says_that_ack_types_are_missing(tmp_path, capsys):
    untyped, typed = recorded((0, [1])), recorded((0, [1], "Individual"))
    path = tmp_path / "runs.jsonl"
    for rows, remark in (([untyped, typed], "1 run of 2 without ack types"), ([typed, recorded()], "")):
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        said = " ".join(run(capsys, "pulsar", "replay", path).out.split())
        assert remark in said if remark else "ack types" not in said
        objects = [json.loads(line) for line in run(capsys, "pulsar", "replay", path, "--json").out.splitlines()]
        assert [each["has_ack_types"] for each in objects] == [not remark, True]


def test_the_longest_creation_of_a_ledger_is_an_option(tmp_path, capsys):
    """The second command came 700 ms after the first, which alone was granted a write."""
    path = tmp_path / "runs.jsonl"
    fields = recorded((0, [1], "Individual"), (700, [3], "Individual"), acked=[1, 3]) | {"cursor_opened_ms": [-1, -1]}
    fields |= {"cursor_ledger_ms": None, "t_end_ms": 2_000, "redelivered_acked": []}
    path.write_text(json.dumps(fields))
    assert run(capsys, "pulsar", "replay", path).status == 1
    assert run(capsys, "pulsar", "replay", path, "--ledger-creation-ms", "800").status == 0
    assert_one_line(run(capsys, "pulsar", "replay", path, "--ledger-creation-ms", "-1"), "--ledger-creation-ms")


def test_a_broker_that_is_slow_in_memory_is_slow_at_creating_ledgers():
    """The first command took 80 ms to be handled, so that its ledger may have taken a second."""
    fields = recorded((0, [1], "Individual"), (900, [3], "Individual"), acked=[1, 3], t_end_ms=2_000)
    fields |= {"cursor_opened_ms": [-1, -1], "cursor_ledger_ms": None}
    assert set(predicted(fields).candidates) == {(3,)}
    fields["broker_acks_ms"][0][1] = 80
    assert set(predicted(fields).candidates) == {(3,), ()}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"entries": None}, ["entries", "list"]),
        ({"entries": []}, ["entries must not be empty"]),
        ({"entries": [[3, 5, 4]]}, ["entries[0]"]),
        ({"entries": [[3, 0, 2], [3, 2, 4]]}, ["entries[1]", "3:2"]),
        ({"entries": [[3, 0, 2**32 - 1]]}, ["entries[0]", "at most"]),
        ({"end": "crash"}, ["end", "'crash'"]),
        ({"topic": 7}, ["topic", "7"]),
        ({"t_end_ms": "soon"}, ["t_end_ms", '"soon"']),
        ({"t_end_ms": float("nan")}, ["t_end_ms", "NaN"]),
        ({"broker_up_ms": [5]}, ["broker_up_ms"]),
        ({"broker_up_ms": [5, 4]}, ["broker_up_ms", "got 4"]),
        ({"cursor_opened_ms": [0, True]}, ["cursor_opened_ms[1]", "true"]),
        ({"client_ack_order": [10]}, ["client_ack_order[0]", "10"]),
        ({"batch_sizes": [1]}, ["batch_sizes", "10 numbers"]),
        ({"batch_sizes": [0] * 10}, ["batch_sizes[0]"]),
        ({"broker_acks_ms": [[0, 0, [10]]]}, ["broker_acks_ms[0][2][0]", "10"]),
        ({"broker_acks_ms": [[0, 0, [-1]]]}, ["broker_acks_ms[0][2][0]", "-1"]),
        ({"broker_acks_ms": [[0, "x", [1]]]}, ["broker_acks_ms[0][1]", '"x"']),
        ({"broker_acks_ms": [[0, 1]]}, ["broker_acks_ms[0]"]),
        ({"broker_acks_ms": [[0, 1, [[1, [2]]]]]}, ["broker_acks_ms[0][2][0][1][0]", "batch of 1", "2"]),
        ({"broker_acks_ms": [[0, 1, [[1, [2**63]]]]]}, ["broker_acks_ms[0][2][0][1][0]"]),
        ({"broker_acks_ms": [[0, 1, [[1, [0, 1]]]]]}, ["broker_acks_ms[0][2][0][1][1]"]),
        ({"config": {"managedLedgerMaxUnackedRangesToPersist": "many"}}, ["managedLedgerMaxUnackedRangesToPersist"]),
        ({"config": {"managedLedgerMaxUnackedRangesToPersistt": "1"}}, ["managedLedgerMaxUnackedRangesToPersistt"]),
        ({"config": {"a": []}}, ["config.a"]),
        ({"broker_acks_ms": [[0, 0, [1], "Cumulated"]]}, ["broker_acks_ms[0][3]", "Cumulated"]),
        ({"broker_acks_ms": [[0, 0, [1], 7]]}, ["broker_acks_ms[0][3]", "7"]),
        ({"broker_acks_ms": [[0, 0, [], "Cumulative"]]}, ["broker_acks_ms[0][2]", "last entry"]),
        ({"broker_acks_ms": [[0, 0, [2, 1], "Cumulative"]]}, ["broker_acks_ms[0][2]", "[2, 1]"]),
        (
            {"broker_acks_ms": [[0, 0, [1]], [0, 0, [1], "Individual"]]},
            ["broker_acks_ms", "of every command or of none"],
        ),
        ({"cursor_ledger_ms": [7]}, ["cursor_ledger_ms"]),
    ],
)
def test_a_line_that_is_no_run_is_named(change, named, tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    good = recorded((0, [1]))
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good | change)}\n")
    for options in ([], ["--json"]):
        assert_one_line(run(capsys, "pulsar", "replay", path, *options), path, "line 2", *named)


@pytest.mark.parametrize("name", ["topic", "end", "entries", "client_ack_order", "broker_acks_ms", "t_end_ms"])
def test_a_field_that_is_missing_is_named(name, tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({key: value for key, value in recorded((0, [1])).items() if key != name}))
    assert_one_line(run(capsys, "pulsar", "replay", path, "--json"), "line 1", name, "missing")


@pytest.mark.slow
def test_files_that_hold_no_runs(tmp_path, lines, capsys):
    whole = gzip.compress(lines[0].encode())
    contents = {
        "empty.jsonl": (b"", "has no run"),
        "blank.jsonl": (b"\n\n", "has no run"),
        "empty.jsonl.gz": (gzip.compress(b""), "has no run"),
        "plain.jsonl.gz": (b"{}", "not a gzip file"),
        "cut.jsonl.gz": (whole[:-20], "cut short"),
        "damaged.jsonl.gz": (whole[:100] + bytes(20) + whole[120:], "not a gzip file"),
        "binary.jsonl": (whole, "not text"),
        "words.jsonl": (b"hello\n", "not JSON"),
        "list.jsonl": (b"[]\n", "JSON object"),
        "deep.jsonl": (b"[" * 100_000, "not JSON"),
    }
    for name, (content, said) in contents.items():
        (tmp_path / name).write_bytes(content)
        assert_one_line(run(capsys, "pulsar", "replay", tmp_path / name), name, said)
    assert_one_line(run(capsys, "pulsar", "replay", tmp_path / "gone.jsonl"), "gone.jsonl", "No such file")
    assert_one_line(run(capsys, "pulsar", "replay", ""), "FILE")
    assert_one_line(run(capsys, "pulsar", "replay", tmp_path / "list.jsonl", "--policy", "pulsar-9"), "pulsar-9")


def test_a_measurement_that_is_none_concerns_the_table_alone(tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps(recorded((0, [1])) | {"redelivered_acked": [10]}))
    assert_one_line(run(capsys, "pulsar", "replay", path), "line 1", "redelivered_acked[0]", "10")
    assert run(capsys, "pulsar", "replay", path, "--json").status == 0


# On a cluster
