"""Limits on dispatch and on publishing, and the policies that set them: numbers in, a verdict out; no clock."""

from ackstate.limits.broker import BrokerLimit
from ackstate.limits.gate import DispatchGate
from ackstate.limits.limiter import AckLimiter
from ackstate.limits.policies import (
    BrokerDelayedDelivery,
    DelayedDeliveryPolicies,
    DelayPolicyRefusedError,
    DeliveryDelayExceededError,
    EffectiveDelayedDelivery,
    Policies,
    PolicyOwner,
    PolicyStore,
    check_namespace_settable,
    check_topic_settable,
    effective,
)
from ackstate.limits.rules import GateLimits, Rule, Usage, Verdict

__all__ = [
    "AckLimiter",
    "BrokerDelayedDelivery",
    "BrokerLimit",
    "DelayPolicyRefusedError",
    "DelayedDeliveryPolicies",
    "DeliveryDelayExceededError",
    "DispatchGate",
    "EffectiveDelayedDelivery",
    "GateLimits",
    "Policies",
    "PolicyOwner",
    "PolicyStore",
    "Rule",
    "Usage",
    "Verdict",
    "check_namespace_settable",
    "check_topic_settable",
    "effective",
]

if __name__ == "limits":
    raise ImportError("limits is a link to a folder of ackstate: import ackstate.limits")
