"""The parts of a `Subscription`: messages in flight, queued and delayed, and the choice of the next message to send."""

from ackstate.dispatch.admission import AckRefusedError as AckRefusedError
from ackstate.dispatch.consumers import (
    ConsumerBusyError as ConsumerBusyError,
    ConsumerClosedError as ConsumerClosedError,
    SubscriptionType as SubscriptionType,
)
from ackstate.dispatch.explain import (
    BlockReason as BlockReason,
    ConsumerUse as ConsumerUse,
    DispatchStats as DispatchStats,
    HoleReport as HoleReport,
    RuleStats as RuleStats,
)
from ackstate.dispatch.options import (
    DeadLetterPolicy as DeadLetterPolicy,
    Delivery as Delivery,
    DispatchRound as DispatchRound,
    RetryPolicy as RetryPolicy,
    Start as Start,
    StartTime as StartTime,
    SubscriptionOptions,
)
from ackstate.dispatch.subscription import Subscription as Subscription

__all__ = ["SubscriptionOptions"]
