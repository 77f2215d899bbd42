"""Many threads: one index, a view each. Each test has been seen to fail without the lock."""

import random
import sys
import threading
from itertools import count

import pytest
from pyroaring import BitMap

from ackstate import MemoryStore, Position
from ackstate.delay import BucketedDelayIndex, TopicDelayIndex
from ackstate.delay.buckets import SealedBuckets
from ackstate.position_set import PositionSet
from small_buckets import config, storage_of

THREADS = 8
TICK = 10
MESSAGES = 300


@pytest.fixture(autouse=True)
def threads_switch_often():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work):
    """Call a function with each thread's number, all at the same time; raise the first error that one ran into."""
    errors = []
    all_there = threading.Barrier(THREADS, timeout=30)

    def run(number):
        try:
            all_there.wait()
            work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    if errors:
        raise errors[0]


class DispatcherInThread:
    """Reads, polls and acks in its own thread; each message is to come to it once."""

    def __init__(self, index, times, ticks, *, is_attached):
        self.index, self.times = index, times
        self.ticks = ticks  # a clock that advances by a millisecond at each reading, in any thread
        self.delivered = set()
        self.read_end = 0
        self.view = index.open_view(lambda position: False)
        if is_attached:
            self.view.attach(self)

    def discard_acked(self, ledger_id, entries):
        pass

    def not_sent_between(self, first, end):
        low, high = first.entry_id if first.ledger_id == 3 else 0, min(self.read_end, end.entry_id)
        unsent = BitMap(range(low, high)) - BitMap([position.entry_id for position in self.delivered])
        found = PositionSet()
        found.update_entries(3, unsent)
        return found

    def read_one(self):
        position = Position(3, self.read_end)
        deliver_at_ms = self.times[self.read_end]
        is_to_wait = self.view.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=next(self.ticks))
        self.read_end += 1
        if not is_to_wait:
            self.deliver(position)

    def poll(self, now_ms):
        due = self.view.scheduled_messages(20, now_ms=now_ms)
        for position in due:
            self.deliver(position)
        return due

    def deliver(self, position):
        assert position not in self.delivered, f"{position} twice"
        assert self.times[position.entry_id] <= self.index.now_ms, f"{position} early"
        self.delivered.add(position)

    def run(self, rng):
        while self.read_end < len(self.times):
            for _ in range(rng.randrange(5)):
                if self.read_end < len(self.times):
                    self.read_one()
            if rng.randrange(3):
                self.poll(next(self.ticks))
            if not rng.randrange(20):
                assert self.view.delayed_message_count <= self.read_end
        while self.poll(10**9):
            pass


def run_dispatchers(index, *, learns):
    rng = random.Random(1)
    times = [each * THREADS + rng.randrange(1_000) for each in range(MESSAGES)]
    ticks = count(1)
    dispatchers = [DispatcherInThread(index, times, ticks, is_attached=number % 2 == 0) for number in range(THREADS)]

    def work(number):
        if learns and number == 0:
            for first in range(0, MESSAGES, 50):
                index.learn((Position(3, each), times[each]) for each in range(first, first + 50))
        dispatchers[number].run(random.Random(number))

    in_threads(work)
    for dispatcher in dispatchers:
        assert len(dispatcher.delivered) == MESSAGES, "lost"
    index._check()
    assert len(index) == 0
    assert index.now_ms == 10**9


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("due_log_bytes_max", [0, 5_000, 1 << 20])
def test_each_message_comes_once_to_each_and_never_early(due_log_bytes_max, learns):
    for _ in range(5):
        run_dispatchers(TopicDelayIndex(tick_time_ms=TICK, due_log_bytes_max=due_log_bytes_max), learns=learns)


def test_the_boundaries_of_buckets_are_looked_at_under_the_lock(monkeypatch):
    index = BucketedDelayIndex(config(), storage=storage_of(MemoryStore()))
    view = index.open_view(lambda position: False)
    first_boundary = SealedBuckets.first_boundary

    def guarded(sealed):
        assert index.lock.locked()
        return first_boundary(sealed)

    monkeypatch.setattr(SealedBuckets, "first_boundary", guarded)
    view.add_message(Position(1, 0), deliver_at_ms=50, now_ms=0)
    assert view.next_delivery_ms == 50
    assert view.scheduled_messages(9, now_ms=50) == [Position(1, 0)]
