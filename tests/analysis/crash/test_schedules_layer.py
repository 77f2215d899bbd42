"""L0: random schedules find nothing in the product, and each planted bug in a story of a few lines."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from itertools import islice

import pytest

import cursor.native_format
import cursor.persister
from analysis.crash.layers import schedules
from analysis.crash.model.promise import Promise, PromiseBrokenError
from analysis.crash.model.schedule import Schedule, judged
from analysis.crash.model.settings import Settings, Tracker
from analysis.crash.model.side import _Asked
from analysis.crash.model.traffic import ack, append, dispatch
from cursor import CursorConfig, Format, ManagedCursor, Message, persist_all
from cursor.ack_state import AckState
from cursor.dispatch.dispatcher import Dispatcher
from cursor.journal import Journal
from cursor.message_log import NO_DELAY
from cursor.outcome import Route
from cursor.pulsar_format import PulsarFormat
from cursor.store import StoreError
from cursor.stores.memory import FaultKind, _MemoryLedgers
from delay.position_set import PositionSet
from limits import GateLimits
from museum.exhibits import EXHIBITS

PLAIN = {exhibit.name: exhibit for exhibit in EXHIBITS}


@pytest.mark.slow
def test_schedules_break_no_promise():
    first = int(os.environ.get("FIRST_SCHEDULE", "0"))
    outcomes = list(islice(schedules.schedules(first), int(os.environ.get("CRASH_SCHEDULES", "16"))))
    assert [broken for outcome in outcomes for broken in outcome.broken] == []
    assert sum(outcome.cycles for outcome in outcomes) > 8 * len(outcomes)
    assert sum(outcome.counts["steps"] for outcome in outcomes) > 70 * len(outcomes)
    assert sum(outcome.counts["faults"] for outcome in outcomes) > len(outcomes)
    unused = [name for name in schedules.FEATURES if not sum(outcome.counts[name] for outcome in outcomes)]
    assert unused == []


@pytest.mark.slow
def test_a_seed_says_what_happens():
    first, again = (Schedule(7) for _ in range(2))
    first.run()
    again.run()
    assert first.story() == again.story()
    other = Schedule(8)
    other.run()
    assert other.story() != first.story()


def test_an_event_that_is_left_out_changes_no_other_event():
    """Time passes by what the events draw, each from its own seed."""
    waits = {}
    for number in range(150):
        schedule = Schedule(3, Settings())
        schedule.run([number], ends=False)
        waits[number] = schedule.now_ms
    passing = [number for number, passed_ms in waits.items() if passed_ms]
    assert len(passing) > 3
    schedule = Schedule(3, Settings())
    schedule.run(passing, ends=False)
    assert schedule.now_ms == sum(waits.values())


class Story:
    """A schedule without chance: events told one by one."""

    def __init__(self, **settings):
        self.schedule = Schedule(0, Settings(**settings))
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
    story = Story()
    story.sent(5)
    story.ack(1)
    story.ack_while_a_persist_writes(3)
    story.end()


def persists_into_a_full_disk():
    story = Story()
    story.sent(3)
    story.ack(1)
    story.schedule.script_faults(story.side, FaultKind.FULL, count=1)
    story.side.store.break_ledgers()
    story("persist")
    story.end()


def ticks_more_often_than_the_rate_limit_lets_through():
    story = Story(config=CursorConfig(flush_interval_ms=60_000, mark_delete_rate_limit=1))
    story.sent(5)
    story.ack(1)
    story("tick")
    story.ack(3)
    story("tick")
    story("crash")
    story.end()


def has_more_ranges_than_may_be_durable():
    story = Story(config=CursorConfig(range_count_max=1))
    story.sent(5)
    story.ack(1, 3)
    story("persist")
    story.end()


def acks_until_the_gate_is_shut():
    story = Story()
    story("publish", 200)
    for _ in range(20):
        story("dispatch", "a", 10)
        story.ack(*[number for number in story.side.model.in_flight if number % 2])
    story.end()


def fills_the_first_hole_while_a_persist_writes():
    story = Story(config=CursorConfig(ledger_entry_count_max=1))
    story.sent(5)
    story.ack(1, 2)
    story.ack_while_a_persist_writes(0)
    story.end()


def restarts_above_a_limit():
    story = Story()
    story.sent(9)
    story.ack(1, 3, 5)
    story("persist")
    story.restart(limits=GateLimits(max_unacked_ranges=1))
    story.end()


def restarts_in_the_other_format():
    story = Story()
    story.sent(5)
    story.ack(1, 3)
    story("persist")
    story.restart(config=CursorConfig(format=Format.PULSAR))
    story.end()


def restarts_when_a_delayed_message_is_due():
    story = Story(delay_share=1, tracker=Tracker.BUCKETED, entries_per_ledger_max=8)
    schedule = story.schedule
    for _ in range(3):
        append(schedule, [Message(0, 10 + 10 * number, b"") for number in range(8)])
        story("dispatch", "a", 8)
    schedule.now_ms = 50
    story.restart()
    story.end()


def seeks_back():
    story = Story()
    story.sent(5)
    story.ack(1, 3)
    story("seek")
    story.end()


def opens_copies_that_are_damaged():
    story = Story()
    story.sent(3)
    story.ack(1)
    story("persist")
    for _ in range(8):
        story("open_damaged_copy")
    story.end()


def is_fenced_after_a_crash():
    """The owner before writes once more while the next one comes, and then goes on."""
    story = Story(race_count_max=2)
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


def persists_together_with_a_fault():
    story = Story(subscription_count=2)
    schedule = story.schedule
    schedule.meanwhile_share = 0
    append(schedule, [Message(0, NO_DELAY, b"")] * 200)
    for side in schedule.sides:
        dispatch(schedule, side, "a", 20)
    story("persist_together")
    assert schedule.counts["group_persists"] > 0
    for side in schedule.sides:
        ack(schedule, side, max(side.model.in_flight))
    schedule.script_faults(schedule.at_work, FaultKind.FAIL_BEFORE, count=1)
    outcomes = schedule.interleave(
        schedule.sides, lambda: persist_all([side.cursor for side in schedule.sides], now_ms=schedule.now_ms)
    )
    assert {outcome.route for outcome in outcomes} == {Route.METADATA}
    story.end()


def falls_behind():
    story = Story(subscription_count=2, delay_share=0.5, due_log_bytes_max=0)
    story("fall_behind")
    story("dispatch", "a", 5)
    story.end()
    assert story.schedule.counts["derived"] > 0


def ticks_after_the_interval():
    story = Story()
    story.sent(3)
    story.ack(1)
    story.schedule.now_ms += 1_000
    story("tick")
    story.end()


def persists_without_ledgers():
    story = Story()
    story.sent(3)
    story.ack(1)
    story.side.store.break_ledgers()
    story("persist")
    assert story.schedule.counts["metadata"] == 1
    story.end()


def seeks_in_vain():
    story = Story(fault_share=1e-9)
    story.sent(3)
    for number in range(3):
        story("seek_in_vain")
        story.ack(number)
        story("persist")
    assert story.schedule.counts["failed_resets"] == 3
    story.end()


def attaches_properties():
    story = Story()
    story("set_cursor_properties")
    story("crash")
    story.end()


def acks_into_a_batch():
    story = Story()
    append(story.schedule, [Message(0, NO_DELAY, b"", None, 3)] * 2)
    story("persist")
    for _ in range(3):
        story("ack_into_batch")
        story("persist")
    story.end()


STORIES = {
    "M5": (acks_while_a_persist_writes, Promise.I4),
    "M6": (persists_into_a_full_disk, Promise.I9),
    "M7": (ticks_more_often_than_the_rate_limit_lets_through, Promise.I2),
    "M8": (has_more_ranges_than_may_be_durable, Promise.I4),
    "M9": (acks_until_the_gate_is_shut, Promise.I4),
    "M10": (fills_the_first_hole_while_a_persist_writes, Promise.I9),
    "M12": (opens_copies_that_are_damaged, Promise.I10),
    "M13": (restarts_above_a_limit, Promise.I8),
    "M15": (restarts_in_the_other_format, Promise.I2),
    "M16": (restarts_when_a_delayed_message_is_due, Promise.I8),
}


@pytest.mark.parametrize(
    "story",
    [
        *(story for story, _ in STORIES.values()),
        *(seeks_back, is_fenced_after_a_crash, persists_together_with_a_fault, falls_behind),
        *(ticks_after_the_interval, persists_without_ledgers, seeks_in_vain, attaches_properties, acks_into_a_batch),
    ],
    ids=lambda each: each.__name__,
)
def test_each_story_ends_well(story):
    story()


@pytest.mark.parametrize("name", STORIES)
def test_a_bug_of_the_museum_breaks_a_promise_in_a_short_story(name):
    story, promise = STORIES[name]
    with PLAIN[name].plant(), pytest.raises(PromiseBrokenError) as caught, judged():
        story()
    assert caught.value.promise is promise


def test_a_receipt_from_before_a_reset_that_counts_is_found(monkeypatch):
    reset = ManagedCursor.reset

    def forgiving(self, position, *, now_ms):
        result = reset(self, position, now_ms=now_ms)
        self._persister.void_number = -1
        return result

    monkeypatch.setattr(ManagedCursor, "reset", forgiving)
    with pytest.raises(PromiseBrokenError, match="a receipt from before the reset counts") as caught:
        seeks_back()
    assert caught.value.promise is Promise.I13


def test_a_reset_in_the_same_epoch_is_found(monkeypatch):
    monkeypatch.setattr(Journal, "begin_epoch", lambda self: None)
    with pytest.raises(PromiseBrokenError, match="a reset did not raise the epoch"):
        seeks_back()


def goes_back_with_the_mark_delete(patch):
    encode, seen = PulsarFormat.encode_entry, []

    def first_again(self, content, **where):
        seen.append(content.mark_delete)
        return encode(self, content._replace(mark_delete=seen[0 if len(seen) > 2 else -1]), **where)

    patch(PulsarFormat, "encode_entry", first_again)
    story = Story(config=CursorConfig(format=Format.PULSAR))
    story.sent(9)
    for number in range(9):
        story.ack(number)
        story("persist")


def forgets_the_last_delta(patch):
    fold = cursor.native_format.fold
    patch(cursor.native_format, "fold", lambda entries, **named: fold(entries[:-1] or entries, **named))
    story = Story()
    story.sent(3)
    story.ack(1)
    story("persist")


def loses_the_last_delta_while_it_recovers(patch):
    take_over = Journal._take_over

    def cut_off(self, found):
        taken = take_over(self, found)
        del self.store._disk.ledgers[found.record.cursor_ledger_id].entries[1:]
        return taken

    patch(Journal, "_take_over", cut_off)
    patch(Journal, "_appended_since", lambda _, found, __: found)
    story = Story()
    story.sent(3)
    story.ack(1)
    story("persist")
    story("crash")


def recovers_one_ack_too_many(patch):
    restore = AckState.restore

    def too_many(self, mark_delete, deleted, **others):
        restore(self, mark_delete, deleted, **others)
        self.ack(self._ledgers.next_valid(self.mark_delete))

    patch(AckState, "restore", too_many)
    story = Story()
    story.sent(3)
    story("crash")


def says_that_one_message_more_comes_back(patch):
    patch(ManagedCursor, "redelivery_if_crashed", property(lambda self: self._state.redelivery_if_crashed + 1))
    story = Story()
    story.sent(3)
    story("crash")


def never_compacts(patch):
    patch(cursor.persister, "_COMPACTION_RATIO", 1_000)
    story = Story(config=CursorConfig(compaction_bytes_min=0))
    story.sent(40)
    for number in range(40):
        story.ack(number)
        story("persist")


def sends_a_delayed_message_at_once(patch):
    patch(Dispatcher, "_is_delayed", lambda *_, **__: False)
    story = Story(delay_share=1)
    story.sent(1)


def lets_an_earlier_owner_append(patch):
    patch(_MemoryLedgers, "fence", lambda self, ledger_id: self.last(ledger_id))
    is_fenced_after_a_crash()


def lets_an_earlier_owner_swing(patch):
    patch(Journal, "_is_ours", lambda *_: True)
    is_fenced_after_a_crash()


def does_not_raise_the_term(patch):
    take_over = Journal._take_over

    def same_term(self, found):
        return take_over(self, replace(found, record=replace(found.record, term=found.record.term - 1)))

    patch(Journal, "_take_over", same_term)
    is_fenced_after_a_crash()


def reads_before_it_fences(patch):
    patch(Journal, "_appended_since", lambda _, found, __: found)
    is_fenced_after_a_crash()


def leaves_ledgers_over(patch):
    patch(Journal, "_delete", lambda *_: None)
    is_fenced_after_a_crash()


def calls_a_group_that_failed_durable(patch):
    append_all = _MemoryLedgers.append_all

    def silent(self, entries):
        with suppress(StoreError):
            return append_all(self, entries)
        return [0 for _ in entries]

    patch(_MemoryLedgers, "append_all", silent)
    persists_together_with_a_fault()


def forgets_what_a_view_has_missed(patch):
    patch(_Asked, "not_sent_between", lambda *_: PositionSet())
    falls_behind()


def never_ticks(patch):
    patch(cursor.persister.Persister, "tick", lambda *_, **__: False)
    ticks_after_the_interval()


def never_falls_back(patch):
    def give_up(self, error, *_, **__):
        self.abandon()
        raise error

    patch(cursor.persister.Persister, "fall_back", give_up)
    persists_without_ledgers()


def halves_the_limit(patch):
    begin_persist = AckState.begin_persist

    def halved(self, *, limits, **named):
        return begin_persist(self, limits=limits._replace(range_count_max=limits.range_count_max // 2), **named)

    patch(AckState, "begin_persist", halved)
    story = Story(config=CursorConfig(range_count_max=2))
    story.sent(5)
    story.ack(1, 3)
    story("persist")


def keeps_the_epoch_of_a_reset_that_failed(patch):
    patch(Journal, "abandon_epoch", lambda _: None)
    seeks_in_vain()


def drops_the_cursor_properties(patch):
    patch(Journal, "cursor_properties", property(lambda _: {}, lambda *_: None), raising=False)
    attaches_properties()


def forgets_acks_into_a_batch(patch):
    ack_up_to_batch = AckState.ack_up_to_batch

    def unnoted(self, position, words, **named):
        result = ack_up_to_batch(self, position, words, **named)
        self._changed_batches.discard(position)
        return result

    patch(AckState, "ack_up_to_batch", unnoted)
    acks_into_a_batch()


PLANTED = {
    goes_back_with_the_mark_delete: Promise.I7,
    forgets_the_last_delta: Promise.I6,
    loses_the_last_delta_while_it_recovers: Promise.I5,
    recovers_one_ack_too_many: Promise.I1,
    says_that_one_message_more_comes_back: Promise.I3,
    never_compacts: Promise.I11,
    sends_a_delayed_message_at_once: Promise.I12,
    lets_an_earlier_owner_append: Promise.I14,
    lets_an_earlier_owner_swing: Promise.I14,
    does_not_raise_the_term: Promise.I14,
    reads_before_it_fences: Promise.I2,
    leaves_ledgers_over: Promise.I11,
    calls_a_group_that_failed_durable: Promise.I9,
    forgets_what_a_view_has_missed: Promise.I8,
    never_ticks: Promise.I15,
    never_falls_back: Promise.ERRORS,
    halves_the_limit: Promise.I15,
    keeps_the_epoch_of_a_reset_that_failed: Promise.I13,
    drops_the_cursor_properties: Promise.I6,
    forgets_acks_into_a_batch: Promise.I2,
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: each.__name__)
def test_a_planted_bug_breaks_its_promise(planted, monkeypatch):
    with pytest.raises(PromiseBrokenError) as caught, judged():
        planted(monkeypatch.setattr)
    assert caught.value.promise is PLANTED[planted]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["M5", "M8"])
def test_the_layer_finds_a_planted_bug_and_tells_it_shortly(name):
    with PLAIN[name].plant():
        outcome = next(each for each in islice(schedules.schedules(0), 40) if each.broken)
    (broken,) = outcome.broken
    assert len(broken.story) <= 14, broken
    assert (outcome.lost_durable > 0) == broken.promise.startswith("I2:")
