"""Whatever tracks delayed messages: never early, never lost, at most once to each subscription.

One machine drives all three trackers as dispatchers do, with storage that fails; then stories without chance.
"""

from contextlib import suppress

import pytest
from hypothesis import assume
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from ackstate import MemoryStore, Position, StoreError
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, SnapshotStorage, TopicDelayIndex
from ackstate.stores.memory import Fault, FaultKind, PowerCutError
from delay_driver import ALL, KINDS, NO_DELAY, BucketedKind, BucketedViewsKind, DelayBroker, InMemoryKind, ViewsKind
from strategies import few

# Long against the steps of time, so that something waits at most moments.
delays = st.sampled_from([NO_DELAY, 0, 9, 64]) | st.integers(1, 200)
picks = st.integers(0, 99)
subscriptions = st.integers(0, 1)
bucket_settings = st.fixed_dictionaries(
    {},
    optional={
        "min_index_count_per_bucket": st.integers(1, 4),
        "max_time_step_per_segment_ms": st.sampled_from([1, 30, 1_000]),
        "max_indexes_per_segment": st.sampled_from([None, 1, 2]),
        "max_bucket_count": st.sampled_from([None, 1, 2, 3]),
        "ledger_step_per_bucket": st.sampled_from([None, 2]),
    },
)


class TrackersMachine(RuleBasedStateMachine):
    """One topic, two subscriptions, a growing log; a subclass says which tracker."""

    kind: object

    @initialize(tick_ms=st.sampled_from([1, 10, 64, 100]), settings=bucket_settings)
    def open(self, tick_ms, settings):
        self.broker = DelayBroker(self.kind, tick_ms=tick_ms, **settings)

    @rule(
        after=st.integers(0, 6),
        times=st.integers(1, 5),
        fault=st.sampled_from([FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER]),
    )
    def storage_fails(self, after, times, fault):
        if self.broker.store is not None:
            for at in range(after, after + times):
                self.broker.store.inject(Fault(self.broker.store.mutation_count + at, fault))

    @rule(delays=st.lists(delays, min_size=1, max_size=6), which=subscriptions)
    def publish(self, delays, which):
        """To a reader that is at the log's end, one of two; the other comes to it later, if ever."""
        self.broker.publish(*delays)
        self.broker.dispatchers[which].read(len(delays))

    @rule(count=st.integers(1, 6))
    def feed(self, count):
        self.broker.feed(self.broker.fed_count + count)

    @rule(which=subscriptions, count=st.integers(1, 8))
    def read(self, which, count):
        self.broker.dispatchers[which].read(count)

    @rule(which=subscriptions, count=st.integers(1, 8))
    def read_fails(self, which, count):
        self.broker.dispatchers[which].rewind(count)

    @rule(which=subscriptions, max_messages=st.sampled_from([0, 1, 2, 3, ALL]))
    def poll(self, which, max_messages):
        self.broker.dispatchers[which].poll(max_messages)

    @rule(which=subscriptions, count=st.integers(1, 4))
    def send_again(self, which, count):
        self.broker.dispatchers[which].send_again(count)

    @rule(which=subscriptions, pick=picks)
    def ack(self, which, pick):
        """Also of messages that wait: they are cancelled."""
        if self.broker.log:
            self.broker.dispatchers[which].ack(self.broker.log[pick % len(self.broker.log)])

    @rule(which=subscriptions, count=st.integers(1, 6))
    def ack_in_order(self, which, count):
        dispatcher = self.broker.dispatchers[which]
        for position in sorted(dispatcher.lacks() | dispatcher.in_flight)[:count]:
            dispatcher.ack(position)

    @rule(which=subscriptions, pick=picks)
    def nack(self, which, pick):
        dispatcher = self.broker.dispatchers[which]
        if dispatcher.in_flight:
            dispatcher.nack(sorted(dispatcher.in_flight)[pick % len(dispatcher.in_flight)])

    @rule(forward_ms=st.integers(1, 40))
    def time_passes(self, forward_ms):
        self.broker.clock_ms += forward_ms

    @rule(back_ms=st.sampled_from([1, 30, 500]))
    def clock_jumps_back(self, back_ms):
        self.broker.clock_ms = max(0, self.broker.clock_ms - back_ms)

    @rule(which=subscriptions, tick_ms=st.sampled_from([1, 7, 50]))
    def reset_tick(self, which, tick_ms):
        self.broker.dispatchers[which].set_tick(tick_ms)

    @rule(which=subscriptions)
    def acks_become_durable(self, which):
        self.broker.dispatchers[which].durable = set(self.broker.dispatchers[which].acked)

    @rule()
    def crash(self):
        self.broker.crash()

    @rule(which=subscriptions)
    def new_subscription(self, which):
        self.broker.replace(which)

    @rule(which=subscriptions, pick=picks)
    def seek(self, which, pick):
        assume(self.broker.log)
        self.broker.dispatchers[which].seek(pick % len(self.broker.log))

    @rule()
    def trim(self):
        self.broker.trim()

    @invariant()
    def counts_are_exact(self):
        self.broker.check()

    def teardown(self):
        if hasattr(self, "broker"):
            self.broker.drain()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_message_comes_in_time_and_once(kind):
    run_state_machine_as_test(type("Machine", (TrackersMachine,), {"kind": kind}), settings=few)


