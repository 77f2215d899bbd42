"""A whole broker in memory with random events: one or two subscriptions of a topic, real except for the disk.

Each event has its own seed, so any event can be removed without changing the others. After every event the cheap
counters are recounted, and every sixteen events all of them. A persist is also checked while it writes: then messages
are acked, sent and given back as by another thread.
"""

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random
from typing import TypeVar

from ackstate.analysis.crash.oracle import Promise
from ackstate.delay import (
    BucketedDelayIndex,
    BucketRegistry,
    DelayConfig,
    InMemoryDelayTracker,
    SnapshotStorage,
    TopicDelayIndex,
)
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.limits import BrokerLimit
from ackstate.message import Message
from ackstate.position import Position
from ackstate.stores.base import PayloadTooLargeError, StoreError
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore
from ackstate.topic.log import MessageLog
from crash.model import checks
from crash.model.broker_events import EVENTS
from crash.model.client_events import drain, work_meanwhile
from crash.model.earlier import EarlierLog, open_log
from crash.model.numbered_log import NumberedLog
from crash.model.settings import TICK_MS, Tracker, drawn
from crash.model.simulated_subscription import SimulatedSubscription
from crash.model.watched_store import WatchedStore
from crash.promises import PromiseBrokenError, hold

EVENT_COUNT_MIN, EVENT_COUNT_MAX = 70, 150
_RECOUNT_EVERY = 16
_Result = TypeVar("_Result")
_HIGH_FIRST = 16_384 - 40
_HIGH_END = 16_450
_BUCKETS = DelayConfig(
    tick_time_ms=TICK_MS, is_deliver_at_time_strict=True,
    min_index_count_per_bucket=4, max_indexes_per_segment=3, max_bucket_count=3,
)  # fmt: skip


