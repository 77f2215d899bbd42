"""The trace of a subject's lives predicts the redelivery of each kill."""

from __future__ import annotations

from itertools import islice

import pytest

from ackstate.analysis.crash.acked_set import Numbering
from ackstate.analysis.crash.conversation import Accepted, Durable
from ackstate.analysis.crash.layers.kills import Kills
from ackstate.analysis.crash.process_layer import RunSize
from ackstate.analysis.crash.subject import Operation, OperationKind
from ackstate.analysis.crash.subject_launch import subject_launch
from ackstate.analysis.crash.subject_trace import Lived, SubjectTrace
from ackstate.analysis.trace.entry_set import SubscriptionHistory
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.recorder import Frame, read_recording
from trace_files import crashes_of, subscriptions_of

LOG = {3: 10, 5: 0, 6: 10}
BEGUN, ENDED = EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED


def asked(number, entry_id, kind=OperationKind.ACK, ledger_id=3):
    return Operation(number, kind, ledger_id, entry_id)


def recorded(tmp_path, steps, *recovered, died_ms=99):
    """A life as (time, kind, first entry or number of the persist)."""
    acked = Numbering(LOG).runs([(3, entry_id, entry_id + 1) for entry_id in recovered])
    with SubjectTrace(tmp_path) as trace:
        trace.record("t", Lived(LOG, steps, died_ms, acked))
    (frame,) = read_recording(tmp_path)
    assert (frame.topic, frame.subscription) == ("persistent://crash/t", "subject")
    return [(event.ts_ms, event.kind.name, max(event.first_entry, event.number, 0)) for event in frame.events]


def four(*answers):
    """Acks of the entries 0 to 3, and their answers."""
    return [*((1, asked(number, number)) for number in range(4)), *answers]


def test_a_persist_covers_what_was_said_to_be_durable_and_ends_when_it_was_said(tmp_path):
    steps = four((2, Accepted(0)), (3, Accepted(1)), (4, Accepted(2)), (5, Durable((0, 1))))
    assert recorded(tmp_path, steps, 0, 1) == [
        (2, "ACK", 0), (3, "ACK", 1), (3, "PERSIST_BEGUN", 1), (4, "ACK", 2), (5, "PERSIST_ENDED", 1),
        (99, "CRASH", 0), (99, "RECOVER", 0), (99, "REDELIVER", 2),
    ]  # fmt: skip


def test_what_is_durable_was_accepted_even_if_that_was_not_said(tmp_path):
    steps = four((2, Durable((1, 0))), (3, Accepted(0)))
    assert recorded(tmp_path, steps, 0, 1)[:4] == [
        (2, "ACK", 0), (2, "ACK", 1), (2, "PERSIST_BEGUN", 1), (2, "PERSIST_ENDED", 1),
    ]  # fmt: skip


def test_more_was_recovered_than_said_so_a_persist_was_under_way(tmp_path):
    steps = four((2, Accepted(0)), (3, Accepted(1)), (4, Accepted(2)))
    assert recorded(tmp_path, steps, 0, 1) == [
        (2, "ACK", 0), (3, "ACK", 1), (3, "PERSIST_BEGUN", 1), (4, "ACK", 2),
        (99, "CRASH", 0), (99, "RECOVER", 0), (99, "REDELIVER", 2),
    ]  # fmt: skip


def test_the_persist_under_way_began_after_the_one_before_had_ended(tmp_path):
    steps = four(*((2, Accepted(number)) for number in range(4)), (3, Durable((0, 1))))
    assert recorded(tmp_path, steps, 0, 1, 2, 3) == [
        (2, "ACK", 0), (2, "ACK", 1), (2, "PERSIST_BEGUN", 1), (2, "ACK", 2), (2, "ACK", 3), (3, "PERSIST_ENDED", 1),
        (3, "PERSIST_BEGUN", 2), (99, "CRASH", 0), (99, "RECOVER", 0),
    ]  # fmt: skip


def test_the_persist_under_way_stands_for_one_that_ended_after_it_had_begun(tmp_path):
    """The fourth was accepted by then and not recovered, so no persist that began later can be the one under way."""
    steps = four(*((2, Accepted(number)) for number in range(4)), (3, Durable((0, 1))))
    assert recorded(tmp_path, steps, 0, 1, 2) == [
        (2, "ACK", 0), (2, "ACK", 1), (2, "ACK", 2), (2, "PERSIST_BEGUN", 1), (2, "ACK", 3),
        (99, "CRASH", 0), (99, "RECOVER", 0), (99, "REDELIVER", 3),
    ]  # fmt: skip


def test_what_was_recovered_unheard_was_accepted(tmp_path):
    steps = four((2, Accepted(0)))
    assert recorded(tmp_path, steps, 0, 1) == [
        (2, "ACK", 0), (99, "ACK", 1), (99, "PERSIST_BEGUN", 1), (99, "CRASH", 0), (99, "RECOVER", 0),
    ]  # fmt: skip


