"""Logs of ACK commands of real brokers: the effect of each command, in messages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ackstate.analysis.trace.check import BadRowsMax, Wrong, check_events
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.entry_set import EntrySet
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from trace_files import read_back, write

VECTORS = Path(__file__).parents[3] / "vectors"
PUBLISH, ACK, CRASH = EventKind.PUBLISH, EventKind.ACK, EventKind.CRASH
MARK_DELETE, BATCH = EventKind.MARK_DELETE, EventKind.BATCH
RUN = {
    "topic": "t", "subscription": "s", "entries": [[4, 0, 2], [6, 10, 11]], "batch_sizes": None, "t_end_ms": 90,
    "broker_acks_ms": [[8, 45, [0, 1, 3]], [9, 12, [4]]], "pulsar": "4.2.4",
}  # fmt: skip
BATCHES = RUN | {"batch_sizes": [3, 70, 2, 5, 1], "index_ack": True}
DIED = Event(90, CRASH)


def converted(tmp_path, *runs):
    tmp_path.mkdir(exist_ok=True)
    convert([write(tmp_path / "log.jsonl", list(runs))], tmp_path / "trace")
    return read_back(tmp_path / "trace")


def test_a_trace_of_a_log_holds_what_was_acked(tmp_path):
    """Commands are in the order in which they were handled."""
    assert converted(tmp_path, RUN) == {
        ("t", ""): [Event(0, PUBLISH, 4, 0, 2), Event(0, PUBLISH, 6, 10, 11)],
        ("t", "s"): [Event(12, ACK, 6, 11, 11), Event(45, ACK, 4, 0, 1), Event(45, ACK, 6, 10, 10), DIED],
    }
    assert check_events(tmp_path / "trace").kinds == {"publish": 2, "ack": 3, "crash": 1}


def test_batches_are_counted_in_messages(tmp_path):
    words = [2**64 - 1 - 2**5, 1]  # all but message 5 and those from 65 on
    acks = [[1, 2, [0]], [3, 4, [[1, words]]], [5, 6, [[3, [0]], 4]]]
    found = converted(tmp_path, BATCHES | {"broker_acks_ms": acks})
    assert found["t", ""] == [Event(0, PUBLISH, 4, 0, 74), Event(0, PUBLISH, 6, 0, 5)]
    assert found["t", "s"] == [
        Event(2, ACK, 4, 0, 2), Event(4, BATCH, 4, 3, 72), Event(4, ACK, 4, 8, 8), Event(4, ACK, 4, 68, 72),
        Event(6, ACK, 6, 0, 5), DIED,
    ]  # fmt: skip


@pytest.mark.parametrize("change", [
    {"index_ack": False}, {"config": {"acknowledgmentAtBatchIndexLevelEnabled": "false"}},
])  # fmt: skip
def test_a_part_of_a_batch_is_ignored_where_the_broker_ignores_it(tmp_path, change):
    found = converted(tmp_path, BATCHES | {"broker_acks_ms": [[1, 2, [[0, [4]]]], [3, 4, [[0, [0]]]]]} | change)
    assert found["t", "s"] == [Event(4, ACK, 4, 0, 2), DIED]


def test_a_cumulative_ack_acks_everything_up_to_its_last_entry(tmp_path):
    acks = [[1, 2, [[1, [2**64 - 1 - 1, 63]]], "Cumulative"], [3, 4, [2], "Cumulative"], [5, 6, [4], "Individual"]]
    found = converted(tmp_path, BATCHES | {"broker_acks_ms": acks})
    assert found["t", "s"] == [
        Event(2, BATCH, 4, 3, 72), Event(2, MARK_DELETE, 4, 0, 3), Event(4, MARK_DELETE, 4, 0, 74),
        Event(6, ACK, 6, 5, 5), DIED,
    ]  # fmt: skip


@pytest.mark.parametrize(("run", "events"), [
    # Commands of one millisecond are told apart.
    (RUN | {"broker_acks_ms": [[8, 12, [0]], [9, 12, [2]], [9, 13, [3]]]},
     [Event(12, ACK, 4, 0, 0), Event(12, EventKind.COMMAND), Event(12, ACK, 4, 2, 2), Event(13, ACK, 6, 10, 10), DIED]),
    # Times before the first command begin the trace.
    (RUN | {"broker_acks_ms": [[-8, -5, [0]]], "cursor_opened_ms": [-40, -30], "t_end_ms": 0},
     [Event(0, EventKind.RECOVER), Event(25, ACK, 4, 0, 0), Event(30, CRASH)]),
    (RUN | {"broker_acks_ms": [[-8, -5, [0]]], "cursor_opened_ms": [-40, -30], "t_end_ms": 0, "end": "term"},
     [Event(0, EventKind.RECOVER), Event(25, ACK, 4, 0, 0)]),
    # Negative words are those of Java, whose BitSet omits the last words if they are 0.
    (BATCHES | {"broker_acks_ms": [[1, 2, [[1, [-1, 2**6 - 2]]]]]},
     [Event(2, BATCH, 4, 3, 72), Event(2, ACK, 4, 67, 67), DIED]),
    (BATCHES | {"broker_acks_ms": [[1, 2, [[1, [-1]]]], [3, 4, [[2, []]]]]},
     [Event(2, BATCH, 4, 3, 72), Event(2, ACK, 4, 67, 72), Event(4, ACK, 4, 73, 74), DIED]),
])  # fmt: skip
def test_commands_are_read_as_the_broker_means_them(tmp_path, run, events):
    assert converted(tmp_path, run)["t", "s"] == events


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        *(({"broker_acks_ms": acks}, Wrong.WRONG_TYPE) for acks in (
            [[1, 2, [5]]], [[1, 2, [-1]]], [[1, "2", [1]]], 7, [[1, 2, [1], "Cumulated"]], [[1, 2, [], "Cumulative"]],
            [[1, 2, [5], "Cumulative"]],
        )),
        ({"batch_sizes": [1, 2]}, Wrong.WRONG_TYPE),
        ({"entries": None}, Wrong.WRONG_TYPE),
        ({"topic": None}, Wrong.MISSING),
        ({"entries": [[-4, 0, 9]]}, Wrong.NEGATIVE),
        ({"entries": [[4, 0, 10**15]]}, Wrong.WRONG_TYPE),
        ({"batch_sizes": [10**15, 1, 1, 1, 1]}, Wrong.WRONG_TYPE),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_read_is_named(tmp_path, change, wrong):
    with pytest.raises(TraceError, match=rf"{wrong.value}: \d+, .* line 2 "):
        converted(tmp_path, RUN | {"topic": "other"}, RUN | change)
    source = tmp_path / "log.jsonl"
    done = convert([source], tmp_path / "trace", bad_rows_max=BadRowsMax.parse("100%"))
    assert set(done.bad_rows.counts) == {wrong}
    assert ("other", "s") in read_back(tmp_path / "trace")


def test_two_runs_of_one_name_are_two_cursors(tmp_path):
    with pytest.raises(TraceError, match="a time before"):
        converted(tmp_path, RUN, RUN)
    later = json.loads(json.dumps(RUN).replace("45", "145").replace("12,", "112,"))
    with pytest.raises(TraceError, match="two cursors under one name"):
        converted(tmp_path, RUN, later)


@pytest.mark.slow
def test_the_runs_of_real_brokers_are_taken_whole(tmp_path):
    done = convert([VECTORS / "broker-redelivery.jsonl.gz"], tmp_path / "trace")
    assert done.bad_rows.count == 0
    found = read_back(tmp_path / "trace")
    for run in map(json.loads, gzip.decompress((VECTORS / "broker-redelivery.jsonl.gz").read_bytes()).splitlines()):
        mine = found[run["topic"], run["subscription"]]
        acked = EntrySet()
        for event in mine:
            if event.kind is ACK:
                acked.add_run(event.ledger_id, event.first_entry, event.last_entry + 1)
        published = sum(event.last_entry - event.first_entry + 1 for event in found[run["topic"], ""])
        assert published == run["n_messages"]
        ignores_parts = not run["index_ack"] or run["config"].get("acknowledgmentAtBatchIndexLevelEnabled") == "false"
        assert len(acked) == run["n_acked"] or ignores_parts
        assert (mine[-1].kind is CRASH) == (run["end"] == "kill")


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a":' * 100_000, '{"broker_acks_ms": ' + "9" * 9_999 + "}"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_no_parser_takes_is_a_bad_row(tmp_path, line, is_first):
    lines = [line, json.dumps(RUN)]
    source = tmp_path / "log.jsonl"
    source.write_text("\n".join(lines if is_first else lines[::-1]))
    with pytest.raises(TraceError, match=f"line {2 - is_first} "):
        convert([source], tmp_path / "trace")
