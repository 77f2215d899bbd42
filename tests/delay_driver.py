"""A broker in plain sets: drives any tracker of delayed messages as a dispatcher does, and checks its answers.

The oracle is `deliver_at_ms`, a dict, and for each subscription the messages that the tracker reported as waiting and
has not handed out since. Acks, deliveries and the messages to be sent again are the driver's own. Each kind of tracker
defines by how much a message may be early and late, whether acked ones are omitted, and the state after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from pyroaring import BitMap

from ackstate import MemoryStore, Position, StoreError
from ackstate.delay import (
    BucketedDelayIndex,
    BucketRegistry,
    DelayConfig,
    InMemoryDelayTracker,
    SnapshotStorage,
    TopicDelayIndex,
)
from ackstate.position_set import PositionSet
from ackstate.stores.memory import PowerCutError

NO_DELAY = -1
LEDGER_ENTRIES = 4
ALL = 10_000
FAR_MS = 10**9


class DelayDispatcher:
    """One subscription: reads the log in order, skips messages that must wait, polls for them later, sends, takes
    acks."""

    def __init__(self, broker, name):
        self.broker, self.name = broker, name
        self.acked = set(broker.log[: broker.trimmed])
        self.durable = set(self.acked)
        self.ever_waited = set()
        self.forget_reads()
        self.clockwork = broker.kind.clockwork(broker)
        broker.kind.open(broker, self)

    def forget_reads(self):
        """Forget all reads."""
        self.next_read = 0
        self.waiting = set()  # the messages that the tracker has to hand out
        self.told = set()  # those that it has handed out, or reported as due now
        self.replay = set()
        self.in_flight = set()
        self.sent = []

    def now(self):
        self.clockwork.see(self.broker.clock_ms)
        return self.broker.clock_ms

    # The reports to a view that is attached to this subscription.

    def discard_acked(self, ledger_id, entries):
        entries -= BitMap([entry_id for acked_ledger_id, entry_id in self.acked if acked_ledger_id == ledger_id])

    def not_sent_between(self, first, end):
        found = PositionSet()
        for position in self.broker.log[: self.next_read]:
            if first <= position < end and not self.has(position):
                found.add(position)
        return found

    def has(self, position):
        return position in self.acked or position in self.in_flight or position in self.replay

    # The actions.

    def offer(self, position):
        """Say whether the tracker wants the message to wait."""
        deliver_at_ms = self.broker.deliver_at_ms[position]
        must_wait = self.tracker.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=self.now())
        self.answered(position, must_wait=must_wait)
        return must_wait

    def answered(self, position, *, must_wait):
        if must_wait:
            self.waiting.add(position)
            self.ever_waited.add(position)
        else:
            self.told.add(position)
            if not self.broker.kind.keeps_what_is_due:
                self.waiting.discard(position)

    def must_wait(self, position):
        """Ask as a reader does: where one reader feeds the index a message that waits is not even read."""
        if self.broker.kind.is_fed and not self.tracker.unknown([position], now_ms=self.now()):
            self.answered(position, must_wait=True)
            return True
        return self.offer(position)

    def read(self, count=ALL):
        end = min(self.next_read + count, len(self.broker.log))
        while self.next_read < end:
            position = self.broker.log[self.next_read]
            self.next_read += 1
            if not self.has(position) and not self.must_wait(position):
                self.send(position)

    def rewind(self, count):
        """Read some again, since a read failed."""
        self.next_read = max(0, self.next_read - count)

    def poll(self, max_messages=ALL):
        """Take the due messages, and return them; they are to be sent again."""
        kind, now_ms = self.broker.kind, self.now()
        handed_out = self.tracker.scheduled_messages(max_messages, now_ms=now_ms)
        assert handed_out == sorted(set(handed_out)), "not in order of position"
        assert len(handed_out) <= max_messages
        for position in handed_out:
            assert position in self.broker.deliver_at_ms, "never published"
            self.check_not_early(position)
            may_come = position in self.waiting or (kind.is_fed and position not in self.told)
            assert may_come, f"{position} was handed out twice"
            self.waiting.discard(position)
            self.told.add(position)
            if position in self.acked:
                assert not kind.knows_acks, f"{position} is acked"
            elif position in self.in_flight or position in self.replay:
                assert kind.keeps_what_is_due, f"{position} was handed out, and delivered otherwise"
            else:
                self.replay.add(position)
        if len(handed_out) < max_messages:
            self.check_none_is_late()
        if kind.knows_acks and max_messages:
            assert not self.late() or not handed_out or min(self.late()) > handed_out[-1], "not the lowest"
        return handed_out

    def check_not_early(self, position):
        deliver_at_ms = self.broker.deliver_at_ms[position]
        assert deliver_at_ms <= self.clockwork.seen_ms + self.broker.kind.early_ms(self.clockwork), f"{position} early"

    def check_none_is_late(self):
        """After a poll that had room: the tracker no longer has messages that are due by more than the rounding."""
        assert not self.late(), f"{self.late()} are due and were not handed out"

    def late(self):
        if self.broker.is_cut:
            return []
        before_ms = self.clockwork.seen_ms - self.broker.kind.late_ms(self.clockwork)
        waiting = self.surely(self.waiting - self.acked)
        return [each for each in waiting if self.broker.deliver_at_ms[each] <= before_ms]

    def surely(self, waiting):
        """Omit messages that a cut-off view may have left to the reader, which reads them again."""
        if not self.broker.kind.is_attached:
            return waiting
        return waiting.intersection(self.broker.log[: self.next_read])

    def send_again(self, count=ALL):
        """Send messages that were handed out or given back, unless their own time has not come."""
        for position in sorted(self.replay)[:count]:
            self.replay.discard(position)
            if not self.offer(position):
                self.send(position)

    def send(self, position):
        assert not self.has(position), f"{position} was sent twice"
        self.check_not_early(position)
        self.in_flight.add(position)
        self.sent.append(position)

    def ack(self, position):
        self.acked.add(position)
        self.in_flight.discard(position)
        self.replay.discard(position)

    def nack(self, position):
        self.in_flight.remove(position)
        self.replay.add(position)

    def mark_delete(self):
        """Return how many messages at the beginning are acked, which is durable; a tracker of its own is told."""
        count = next((at for at, each in enumerate(self.broker.log) if each not in self.acked), len(self.broker.log))
        self.durable.update(self.broker.log[:count])
        if not self.broker.kind.is_shared:
            self.broker.tell_mark_delete(self.tracker, count)
            if isinstance(self.tracker, BucketedDelayIndex) and count:
                first = Position(self.broker.log[count - 1].ledger_id, 0)
                self.waiting = {position for position in self.waiting if position >= first}
        return count

    def seek(self, number):
        while not is_cleared(self.tracker):
            assert self.tracker.delayed_message_count == 0
        self.acked = set(self.broker.log[: max(number, self.broker.trimmed)])
        self.forget_reads()

    def set_tick(self, tick_ms):
        """Change the tick, where the tracker is Pulsar's own: no other can."""
        if isinstance(self.tracker, InMemoryDelayTracker):
            self.tracker.reset_tick_time(tick_ms)
            self.clockwork.set_tick(tick_ms)

    def restart(self):
        """Whatever was in memory is gone."""
        self.acked = set(self.durable)
        self.forget_reads()
        self.clockwork = self.broker.kind.clockwork(self.broker)
        self.broker.kind.restart(self.broker, self)

    def work(self):
        self.read()
        self.poll()
        self.send_again()

    def lacks(self):
        """Return the messages that were neither acked nor sent."""
        return set(self.broker.log) - self.acked - self.in_flight

    # The checks.

    def check(self):
        self.tracker_owner()._check()
        if self.broker.kind.is_fed:
            return
        expected = self.waiting - self.acked if self.broker.kind.knows_acks else self.waiting
        assert len(self.surely(expected)) <= self.tracker.delayed_message_count <= len(expected)
        if self.waiting - self.acked:
            latest_ms = max(self.broker.deliver_at_ms[each] for each in self.waiting)
            assert self.tracker.next_delivery_ms is not None
            assert self.tracker.next_delivery_ms <= max(
                latest_ms + self.broker.kind.late_ms(self.clockwork), self.clockwork.seen_ms
            )

    def tracker_owner(self):
        return self.broker.index if self.broker.kind.is_shared else self.tracker


