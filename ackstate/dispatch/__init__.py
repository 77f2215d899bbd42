"""The parts of a `Subscription`: messages in flight, queued and delayed, and the choice of the next message to send."""

from ackstate.dispatch.admission import AckRefusedError
from ackstate.dispatch.consumers import ConsumerBusyError, ConsumerClosedError, SubscriptionType
from ackstate.dispatch.explain import (
    BlockReason,
    ConsumerUse,
    DispatchStats,
    HoleReport,
    RuleStats,
)
from ackstate.dispatch.options import (
    DeadLetterPolicy,
    Delivery,
    DispatchRound,
    Start,
    StartTime,
    SubscriptionOptions,
)
from ackstate.dispatch.subscription import Subscription

__all__ = [
    "AckRefusedError",
    "BlockReason",
    "ConsumerBusyError",
    "ConsumerClosedError",
    "ConsumerUse",
    "DeadLetterPolicy",
    "Delivery",
    "DispatchRound",
    "DispatchStats",
    "HoleReport",
    "RuleStats",
    "Start",
    "StartTime",
    "Subscription",
    "SubscriptionOptions",
    "SubscriptionType",
]
