"""Logs of ACK commands of real brokers: the effect of each command, in messages."""

import json

import pytest

from ackstate.analysis.trace.check import BadRowsMax, Wrong, check_events
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from trace_files import read_back, write

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


@pytest.mark.parametrize("line", ["[" * 100_000, '{"a":' * 100_000, '{"broker_acks_ms": ' + "9" * 9_999 + "}"])
@pytest.mark.parametrize("is_first", [True, False])
def test_what_no_parser_takes_is_a_bad_row(tmp_path, line, is_first):
    lines = [line, json.dumps(RUN)]
    source = tmp_path / "log.jsonl"
    source.write_text("\n".join(lines if is_first else lines[::-1]))
    with pytest.raises(TraceError, match=f"line {2 - is_first} "):
        convert([source], tmp_path / "trace")
