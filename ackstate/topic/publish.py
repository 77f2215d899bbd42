"""Publishes to a topic under its delivery-delay policies, and counts their effects."""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.limits.policies import DeliveryDelayExceededError, Policies, PolicyOwner, effective
from ackstate.message import CheckedMessages, checked_messages
from ackstate.topic.log import checked_time
from ackstate.topic_name import parse_topic

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.limits.policies import BrokerDelayedDelivery, EffectiveDelayedDelivery, PolicyStore
    from ackstate.message import Message
    from ackstate.position import Position
    from ackstate.topic.log import MessageLog, Publication

REJECTED = "pulsar.broker.topic.messages.delayed.rejected"
OVERRIDDEN = "pulsar.broker.topic.messages.fixed.delay.overridden"


class CounterSample(NamedTuple):
    """A counter of one topic, as OpenTelemetry has it; the unit is ``{message}``.

    Attributes:
        name: `REJECTED` or `OVERRIDDEN`.
        attributes: ``pulsar.cluster``, ``pulsar.namespace`` and ``pulsar.topic``.
        value: Messages so far, those of a batch each for itself.
    """

    name: str
    attributes: dict[str, str]
    value: int


@final
class PublishCounters:
    """How many messages the policies rejected or overrode, for each topic of a broker. Safe for any number of threads.

    Args:
        cluster: The name of the cluster that the broker is in.

    Source: PIP-437.
    """

    def __init__(self, *, cluster: str) -> None:
        self._cluster = cluster
        self._lock = threading.Lock()
        # By counter and topic, from when the topic is added.
        self._values: dict[tuple[str, str], int] = {}

    def add_topic(self, topic: str) -> None:
        """Count a topic from 0; no-op if it is counted already.

        Args:
            topic: As Pulsar names it, like ``persistent://public/default/orders``; for any other text, the namespace is
                empty.
        """
        with self._lock:
            for name in (REJECTED, OVERRIDDEN):
                self._values.setdefault((name, topic), 0)

    def remove_topic(self, topic: str) -> None:
        """Forget a topic, such as one that another broker has now; no-op if it is not counted."""
        with self._lock:
            for name in (REJECTED, OVERRIDDEN):
                self._values.pop((name, topic), None)

    def count(self, name: str, *, topic: str, message_count: int) -> None:
        """Count messages of a topic; no-op if it was not added, or was removed."""
        with self._lock:
            if (name, topic) in self._values:
                self._values[name, topic] += message_count

    def samples(self) -> list[CounterSample]:
        """Return every counter of every topic, topics in the order they were added."""
        with self._lock:
            values = dict(self._values)
        samples = []
        for (name, topic), value in values.items():
            parts = parse_topic(topic)
            namespace = parts.namespace if parts else ""
            attributes = {"pulsar.cluster": self._cluster, "pulsar.namespace": namespace, "pulsar.topic": topic}
            samples.append(CounterSample(name, attributes, value))
        return samples


def policy_owner(topic: str) -> PolicyOwner | None:
    """Return whose policies apply to a topic; None if it is not named as in Pulsar."""
    name = parse_topic(topic)
    if name is None:
        return None
    tenant, _, namespace = name.namespace.partition("/")
    try:
        return PolicyOwner(tenant, namespace, name.local)
    except ValueError:
        return None


def delay_policies(
    topic: str, store: PolicyStore | None, broker: BrokerDelayedDelivery
) -> Callable[[], EffectiveDelayedDelivery]:
    """Return a function that returns the delay policies in force for a topic, with the errors of `PolicyStore.read`."""
    owner = policy_owner(topic)
    if store is None or owner is None:
        nothing = Policies().delayed_delivery
        in_force = effective(nothing, nothing, broker)
        return lambda: in_force

    def _read() -> EffectiveDelayedDelivery:
        of_topic, of_namespace = (store.read(each).policies.delayed_delivery for each in (owner, owner.of_namespace))
        return effective(of_topic, of_namespace, broker)

    return _read


@final
class TopicPublisher:
    """Appends messages to a topic's log at the delivery times that its policies give them.

    The policies are read at each publish, so a change applies from the next one on. One writer at a time. The log
    reports delayed messages to the delay indexes of the topic's subscriptions.

    Attributes:
        log: The topic's messages.

    Args:
        log: The topic's messages.
        topic: Its name in the counters; see `PublishCounters.add_topic`.
        policies: Returns the policies in force now.
        counters: Counts the effects of the policies.
    """

    def __init__(
        self,
        log: MessageLog,
        *,
        topic: str,
        policies: Callable[[], EffectiveDelayedDelivery],
        counters: PublishCounters,
    ) -> None:
        self.log = log
        self._topic = topic
        self._policies = policies
        self._counters = counters
        counters.add_topic(topic)

    def publish(self, messages: Sequence[Message], *, now_ms: int | None = None) -> list[Position]:
        """Append messages with one sync, all or nothing, and return their positions in order.

        Args:
            messages: Those without a publish time are published at `now_ms`.
            now_ms: The present, for `MessageLog.publish`, too; None leaves such messages without a publish time.

        Raises:
            DeliveryDelayExceededError: One of them has more than the maximum delay. None is stored; all that exceed the
                maximum are counted.
            TypeError, ValueError, LogFencedError, StoreError: As `MessageLog.publish`; nothing is counted.
        """
        return self.prepare(messages, now_ms=now_ms).append()

    def prepare(self, messages: Sequence[Message], *, now_ms: int | None = None) -> Publication:
        """Return messages at their delivery times for `publish_all`; errors as `publish`, and nothing is stored."""
        now_ms, policies = checked_time(now_ms), self._policies()
        refusal: DeliveryDelayExceededError | None = None
        decided: list[Message] = []
        rejected = overridden = 0
        for message in checked_messages(messages):
            published_ms = message.publish_time_ms or now_ms or 0
            try:
                decision = policies.deliver_at(published_ms, message.deliver_at_ms)
            except DeliveryDelayExceededError as error:
                refusal = error
                rejected += message.message_count
                continue
            decided.append(message._replace(publish_time_ms=published_ms, deliver_at_ms=decision.deliver_at_ms))
            overridden += message.message_count if decision.overrides_client else 0
        if refusal is not None:
            self._counters.count(REJECTED, topic=self._topic, message_count=rejected)
            raise refusal
        publication = self.log.prepare_checked(CheckedMessages(decided), now_ms)
        if not overridden:
            return publication
        count = partial(self._counters.count, OVERRIDDEN, topic=self._topic, message_count=overridden)
        return publication._replace(on_stored=count)