class DelayBroker:
    """One topic with some subscriptions, and a clock that may run back."""

    def __init__(self, kind, *, tick_ms=10, subscription_count=2, clock_ms=1_000, **settings):
        self.kind, self.tick_ms, self.clock_ms, self.settings = kind, tick_ms, clock_ms, settings
        self.log, self.deliver_at_ms = [], {}
        self.trimmed = self.fed_count = self.opened = 0
        self.store = self.index = None
        kind.start(self)
        self.dispatchers = [self.new_dispatcher() for _ in range(subscription_count)]

    @property
    def is_cut(self):
        """Whether the power of its storage was cut: no segment can be loaded."""
        try:
            return bool(self.store and self.store.ledgers.owned_by("nobody"))
        except PowerCutError:
            return True

    def new_dispatcher(self):
        self.opened += 1
        return DelayDispatcher(self, f"s{self.opened}")

    def begin_index(self):
        """Let a new index see what the one before was fed, by a new clockwork."""
        self.clockwork = Clockwork(self.tick_ms)
        fed_before, self.fed_count = self.fed_count, 0
        self.feed(fed_before)
        return self.clockwork

    def publish(self, *delays_ms):
        """Append messages that are to be delivered so long from now; return them."""
        published = []
        for delay_ms in delays_ms:
            ledger, entry_id = divmod(len(self.log), LEDGER_ENTRIES)
            position = Position(3 + 2 * ledger, entry_id)
            self.log.append(position)
            self.deliver_at_ms[position] = NO_DELAY if delay_ms == NO_DELAY else self.clock_ms + delay_ms
            published.append(position)
        return published

    def feed(self, end=ALL):
        """Let the topic's own reader go on to a message."""
        if self.kind.is_fed:
            end = min(end, len(self.log))
            for position in self.log[max(self.fed_count, self.trimmed) : end]:
                self.index.learn([(position, self.deliver_at_ms[position])])
            self.fed_count = max(self.fed_count, end)

    def trim(self):
        """Drop the ledgers from the log that everybody has acked."""
        count = min(dispatcher.mark_delete() for dispatcher in self.dispatchers)
        if self.kind.is_shared:
            self.tell_mark_delete(self.index, count)
        self.trimmed = max(self.trimmed, count - count % LEDGER_ENTRIES)

    def tell_mark_delete(self, index, count):
        if count and isinstance(index, BucketedDelayIndex):
            index.advance_mark_delete(self.log[count - 1])

    def crash(self, *, took_ms=0):
        self.kind.start(self)
        for dispatcher in self.dispatchers:
            dispatcher.restart()
        self.clock_ms += took_ms

    def replace(self, which):
        """Close a subscription for good and open a new one, from the beginning of the log."""
        self.dispatchers[which].tracker.close()
        self.dispatchers[which] = self.new_dispatcher()

    def check(self):
        for dispatcher in self.dispatchers:
            dispatcher.check()

    def drain(self):
        """Poll only when a tracker says so, until everything that is not acked was sent; then nothing may come."""
        self.feed()
        for _ in range(10 * len(self.log) + 10):
            for dispatcher in self.dispatchers:
                dispatcher.work()
            lacking = [dispatcher for dispatcher in self.dispatchers if dispatcher.lacks()]
            if not lacking:
                break
            self.wait_for(lacking)
        else:
            raise AssertionError(f"stalled at {self.clock_ms} ms")
        self.clock_ms = FAR_MS
        for dispatcher in self.dispatchers:
            dispatcher.poll()
            assert not dispatcher.replay, "sent once more at the end"
            assert not dispatcher.waiting - dispatcher.acked, "lost"
            assert dispatcher.tracker.delayed_message_count == 0
        self.kind.check_at_end(self)

    def wait_for(self, dispatchers):
        times = [dispatcher.tracker.next_delivery_ms for dispatcher in dispatchers]
        assert None not in times, "lost: nothing would wake the dispatcher"
        if min(times) - 1 > self.clock_ms:
            self.clock_ms = min(times) - 1
            for each in dispatchers:
                assert each.tracker.scheduled_messages(ALL, now_ms=each.now()) == [], "due before it is time"
        self.clock_ms = max(self.clock_ms, min(times))