class BrokerSimulation:
    """One broker, from one seed; `run` executes its events, or the caller executes events by name.

    `crash_count` also counts recoveries that a fault ended. `meanwhile` is the work of other threads while a persist
    writes, done at each write with the probability `meanwhile_share`.
    """

    def __init__(self, seed, settings=None):
        self.seed = seed
        self.random = self.random_of("settings")
        self.settings = drawn(self.random) if settings is None else settings
        self.now_ms = 0
        self.event_number = None
        self.crash_count = self.fault_count = self.step_count = 0
        self.counts = Counter()
        self.meanwhile = work_meanwhile
        self.meanwhile_share = 0.5
        self.broker_max = self.settings.broker_max
        self.log = NumberedLog()
        self._fault_share = self.settings.fault_share
        self._lines = []
        self._interleaved = ()
        self._stores_at_begin = ()
        self._fired_before = 0
        self.cursor_disk = MemoryDisk()
        self.cursor_store = WatchedStore(self.cursor_disk)
        self._log_disk = _copied(_disk_with_a_long_ledger()) if self.settings.starts_high else MemoryDisk()
        if not self.settings.starts_high:
            self._log_disk.next_ledger_id = self.settings.first_ledger_id
        self.open_broker()
        if self.settings.starts_high:
            (ledger_id,) = self.message_log.ledgers
            positions = [Position(ledger_id, entry_id) for entry_id in range(_HIGH_FIRST, _HIGH_END)]
            self.log.append(positions, [None] * len(positions))
        self.sides = []
        self.sides = [SimulatedSubscription(self, name) for name in "xy"[: self.settings.subscription_count]]
        self.at_work = self.sides[0]
        for side in self.sides:
            side.forgive()
            if self.settings.starts_high:
                side.cursor.mark_delete(Position(ledger_id, _HIGH_FIRST - 1), now_ms=0)
                side.cursor.persist(now_ms=0)
                side.cursor.reader.rewind()

    def open_broker(self):
        self.earlier_log = EarlierLog(self, race_count_max=self.settings.race_count_max) if self.step_count else None
        self.log_store = MemoryStore(self._log_disk)
        self.cursor_store.is_left = True
        self.cursor_store = WatchedStore(self.cursor_disk)
        self.message_log = open_log(self, self.log_store, rival=self.earlier_log)
        self.broker = BrokerLimit(self.broker_max) if self.broker_max else None
        self._index = self._open_index() if self.settings.delay_share else None

    def go_on_before(self):
        """Make the owner of the log before a crash publish."""
        if self.earlier_log is not None:
            self.earlier_log.go_on(self._log_disk)

    def lose_entries(self, ledger_id, left, *, is_gone):
        """Remove the entries of a ledger of the log but the first ones, or the ledger, from the disk and the models."""
        lost = {position for position in self.log.positions if position.ledger_id == ledger_id}
        lost = {position for position in lost if position.entry_id >= left}
        for line in self._lines:
            line.settle(self)
        if is_gone:
            del self._log_disk.ledgers[ledger_id]
        else:
            del self._log_disk.ledgers[ledger_id].entries[left:]
        numbers = self.log.lose(lost)
        for side in self.sides:
            side.lost(numbers)

    def _open_index(self):
        tracker = self.settings.tracker
        if tracker is Tracker.VIEW:
            return TopicDelayIndex(tick_time_ms=TICK_MS, due_log_bytes_max=self.settings.due_log_bytes_max)
        return None if tracker is Tracker.IN_MEMORY or self._is_bucketed_alone else self._recovered_buckets()

    @property
    def _is_bucketed_alone(self):
        # A storage belongs to one subscription, or all share the index.
        return self.settings.tracker is Tracker.BUCKETED and self.settings.subscription_count == 1

    def _recovered_buckets(self):
        storage = SnapshotStorage(
            self.log_store.ledgers, BucketRegistry(self.log_store.metadata, "/buckets"), "delayed"
        )
        return BucketedDelayIndex.recover(_BUCKETS, storage=storage, now_ms=self.now_ms)[0]

    def open_tracker(self, is_acked):
        if not self.settings.delay_share:
            return None
        if self._index is not None:
            return self._index.open_view(is_acked)
        if self._is_bucketed_alone:
            return self._recovered_buckets()
        return InMemoryDelayTracker(tick_time_ms=TICK_MS, is_deliver_at_time_strict=True)

    def random_of(self, part):
        """Return the source of randomness of one part of the schedule, independent of other parts."""
        return Random(f"{self.seed}/{part}")

    def event_count(self):
        """Return the number of events in the schedule of this seed."""
        return self.random_of("count").randint(EVENT_COUNT_MIN, EVENT_COUNT_MAX)

    def run(self, numbers=None, *, ends=True):
        """Execute events, all of the seed or some by number, and, if it ends, ack everything that is left."""
        weights = {name: weight for name, (weight, _) in EVENTS.items()} | {"crash": self.settings.crash_weight}
        for name in ("persist", "persist_in_vain", "promote", "tick"):
            weights[name] *= self.settings.write_weight
        with judged():
            for number in range(self.event_count()) if numbers is None else numbers:
                self.event_number, self.random = number, self.random_of(number)
                self.step(*self.random.choices(list(weights), list(weights.values())))
                if number % _RECOUNT_EVERY == 0:
                    self.check_all()
            self.event_number = None
            if ends:
                self._finish()

    def _finish(self):
        self.random = self.random_of("end")
        if self.settings.crash_weight and self.random.random() < 0.5:
            self.step("crash")
        self.drain()
        if self.settings.crash_weight:
            self.step("crash")

    def drain(self):
        """Repair the store and make consumers ack all deliveries: no message may stay."""
        self._fault_share = 0
        self._lines.append(_Line(self.now_ms, "", [("everything is sent, acked and persisted", ())]))
        drain(self)
        self.check_all()

    def step(self, event, *args, **named):
        """Execute one event on one subscription, with or without a fault of its store, and check."""
        happen = EVENTS[event][1] if isinstance(event, str) else event
        side = self.random.choice(self._asked())
        self.step_count += 1
        self._lines.append(_Line(self.now_ms, side.name, []))
        self.at_work = side
        # An event may replace the stores.
        self._stores_at_begin = [each.store for each in self.sides]
        self._fired_before = _fired(self._stores_at_begin)
        if self.random.random() < self._fault_share:
            self._script_fault(side)
        try:
            happen(self, side, *args, **named)
        except StoreError as error:
            self.excuse(error, side)
        while any(each.store.is_over for each in self.sides):  # the next recovery may also end its store
            EVENTS["crash"][1](self, side)
        for each in self.sides:
            each.store.forget_faults()
        self.check()

    def _asked(self):
        """Return the subscriptions for the next event: occasionally the second one lags behind."""
        size = self.settings.lag_events
        return self.sides[:1] if size and (self.event_number or 0) // size % 2 else self.sides

    def excuse(self, error, side, *others):
        """Accept an error that a fault of this event or a limit explains, and raise any other."""
        self.note(f"-> {error}")
        # A scripted fault that did not happen explains nothing.
        if _fired(self._stores_at_begin) > self._fired_before:
            return
        # If no ledger can be written, the metadata store is used, unless the state is too large for it.
        refusal = error.__cause__ if any(each.store.has_broken_ledgers for each in (side, *others)) else None
        if not isinstance(error, PayloadTooLargeError) and not isinstance(refusal, PayloadTooLargeError):
            raise error
        hold(Promise.ERRORS, side.is_limited, f"refused as too large, and no limit was set: {error}")

    def _script_fault(self, side):
        settings = self.settings
        kind, ahead = self.random.choice(settings.fault_kinds), self.random.choice((0, 0, 1, 2))
        count = self.random.randint(2, 6) if self.random.random() < settings.burst_share else 1
        self.script_faults(side, kind, ahead=ahead, count=count)

    def script_faults(self, side, kind, *, ahead=0, count):
        """Make some consecutive writes of the current event fail."""
        for number in range(ahead, ahead + count):
            side.store.inject(Fault(side.store.mutation_count + number, kind))
        self.fault_count += count
        self.note(f"[{kind.name} at write {ahead}{f' and {count - 1} more' if count > 1 else ''}]")

    def drawn_faults(self):
        """Return the faults of the broker's start: mostly none."""
        if self.random.random() >= self._fault_share:
            return []
        kind, mutation = self.random.choice(list(FaultKind)), self.random.randrange(4)
        self.fault_count += 1
        self.note(f"[{kind.name} at write {mutation} of the recovery]")
        return [Fault(mutation, kind)]

    def check(self):
        for side in self.sides:
            checks.check(side)
        if self.broker is not None:
            unacked = sum(side.model.unacked() for side in self.sides)
            found = f"the broker counts {self.broker.unacked_messages} unacked messages, there are {unacked}"
            hold(Promise.I4, self.broker.unacked_messages == unacked, found)

    def check_all(self):
        for side in self.sides:
            checks.check_all(side)

    def interleave(self, sides, write):
        self._interleaved = sides
        try:
            return write()
        finally:
            self._interleaved = ()

    def while_writing(self, writer):
        if writer.is_writing and not self._interleaved:
            return
        checks.check_writing(writer)
        if writer not in self._interleaved:
            return
        was_writing, writer.is_writing = writer.is_writing, True
        try:
            checks.check(writer)
            if self.random.random() < self.meanwhile_share:
                self.meanwhile(self, writer)
                checks.check(writer)
                checks.check_writing(writer)
        finally:
            writer.is_writing = was_writing

    def note(self, what, numbers=()):
        if self._lines:
            self._lines[-1].notes.append((what, tuple(numbers)))

    def story(self):
        """Return the story, a line for each event that had an effect."""
        *others, last = self._lines
        return tuple(line.text(self) for line in (*(each for each in others if each.tells), last))