def test_a_gap_in_what_is_durable_is_not_covered(tmp_path):
    """A trace cannot say that the third is durable and the second is not, so it promises the first alone."""
    steps = four((2, Accepted(0)), (2, Accepted(1)), (2, Accepted(2)), (3, Durable((0, 2))))
    assert recorded(tmp_path, steps, 0, 2)[:5] == [
        (2, "ACK", 0), (2, "PERSIST_BEGUN", 1), (2, "ACK", 1), (2, "ACK", 2), (3, "PERSIST_ENDED", 1),
    ]  # fmt: skip


def test_persists_that_overlap_end_as_one(tmp_path):
    said = [(2, Accepted(number)) for number in range(4)]
    steps = four(*said, (3, Durable((0,))), (4, Durable((1, 2))))
    assert recorded(tmp_path, steps, 0, 1, 2)[:6] == [
        (2, "ACK", 0), (2, "ACK", 1), (2, "ACK", 2), (2, "PERSIST_BEGUN", 1), (2, "ACK", 3), (4, "PERSIST_ENDED", 1),
    ]  # fmt: skip


def test_a_mark_delete_is_one_event_for_each_ledger_that_has_entries(tmp_path):
    steps = [(1, asked(0, 4, OperationKind.MARK_DELETE, 6)), (1, asked(1, -1, OperationKind.PERSIST, -1))]
    steps += [(2, Accepted(0)), (2, Accepted(1))]
    with SubjectTrace(tmp_path) as trace:
        trace.record("t", Lived(LOG, steps, 9, Numbering(LOG).nothing))
    (frame,) = read_recording(tmp_path)
    assert [event[2:5] for event in frame.events if event.kind is EventKind.MARK_DELETE] == [(3, 0, 9), (6, 0, 4)]
    assert [event[2:5] for event in frame.events if event.kind is EventKind.REDELIVER] == [(3, 0, 9), (6, 0, 4)]


def test_time_never_falls(tmp_path):
    steps = four((7, Accepted(0)), (5, Accepted(1)))
    assert [ts_ms for ts_ms, *_ in recorded(tmp_path, steps, 0, 1, died_ms=3)] == [7] * 5


def killed(tmp_path, name, *, lives=6):
    """A recording of a few lives; how many kills were judged."""
    layer = Kills(subject_launch(name), recording=tmp_path / "recording", size=RunSize(lives, 60))(3)
    outcomes = list(islice(layer, 2))
    layer.close()
    assert not any(outcome.broken for outcome in outcomes)
    return tmp_path / "recording"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", "naive"])
def test_a_history_of_the_trace_predicts_what_came_back(tmp_path, name):
    """Its promises, or if a persist was under way, those of it; and no promised ack is redelivered."""
    crashes = 0
    histories = {}
    for frame in read_recording(killed(tmp_path, name)):
        history = histories.setdefault(frame.topic, SubscriptionHistory())
        crash = [event.kind for event in frame.events].index(EventKind.CRASH)
        history.follow(Frame(*frame[:2], frame.events[:crash]))
        last_persist = [event.kind for event in frame.events if event.kind in {BEGUN, ENDED}][-1:]
        under_way = last_persist == [BEGUN]
        again = {event[2:5] for event in frame.events if event.kind is EventKind.REDELIVER}
        covered = history._begun if under_way else history.promised
        predicted = {(ledger_id, first, end - 1) for ledger_id, first, end in (history.accepted - covered).runs()}
        assert predicted == again
        history.follow(Frame(*frame[:2], frame.events[crash:]))
        crashes += 1
    assert crashes >= 6


@pytest.mark.slow
def test_an_estimate_predicts_what_came_back(tmp_path):
    from ackstate.analysis.trace.parquet import write_trace

    frames = list(read_recording(killed(tmp_path, "ours", lives=4)))
    write_trace(frames, tmp_path / "trace")
    predicted = sorted(
        (row["topic"], ts_ms, if_written if is_persisting else not_written)
        for row in subscriptions_of(tmp_path / "trace")
        for ts_ms, (not_written, if_written, is_persisting) in crashes_of(row)
    )
    observed = []
    for frame in frames:
        again = sum(
            event.last_entry - event.first_entry + 1 for event in frame.events if event.kind is EventKind.REDELIVER
        )
        (crash,) = (event for event in frame.events if event.kind is EventKind.CRASH)
        observed.append((frame.topic, crash.ts_ms, again))
    assert len(observed) > 3
    assert predicted == sorted(observed)


def test_a_recording_is_gone_on_with(tmp_path):
    for _ in range(2):
        with SubjectTrace(tmp_path) as trace:
            trace.record("t", Lived(LOG, four((2, Accepted(0))), 9, Numbering(LOG).nothing))
    assert len(list(read_recording(tmp_path))) == 2
