"""L0, event by event: each story ends well, and breaks its promise with the bug that it is for."""

from __future__ import annotations

from contextlib import contextmanager, suppress

import pytest

import ackstate.cursor.journal.native
import ackstate.cursor.persist.planner
import ackstate.topic.message_log
from ackstate.analysis.crash.promises import Promise, PromiseBrokenError
from ackstate.cursor import CursorConfig, Format, ManagedCursor, MessageLog
from ackstate.cursor.journal.journal import Journal
from ackstate.cursor.journal.pulsar import PulsarFormat
from ackstate.cursor.persist.persister import Persister
from ackstate.cursor.persist.planner import RecordPlanner
from ackstate.cursor.persist.round import Round
from ackstate.cursor.state.ack_state import CursorAckState
from ackstate.cursor.state.unpersisted_acks import UnpersistedAcks
from ackstate.cursor.store import StoreError
from ackstate.cursor.writes import PutValue
from ackstate.delay.position_set import PositionSet
from ackstate.dispatch.delayed import DelayedMessages
from ackstate.stores.memory import FaultKind, _MemoryLedgers
from ackstate.topic.log_ownership import LogOwnership, log_path
from crash.model.callbacks import CountedRequests
from crash.model.simulation import judged
from museum.exhibits import EXHIBITS
from planted_cursor import (
    new_owner_keeps_the_term,
    receipts_outlive_a_reset,
    receipts_outlive_a_reset_that_failed,
)
from schedule_stories import (
    ScheduleStory,
    acks_into_a_batch,
    acks_the_batch_that_closed_the_limit_of_the_broker,
    acks_until_the_gate_is_shut,
    acks_up_to_old_acks_while_no_write_succeeds,
    acks_while_a_persist_writes,
    appends_with_unknown_outcome_where_nothing_else_has_room,
    attaches_properties,
    compacts,
    crashes_while_it_recovers_from_a_persist_of_unknown_outcome,
    falls_behind,
    fills_the_first_hole_while_a_persist_writes,
    has_more_ranges_than_may_be_durable,
    is_fenced_after_a_crash,
    opens_copies_that_are_damaged,
    persists_after_the_ledger_became_old,
    persists_into_a_full_disk,
    persists_together_where_nothing_has_room,
    persists_together_with_a_fault,
    persists_without_ledgers,
    publishes_as_an_earlier_owner,
    restarts_above_a_limit,
    restarts_in_the_other_format,
    restarts_when_a_delayed_message_is_due,
    seeks_back,
    seeks_in_vain,
    ticks_after_the_interval,
    ticks_more_often_than_the_rate_limit_lets_through,
    trims,
)

PLAIN = {exhibit.name: exhibit for exhibit in EXHIBITS}


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
        persists_together_where_nothing_has_room,
        publishes_as_an_earlier_owner,
        appends_with_unknown_outcome_where_nothing_else_has_room,
        acks_up_to_old_acks_while_no_write_succeeds,
        acks_the_batch_that_closed_the_limit_of_the_broker,
        persists_after_the_ledger_became_old,
        compacts,
        trims,
        crashes_while_it_recovers_from_a_persist_of_unknown_outcome,
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
    receipts_outlive_a_reset(monkeypatch.setattr)
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
    story = ScheduleStory(config=CursorConfig(format=Format.PULSAR))
    story.sent(9)
    for number in range(9):
        story.ack(number)
        story("persist")


def forgets_the_last_delta(patch):
    fold = ackstate.cursor.journal.native.fold
    patch(ackstate.cursor.journal.native, "fold", lambda entries, **named: fold(entries[:-1] or entries, **named))
    story = ScheduleStory()
    story.sent(3)
    story.ack(1)
    story("persist")


def loses_the_last_delta_while_it_recovers(patch):
    take_over = Journal._take_over

    def cut_off(self, found):
        taken = yield from take_over(self, found)
        del self.store._disk.ledgers[found.record.cursor_ledger_id].entries[1:]
        return taken

    patch(Journal, "_take_over", cut_off)
    patch(Journal, "_appended_since", lambda _, found, __: found)
    story = ScheduleStory()
    story.sent(3)
    story.ack(1)
    story("persist")
    story("crash")


def recovers_one_ack_too_many(patch):
    restore = CursorAckState.restore

    def too_many(self, mark_delete, deleted, **others):
        restore(self, mark_delete, deleted, **others)
        self.ack(self.ledgers.next_valid(self.mark_delete))

    patch(CursorAckState, "restore", too_many)
    story = ScheduleStory()
    story.sent(3)
    story("crash")


def says_that_one_message_more_comes_back(patch):
    patch(ManagedCursor, "redelivery_if_crashed", property(lambda self: self.view.redelivery_if_crashed + 1))
    story = ScheduleStory()
    story.sent(3)
    story("crash")


