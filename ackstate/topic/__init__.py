"""The parts of a topic: its message log, publisher, policies and delay buckets."""

from ackstate.topic.deletion import (
    delete_topic as delete_topic,
)
from ackstate.topic.message_log import (
    MessageLog,
)
from ackstate.topic.publish_all import (
    publish_all as publish_all,
)
from ackstate.topic.publisher import (
    CounterSample as CounterSample,
    PublishCounters as PublishCounters,
    TopicPublisher as TopicPublisher,
)
from ackstate.topic.retention import (
    BacklogPolicy as BacklogPolicy,
    BacklogQuotaExceededError as BacklogQuotaExceededError,
    BacklogReport as BacklogReport,
    Retention,
    backlog_report as backlog_report,
    trim_log as trim_log,
)
from ackstate.topic.settings import (
    TopicSettings as TopicSettings,
)
from ackstate.topic.subscribing import (
    SubscriptionRequest as SubscriptionRequest,
)
from ackstate.topic.subscription_type import (
    SubscriptionTypeError as SubscriptionTypeError,
)
from ackstate.topic.topic import (
    Topic as Topic,
)
from ackstate.topic.topics import (
    Topics as Topics,
)

__all__ = ["MessageLog", "Retention"]
