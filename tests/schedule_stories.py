"""Schedules of the crash model without chance: short stories, told event by event, in which planted bugs show."""

from __future__ import annotations

from contextlib import suppress

from serial import SerialExecutor

from ackstate import CursorConfig, Format, Message
from ackstate.cursor import persist_all
from ackstate.cursor.results import PersistTarget
from ackstate.limits import GateLimits
from ackstate.stores.base import StoreError
from ackstate.stores.memory import Fault, FaultKind
from crash.model.client_events import ack, ack_at_once, append, dispatch
from crash.model.settings import Settings, Tracker
from crash.model.simulation import BrokerSimulation


class ScheduleStory:
    """A schedule without chance: events told one by one."""

    def __init__(self, **settings):
        self.schedule = BrokerSimulation(0, Settings(**settings))
        self.side = self.schedule.sides[0]

    def __call__(self, name, *args, **named):
        self.schedule.step(name, *args, **named)

    def sent(self, count):
        self("publish", count)
        self("dispatch", "a", count)

    def ack(self, *numbers):
        for number in numbers:
            self("ack", number)

    def ack_while_a_persist_writes(self, number):
        def ack_once(schedule, side):
            schedule.meanwhile_share = 0
            ack(schedule, side, number)

        self.schedule.meanwhile, self.schedule.meanwhile_share = ack_once, 1
        self("persist")

    def restart(self, *, config=None, limits=None):
        self.side.config = config or self.side.config
        self.side.limits = limits or self.side.limits
        self("crash")

    def end(self):
        self.schedule.check_all()
        self.schedule.drain()


def acks_while_a_persist_writes():
    story = ScheduleStory()
    story.sent(5)
    story.ack(1)
    story.ack_while_a_persist_writes(3)
    story.end()


def persists_into_a_full_disk():
    story = ScheduleStory()
    story.sent(3)
    story.ack(1)
    story.schedule.script_faults(story.side, FaultKind.FULL, count=1)
    story.side.store.break_ledgers()
    story("persist")
    story.end()


def ticks_more_often_than_the_rate_limit_lets_through():
    story = ScheduleStory(config=CursorConfig(flush_interval_ms=60_000, mark_delete_rate_limit=1))
    story.sent(5)
    story.ack(1)
    story("tick")
    story.ack(3)
    story("tick")
    story("crash")
    story.end()


def has_more_ranges_than_may_be_durable():
    story = ScheduleStory(config=CursorConfig(range_count_max=1))
    story.sent(5)
    story.ack(1, 3)
    story("persist")
    story.end()


def acks_until_the_gate_is_shut():
    story = ScheduleStory()
    story("publish", 200)
    for _ in range(20):
        story("dispatch", "a", 10)
        story.ack(*[number for number in story.side.model.in_flight if number % 2])
    story.end()


def fills_the_first_hole_while_a_persist_writes():
    story = ScheduleStory(config=CursorConfig(ledger_entry_count_max=1))
    story.sent(5)
    story.ack(1, 2)
    story.ack_while_a_persist_writes(0)
    story.end()


def restarts_above_a_limit():
    story = ScheduleStory()
    story.sent(9)
    story.ack(1, 3, 5)
    story("persist")
    story.restart(limits=GateLimits(max_unacked_ranges=1))
    story.end()


def restarts_in_the_other_format():
    story = ScheduleStory()
    story.sent(5)
    story.ack(1, 3)
    story("persist")
    story.restart(config=CursorConfig(format=Format.PULSAR))
    story.end()


def restarts_when_a_delayed_message_is_due():
    story = ScheduleStory(delay_share=1, tracker=Tracker.BUCKETED, entries_per_ledger_max=8)
    schedule = story.schedule
    for _ in range(3):
        append(schedule, [Message(b"", deliver_at_ms=10 + 10 * number) for number in range(8)])
        story("dispatch", "a", 8)
    schedule.now_ms = 50
    story.restart()
    story.end()


def seeks_back():
    story = ScheduleStory()
    story.sent(5)
    story.ack(1, 3)
    story("seek")
    story.end()


def opens_copies_that_are_damaged():
    story = ScheduleStory()
    story.sent(3)
    story.ack(1)
    story("persist")
    for _ in range(8):
        story("open_damaged_copy")
    story.end()


def is_fenced_after_a_crash():
    """The owner before writes once more while the next one comes, and then goes on."""
    story = ScheduleStory(race_count_max=2)
    story.sent(40)
    for number in range(0, 40, 4):
        story.ack(number)
        story("persist")
        story("crash")
        story("go_on_before")
        story("dispatch", "a", 40)
    assert story.schedule.counts["fenced"] > 10
    assert story.schedule.counts["raced"] > 0
    story.end()


def publishes_as_an_earlier_owner():
    """The broker before publishes while the next one opens the log, and again afterwards."""
    story = ScheduleStory(race_count_max=2, entries_per_ledger_max=6)
    for _ in range(12):
        story.sent(3)
        story("crash")
        story("go_on_before")
    assert story.schedule.counts["fenced_publishes"] == 12
    assert story.schedule.counts["published_in_a_race"] > 0
    story.end()


