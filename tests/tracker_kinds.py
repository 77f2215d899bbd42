"""The trackers of delayed messages as `delay_driver` takes them: how one is opened, and its permitted answers.

Each defines by how much a message may be early and late, whether acked ones are omitted, and the state after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass

from ackstate import MemoryStore
from ackstate.delay import (
    BucketedDelayIndex,
    BucketRegistry,
    DelayConfig,
    InMemoryDelayTracker,
    SnapshotStorage,
    TopicDelayIndex,
)


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


class InMemoryKind:
    """Pulsar's tracker, one for each subscription."""

    keeps_what_is_due = True  # also if it was offered once more, and the answer was to deliver it
    knows_acks = is_shared = is_fed = is_attached = False

    def __init__(self, *, strict):
        self.strict = strict

    def start(self, broker):
        pass

    def clockwork(self, broker):
        return Clockwork(broker.tick_ms, follows_back=True)

    def open(self, broker, dispatcher):
        dispatcher.tracker = InMemoryDelayTracker(
            tick_time_ms=broker.tick_ms, is_deliver_at_time_strict=self.strict, fixed_delay_detection_lookahead=0
        )

    def restart(self, broker, dispatcher):
        self.open(broker, dispatcher)

    def early_ms(self, clockwork):
        return 0 if self.strict else clockwork.tick_ms

    def late_ms(self, clockwork):
        precision_ms = 1 << clockwork.first_tick_ms.bit_length() - 1
        return precision_ms - 1 if self.strict else max(precision_ms - 1 - clockwork.tick_ms, 0)


class ViewsKind:
    """Views of one index of the topic."""

    knows_acks = is_shared = True
    keeps_what_is_due = False

    def __init__(self, *, is_attached=False, is_fed=False, due_log_bytes_max=1 << 20):
        self.is_attached, self.is_fed, self.due_log_bytes_max = is_attached, is_fed, due_log_bytes_max

    def start(self, broker):
        broker.index = TopicDelayIndex(tick_time_ms=broker.tick_ms, due_log_bytes_max=self.due_log_bytes_max)
        broker.clockwork = Clockwork(broker.tick_ms)
        fed_before, broker.fed_count = broker.fed_count, 0
        broker.feed(fed_before)

    def clockwork(self, broker):
        return broker.clockwork

    def open(self, broker, dispatcher):
        dispatcher.tracker = broker.index.open_view(lambda position: position in dispatcher.acked)
        if self.is_attached:
            dispatcher.tracker.attach(dispatcher)

    def restart(self, broker, dispatcher):
        self.open(broker, dispatcher)

    def early_ms(self, _):
        return 0

    def late_ms(self, clockwork):
        return clockwork.tick_ms_max - 1


class BucketedKind:
    """The tracker with snapshots, one for each subscription, all in one store."""

    knows_acks = keeps_what_is_due = is_shared = is_fed = is_attached = False

    def __init__(self, *, strict, **settings):
        self.strict = strict
        self.settings = {"min_index_count_per_bucket": 3, "max_indexes_per_segment": 2} | settings

    def start(self, broker):
        if broker.store is None:
            broker.store = MemoryStore()
        # The files on the disk survive a crash.
        broker.store = MemoryStore(broker.store.disk)

    def clockwork(self, broker):
        return Clockwork(broker.tick_ms)

    def open(self, broker, dispatcher):
        dispatcher.tracker = BucketedDelayIndex(self.config(broker), storage=self.storage(broker, dispatcher.name))

    def restart(self, broker, dispatcher):
        dispatcher.tracker, report = BucketedDelayIndex.recover(
            self.config(broker), storage=self.storage(broker, dispatcher.name), now_ms=dispatcher.now()
        )
        assert not report.fell_back
        recovered = {position for position in broker.log if position in dispatcher.tracker}
        assert recovered <= dispatcher.ever_waited, "recovered a message that was never added"
        dispatcher.waiting |= recovered

    def config(self, broker):
        return DelayConfig(tick_time_ms=broker.tick_ms, is_deliver_at_time_strict=self.strict, **self.settings)

    def storage(self, broker, name):
        registry = BucketRegistry(broker.store.metadata, f"/buckets/{name}")
        return SnapshotStorage(broker.store.ledgers, registry, f"delayed/{name}")

    def early_ms(self, clockwork):
        return 0 if self.strict else clockwork.tick_ms

    def late_ms(self, _):
        return 0


class BucketedViewsKind(BucketedKind):
    """Views of one index of the topic that has snapshots."""

    knows_acks = is_shared = True

    def __init__(self, *, strict, is_attached=False, is_fed=False, **settings):
        super().__init__(strict=strict, **settings)
        self.is_attached, self.is_fed = is_attached, is_fed

    def start(self, broker):
        is_new = broker.store is None
        super().start(broker)
        broker.clockwork = Clockwork(broker.tick_ms)
        if is_new:
            broker.index = BucketedDelayIndex(self.config(broker), storage=self.storage(broker, "t"))
        else:
            broker.clockwork.see(broker.clock_ms)
            broker.index, report = BucketedDelayIndex.recover(
                self.config(broker), storage=self.storage(broker, "t"), now_ms=broker.clock_ms
            )
            assert not report.fell_back
        fed_before, broker.fed_count = broker.fed_count, 0
        broker.feed(fed_before)

    def clockwork(self, broker):
        return broker.clockwork

    def early_ms(self, _):
        return 0

    def open(self, broker, dispatcher):
        ViewsKind.open(self, broker, dispatcher)

    def restart(self, broker, dispatcher):
        self.open(broker, dispatcher)


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
