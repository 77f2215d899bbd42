"""Recordings of the broker interceptor become predictions that name messages."""

from __future__ import annotations

import json

import pytest

from ackstate.analysis.cli import main
from ackstate.analysis.pulsar import broker_runs
from ackstate.analysis.pulsar.broker_replay import predict_broker_runs
from ackstate.analysis.trace.broker_recording import recording_files
from ackstate.analysis.trace.events import TraceError
from broker_lines import CONSUMER, T0, ack, look, mark, opened, sent, start, written

WRITTEN_ONCE = (start(), CONSUMER, opened(0), sent(1, [3, 0, 9]), ack(10, [3, 1, 2]), look(90, 7, 1, 1, "3:-1"))


def predicted(tmp_path, *lines):
    """Return the prediction of the only run of a recording."""
    (found,) = predict_broker_runs(recording_files(written(tmp_path / "r", *lines)))
    return found.to_json()


def test_acks_after_the_last_record_come_again(tmp_path):
    found = predicted(tmp_path, *WRITTEN_ONCE, ack(200, [3, 5, 6], before=(7, 1)), mark("alive", 2_000))
    assert (found["low"], found["high"], found["candidates"]) == (2, 2, [["3:5", "3:6"]])


def test_a_record_begun_by_an_ack_covers_it(tmp_path):
    found = predicted(
        tmp_path, *WRITTEN_ONCE, ack(200, [3, 5, 5], before=(7, 1), after=(7, 2)), ack(300, [3, 7, 7], before=(7, 2)),
        mark("alive", 2_000),
    )  # fmt: skip
    assert found["candidates"] == [["3:7"]]


def test_a_record_begun_between_acks_covers_those_before(tmp_path):
    """The flush timer began it."""
    found = predicted(
        tmp_path, *WRITTEN_ONCE, ack(200, [3, 5, 5], before=(7, 1)), ack(300, [3, 7, 7], before=(7, 2)),
        mark("alive", 2_000),
    )  # fmt: skip
    assert found["candidates"] == [["3:7"]]


def test_a_record_begun_just_before_the_end_may_be_lost(tmp_path):
    found = predicted(tmp_path, *WRITTEN_ONCE, ack(200, [3, 5, 5], before=(7, 1), after=(7, 2)), mark("alive", 210))
    assert found["candidates"] == [[], ["3:5"]]


def test_the_position_that_was_seen_counts(tmp_path):
    """The first record waits for its ledger, and lacks the position of the acks that were refused meanwhile."""
    found = predicted(
        tmp_path, start(), CONSUMER, opened(0), sent(1, [3, 0, 9]), ack(10, [3, 2, 2], kind="Cumulative"),
        ack(20, [3, 6, 6], kind="Cumulative"), look(120, 7, 1, 1, "3:2"), mark("alive", 2_000),
    )  # fmt: skip
    assert found["candidates"] == [["3:3", "3:4", "3:5", "3:6"]]


def test_the_flush_timer_may_tick_after_the_last_look(tmp_path):
    config = {"managedLedgerCursorPositionFlushSeconds": "1"}
    lines = (start(**config), *WRITTEN_ONCE[1:], ack(200, [3, 5, 5], before=(7, 1)))
    assert predicted(tmp_path, *lines, mark("alive", 950))["candidates"] == [["3:5"], []]
    assert predicted(tmp_path, *lines, mark("alive", 500))["candidates"] == [["3:5"]]


def test_messages_of_batches_are_named(tmp_path):
    found = predicted(
        tmp_path, start(), CONSUMER, opened(0), sent(1, [3, 0, 2], messages=3), ack(10, [3, 0, 0]),
        look(90, 7, 1, 1, "3:0"), ack(200, [3, 1, 1, [0b101]], before=(7, 1)), ack(210, [3, 2, 2], before=(7, 1)),
        mark("alive", 2_000),
    )  # fmt: skip
    assert found["candidates"] == [["3:1:1", "3:2:0", "3:2:1", "3:2:2"]]


def test_a_cursor_with_a_history_begins_with_it(tmp_path):
    """A partly acked batch is known from its delivery."""
    found = predicted(
        tmp_path, start(), CONSUMER, opened(0, "3:1", "[(3:3..3:4]]"), sent(1, [3, 2, 2, [0b10]], messages=2),
        sent(2, [3, 5, 9]), ack(10, [3, 9, 9]), look(90, 7, 1, 1, "3:1"), ack(200, [3, 2, 2], before=(7, 1)),
        ack(210, [3, 5, 5], before=(7, 1)), mark("alive", 2_000),
    )  # fmt: skip
    assert found["candidates"] == [["3:2:1", "3:5"]]


def test_the_limit_on_ranges_displaces_older_acks(tmp_path):
    """The record lacks ranges that were durable when the cursor was opened, of entries that are not delivered now."""
    config = {
        "managedLedgerMaxUnackedRangesToPersist": "1", "managedLedgerPersistIndividualAckAsLongArray": "false",
    }  # fmt: skip
    found = predicted(
        tmp_path, start(**config), CONSUMER, opened(0, "3:0", "[(3:3..3:4],(3:6..3:8]]"), sent(1, [3, 1, 2]),
        ack(10, [3, 2, 2]), look(90, 7, 1, 1, "3:0"), mark("alive", 2_000),
    )  # fmt: skip
    assert found["candidates"] == [["3:7", "3:8"]]


def test_without_records_the_model_of_a_broker_decides(tmp_path):
    """Nothing is written of acks of only some messages of batches."""
    found = predicted(
        tmp_path, start(), CONSUMER, opened(0), sent(1, [3, 0, 9], messages=2), ack(10, [3, 1, 1, [0b10]]),
        mark("alive", 2_000),
    )  # fmt: skip
    assert found["candidates"] == [["3:1:0"]]


def test_an_end_in_order_is_a_closed_cursor(tmp_path):
    found = predicted(tmp_path, *WRITTEN_ONCE, ack(200, [3, 5, 6], before=(7, 1)), mark("end", 2_000))
    assert (found["end"], found["candidates"]) == ("term", [[]])


def test_a_run_says_what_it_lacks(tmp_path):
    seek = {"kind": "seek", "subject": 0, "ts_ms": T0 + 300, "to": [3, 0]}
    found = predicted(tmp_path, *WRITTEN_ONCE, seek, mark("dropped", 400, events=3))
    assert (found["is_reset"], found["dropped_events"]) == (True, 3)


def test_too_many_entries_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(broker_runs, "ENTRY_COUNT_MAX", 1_000)
    lines = (start(), CONSUMER, opened(0), sent(1, *([number, 0, 600] for number in range(2))))
    with pytest.raises(TraceError, match="line 4: more than 1000 entries"):
        predicted(tmp_path, *lines)


def test_the_command_reads_a_directory(tmp_path, capsys):
    directory = written(tmp_path / "r", *WRITTEN_ONCE, ack(200, [3, 5, 6], before=(7, 1)), mark("alive", 2_000))
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["pulsar", "replay", str(directory), "--json"])
    assert json.loads(capsys.readouterr().out)["candidates"] == [["3:5", "3:6"]]
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["pulsar", "replay", str(directory)])
    assert "public/default/t" in "".join(capsys.readouterr().out.split())
