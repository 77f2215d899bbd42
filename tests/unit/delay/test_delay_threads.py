"""Many threads: one registry, one index, a view each. Each test has been seen to fail without the lock."""

import random
import sys
import threading
from contextlib import nullcontext
from itertools import count

import pytest
from pyroaring import BitMap

from ackstate import Position
from ackstate.delay import DelayIndexRegistry, TopicDelayIndex
from ackstate.delay.position_set import PositionSet

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


def often(race):
    """So often that a race is won: the ones here are five times out of six."""
    for _ in range(20):
        race()


def nothing_acked(position):
    return False


# The registry.


def open_and_close(registry, *, rounds):
    """Each thread with an open view looks which index the others with an open view have at that moment."""
    indexes = [None] * THREADS

    def work(number):
        for _ in range(rounds):
            view = registry.open_view("orders", is_acked=nothing_acked)
            mine = indexes[number] = view._index
            others = {id(index) for index in list(indexes) if index is not None}
            assert others == {id(mine)}, "two indexes of one topic"
            assert "orders" in registry, "an index was given up that is in use"
            del mine
            indexes[number] = None
            view.close()

    in_threads(work)


def counting_registry():
    made = count()

    def make_index(topic):
        next(made)
        return TopicDelayIndex(tick_time_ms=TICK)

    return DelayIndexRegistry(make_index=make_index), made


@pytest.mark.slow
def test_views_that_are_open_at_one_time_share_one_index():
    registry, made = counting_registry()
    open_and_close(registry, rounds=3_000)
    assert len(registry) == 0
    assert next(made) > 10, "the index was given up and made again many times"


@pytest.mark.slow
def test_a_registry_without_its_lock_is_caught():
    registry, _ = counting_registry()
    registry._lock = nullcontext()
    with pytest.raises(AssertionError, match=r"two indexes|given up"):
        often(lambda: open_and_close(registry, rounds=3_000))


def test_a_topic_that_cannot_be_made_leaves_nothing_behind():
    made = iter([OSError("scripted"), TopicDelayIndex(tick_time_ms=TICK)])

    def make_index(topic):
        made_now = next(made)
        if isinstance(made_now, OSError):
            raise made_now
        return made_now

    registry = DelayIndexRegistry(make_index=make_index)
    with pytest.raises(OSError, match="scripted"):
        registry.open_view("orders", is_acked=nothing_acked)
    assert "orders" not in registry
    assert registry.open_view("orders", is_acked=nothing_acked).delayed_message_count == 0


def test_each_topic_is_made_with_its_own_settings():
    registry = DelayIndexRegistry(make_index=lambda topic: TopicDelayIndex(tick_time_ms=len(topic)))
    views = [registry.open_view(topic, is_acked=nothing_acked) for topic in ("a", "four", "ten chars!")]
    for view in views:
        view.add_message(Position(3, 0), deliver_at_ms=1_001, now_ms=1_000)
    assert [view.next_delivery_ms for view in views] == [1_001, 1_004, 1_010]


@pytest.mark.parametrize("settings", [{}, {"tick_time_ms": TICK, "make_index": TopicDelayIndex}])
def test_a_registry_has_a_tick_or_a_way_to_make_indexes(settings):
    with pytest.raises(TypeError, match="exactly one of tick_time_ms and make_index"):
        DelayIndexRegistry(**settings)


# The index and its views.


class SharedClock:
    """Advances by a millisecond at each reading, in any thread."""

    def __init__(self):
        self._ticks = count(1)
        self.latest_ms = 0

    def now(self):
        now_ms = next(self._ticks)
        # Not above the times that were handed out, and so not above those that the index was given.
        self.latest_ms = max(self.latest_ms, now_ms)
        return now_ms


class DispatcherInThread:
    """Reads, polls and acks in its own thread; each message is to come to it once."""

    def __init__(self, index, times, clock, *, is_attached):
        self.index, self.times, self.clock = index, times, clock
        self.delivered = set()
        self.read_end = 0
        self.view = index.open_view(lambda position: False)
        # Where the index is fed: nothing that its reader has yet to come to.
        self.view.passed(Position(3, 0))
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
        is_to_wait = self.view.add_message(position, deliver_at_ms=deliver_at_ms, now_ms=self.clock.now())
        self.read_end += 1
        if not is_to_wait:
            self.deliver(position)

    def poll(self, now_ms):
        for position in self.view.scheduled_messages(20, now_ms=now_ms):
            self.deliver(position)

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
                self.poll(self.clock.now())
            if not rng.randrange(20):
                assert self.view.delayed_message_count <= self.read_end
                assert self.view.memory_bytes > 0
        while self.view.has_message_available(now_ms=10**9):
            self.poll(10**9)


def run_dispatchers(index, *, is_fed):
    rng = random.Random(1)
    # The clock is asked by all threads.
    times = [each * THREADS + rng.randrange(1_000) for each in range(MESSAGES)]
    clock = SharedClock()
    dispatchers = [DispatcherInThread(index, times, clock, is_attached=number % 2 == 0) for number in range(THREADS)]

    def work(number):
        if is_fed and number == 0:
            for first in range(0, MESSAGES, 50):
                index.feed_many(3, range(first, first + 50), times[first : first + 50], now_ms=clock.now())
        dispatchers[number].run(random.Random(number))

    in_threads(work)
    for dispatcher in dispatchers:
        assert len(dispatcher.delivered) == MESSAGES, "lost"
    index._check()
    assert len(index) == 0
    assert index.now_ms == 10**9


@pytest.mark.slow
@pytest.mark.parametrize("is_fed", [False, True])
@pytest.mark.parametrize("due_log_bytes_max", [0, 5_000, 1 << 20])
def test_each_message_comes_once_to_each_and_never_early(due_log_bytes_max, is_fed):
    for _ in range(5):
        run_dispatchers(TopicDelayIndex(tick_time_ms=TICK, due_log_bytes_max=due_log_bytes_max), is_fed=is_fed)


@pytest.mark.slow
def test_an_index_whose_lock_does_nothing_is_caught():
    errors = (AssertionError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, BufferError)
    with pytest.raises(errors):
        often(lambda: run_dispatchers(index_without_lock(), is_fed=False))


def index_without_lock():
    index = TopicDelayIndex(tick_time_ms=TICK, due_log_bytes_max=0)
    index.lock = nullcontext()
    return index
