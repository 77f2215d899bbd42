"""Dispatches to all consumers at once, as events of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.cursor.subscription import SubscriptionType
from crash.model import checks
from crash.model.client_events import dispatch, note_dead_letters, note_sent
from crash.model.settings import CONSUMERS

if TYPE_CHECKING:
    from ackstate.dispatch.delivery import Delivery
    from crash.model.simulated_subscription import SimulatedSubscription
    from crash.model.simulation import BrokerSimulation

_ROUND_EVERY = 3


def dispatch_some(
    simulation: BrokerSimulation, side: SimulatedSubscription, consumer: str | None = None, count: int | None = None
) -> int:
    """Dispatch to one consumer or, if none is given, now and then to all; return the number of entries."""
    if consumer is None and simulation.step_count % _ROUND_EVERY == 0:
        return dispatch_all(simulation, side)
    return dispatch(simulation, side, consumer, count)


def dispatch_all(simulation: BrokerSimulation, side: SimulatedSubscription) -> int:
    """Give some consumers permits and dispatch to all of them, and return the number of entries."""
    subscription, count_max = side.subscription, simulation.settings.count_max
    for consumer in CONSUMERS[: simulation.settings.consumer_count]:
        if consumer not in subscription.consumers:
            subscription.consumer_opened(consumer)
        if count := min(simulation.random.choice((0, 5, 20)), count_max):
            subscription.add_permits(consumer, count)
    before = {consumer: checks.closed_for(side, consumer) for consumer in subscription.consumers}
    deliveries: list[tuple[str, list[Delivery]]] = []
    was_handed_over = False
    try:
        deliveries, _ = subscription.dispatch_all(now_ms=simulation.now_ms)
    finally:
        was_handed_over = note_dead_letters(simulation, side)
    for consumer, sent in deliveries:
        note_sent(simulation, side, consumer, sent)
    if simulation.settings.kind is SubscriptionType.KEY_SHARED:
        checks.check_keys(side)
    elif not was_handed_over:
        for consumer, closed_before in before.items():
            if subscription.permits(consumer) > 0:
                sent_elsewhere = [each for other, sent in deliveries if other != consumer for each in sent]
                weight = max(
                    (side.model.weight(side.model.log.numbers[each.position]) for each in sent_elsewhere), default=0
                )
                checks.check_shortage(side, consumer, closed_before, weight_elsewhere=weight)
    return sum(len(sent) for _, sent in deliveries)
