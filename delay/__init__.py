"""Which delayed messages are due? One index for a topic, one view of it for each subscription; no clock."""

from delay.buckets.index import BucketedDelayIndex
from delay.buckets.recovery import BucketRecoveryReport
from delay.buckets.snapshots import BucketRegistry, SnapshotLedgers, SnapshotStorage
from delay.config import DelayConfig
from delay.in_memory import InMemoryDelayTracker
from delay.index import TopicDelayIndex
from delay.registry import DelayIndexRegistry
from delay.tracker import DelayedDeliveryTracker
from delay.view import SubscriptionDelayView

__all__ = [
    "BucketRecoveryReport",
    "BucketRegistry",
    "BucketedDelayIndex",
    "DelayConfig",
    "DelayIndexRegistry",
    "DelayedDeliveryTracker",
    "InMemoryDelayTracker",
    "SnapshotLedgers",
    "SnapshotStorage",
    "SubscriptionDelayView",
    "TopicDelayIndex",
]
