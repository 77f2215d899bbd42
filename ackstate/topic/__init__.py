"""The parts of a topic: its message log, publisher, policies and delay buckets."""

from ackstate.topic.deletion import (
    delete_topic,
)
from ackstate.topic.message_log import (
    MessageLog,
)
from ackstate.topic.publish_all import (
    publish_all,
)
from ackstate.topic.publisher import (
    CounterSample,
    PublishCounters,
    TopicPublisher,
)
from ackstate.topic.retention import (
    BacklogPolicy,
    BacklogQuotaExceededError,
    BacklogReport,
    Retention,
    backlog_report,
    trim_log,
)
from ackstate.topic.settings import (
    TopicSettings,
)
from ackstate.topic.subscribing import (
    SubscriptionRequest,
)
from ackstate.topic.subscription_type import (
    SubscriptionTypeError,
)
from ackstate.topic.topic import (
    Topic,
)
from ackstate.topic.topics import (
    Topics,
)

__all__ = [
    "BacklogPolicy",
    "BacklogQuotaExceededError",
    "BacklogReport",
    "CounterSample",
    "MessageLog",
    "PublishCounters",
    "Retention",
    "SubscriptionRequest",
    "SubscriptionTypeError",
    "Topic",
    "TopicPublisher",
    "TopicSettings",
    "Topics",
    "backlog_report",
    "delete_topic",
    "publish_all",
    "trim_log",
]
