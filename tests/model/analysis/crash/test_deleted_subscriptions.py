"""L0 and L1 delete subscriptions: clean on our deletion, and each planted bug of it is found."""

from __future__ import annotations

import pytest

from ackstate import Position
from ackstate.analysis.crash.promises import Promise, PromiseBrokenError
from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.cursor import CursorConfig, Format
from ackstate.cursor.journal import deletion
from ackstate.cursor.journal.format import CursorRecord
from ackstate.cursor.journal.journal import Journal, cursor_owner, cursor_path
from ackstate.stores.memory import FaultKind
from crash.crash_states import execution
from crash.crash_states.examination import examine
from crash.crash_states.workload import Workload
from crash.model import deletion as event
from crash.model.simulation import judged
from schedule_stories import ScheduleStory

P = Position
ACK, PERSIST, DELETE = StepKind.ACK, StepKind.PERSIST, StepKind.DELETE
STEPS = (
    Step(ACK, 0, P(1, 3), 2),
    Step(PERSIST),
    Step(DELETE),
    Step(ACK, 0, P(1, 9)),
    Step(PERSIST),
)


def examined(format_=Format.NATIVE):
    return examine(Workload(("billing",), CursorConfig(format=format_), STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("format_", Format)
def test_every_crash_state_of_a_deletion_is_the_subscription_or_none(format_):
    found = examined(format_)
    assert found.failure is None
    assert found.counts["deletions"] == 1
    assert found.counts["recoveries"] > 100


def record_before_ledgers(store, *, topic, subscription):
    path = cursor_path(topic, subscription)
    owned = store.ledgers.owned_by(cursor_owner(path))
    store.metadata.delete(path, expected_version=store.metadata.get(path).version)
    for ledger_id in owned:
        store.ledgers.delete(ledger_id)


def ledgers_before_record(store, *, topic, subscription):
    path = cursor_path(topic, subscription)
    for ledger_id in store.ledgers.owned_by(cursor_owner(path)):
        store.ledgers.delete(ledger_id)
    store.metadata.delete(path, expected_version=store.metadata.get(path).version)


def marked_and_left(monkeypatch):
    """The record of a deleted subscription stays a record of a cursor: an open finds it."""
    monkeypatch.setattr(CursorRecord, "is_deleted", False)


def ledgers_left(monkeypatch):
    monkeypatch.setattr(deletion, "cursor_owner", lambda path: "nobody")


def same_terms(monkeypatch):
    """A new cursor begins with the term of the deleted one, whose owner takes the record for its own."""
    monkeypatch.setattr(deletion, "raise_term_floor", lambda metadata, term: None)


def fenced_owner_leaves_a_ledger(monkeypatch):
    monkeypatch.setattr(Journal, "_check_not_deleted", lambda self: None)
    monkeypatch.setattr(Journal, "_delete_unnamed", lambda self, ledger_id: iter(()))


def instead(delete):
    """Delete in another way."""

    def plant(monkeypatch):
        monkeypatch.setattr(execution, "delete_subscription", delete)
        monkeypatch.setattr(event, "delete_subscription", delete)

    return plant


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", [instead(record_before_ledgers), instead(ledgers_before_record), marked_and_left, ledgers_left]
)
def test_l1_finds_a_planted_bug(plant, monkeypatch):
    plant(monkeypatch)
    failure = examined().failure
    assert failure is not None
    assert failure.broken.promise in {Promise.I2, Promise.I10, Promise.I17}


def told():
    """Delete a subscription with acks on the disk, and one that is fenced before anything is acked."""
    story = ScheduleStory()
    story.sent(3)
    story.ack(1)
    story("persist")
    story("delete", 1)
    story("dispatch", "a", 3)
    story.ack(1)
    story("crash")
    story("delete", 0)
    story("go_on_before")
    return story


def test_a_deleted_subscription_is_created_anew():
    story = told()
    assert story.side.model.acked == set()
    story.end()
    assert story.schedule.counts["deletions"] == 2


@pytest.mark.parametrize("kind", FaultKind)
@pytest.mark.parametrize("mutation", range(6))
def test_a_deletion_that_fails_at_any_write_has_happened_or_not(kind, mutation):
    story = ScheduleStory()
    story.schedule.meanwhile_share = 0
    story.sent(3)
    story.ack(1)
    story("persist")
    story.schedule.script_faults(story.side, kind, ahead=mutation, count=1)
    story("delete", 1)
    assert story.side.model.acked in ({0}, {1}, {0, 1})  # the owner may have acked once more
    story.end()


@pytest.mark.parametrize(
    "plant",
    [
        instead(record_before_ledgers), instead(ledgers_before_record), ledgers_left, same_terms,
        fenced_owner_leaves_a_ledger,
    ],
)  # fmt: skip
def test_l0_finds_a_planted_bug(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(PromiseBrokenError) as broken, judged():
        told()
    assert broken.value.promise in {Promise.I14, Promise.I17}
