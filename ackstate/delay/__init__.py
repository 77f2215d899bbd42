"""Delayed messages: one index for a topic, one view of it for each subscription; no clock."""

from ackstate.delay.bucket_storage import (
    BucketRecoveryReport as BucketRecoveryReport,
    BucketRegistry as BucketRegistry,
    SnapshotStorage as SnapshotStorage,
)
from ackstate.delay.buckets import BucketedDelayIndex
from ackstate.delay.config import DelayConfig, TrackerKind
from ackstate.delay.in_memory import InMemoryDelayTracker
from ackstate.delay.index import TopicDelayIndex
from ackstate.delay.view import (
    DelayedDeliveryTracker as DelayedDeliveryTracker,
    SubscriptionDelayView as SubscriptionDelayView,
)

__all__ = ["BucketedDelayIndex", "DelayConfig", "InMemoryDelayTracker", "TopicDelayIndex", "TrackerKind"]

if __name__ == "delay":
    raise ImportError("delay is a link to a folder of ackstate: import ackstate.delay")
