"""The parts of a `Subscription`: messages in flight, queued and delayed, and the choice of the next message to send."""

from ackstate.dispatch.hole_report import (
    HoleReport,
)
from ackstate.dispatch.start import (
    Start,
    StartTime,
)
from ackstate.dispatch.stats import (
    ConsumerUse,
    DispatchStats,
    RuleStats,
)
from ackstate.dispatch.subscription import (
    AckRefusedError,
    BlockReason,
    ConsumerBusyError,
    ConsumerClosedError,
    DeadLetterPolicy,
    Delivery,
    DispatchRound,
    Subscription,
    SubscriptionOptions,
    SubscriptionType,
)

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
