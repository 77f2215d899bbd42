"""A broker in plain sets: drives any tracker of delayed messages as a dispatcher does, and checks its answers.

The oracle is `deliver_at_ms`, a dict, and for each subscription the messages that the tracker reported as waiting and
has not handed out since. Acks, deliveries and the messages to be sent again are the driver's own.
"""

from __future__ import annotations

from pyroaring import BitMap

from ackstate import Position
from ackstate.delay import BucketedDelayIndex, InMemoryDelayTracker
from ackstate.delay.view import batches_from
from ackstate.position_set import PositionSet

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
        if self.broker.kind.is_fed and self.tracker.skip(position, now_ms=self.now()):
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
        is_available = self.tracker.has_message_available(now_ms=now_ms)
        handed_out = self.tracker.scheduled_messages(max_messages, now_ms=now_ms)
        assert handed_out == sorted(set(handed_out)), "not in order of position"
        assert len(handed_out) <= max_messages
        assert is_available or not handed_out, "denied a message that it had"
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
        return handed_out

    def check_not_early(self, position):
        deliver_at_ms = self.broker.deliver_at_ms[position]
        assert deliver_at_ms <= self.clockwork.seen_ms + self.broker.kind.early_ms(self.clockwork), f"{position} early"

    def check_none_is_late(self):
        """After a poll that had room: the tracker no longer has messages that are due by more than the rounding."""
        before_ms = self.clockwork.seen_ms - self.broker.kind.late_ms(self.clockwork)
        waiting = self.surely(self.waiting - self.acked)
        late = [each for each in waiting if self.broker.deliver_at_ms[each] <= before_ms]
        assert not late, f"{late} are due and were not handed out"

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
        self.tracker.clear()
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

    def __init__(self, kind, *, tick_ms=10, subscription_count=2, clock_ms=1_000):
        self.kind, self.tick_ms, self.clock_ms = kind, tick_ms, clock_ms
        self.log, self.deliver_at_ms = [], {}
        self.trimmed = self.fed_count = self.opened = 0
        self.store = self.index = None
        kind.start(self)
        self.dispatchers = [self.new_dispatcher() for _ in range(subscription_count)]

    def new_dispatcher(self):
        self.opened += 1
        return DelayDispatcher(self, f"s{self.opened}")

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
                self.clockwork.see(self.clock_ms)
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

    def wait_for(self, dispatchers):
        times = [dispatcher.tracker.next_delivery_ms for dispatcher in dispatchers]
        assert None not in times, "lost: nothing would wake the dispatcher"
        if min(times) - 1 > self.clock_ms:
            self.clock_ms = min(times) - 1
            for each in dispatchers:
                assert not each.tracker.has_message_available(now_ms=each.now()), "something is due before it is time"
        self.clock_ms = max(self.clock_ms, min(times))


def unread_batches(index):
    """Return how many batches of a due log some view has yet to read."""
    return sum(1 for _ in batches_from(index.due_log._first_unread()))