def is_cleared(tracker):
    try:
        tracker.clear()
    except PowerCutError:
        raise
    except StoreError:  # as scripted
        return False
    return True


def unread_batches(index):
    """Return how many batches of a due log some view has yet to read."""
    return max((_batches_from(reader.unread) for reader in index.due_log.readers), default=0)


def _batches_from(batch):
    count = 0
    while batch.next is not None:
        batch, count = batch.next, count + 1
    return count


@dataclass
class Clockwork:
    """The times that an index has seen, and the tick by which it rounds.

    A tracker that takes each time as it comes has seen only the last one.
    """

    tick_ms: int
    follows_back: bool = False
    seen_ms: int = 0

    def __post_init__(self):
        self.first_tick_ms = self.tick_ms_max = self.tick_ms

    def see(self, clock_ms):
        self.seen_ms = clock_ms if self.follows_back else max(self.seen_ms, clock_ms)

    def set_tick(self, tick_ms):
        self.tick_ms = tick_ms
        self.tick_ms_max = max(self.tick_ms_max, tick_ms)


class Kind:
    """A tracker for each subscription, with nothing stored, unless a subclass says otherwise."""

    # Of keeps_what_is_due: also if it was offered once more, and the answer was to deliver it.
    knows_acks = keeps_what_is_due = is_shared = is_fed = is_attached = False

    def __init__(self, *, strict=True, **settings):
        self.strict, self.settings = strict, settings

    def start(self, broker):
        pass

    def clockwork(self, broker):
        return broker.clockwork if self.is_shared else Clockwork(broker.tick_ms)

    def restart(self, broker, dispatcher):
        self.open(broker, dispatcher)

    def check_at_end(self, broker):
        pass

    def early_ms(self, clockwork):
        return 0 if self.strict else clockwork.tick_ms

    def late_ms(self, _):
        return 0

    def open_view(self, broker, dispatcher):
        dispatcher.tracker = broker.index.open_view(lambda position: position in dispatcher.acked)
        if self.is_attached:
            dispatcher.tracker.attach(dispatcher)


