"""How many calls a message costs, from publish to ack: work for each batch must not become work for each message."""

import gc
import random
import sys
from collections import Counter
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

import ackstate
from ackstate import (
    CursorConfig,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    SqliteStore,
    Start,
    Subscription,
    SubscriptionType,
    Topic,
    TopicSettings,
)
from ackstate.cursor import PersistTarget
from ackstate.delay import TopicDelayIndex
from ackstate.limits import DispatchGate, GateLimits
from ackstate.topic import BacklogPolicy, MessageLog, Retention

MESSAGES = 1_000
STORES = {"memory": lambda _: MemoryStore(), "sqlite": SqliteStore}


LIBRARY = str(Path(ackstate.__file__).parent)


class CallCounter:
    """Counts calls of Python functions, and of generators each time they resume; of the library by module, too."""

    def __init__(self):
        self.counts = Counter()
        self.by_module = Counter()
        self._step = ""

    def _note(self, frame, event, _argument):
        if event == "call":
            self.counts[self._step] += 1
            if frame.f_code.co_filename.startswith(LIBRARY):
                self.by_module[frame.f_code.co_filename] += 1

    def __call__(self, step, function, *arguments, **named):
        self._step = step
        before = sys.getprofile()
        gc.disable()  # The objects of other tests may call functions when they are collected.
        sys.setprofile(self._note)
        try:
            return function(*arguments, **named)
        finally:
            sys.setprofile(before)
            gc.enable()

    def per_message(self):
        return {step: count / MESSAGES for step, count in self.counts.items()}


def calls_per_message(store, kind=SubscriptionType.SHARED, *, acks_at_once=False, delays=False, in_rounds=False):
    counter = CallCounter()
    log = MessageLog.open(store, topic="t", entries_per_ledger_max=10**6)
    cursor = ManagedCursor.open(
        store, topic="t", subscription="s", ledgers=log.ledgers, config=CursorConfig(), now_ms=0
    )
    view = TopicDelayIndex(tick_time_ms=1_000).open_view(cursor.is_acked) if delays else None
    subscription = Subscription(log, cursor, gate=DispatchGate(GateLimits()), kind=kind, delays=view)
    for consumer in "ab":
        subscription.consumer_opened(consumer)
    keys = [b"%d" % number for number in range(50)]
    for first in range(0, MESSAGES, 100):
        batch = [Message(b"x", key=keys[number % 50], publish_time_ms=1) for number in range(first, first + 100)]
        counter("publish", log.publish, batch)
    held = []
    while sent := sent_to_all(counter, subscription, in_rounds=in_rounds):
        held += sent
    assert len(held) == MESSAGES
    random.Random(1).shuffle(held)
    if acks_at_once:
        for first in range(0, MESSAGES, 100):
            counter("ack", subscription.ack_many, held[first : first + 100], now_ms=2)
    else:
        for position in held:
            counter("ack", subscription.ack, position, now_ms=2)
    assert cursor.mark_delete_position == log.ledgers.last_confirmed
    return counter.per_message()


def sent_to_all(counter, subscription, *, in_rounds):
    """Send 100 messages to each of two consumers, or as many as a round does, and return their positions."""
    if not in_rounds:
        batches = [counter("dispatch", subscription.dispatch, consumer, 100, now_ms=1) for consumer in "ab"]
    else:
        for consumer in "ab":
            counter("dispatch", subscription.add_permits, consumer, 200)
        batches = [each for _, each in counter("dispatch", subscription.dispatch_all, now_ms=1, waiter=list).deliveries]
    return [delivery.position for batch in batches for delivery in batch]


@pytest.mark.parametrize("store", STORES)
def test_a_message_costs_few_calls(store, tmp_path):
    with closing(STORES[store](tmp_path / "store")) as opened:
        counts = calls_per_message(opened)
    assert counts["publish"] <= 2
    assert counts["dispatch"] <= 4
    assert counts["ack"] <= 7


def test_a_key_in_a_round_with_acks_in_lists_costs_few_calls():
    counts = calls_per_message(MemoryStore(), SubscriptionType.KEY_SHARED, acks_at_once=True, in_rounds=True)
    assert counts["dispatch"] <= 5.3
    assert counts["ack"] <= 1.03


