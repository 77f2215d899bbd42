"""Random schedules over a whole broker in memory: each from one seed, and after every event all limits are recounted.

One or two subscriptions of a topic, real but for the disk, against `ack_model`. A persist is looked at while it
writes, too: then messages are acked, sent and given back as by another thread.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

from ack_model import NumberedLog
from ackstate import Keep, Position
from ackstate.wire.pulsar import RangeForm
from cursor import AutoAge, CursorConfig, Format, MessageLog, StoreError
from cursor.bucket_registry import MetadataBucketRegistry
from cursor.message_log import NO_DELAY, Message
from cursor.store import PayloadTooLargeError
from cursor.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore
from cursor.subscription import AckRefusedError, SubscriptionType
from delay import BucketedDelayIndex, DelayConfig, InMemoryDelayTracker, SnapshotStorage, TopicDelayIndex
from limits import BrokerLimit, GateLimits
from watched_subscription import CONSUMERS, TICK_MS, Waiter, WatchedSubscription

EVENTS = {
    "publish": 14, "dispatch": 34, "ack_some": 34, "ack_late": 3, "ack_cumulative": 1, "nack": 6, "close_consumer": 2,
    "persist": 7, "tick": 6, "wait": 8, "change_limits": 2, "change_broker_limit": 1, "break_ledgers": 1,
    "mend_ledgers": 3, "crash": 1, "reopen": 1, "seek": 1, "skip": 1, "clear_backlog": 0.3, "wait_for_gate": 2,
}  # fmt: skip

TRACKERS = ("view", "in memory", "bucketed", "view of buckets")
BUCKETS = DelayConfig(
    tick_time_ms=TICK_MS, is_deliver_at_time_strict=True,
    min_index_count_per_bucket=4, max_indexes_per_segment=3, max_bucket_count=3,
)  # fmt: skip


def disk_with_a_long_ledger():
    """Return a disk whose log has one ledger of 16,450 entries: 16,384 is the first id of three bytes."""
    store = MemoryStore()
    log = MessageLog.open(store, topic="t", entries_per_ledger_max=20_000)
    log.publish([Message(0, NO_DELAY, b"")] * 16_450)
    return store.disk


class Schedule:
    """One broker, from one seed; `run` lets it work, or a test calls the events itself."""

    def __init__(self, seed, *, long_disk=None, **settings):
        self.seed = seed
        self.random = random.Random(seed)
        self.now_ms = 0
        self.settings = settings
        self.draw_settings(long_disk is not None)
        vars(self).update(settings)
        self.log_disk = _copied(long_disk) if self.starts_high else MemoryDisk()
        if not self.starts_high:
            self.log_disk.next_ledger_id = self.first_ledger_id
        self.log = NumberedLog()
        self.open_broker()
        if self.starts_high:
            (ledger_id,) = self.message_log.ledgers
            self.log = NumberedLog(ledger_id, 16_384 - 40, 16_450)
        self.interleaves = None
        self.sides = [WatchedSubscription(self, name) for name in "xy"[: self.subscription_count]]
        for side in self.sides:
            side.forgive()
            if self.starts_high:
                side.cursor.mark_delete(Position(ledger_id, 16_384 - 41), now_ms=0)
                side.cursor.persist(now_ms=0)
                side.cursor.rewind()

    def draw_settings(self, may_start_high):
        draw = self.random.choice
        self.starts_high = may_start_high and draw((True, False, False, False))
        self.first_ledger_id = draw((1, 126, 126, 16_382))
        self.entries_per_ledger_max = draw((40, 150, 150, 400))
        self.kind = draw((SubscriptionType.SHARED,) * 4 + (SubscriptionType.KEY_SHARED,))
        self.subscription_count = draw((1, 1, 1, 2))
        self.consumer_count = draw((1, 2, 4))
        self.promotes_young = draw((True, True, False))
        self.hole_tries_max = draw((1, 3))
        self.has_dead_letters = draw((False,) * 7 + (True,))
        self.fault_share = draw((0, 0, 0.05, 0.2))
        self.batch_share = draw((0, 0, 0.3))
        self.delay_share = draw((0, 0, 0.2))
        self.tracker = "view"
        self.broker_max = draw((0, 0, 12, 30)) if self.subscription_count > 1 else 0
        self.limits = self.draw_limits()
        self.config = self.draw_config()

    def draw_limits(self):
        draw = self.random.choice
        return GateLimits(
            max_unpersisted_ack_record_bytes=draw((1_024, 1_024, 1_024, 1_100, 1_500, 0)),
            max_unacked_messages=draw((200_000, 200_000, 10, 30)),
            unpersisted_release_ratio=draw((0.8, 1.0, 1.0, 0.3)),
            unacked_release_ratio=draw((0.5, 1.0)),
            max_unacked_ranges=draw((0, 0, 0, 5, 20, 40)),
            max_unacked_messages_per_consumer=draw((50_000, 50_000, 4, 12)),
        )

    def draw_config(self):
        draw = self.random.choice
        return CursorConfig(
            format=draw((Format.NATIVE, Format.NATIVE, Format.PULSAR)),
            flush_interval_ms=draw((10, 1_000)),
            compaction_bytes_min=draw((0, 200, 65_536)),
            ledger_entry_count_max=draw((2, 50_000)),
            range_count_max=draw((None, None, 1, 3, 8, 20)),
            keep=draw((Keep.LOWEST, Keep.WIDEST)),
            batch_count_max=draw((10_000, 1)),
            metadata_range_count_max=draw((None, None, 2, 10)),
            range_form=draw((RangeForm.LIST, RangeForm.WORDS)),
            become_old_ack_record_seconds=draw(
                (0, 0, 0, 1, 2, 5, AutoAge(late_share_max=0.5, seconds_max=3))
            ),
            ledger_retry_ms=draw((0, 10, 1_000)),
        )  # fmt: skip

    def open_broker(self):
        store = MemoryStore(self.log_disk)
        self.message_log = MessageLog.open(store, topic="t", entries_per_ledger_max=self.entries_per_ledger_max)
        self.broker = BrokerLimit(self.broker_max) if self.broker_max else None
        self.delays = self.open_delays(store) if self.delay_share else None

    def open_delays(self, store):
        """Return what opens the tracker of each subscription: a view of one index, or one of its own; of `TRACKERS`."""
        if self.tracker == "view":
            return TopicDelayIndex(tick_time_ms=TICK_MS)
        if self.tracker == "in memory":
            return SimpleNamespace(
                open_view=lambda _: InMemoryDelayTracker(tick_time_ms=TICK_MS, is_deliver_at_time_strict=True)
            )
        storage = SnapshotStorage(store.ledgers, MetadataBucketRegistry(store.metadata, "/buckets"), "delayed")

        def recover():
            # It was ready a moment ago.
            return BucketedDelayIndex.recover(BUCKETS, storage=storage, now_ms=max(self.now_ms - 1, 0))[0]

        # Their storage is one subscription's, or all share the index.
        is_own = self.tracker == "bucketed" and self.subscription_count == 1
        return SimpleNamespace(open_view=lambda _: recover()) if is_own else recover()

    def run(self, event_count=70):
        names, weights = list(EVENTS), list(EVENTS.values())
        for number, name in enumerate(self.random.choices(names, weights, k=event_count)):
            self.step(name)
            if number % 16 == 0:
                self.check_all()
        self.drain()

    def step(self, name, *args, **named):
        """Let one event happen to one subscription, with a fault of its store or without, and check."""
        side, faults = self.random.choice(self.sides), False
        if self.random.random() < self.fault_share:
            faults = True
            kind = self.random.choice(list(FaultKind))
            side.store.inject(Fault(side.store.mutation_count + self.random.choice((0, 0, 1, 2)), kind))
        try:
            getattr(self, name)(side, *args, **named)
        except PayloadTooLargeError:
            assert self.config.metadata_range_count_max is not None
        except StoreError:
            assert faults or side.store._session.has_broken_ledgers, f"{name} failed by itself"
        if side.store._session._end is not None:
            self.crash()
        side.store._session.faults.clear()
        self.check()

    def check(self):
        for side in self.sides:
            side.check()
        if self.broker is not None:
            assert self.broker.unacked_messages == sum(side.model.unacked() for side in self.sides)

    def check_all(self):
        for side in self.sides:
            side.check_all()
            assert side.store._session._end is None

    def while_writing(self, writer):
        """Look from another thread, as it were, and let it do something."""
        if writer.is_writing and self.interleaves is None:
            return
        writer.check_writing()
        if self.interleaves is not writer:
            return
        was_writing, writer.is_writing = writer.is_writing, True
        writer.check()
        if self.random.random() < 0.5:
            self.work_meanwhile(writer)
            writer.check()
            writer.check_writing()
        writer.is_writing = was_writing

    def work_meanwhile(self, side):
        for _ in range(self.random.randrange(4)):
            choice = self.random.random()
            if choice < 0.6:
                self.ack_some(side, only_covered=True)
            elif choice < 0.75:
                self.nack(side)
            elif choice < 0.8:
                self.close_consumer(side)
            elif not self.has_dead_letters and not (self.promotes_young and self.config.become_old_ack_record_seconds):
                self.dispatch(side)

    def publish(self, side, count=None):
        draw = self.random
        count = count or draw.choice((1, 3, 10, 20, 40))
        messages = []
        for _ in range(count):
            deliver_at_ms = self.now_ms + draw.choice((1, 100, 3_000)) if draw.random() < self.delay_share else NO_DELAY
            message_count = draw.choice((2, 3, 7, 70)) if draw.random() < self.batch_share else 1
            key = draw.choice((None, b"k", b"l", b"m", b"n"))
            messages.append(Message(self.now_ms, deliver_at_ms, b"", key, message_count))
        self.log.append(self.message_log.publish(messages), messages)
        for each in self.sides:
            each.model.changed()

    def dispatch(self, side, consumer=None, count=None):
        consumer = consumer or self.random.choice(CONSUMERS[: self.consumer_count])
        count = self.random.choice((1, 5, 20, 40)) if count is None else count
        subscription, model, log = side.subscription, side.model, self.log
        before = side.closed_for(consumer)
        sent = []
        try:
            sent = subscription.dispatch(consumer, count, now_ms=self.now_ms)
        finally:
            model.ack(side.handed_over)
            was_handed_over, side.handed_over = side.handed_over, []
        for each in sent:
            model.sent(log.numbers[each.position], consumer, each.redelivery_count, now_ms=self.now_ms)
        if self.kind is SubscriptionType.KEY_SHARED:
            side.check_keys()
        elif len(sent) < count and not side.is_writing and not was_handed_over:
            side.check_shortage(consumer, before)
        return len(sent)

    def ack_some(self, side, *, only_covered=False, count=None):
        numbers = list(side.model.in_flight)
        self.random.shuffle(numbers)
        order = self.random.random()
        if order < 0.5:
            numbers.sort(key=lambda number: (number % 2, number))
        elif order < 0.7:
            numbers.sort(reverse=order < 0.6)
        for number in numbers[: count or self.random.choice((1, 3, 10, 40))]:
            if only_covered and not side.is_covered(number):
                continue
            if side.model.weight(number) > 1 and self.random.random() < 0.6:
                self.ack_part(side, number)
            else:
                self.ack(side, number)

    def ack(self, side, number):
        position, was_covered = self.log.positions[number], side.is_covered(number)
        try:
            side.subscription.ack(position, now_ms=self.now_ms)
        except AckRefusedError:
            side.check_refusal(number, was_covered)
        else:
            side.model.ack([number])

    def ack_part(self, side, number):
        left = side.model.unacked_of_batch.get(number) or set(range(self.log.message_count(number)))
        left = left - set(self.random.sample(sorted(left), self.random.randint(1, len(left))))
        words = [sum(1 << index % 64 for index in left if index // 64 == word) for word in range(2)]
        signed = [word - 2**64 if word >> 63 else word for word in words]
        position, was_covered = self.log.positions[number], side.is_covered(number)
        try:
            side.subscription.ack_batch(position, signed, now_ms=self.now_ms)
        except AckRefusedError:
            side.check_refusal(number, was_covered)
        else:
            side.model.ack_part(number, left)

    def ack_late(self, side):
        """Ack what is not on its way: given back, or sent before a crash."""
        model = side.model
        numbers = [n for n in range(model.first_unacked(), len(self.log)) if n not in model.in_flight]
        for number in self.random.sample(numbers, min(len(numbers), self.random.choice((1, 5, 30)))):
            if number not in model.acked and model.weight(number) > 1 and self.random.random() < 0.3:
                self.ack_part(side, number)
            else:
                self.ack(side, number)

    def ack_cumulative(self, side):
        first = side.model.first_unacked()
        if first < len(self.log):
            self.ack_up_to(side, self.random.randrange(first, min(first + 30, len(self.log))))

    def ack_up_to(self, side, last):
        side.subscription.ack_cumulative(self.log.positions[last], now_ms=self.now_ms)
        side.model.ack(range(side.model.first_unacked(), last + 1))

    def nack(self, side):
        numbers = list(side.model.in_flight)
        delay_ms = self.random.choice((0, 0, 100, 2_000))
        for number in self.random.sample(numbers, min(len(numbers), self.random.choice((1, 5, 20)))):
            assert side.subscription.nack(self.log.positions[number], delay_ms=delay_ms, now_ms=self.now_ms)
            side.model.give_back(number, until_ms=self.now_ms + delay_ms if delay_ms else 0)

    def close_consumer(self, side):
        consumer = self.random.choice(CONSUMERS[: self.consumer_count])
        held = [number for number, holder in side.model.in_flight.items() if holder == consumer]
        unacked = side.model.unacked(consumer)
        assert side.subscription.consumer_closed(consumer) == unacked
        for number in held:
            side.model.give_back(number)

    def persist(self, side):
        self.interleaves = side
        try:
            side.cursor.persist(now_ms=self.now_ms)
        finally:
            self.interleaves = None

    def tick(self, side):
        self.interleaves = side
        try:
            side.cursor.tick(now_ms=self.now_ms)
        finally:
            self.interleaves = None

    def wait(self, side):
        self.now_ms += self.random.choice((10, 100, 1_000, 3_000))

    def change_limits(self, side):
        limits = self.draw_limits()
        ratio = side.limits.unpersisted_release_ratio
        side.limits = replace(limits, unpersisted_release_ratio=ratio, accounting=side.limits.accounting)
        side.subscription.change_limits(side.limits)
        side.forgive()

    def change_broker_limit(self, side):
        if self.broker is not None:
            self.broker_max = self.random.choice((6, 12, 30))
            self.broker.change_limit(self.broker_max)

    def break_ledgers(self, side):
        if self.fault_share:
            side.store.break_ledgers()

    def mend_ledgers(self, side):
        side.store.mend_ledgers()

    def crash(self, side=None):
        """The whole broker dies and is started again."""
        self.open_broker()
        for each in self.sides:
            each.open()
            each.recover()

    def reopen(self, side):
        """Close one subscription in order; everything is durable then, unless a limit on the durable state cuts."""
        try:
            side.subscription.close(now_ms=self.now_ms)
        except StoreError:
            side.forget_displaced()
            raise
        if self.config.format is Format.PULSAR:
            side.read_disk()
        side.open()
        everything = set(side.model.acked)
        side.recover()
        if self.config.range_count_max is None and self.config.metadata_range_count_max is None:
            assert side.model.acked == everything, "closing lost acks"

    def seek(self, side):
        if not len(self.log):
            return
        number = self.random.randrange(len(self.log))
        side.is_writing = True
        try:
            side.subscription.seek(self.log.positions[number], now_ms=self.now_ms)
        except StoreError:
            side.resets.append(set(range(number)))
            raise
        finally:
            side.is_writing = False
            side.attempted.clear()
        side.model.begin_anew(number)
        side.resets = []
        side.forgive()

    def skip(self, side):
        model = side.model
        count = self.random.choice((0, 1, 5, 20))
        side.subscription.skip(count, now_ms=self.now_ms)
        unacked = [number for number in range(model.first_unacked(), len(self.log)) if number not in model.acked]
        if unacked[:count]:
            model.ack(range(unacked[:count][-1] + 1))

    def clear_backlog(self, side):
        side.subscription.clear_backlog(now_ms=self.now_ms)
        side.model.ack(range(len(self.log)))

    def wait_for_gate(self, side):
        waiter = Waiter(self.random.choice(CONSUMERS))
        side.waiters.append(waiter)
        side.subscription.when_open(waiter, waiter.consumer)

    def drain(self):
        """Let the store work again and consumers ack all they get: nothing may stay."""
        self.fault_share = 0
        for side in self.sides:
            side.store.mend_ledgers()
        idle = 0
        while any(side.cursor.backlog for side in self.sides):
            before = [(len(side.model.acked), len(side.model.durable)) for side in self.sides]
            for side in self.sides:
                self.drain_once(side)
            is_idle = before == [(len(side.model.acked), len(side.model.durable)) for side in self.sides]
            idle = idle + 1 if is_idle else 0
            assert idle < 4, f"stuck with {[side.cursor.backlog for side in self.sides]}"
            self.now_ms += 5_000
        self.check_all()

    def drain_once(self, side):
        for consumer in CONSUMERS[: self.consumer_count]:
            self.dispatch(side, consumer, 25)
            side.check()
            for number in list(side.model.in_flight):
                self.ack(side, number)
        with suppress(PayloadTooLargeError):  # until the ledger is tried again
            side.cursor.tick(now_ms=self.now_ms)
        side.check()


def _copied(disk):
    copy = MemoryDisk()
    for ledger_id, ledger in disk.ledgers.items():
        copy.ledgers[ledger_id] = replace(ledger, entries=list(ledger.entries))
    copy.next_ledger_id = disk.next_ledger_id
    return copy


def run(seed, *, event_count=70, **settings):
    """Run one schedule; what fails names the seed, with which it fails again."""
    try:
        schedule = Schedule(seed, **settings)
        schedule.run(event_count)
    except BaseException as error:
        error.add_note(f"seed {seed}: schedules.run({seed}, long_disk=disk_with_a_long_ledger())")
        raise
    return schedule