class InMemoryKind(Kind):
    """Pulsar's tracker, one for each subscription."""

    keeps_what_is_due = True

    def clockwork(self, broker):
        return Clockwork(broker.tick_ms, follows_back=True)

    def open(self, broker, dispatcher):
        dispatcher.tracker = InMemoryDelayTracker(
            tick_time_ms=broker.tick_ms, is_deliver_at_time_strict=self.strict, fixed_delay_detection_lookahead=0
        )

    def late_ms(self, clockwork):
        precision_ms = 1 << clockwork.first_tick_ms.bit_length() - 1
        return precision_ms - 1 if self.strict else max(precision_ms - 1 - clockwork.tick_ms, 0)


class ViewsKind(Kind):
    """Views of one index of the topic."""

    knows_acks = is_shared = True
    open = Kind.open_view

    def __init__(self, *, is_attached=False, is_fed=False, **settings):
        super().__init__(**settings)
        self.is_attached, self.is_fed = is_attached, is_fed

    def start(self, broker):
        broker.index = TopicDelayIndex(tick_time_ms=broker.tick_ms, **self.settings)
        broker.begin_index()

    def check_at_end(self, broker):
        assert unread_batches(broker.index) == 0

    def late_ms(self, clockwork):
        return clockwork.tick_ms_max - 1