@pytest.mark.parametrize(("name", "call_count"), [("memory", 65), ("sqlite", 69)])
def test_a_persist_of_one_ack_costs_some_calls(tmp_path, name, call_count):
    """Calls of a round of its own; a cursor that persists each ack pays them for each message."""
    counter = CallCounter()
    ledgers = LedgerMap.from_counts({7: 1_000})
    with closing(STORES[name](tmp_path)) as store:
        cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=ledgers, now_ms=0)
        for entry_id in range(2, 8, 2):
            counter.counts.clear()
            cursor.ack(Position(7, entry_id), now_ms=0)
            assert counter("persist", cursor.persist, now_ms=0).route is PersistTarget.DELTA
    assert counter.counts["persist"] <= call_count


def ack_to_receipt(store):
    topic = Topic.open(store, "acked", now_ms=0)
    subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    sent = topic.publish([Message(b"x") for _ in range(20)], now_ms=0)
    subscription.dispatch("ann", 20, now_ms=1)
    positions = iter(sent[2::2])

    def walk():
        receipt = subscription.ack(next(positions), now_ms=2)
        subscription.cursor.persist(now_ms=2)
        assert subscription.cursor.durable(receipt)

    return walk


def publish_to_late_delivery(store):
    topic = Topic.open(store, "delayed", now_ms=0)
    subscription = topic.subscribe("s", start=Start.EARLIEST, now_ms=0)
    times = count(10_000, 10_000)

    def walk():
        now_ms = next(times)
        topic.publish([Message(b"x", deliver_at_ms=now_ms + 5_000)], now_ms=now_ms)
        assert subscription.dispatch("ann", 10, now_ms=now_ms) == []
        assert len(subscription.dispatch("ann", 10, now_ms=now_ms + 7_000)) == 1

    return walk


def recovery(store):
    ledgers = LedgerMap.from_counts({7: 1_000})
    cursor = ManagedCursor.open(store, topic="recovered", subscription="s", ledgers=ledgers, now_ms=0)
    for entry_id in (2, 4, 6, 8):
        cursor.ack(Position(7, entry_id), now_ms=0)
        cursor.persist(now_ms=0)

    def walk():
        opened = ManagedCursor.open(store, topic="recovered", subscription="s", ledgers=ledgers, now_ms=0)
        assert opened.recovery_report.records_replayed == 5

    return walk


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize(
    ("prepare", "modules_max", "calls_max"),
    [(ack_to_receipt, 14, 65), (publish_to_late_delivery, 25, 326), (recovery, 20, 202)],
)
def test_the_walks_through_the_library_are_short(tmp_path, store, prepare, modules_max, calls_max):
    with closing(STORES[store](tmp_path / "store")) as opened:
        walk = prepare(opened)
        for _ in range(3):
            walk()
        counter = CallCounter()
        counter("walk", walk)
    assert len(counter.by_module) <= modules_max, sorted(counter.by_module)
    assert counter.by_module.total() <= calls_max


def test_a_list_of_acks_costs_the_same_calls_for_any_number():
    def calls(count):
        counter, ledgers = CallCounter(), LedgerMap.from_counts({7: 10_000})
        cursor = ManagedCursor.open(MemoryStore(), topic="t", subscription="s", ledgers=ledgers, now_ms=0)
        cursor.ack(Position(7, 3), now_ms=0)
        positions = [Position(7, entry_id) for entry_id in range(200, 200 + 2 * count, 2)]
        random.Random(1).shuffle(positions)
        assert counter("ack", cursor.ack_many, positions, now_ms=0).newly_acked == count
        return counter.counts["ack"]

    assert calls(1_000) == calls(100) <= 46


def test_a_publish_that_a_backlog_may_refuse_looks_at_no_ledger():
    """The log is above the limit of the backlog because of its retention."""

    def calls(ledger_count):
        retention = Retention(size_bytes=10**9, backlog_bytes_max=50, backlog_policy=BacklogPolicy.REFUSE_PUBLISH)
        settings = TopicSettings(retention=retention, cursor=CursorConfig(flush_interval_ms=0))
        topic, counter = Topic.open(MemoryStore(), "t", settings=settings, now_ms=0), CallCounter()
        subscription = topic.subscribe("s", now_ms=0)
        for _ in range(ledger_count):
            topic.publish([Message(bytes(9))], now_ms=0)
            topic.log.end_ledger()
            subscription.clear_backlog(now_ms=0)
            topic.tick(now_ms=0)
        for _ in range(2):  # The first publish with a backlog adds the ledgers before it.
            topic.publish([Message(b"")], now_ms=0)
        counter("publish", topic.publish, [Message(b"")], now_ms=0)
        assert len(topic.log.ledgers.counts()) == ledger_count + 1
        return counter.counts["publish"]

    assert calls(100) == calls(10) < 110
