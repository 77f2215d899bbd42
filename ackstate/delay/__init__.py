"""Delayed messages: one index for a topic, one view of it for each subscription; no clock."""

from ackstate.delay.buckets.index import BucketedDelayIndex
from ackstate.delay.buckets.recovery import BucketRecoveryReport
from ackstate.delay.buckets.snapshots import BucketRegistry, SnapshotLedgers, SnapshotStorage
from ackstate.delay.config import DelayConfig
from ackstate.delay.in_memory import InMemoryDelayTracker
from ackstate.delay.index import TopicDelayIndex
from ackstate.delay.tracker import DelayedDeliveryTracker
from ackstate.delay.view import SubscriptionDelayView

__all__ = [
    "BucketRecoveryReport",
    "BucketRegistry",
    "BucketedDelayIndex",
    "DelayConfig",
    "DelayedDeliveryTracker",
    "InMemoryDelayTracker",
    "SnapshotLedgers",
    "SnapshotStorage",
    "SubscriptionDelayView",
    "TopicDelayIndex",
]

if __name__ == "delay":
    raise ImportError("delay is a link to a folder of ackstate: import ackstate.delay")
