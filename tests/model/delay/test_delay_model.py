"""Never early, never lost, at most once to each subscription: whatever readers, clock and acks do."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyroaring import BitMap

from ackstate import Position
from ackstate.delay import TopicDelayIndex
from ackstate.position_set import PositionSet
from delay_driver import unread_batches

NO_DELAY = -1
LEDGER_ENTRIES = 4
FAR = 10**9

subscriptions = st.integers(0, 2)
# Long against the steps of time, so that something waits at most moments.
delays = st.sampled_from([NO_DELAY, 0, 9, 64]) | st.integers(1, 200)


class SkippingReader:
    """A subscription's dispatcher: reads the log in order, skips as the tracker requests, polls for these messages
    later."""

    def __init__(self, index: TopicDelayIndex, log: list[Position], *, is_attached: bool) -> None:
        self.acked: set[Position] = set()
        self.log = log
        self.is_attached = is_attached
        self.forget_reads(index)

    def forget_reads(self, index: TopicDelayIndex) -> None:
        self.view = index.open_view(lambda position: position in self.acked)
        if self.is_attached:
            self.view.attach(self)
        self.begin_pass()

    def discard_acked(self, ledger_id: int, entries: BitMap) -> None:
        entries -= BitMap([entry_id for acked_ledger_id, entry_id in self.acked if acked_ledger_id == ledger_id])

    def not_sent_between(self, first: Position, end: Position) -> PositionSet:
        found = PositionSet()
        for position in self.log[: self.next_read]:
            if first <= position < end and position not in self.acked and position not in self.delivered:
                found.add(position)
        return found

    def begin_pass(self) -> None:
        self.next_read = 0
        self.waiting: set[Position] = set()
        self.delivered: set[Position] = set()

    def deliver(self, position: Position) -> None:
        assert position not in self.delivered, "delivered twice"
        self.waiting.discard(position)
        self.delivered.add(position)


class DelayMachine(RuleBasedStateMachine):
    """One topic, three subscriptions, a growing log; `seen_ms` is the latest time told to the index."""

    @initialize(tick_ms=st.sampled_from([1, 10, 64, 100]), due_log_bytes_max=st.sampled_from([0, 2_000, 1 << 20]))
    def open(self, tick_ms, due_log_bytes_max):
        self.tick_ms = tick_ms
        self.index = TopicDelayIndex(tick_time_ms=tick_ms, due_log_bytes_max=due_log_bytes_max)
        self.log: list[Position] = []
        self.deliver_at_ms: dict[Position, int] = {}
        # When each message falls due that some reader has put into the index.
        self.due_ms: dict[Position, int] = {}
        self.clock_ms = self.seen_ms = 1000
        self.index.advance(self.clock_ms)
        self.readers = [SkippingReader(self.index, self.log, is_attached=each > 0) for each in range(3)]

    def now(self) -> int:
        self.seen_ms = max(self.seen_ms, self.clock_ms)
        return self.clock_ms

    def is_held(self, position: Position) -> bool:
        return self.due_ms.get(position, 0) > self.seen_ms

    def offer(self, reader: SkippingReader, position: Position) -> None:
        deliver_at_ms = self.deliver_at_ms[position]
        must_wait = reader.view.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=self.now())
        if deliver_at_ms > self.seen_ms and not self.is_held(position):
            self.due_ms[position] = -(-deliver_at_ms // self.tick_ms) * self.tick_ms
        assert must_wait == (self.is_held(position) or position in reader.waiting)
        if must_wait:
            reader.waiting.add(position)
        elif position not in reader.delivered:
            reader.deliver(position)

    @rule(delays=st.lists(delays, min_size=1, max_size=6), which=subscriptions)
    def publish(self, delays, which):
        """To a reader that is at the log's end, one of three; the others come to it later, if ever."""
        for delay in delays:
            ledger, entry_id = divmod(len(self.log), LEDGER_ENTRIES)
            position = Position(3 + 2 * ledger, entry_id)
            self.log.append(position)
            self.deliver_at_ms[position] = NO_DELAY if delay == NO_DELAY else self.clock_ms + delay
        self.read(which, len(delays))

    @rule(which=subscriptions, count=st.integers(1, 8))
    def read(self, which, count):
        reader = self.readers[which]
        end = min(reader.next_read + count, len(self.log))
        for position in self.log[reader.next_read : end]:
            if position not in reader.acked:
                self.offer(reader, position)
        reader.next_read = end

    @rule(which=subscriptions, pick=st.integers(0, 99))
    def read_again(self, which, pick):
        """After a failed read, or for the replay of messages that were delivered or handed out."""
        reader = self.readers[which]
        again = [position for position in self.log[: reader.next_read] if position not in reader.acked]
        if again:
            self.offer(reader, again[pick % len(again)])

    @rule(which=subscriptions, max_messages=st.integers(0, 3))
    def poll(self, which, max_messages):
        reader = self.readers[which]
        now_ms = self.now()
        due = sorted(p for p in reader.waiting - reader.acked if not self.is_held(p))
        assert reader.view.has_message_available(now_ms=now_ms) == bool(due)
        handed_out = reader.view.scheduled_messages(max_messages, now_ms=now_ms)
        for position in handed_out:
            assert self.deliver_at_ms[position] <= self.seen_ms, "early"
            reader.deliver(position)
        assert handed_out == due[:max_messages]

    @rule(which=subscriptions, pick=st.integers(0, 99))
    def ack(self, which, pick):
        if self.log:
            self.readers[which].acked.add(self.log[pick % len(self.log)])

    @rule(forward_ms=st.integers(1, 40))
    def time_passes(self, forward_ms):
        self.clock_ms += forward_ms

    @rule(back_ms=st.sampled_from([1, 30, 500]))
    def clock_jumps_back(self, back_ms):
        self.clock_ms = max(0, self.clock_ms - back_ms)

    @rule()
    def advance(self):
        self.index.advance(self.now())

    @rule(which=subscriptions)
    def rewind(self, which):
        self.readers[which].view.clear()
        self.readers[which].begin_pass()

    @rule(which=subscriptions)
    def reopen(self, which):
        self.readers[which].view.close()
        self.readers[which].forget_reads(self.index)

    @invariant()
    def the_index_holds_each_message_once(self):
        self.index._check()
        held = [position for position in self.due_ms if self.is_held(position)]
        assert len(self.index) == len(held)
        assert all(position in self.index for position in held)

    @invariant()
    def each_view_counts_what_its_reader_waits_for(self):
        for reader in self.readers:
            unacked = len(reader.waiting - reader.acked)
            assert reader.view.delayed_message_count == unacked
            next_ms = reader.view.next_delivery_ms
            if unacked:
                earliest = min(self.due_ms[position] for position in reader.waiting - reader.acked)
                assert next_ms is not None
                assert next_ms <= max(earliest, self.seen_ms)

    def teardown(self):
        if not hasattr(self, "index"):
            return
        self.clock_ms = FAR
        for which, reader in enumerate(self.readers):
            while reader.view.has_message_available(now_ms=self.now()):
                self.poll(which, 2)
            self.read(which, len(self.log))
            assert set(self.log) - reader.acked <= reader.delivered, "lost"
            assert not reader.waiting - reader.acked
            assert reader.view.delayed_message_count == 0
        assert len(self.index) == 0
        assert unread_batches(self.index) == 0


TestDelay = DelayMachine.TestCase