def never_compacts(patch):
    patch(ackstate.cursor.persist.planner, "_COMPACTION_RATIO", 1_000)
    story = ScheduleStory(config=CursorConfig(compaction_bytes_min=0))
    story.sent(40)
    for number in range(40):
        story.ack(number)
        story("persist")


def sends_a_delayed_message_at_once(patch):
    patch(DelayedMessages, "must_wait", lambda *_, **__: False)
    patch(MessageLog, "feed", lambda *_: None)
    story = ScheduleStory(delay_share=1)
    story.sent(1)


def lets_an_earlier_owner_append(patch):
    patch(_MemoryLedgers, "fence", lambda self, ledger_id: self.last(ledger_id))
    is_fenced_after_a_crash()


def lets_an_earlier_owner_swing(patch):
    patch(Journal, "_is_ours", lambda *_: True)
    is_fenced_after_a_crash()


def does_not_raise_the_term(patch):
    new_owner_keeps_the_term(patch)
    is_fenced_after_a_crash()


def lets_an_earlier_owner_publish(patch):
    patch("ackstate.topic.log_ownership._fence", lambda _: iter(()))
    publishes_as_an_earlier_owner()


def lets_an_earlier_owner_begin_a_ledger(patch):
    def put(self, encoded):
        metadata, path = self._store.metadata, log_path(self._topic)
        return (yield PutValue(path, encoded, metadata.get(path).version))

    patch(LogOwnership, "_put", put)
    patch(LogOwnership, "check", lambda _: None)
    publishes_as_an_earlier_owner()


def counts_the_log_before_it_fences(patch):
    find = MessageLog.find
    seen = []

    def take_over(store, topic, take_over=LogOwnership.take_over):
        seen.append(find(store, topic=topic))
        return take_over(store, topic)

    patch(LogOwnership, "take_over", take_over)
    begin = MessageLog.__init__

    def begin_with(self, store, topic, counts, *others):
        begin(self, store, topic, seen.pop().ledgers.counts() if others[-1] and any(seen) else counts, *others)

    patch(MessageLog, "__init__", begin_with)
    publishes_as_an_earlier_owner()


def trims_what_is_not_durable(patch):
    patch(ManagedCursor, "persisted_mark_delete_position", ManagedCursor.mark_delete_position)
    trims()


def trims_nothing(patch):
    patch(MessageLog, "trim", lambda *_: 0)
    trims()


def reads_before_it_fences(patch):
    patch(Journal, "_appended_since", lambda _, found, __: found)
    is_fenced_after_a_crash()


def leaves_ledgers_over(patch):
    patch(Journal, "_delete", lambda *_: iter(()))
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
    patch(CountedRequests, "not_sent_between", lambda *_: PositionSet())
    falls_behind()


def never_ticks(patch):
    patch(Persister, "tick", lambda *_, **__: False)
    ticks_after_the_interval()


def never_falls_back(patch):
    def give_up(self, error):
        self.abandon()
        raise error

    patch(Round, "fall_back", give_up)
    persists_without_ledgers()


