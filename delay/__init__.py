"""Which delayed messages are due? One index for a topic, one view of it for each subscription; no clock."""

from delay.config import DelayConfig
from delay.in_memory import InMemoryDelayTracker
from delay.index import TopicDelayIndex
from delay.registry import DelayIndexRegistry
from delay.tracker import DelayedDeliveryTracker
from delay.view import SubscriptionDelayView

__all__ = [
    "DelayConfig",
    "DelayIndexRegistry",
    "DelayedDeliveryTracker",
    "InMemoryDelayTracker",
    "SubscriptionDelayView",
    "TopicDelayIndex",
]