def persists_together_with_a_fault():
    story = ScheduleStory(subscription_count=2)
    schedule = story.schedule
    schedule.meanwhile_share = 0
    append(schedule, [Message(b"")] * 200)
    for side in schedule.sides:
        dispatch(schedule, side, "a", 20)
    story("persist_together")
    assert schedule.counts["group_persists"] > 0
    for side in schedule.sides:
        ack(schedule, side, max(side.model.in_flight))
    schedule.script_faults(schedule.at_work, FaultKind.FAIL_BEFORE, count=1)
    outcomes = schedule.interleave(
        schedule.sides,
        lambda: persist_all(
            [side.cursor for side in schedule.sides], now_ms=schedule.now_ms, executor=SerialExecutor()
        ),
    )
    assert [outcome.route for outcome in outcomes].count(PersistTarget.METADATA) == 1
    story.end()


def persists_together_where_nothing_has_room():
    story = ScheduleStory(subscription_count=2, config=CursorConfig(metadata_bytes_max=120))
    schedule = story.schedule
    schedule.meanwhile_share = 0
    append(schedule, [Message(b"")] * 30)
    for side in schedule.sides:
        dispatch(schedule, side, "a", 30)
    story.side.store.break_ledgers()
    story("persist_together")
    assert "no ledger can be written" in schedule.story()[-1]
    story.end()


def crashes_while_it_recovers_from_a_persist_of_unknown_outcome():
    story = ScheduleStory(fault_share=1e-9)
    story.sent(3)
    story.ack(1)
    story.schedule.script_faults(story.side, FaultKind.CRASH_AFTER, count=1)
    with suppress(StoreError):
        story.side.cursor.persist(now_ms=story.schedule.now_ms)
    assert not story.side.is_certain
    story.side.crash_and_recover([Fault(0, FaultKind.FULL)])
    assert story.side.model.acked == {1}
    story.end()


def falls_behind():
    story = ScheduleStory(subscription_count=2, delay_share=0.5, due_log_bytes_max=0)
    story("fall_behind")
    story("dispatch", "a", 5)
    story.end()
    assert story.schedule.counts["derived"] > 0


def acks_the_batch_that_closed_the_limit_of_the_broker():
    story = ScheduleStory(broker_max=12)
    append(story.schedule, [Message(b""), Message(b""), Message(b"", message_count=20), Message(b"")])
    story("dispatch", "a", 4)
    story("ack", 0)
    ack_at_once(story.schedule, story.side, [2])
    story("dispatch", "b", 4)
    story.end()


def ticks_after_the_interval():
    story = ScheduleStory()
    story.sent(3)
    story.ack(1)
    story.schedule.now_ms += 1_000
    story("tick")
    story.end()


def persists_without_ledgers():
    story = ScheduleStory()
    story.sent(3)
    story.ack(1)
    story.side.store.break_ledgers()
    story("persist")
    assert story.schedule.counts["metadata"] == 1
    story.end()


def seeks_in_vain():
    story = ScheduleStory(fault_share=1e-9)
    story.sent(3)
    for number in range(3):
        story("seek_in_vain")
        story.ack(number)
        story("persist")
    assert story.schedule.counts["failed_resets"] == 3
    story.end()


def attaches_properties():
    story = ScheduleStory()
    story("set_cursor_properties")
    story("crash")
    story.end()


def acks_into_a_batch():
    story = ScheduleStory()
    append(story.schedule, [Message(b"", message_count=3)] * 2)
    story("persist")
    for _ in range(3):
        story("ack_into_batch")
        story("persist")
    story.end()


def appends_with_unknown_outcome_where_nothing_else_has_room():
    story = ScheduleStory(config=CursorConfig(metadata_bytes_max=1, ledger_retry_ms=0))
    story.sent(5)
    story.ack(1)
    story.schedule.script_faults(story.side, FaultKind.FAIL_AFTER, count=1)
    story("persist")
    story.ack(3)
    story("persist")
    story.end()


def acks_up_to_old_acks_while_no_write_succeeds():
    """The held-back acks are old by now: the mark-delete moves over them while they are written, and after that."""
    story = ScheduleStory(config=CursorConfig(become_old_ack_record_seconds=1))
    story.schedule.meanwhile_share = 0
    for first, meanwhile in ((0, True), (3, False)):
        story.sent(3)
        story.ack(first + 1)
        story("persist")
        assert story.side.cursor.stats().redelivery_young == 1
        story.schedule.now_ms += 2_000
        story.schedule.script_faults(story.side, FaultKind.FAIL_BEFORE, count=6)
        if meanwhile:
            story.ack_while_a_persist_writes(first)
        else:
            story("persist")
            story.ack(first)
        story.ack(first + 2)
        story("persist")
    story.end()


def persists_after_the_ledger_became_old():
    story = ScheduleStory(config=CursorConfig(ledger_rollover_ms=1_000))
    story.schedule.meanwhile_share = 0
    story.sent(8)
    for number in (1, 3, 5, 7):
        story.schedule.now_ms += 800
        story.ack(number)
        story("persist")
    assert story.schedule.counts["delta"] == story.schedule.counts["snapshot"] == 2
    story.end()


def compacts():
    story = ScheduleStory(config=CursorConfig(compaction_bytes_min=0))
    story.schedule.meanwhile_share = 0
    story.sent(40)
    for number in range(1, 40, 2):
        story.ack(number)
        story("persist")
    assert 1 < story.schedule.counts["snapshot"] < story.schedule.counts["delta"]
    story.end()


def trims():
    """No message leaves the log before it is acked durably; then whole ledgers do, but the last."""
    story = ScheduleStory(entries_per_ledger_max=3)
    for _ in range(3):
        story.sent(3)
    story.ack(*range(9))
    story("trim")
    assert story.schedule.counts["trimmed_ledgers"] == 0
    story("persist")
    story("trim")
    assert story.schedule.counts["trimmed_ledgers"] == 2
    story("crash")
    story.end()
