"""Topics and their parts: the message log, publishing under policies, subscriptions, retention."""

from ackstate.topic.log import (
    MessageLog,
)
from ackstate.topic.publish import (
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
from ackstate.topic.subscriptions import (
    StoredSubscription as StoredSubscription,
    SubscriptionTypeError as SubscriptionTypeError,
    stored_subscriptions as stored_subscriptions,
)
from ackstate.topic.topic import (
    SubscriptionRequest as SubscriptionRequest,
    Topic as Topic,
    delete_topic as delete_topic,
)
from ackstate.topic.topics import (
    Topics as Topics,
    publish_all as publish_all,
)

__all__ = ["MessageLog", "Retention"]