class BucketedKind(Kind):
    """The tracker with snapshots, one for each subscription, all in one store."""

    def __init__(self, **settings):
        super().__init__(**{"min_index_count_per_bucket": 3, "max_indexes_per_segment": 2} | settings)

    def start(self, broker):
        # The files on the disk survive a crash.
        broker.store = MemoryStore(broker.store and broker.store.disk)

    def open(self, broker, dispatcher):
        dispatcher.tracker = BucketedDelayIndex(self.config(broker), storage=self.storage(broker, dispatcher.name))

    def recovered(self, broker, name, now_ms):
        index, report = BucketedDelayIndex.recover(
            self.config(broker), storage=self.storage(broker, name), now_ms=now_ms
        )
        assert not report.fell_back
        return index

    def restart(self, broker, dispatcher):
        dispatcher.tracker = self.recovered(broker, dispatcher.name, dispatcher.now())
        recovered = {position for position in broker.log if position in dispatcher.tracker}
        assert recovered <= dispatcher.ever_waited, "recovered a message that was never added"
        dispatcher.waiting |= recovered

    def config(self, broker):
        settings = self.settings | broker.settings
        return DelayConfig(tick_time_ms=broker.tick_ms, is_deliver_at_time_strict=self.strict, **settings)

    def check_at_end(self, broker):
        """A clear leaves nothing behind."""
        for each in broker.dispatchers:
            name, tracker = ("t", broker.index) if self.is_shared else (each.name, each.tracker)
            while not is_cleared(tracker):
                assert len(tracker) == 0
            assert broker.store.ledgers.owned_by(f"delayed/{name}") == []
            assert dict(self.storage(broker, name).registry.get_all()) == {}

    def storage(self, broker, name):
        registry = BucketRegistry(broker.store.metadata, f"/buckets/{name}")
        return SnapshotStorage(broker.store.ledgers, registry, f"delayed/{name}")


class BucketedViewsKind(BucketedKind):
    """Views of one index of the topic that has snapshots."""

    knows_acks = is_shared = True
    open = restart = Kind.open_view

    def __init__(self, *, is_attached=False, is_fed=False, **settings):
        super().__init__(**settings)
        self.is_attached, self.is_fed = is_attached, is_fed

    def start(self, broker):
        super().start(broker)
        broker.index = self.recovered(broker, "t", broker.clock_ms)
        broker.begin_index().see(broker.clock_ms)

    def early_ms(self, _):
        return 0


KINDS = {
    "in memory": InMemoryKind(strict=False),
    "in memory, strict": InMemoryKind(strict=True),
    "view": ViewsKind(),
    "attached view": ViewsKind(is_attached=True),
    "attached view, cut off at once": ViewsKind(is_attached=True, due_log_bytes_max=0),
    "view, fed": ViewsKind(is_fed=True),
    "attached view, fed": ViewsKind(is_fed=True, is_attached=True),
    "bucketed": BucketedKind(strict=False, max_time_step_per_segment_ms=40),
    "bucketed, strict": BucketedKind(strict=True, max_time_step_per_segment_ms=40),
    "bucketed, merged": BucketedKind(strict=True, max_bucket_count=2),
    "view of buckets": BucketedViewsKind(strict=True),
    "attached view of buckets": BucketedViewsKind(strict=True, is_attached=True),
    "attached view of buckets, fed": BucketedViewsKind(strict=True, is_attached=True, is_fed=True, max_bucket_count=2),
}
