"""Which delayed messages are due? One index for a topic, one view of it for each subscription; no clock."""

from delay.bucket_recovery import BucketRecoveryReport
from delay.bucket_snapshots import BucketRegistry, SnapshotLedgers, SnapshotStorage
from delay.bucketed import BucketedDelayIndex
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
