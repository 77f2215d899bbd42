"""Limits on dispatch and on publishing, and the policies that set them: numbers in, a verdict out; no clock."""

from ackstate.limits.broker import BrokerLimit as BrokerLimit
from ackstate.limits.gate import DispatchGate as DispatchGate
from ackstate.limits.limiter import AckLimiter
from ackstate.limits.policies import (
    BrokerDelayedDelivery as BrokerDelayedDelivery,
    DelayedDeliveryPolicies,
    DelayPolicyRefusedError as DelayPolicyRefusedError,
    DeliveryDelayExceededError as DeliveryDelayExceededError,
    EffectiveDelayedDelivery as EffectiveDelayedDelivery,
    Policies as Policies,
    PolicyOwner as PolicyOwner,
    PolicyStore,
    check_namespace_settable as check_namespace_settable,
    check_topic_settable as check_topic_settable,
    effective as effective,
)
from ackstate.limits.rules import GateLimits as GateLimits, Rule, Usage as Usage, Verdict as Verdict

__all__ = ["AckLimiter", "DelayedDeliveryPolicies", "PolicyStore", "Rule"]

if __name__ == "limits":
    raise ImportError("limits is a link to a folder of ackstate: import ackstate.limits")