def _fired(stores):
    return sum(store.fired_fault_count for store in stores)


class judged:  # noqa: N801 - reads as a statement
    """Converts any escaped error into a broken promise."""

    def __enter__(self):
        pass

    def __exit__(self, _, error, __):
        if error is None or isinstance(error, PromiseBrokenError) or not isinstance(error, Exception):
            return
        promise = Promise.ERRORS
        if isinstance(error, CorruptStateError):
            promise = Promise.I10
        elif isinstance(error, AssertionError):
            promise = Promise.I4
        is_ours = isinstance(error, AckStateError | AssertionError)
        raise PromiseBrokenError(promise, str(error) if is_ours and str(error) else repr(error)) from error


class _Line:
    """One event of the story."""

    def __init__(self, now_ms, side, notes):
        self.now_ms, self.side, self.notes = now_ms, side, notes

    @property
    def tells(self):
        """Whether the event had an effect."""
        return any(numbers or not what.startswith("send") for what, numbers in self.notes)

    def settle(self, simulation):
        self.notes = [
            (f"{what} {simulation.log.text(numbers)}" if numbers else what, ()) for what, numbers in self.notes
        ]

    def text(self, simulation):
        merged = []
        for what, numbers in self.notes:
            if merged and merged[-1][0] == what and numbers:
                known = merged[-1][1]
                if known is not None:
                    known.extend(numbers)
                    continue
            merged.append((what, list(numbers) if numbers else None))
        merged = [each for each in merged if each[1] or not each[0].startswith("send")] or merged
        texts = [what if numbers is None else f"{what} {simulation.log.text(numbers)}" for what, numbers in merged]
        where = f" {self.side}" if len(simulation.sides) > 1 else ""
        return f"{self.now_ms} ms{where}: {', '.join(texts)}"


@cache
def _disk_with_a_long_ledger():
    """Return a disk whose log has one ledger of 16,450 entries: 16,384 is the first id of three bytes."""
    store = MemoryStore()
    log = MessageLog.open(store, topic="t", entries_per_ledger_max=20_000)
    log.publish([Message(b"")] * _HIGH_END)
    return store.disk


def _copied(disk):
    copy = MemoryDisk()
    for ledger_id, ledger in disk.ledgers.items():
        copy.ledgers[ledger_id] = replace(ledger, entries=list(ledger.entries))
    copy.next_ledger_id = disk.next_ledger_id
    return copy