# Stories, with settings: what the broker and its first dispatcher do, or all dispatchers.

STORIES = {
    # Both subscriptions poll at every moment at which something could come too early.
    "asks every ms": (
        {"tick_ms": 100},
        "publish 1 99 100 101 163 164 199 200 228 250; feed; " + "all work; later 1; " * 400,
    ),
    "asks for one at a time": (
        {}, "publish 64 64 64 64 64 64 20 29 38 47 56 65 74 83; feed; "
        + "all read 2; all poll 1; all send_again; later 4; " * 40 + "check",
    ),
    # The topic is idle, and its tick is set below the broker's.
    "sleeps until woken": ({"tick_ms": 1_000}, "all set_tick 100; publish 5000 5500 6001 7777"),
    # The messages are in sealed buckets, where those are.
    "reads what waits again when it is due": (
        {}, "publish 50 60 70 80 90 100 110 120; publish 500; read; later 95; rewind 10000; read; later 5; work; "
        "sent_among_others 0 1 2 3 4",
    ),
    "acks what waits": ({}, "publish 50 60 70; read; ack 1; later 200; poll; send_again; sent 0 2"),
    "seeks back": (
        {}, "publish -1 50 90 900; work; later 60; work; sent 0 1; later 60; poll 0; seek 1; nothing_comes; read; "
        "sent 1 2; check",
    ),
    "crashes while most wait": (
        {}, f"publish {' '.join(map(str, range(30, 330, 10)))}; feed; all read; later 100; work; ack 0; crash; check",
    ),
    # The message is in a sealed bucket, where those are, in one segment with a message that is due later.
    "crashes when a message falls due": ({"tick_ms": 1}, "publish -1 9 64 64 9; read; later 9; crash; check"),
    # Four ledgers in which the later messages are due earlier: whichever segment comes first, none is left out.
    "waits for what is due last": (
        {}, f"publish {' '.join(map(str, range(400, 80, -20)))} 500; read; check; " + "work; later 10; " * 50,
    ),
    "the clock runs back": (
        {"tick_ms": 64},
        "publish 30 60 90 128 300; "
        + "".join(f"later {each}; work; check; " for each in (0, 70, -50, 20, 200, -300, 100)),
    ),
    "the storage fails while the log goes on": (
        {}, "storage_fails 4; publish 10 20 30 40 41 60 70 10 20 30 40; read; later 40; work; check",
    ),
}  # fmt: skip


def tell(broker, text):
    for step in filter(None, text.split("; ")):
        verb, *words = step.split()
        dispatchers = broker.dispatchers if verb == "all" else broker.dispatchers[:1]
        verb, *words = words if verb == "all" else (verb, *words)
        numbers = [int(word) for word in words]
        messages = [broker.log[number] for number in numbers if verb in {"ack", "sent", "sent_among_others"}]
        match verb:
            case "publish":
                broker.publish(*numbers)
            case "later":
                broker.clock_ms += numbers[0]
            case "storage_fails":
                for at in range(numbers[0] if broker.store is not None else 0):
                    broker.store.inject(Fault(broker.store.mutation_count + at, FaultKind.FAIL_BEFORE))
            case "feed" | "crash" | "check":
                getattr(broker, verb)()
            case "ack":
                dispatchers[0].ack(*messages)
            case "sent":
                assert dispatchers[0].sent == messages
            case "sent_among_others":
                assert set(dispatchers[0].sent) >= set(messages)
            case "nothing_comes":
                assert dispatchers[0].poll() == []
            case _:
                for each in dispatchers:
                    getattr(each, verb)(*numbers)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("story", STORIES)
def test_the_stories_that_find_planted_bugs_end_well(story, kind):
    settings, text = STORIES[story]
    broker = DelayBroker(kind, **settings)
    tell(broker, text)
    broker.drain()


# How early and how late at most: the times of the trackers' docstrings, written out.

# With a tick of 100 ms: the precision in memory is 64 ms.
FIRST_COMES = {
    "in memory": (InMemoryKind(strict=False), {640: 603, 703: 603, 704: 667, 739: 667}),
    "in memory, strict": (InMemoryKind(strict=True), {640: 640, 641: 704, 704: 704, 705: 768}),
    "view": (ViewsKind(), {640: 700, 700: 700, 701: 800, 799: 800}),
    "bucketed": (BucketedKind(strict=False), {640: 540, 700: 600, 701: 601, 799: 699}),
    "bucketed, strict": (BucketedKind(strict=True), {640: 640, 700: 700, 701: 701, 799: 799}),
    "view of buckets": (BucketedViewsKind(strict=True), {640: 640, 700: 700, 701: 701, 799: 799}),
    "view of buckets, not strict": (BucketedViewsKind(strict=False), {640: 640, 700: 700, 701: 701, 799: 799}),
}


