"""L0 and L1 delete subscriptions, and find nothing."""

import pytest

from ackstate import CursorConfig, Format, Position
from ackstate.stores.memory import FaultKind
from crash.crash_states.cursors import Workload
from crash.crash_states.examination import examine
from crash.steps import Step, StepKind
from schedule_stories import ScheduleStory

P = Position
ACK, PERSIST, DELETE = StepKind.ACK, StepKind.PERSIST, StepKind.DELETE
STEPS = (Step(ACK, 0, P(1, 3), 2), Step(PERSIST), Step(DELETE), Step(ACK, 0, P(1, 9)), Step(PERSIST))


@pytest.mark.slow
@pytest.mark.parametrize("format_", Format)
def test_every_crash_state_of_a_deletion_is_the_subscription_or_none(format_):
    found = examine(Workload(("billing",), CursorConfig(format=format_), STEPS))
    assert found.failure is None
    assert found.counts["deletions"] == 1
    assert found.counts["recoveries"] > 100


def test_a_deleted_subscription_is_created_anew():
    """One with acks on the disk, and one that is fenced before anything is acked."""
    story = ScheduleStory().tell("sent 3; ack 1; persist; delete 1; dispatch a 3; ack 1; crash; delete 0; go_on_before")
    assert story.side.model.acked == set()
    story.end()
    assert story.schedule.counts["deletions"] == 2


@pytest.mark.parametrize("kind", FaultKind)
@pytest.mark.parametrize("mutation", range(6))
def test_a_deletion_that_fails_at_any_write_has_happened_or_not(kind, mutation):
    story = ScheduleStory().tell("alone; sent 3; ack 1; persist")
    story.schedule.script_faults(story.side, kind, ahead=mutation, count=1)
    story("delete", 1)
    assert story.side.model.acked in ({0}, {1}, {0, 1})  # the owner may have acked once more
    story.end()
