"""Each tracker at the edges of its promise: how early at most, how late at most, and that nothing is lost.

The times are those of the trackers' docstrings, written out.
"""

import pytest

from ackstate import MemoryStore, Position
from ackstate.delay import BucketedDelayIndex, BucketRegistry, DelayConfig, SnapshotStorage, TopicDelayIndex
from ackstate.stores.base import StoreError
from delay_driver import NO_DELAY, DelayBroker
from tracker_kinds import BucketedKind, BucketedViewsKind, InMemoryKind, ViewsKind

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, _ in FIRST_COMES.values()], ids=FIRST_COMES)
def test_a_thousand_come_ten_at_a_time_past_a_hole(kind):
    """The first one is sent and never acked."""
    broker = DelayBroker(kind, tick_ms=100, clock_ms=0, subscription_count=1)
    (dispatcher,) = broker.dispatchers
    broker.publish(NO_DELAY, *[500] * 1_000)
    dispatcher.read()
    broker.clock_ms = 700
    for _ in range(100):
        assert len(dispatcher.poll(10)) == 10
        dispatcher.send_again()
        for position in dispatcher.sent[-10:]:
            dispatcher.ack(position)
    assert dispatcher.poll(10) == []
    assert dispatcher.lacks() == set()
    assert dispatcher.in_flight == {broker.log[0]}


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