@pytest.mark.parametrize(("kind", "comes_ms"), FIRST_COMES.values(), ids=FIRST_COMES)
def test_when_a_message_comes(kind, comes_ms):
    broker = DelayBroker(kind, tick_ms=100, clock_ms=0, subscription_count=1)
    (dispatcher,) = broker.dispatchers
    messages = broker.publish(*comes_ms)
    dispatcher.read()
    assert dispatcher.sent == []
    came_ms = {}
    for broker.clock_ms in range(500, 900):
        for position in dispatcher.poll():
            came_ms[position] = broker.clock_ms
    assert came_ms == dict(zip(messages, comes_ms.values(), strict=True))


STRICT = DelayConfig(
    is_deliver_at_time_strict=True, min_index_count_per_bucket=2, max_indexes_per_segment=2, max_bucket_count=9
)


@pytest.mark.parametrize("make_index", [lambda: TopicDelayIndex(tick_time_ms=10), lambda: BucketedDelayIndex(STRICT)])
def test_what_is_held_for_too_late_a_time_is_not_lost_when_a_reader_comes_to_it(make_index):
    """The reader has passed one message, so it is known how far it is; the next one is overdue."""
    index = make_index()
    view = index.open_view(set().__contains__)
    index.learn([(Position(3, 1), 10_000)])
    assert not view.add_message(Position(3, 0), deliver_at_ms=NO_DELAY, now_ms=500)
    must_wait = view.add_message(Position(3, 1), deliver_at_ms=100, now_ms=500)
    assert view.scheduled_messages(10, now_ms=20_000) == ([Position(3, 1)] if must_wait else [])


class UnreadableLedgers:
    def __init__(self, ledgers):
        self._ledgers = ledgers

    def __getattr__(self, name):
        return getattr(self._ledgers, name)

    def read(self, ledger_id, first, end):
        raise StoreError("not now")


def test_what_lies_in_a_segment_that_cannot_be_read_is_not_lost_to_who_reads_the_log():
    store = MemoryStore()
    storage = SnapshotStorage(UnreadableLedgers(store.ledgers), BucketRegistry(store.metadata, "/buckets"), "delayed")
    index = BucketedDelayIndex(STRICT, storage=storage)
    messages = [Position(3, entry_id) for entry_id in range(6)]
    first, second = (index.open_view(set().__contains__) for _ in range(2))
    for entry_id, position in enumerate(messages):
        assert first.add_message(position, deliver_at_ms=100 + entry_id, now_ms=0)
    assert first.add_message(Position(5, 0), deliver_at_ms=9_000, now_ms=0)
    assert index.stats().bucket_count == 1
    # Another subscription begins when all are overdue.
    came = [each for each in messages if not second.add_message(each, deliver_at_ms=100 + each.entry_id, now_ms=500)]
    came += second.scheduled_messages(10, now_ms=500)
    assert sorted(came) == messages


def test_what_is_due_at_the_moment_of_a_recovery_comes_at_that_moment():
    broker = DelayBroker(BucketedViewsKind(strict=False))
    broker.publish(*range(30, 330, 10))
    for dispatcher in broker.dispatchers:
        dispatcher.read()
    broker.clock_ms += 100
    broker.crash(took_ms=0)
    broker.drain()


def test_a_view_of_buckets_is_never_early_though_the_index_may_be():
    broker = DelayBroker(BucketedViewsKind(strict=False), subscription_count=1)
    broker.publish(50)
    broker.dispatchers[0].read()
    assert broker.dispatchers[0].tracker.next_delivery_ms == broker.deliver_at_ms[broker.log[0]]
    broker.drain()


# A crash before or after any change of the storage.


def go_on_until(broker, mutation):
    """Seal, load, drain, merge, trim and clear. A ledger's first message waits long, so that old buckets stay."""
    (dispatcher,) = broker.dispatchers
    for number in range(11):
        broker.publish(900, 330, 190, 0)
        dispatcher.work()
        for position in sorted(dispatcher.in_flight)[::2]:
            dispatcher.ack(position)
        dispatcher.durable = set(dispatcher.acked)
        broker.trim()
        broker.clock_ms += 45
        dispatcher.poll(3)
        if number == 8:
            dispatcher.tracker.clear()
            dispatcher.forget_reads()
        if broker.store.mutation_count > mutation:
            return


@pytest.mark.slow
# Before a change, the storage is as after the one before.
@pytest.mark.parametrize("fault", [pytest.param(FaultKind.CRASH_BEFORE, marks=pytest.mark.soak), FaultKind.CRASH_AFTER])
@pytest.mark.parametrize("kind", [BucketedKind, BucketedViewsKind])
def test_what_is_not_acked_is_delivered_after_a_crash_at_any_change(kind, fault):
    for change in range(200):
        broker = DelayBroker(kind(strict=True, max_bucket_count=2), subscription_count=1)
        mutation = broker.store.mutation_count + change
        broker.store.inject(Fault(mutation, fault))
        with suppress(PowerCutError):  # only `clear` lets it out
            go_on_until(broker, mutation)
        if broker.store.mutation_count <= mutation:
            assert change > 45
            return
        broker.crash()
        broker.drain()
    raise AssertionError("the story never ended")