def halves_the_limit(patch):
    begin_persist = CursorAckState.begin_persist

    def halved(self, *, limits, **named):
        return begin_persist(self, limits=limits._replace(range_count_max=limits.range_count_max // 2), **named)

    patch(CursorAckState, "begin_persist", halved)
    story = ScheduleStory(config=CursorConfig(range_count_max=2))
    story.sent(5)
    story.ack(1, 3)
    story("persist")


def keeps_the_epoch_of_a_reset_that_failed(patch):
    patch(Journal, "abandon_epoch", lambda _: None)
    seeks_in_vain()


def counts_as_if_a_reset_that_failed_had_not_happened(patch):
    begin_reset = CursorAckState.begin_reset

    def uncounted(self, mark_delete):
        persisted = self.persisted_mark_delete
        begin_reset(self, mark_delete)
        self.persisted_mark_delete = persisted
        self.resets_begun.clear()

    patch(CursorAckState, "begin_reset", uncounted)
    seeks_in_vain()


def believes_receipts_after_a_reset_that_failed(patch):
    receipts_outlive_a_reset_that_failed(patch)
    seeks_in_vain()


def drops_the_cursor_properties(patch):
    patch(Journal, "cursor_properties", property(lambda _: {}, lambda *_: None), raising=False)
    attaches_properties()


def forgets_acks_into_a_batch(patch):
    ack_up_to_batch = CursorAckState.ack_up_to_batch

    def unnoted(self, position, words, **named):
        result = ack_up_to_batch(self, position, words, **named)
        self.unpersisted_batches._changed.discard(position)
        return result

    patch(CursorAckState, "ack_up_to_batch", unnoted)
    acks_into_a_batch()


def appends_again_after_an_unknown_outcome(patch):
    fall_back = Round.fall_back

    def again(self, error):
        if self.appends:
            self._persister.journal._open_ledger = self._persister.journal._pointed_at
        return fall_back(self, error)

    patch(Round, "fall_back", again)
    appends_with_unknown_outcome_where_nothing_else_has_room()


def forgets_what_a_failed_persist_took(patch):
    abandon_write = UnpersistedAcks.abandon_write

    def forget(self, mark_delete):
        self.in_flight.remove_at_most(mark_delete)
        abandon_write(self, mark_delete)

    patch(UnpersistedAcks, "abandon_write", forget)
    acks_up_to_old_acks_while_no_write_succeeds()


def forgets_that_a_persist_has_failed(patch):
    cover = UnpersistedAcks.cover

    def forget(self, mark_delete):
        self._has_failed = False
        cover(self, mark_delete)

    patch(UnpersistedAcks, "cover", forget)
    acks_up_to_old_acks_while_no_write_succeeds()


def never_restarts_the_roll_over(patch):
    wrote = RecordPlanner.wrote

    def unchanged(self, target, *, now_ms):
        begun_ms = self._ledger_begun_ms
        wrote(self, target, now_ms=now_ms)
        self._ledger_begun_ms = begun_ms

    patch(RecordPlanner, "wrote", unchanged)
    persists_after_the_ledger_became_old()


def never_resets_the_size_of_the_deltas(patch):
    begin_ledger = Journal.begin_ledger

    def unchanged(self, *args):
        delta_bytes = self.delta_bytes
        written = yield from begin_ledger(self, *args)
        self.delta_bytes = delta_bytes
        return written

    patch(Journal, "begin_ledger", unchanged)
    compacts()


def writes_what_is_durable_again(patch):
    plan_next = RecordPlanner.plan

    def whole(self, *args, **named):
        plan = plan_next(self, *args, **named)
        return plan._replace(content=plan.content._replace(deleted=self._state.whole()[0]))

    patch(RecordPlanner, "plan", whole)
    compacts()


def writes_the_metadata_store_for_nothing(patch):
    patch(RecordPlanner, "_backs_off", lambda *_, **__: True)
    compacts()


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
    lets_an_earlier_owner_publish: Promise.I14,
    lets_an_earlier_owner_begin_a_ledger: Promise.I14,
    counts_the_log_before_it_fences: Promise.I12,
    trims_what_is_not_durable: Promise.I12,
    trims_nothing: Promise.I11,
    reads_before_it_fences: Promise.I2,
    leaves_ledgers_over: Promise.I11,
    calls_a_group_that_failed_durable: Promise.I9,
    forgets_what_a_view_has_missed: Promise.I8,
    never_ticks: Promise.I15,
    never_falls_back: Promise.ERRORS,
    halves_the_limit: Promise.I15,
    keeps_the_epoch_of_a_reset_that_failed: Promise.I13,
    counts_as_if_a_reset_that_failed_had_not_happened: Promise.I4,
    believes_receipts_after_a_reset_that_failed: Promise.I2,
    drops_the_cursor_properties: Promise.I6,
    forgets_acks_into_a_batch: Promise.I2,
    appends_again_after_an_unknown_outcome: Promise.I10,
    forgets_what_a_failed_persist_took: Promise.I2,
    forgets_that_a_persist_has_failed: Promise.I2,
    never_restarts_the_roll_over: Promise.I16,
    never_resets_the_size_of_the_deltas: Promise.I16,
    writes_what_is_durable_again: Promise.I16,
    writes_the_metadata_store_for_nothing: Promise.I16,
}


@pytest.mark.parametrize("planted", PLANTED, ids=lambda each: each.__name__)
def test_a_planted_bug_breaks_its_promise(planted, monkeypatch):
    with pytest.raises(PromiseBrokenError) as caught, judged():
        planted(monkeypatch.setattr)
    assert caught.value.promise is PLANTED[planted]


@pytest.mark.parametrize(("ahead", "is_excused"), [(0, True), (50, False)])
def test_a_fault_excuses_an_error_only_where_it_happened(ahead, is_excused, monkeypatch):
    persist = ManagedCursor.persist

    def failing(self, **named):
        """A planted bug: a persist reports a failure that no store had, after one that a store may have had."""
        with suppress(StoreError):
            persist(self, **named)
        raise StoreError("planted")

    story = ScheduleStory()
    story.sent(2)
    story.ack(1)
    story.schedule.script_faults(story.side, FaultKind.FAIL_BEFORE, ahead=ahead, count=1)
    with monkeypatch.context() as patch:
        patch.setattr(ManagedCursor, "persist", failing)
        if is_excused:
            story("persist")
        else:
            with judged_as(Promise.ERRORS):
                story("persist")
    story.end()


@contextmanager
def judged_as(promise):
    with pytest.raises(PromiseBrokenError) as caught, judged():
        yield
    assert caught.value.promise is promise
