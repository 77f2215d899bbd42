"""The values of a dispatch: a delivery, a batch or a round of them, and the policy for dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.integers import check_count
from ackstate.message import Message
from ackstate.topic_name import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.position import Position

_UNLIMITED = 2**63


class Delivery(NamedTuple):
    """One message that is sent to a consumer.

    Attributes:
        position: Its position in the log.
        message: The published message.
        redelivery_count: How often it was sent before.
        unacked_words: The unacked messages of a batch that is partly acked, as in `BatchIndexes`; else empty.
    """

    position: Position
    message: Message
    redelivery_count: int = 0
    unacked_words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeadLetterPolicy:
    """The policy for a message that is given back again and again: who gets it, or the topic it is published to.

    A dead letter that could not be handed over or published, or whose ack would exceed a limit by then, stays unacked
    and waits for a second before the next attempt. No attempt is remembered by a crash or a seek, so a dead letter may
    be handed over more than once.

    Attributes:
        max_redelivery_count: How often it is sent again, 0 or more; the next time it is handed over instead.
        hand_over: Receives it; the message is acked when this returns. It is called inside `dispatch`, with locks held,
            and its errors pass through that. With asyncio it is called in a thread, for one message of a subscription
            at a time, and its errors are logged; if it is a coroutine function, or returns an awaitable, that is
            awaited in the event loop before the ack, for any number of messages at once.
        topic: The topic that it is published to, opened or created by the same `Topics` or `AsyncTopics`; it is durable
            there before it is acked. It keeps payload, key, message count and properties, and gets the properties
            ``REAL_TOPIC``, ``REAL_SUBSCRIPTION`` and ``ORIGIN_MESSAGE_ID``, unless it has them already, as in Pulsar.
            The policy does not apply to subscriptions of that topic itself.

    Raises:
        TypeError: The count is not an integer, `hand_over` cannot be called, or the topic is no text.
        ValueError: The count is negative, the topic empty, or not exactly one of `hand_over` and `topic` is given.
    """

    max_redelivery_count: int
    hand_over: Callable[[Delivery], object] | None = None
    topic: str | None = None

    def __post_init__(self) -> None:
        check_count("max_redelivery_count", self.max_redelivery_count, least=0)
        if self.hand_over is not None and not callable(self.hand_over):
            raise TypeError(f"hand_over must take a delivery, got {self.hand_over!r}")
        if self.topic is not None:
            check_name("topic", self.topic)
        if (self.hand_over is None) == (self.topic is None):
            raise ValueError(f"give either hand_over or topic, got {self.hand_over!r} and {self.topic!r}")


def dead_letter(delivery: Delivery, *, topic: str, subscription: str) -> Message:
    """Return the message that is published for a dead letter of a subscription.

    Source: ``ConsumerImpl.getPropertiesMap`` of Apache Pulsar.
    """
    message = delivery.message
    origin = {"REAL_TOPIC": topic, "REAL_SUBSCRIPTION": subscription, "ORIGIN_MESSAGE_ID": str(delivery.position)}
    return Message(
        message.payload, key=message.key, message_count=message.message_count,
        properties={**origin, **message.properties},
    )  # fmt: skip


class DispatchRound(NamedTuple):
    """The result of `Subscription.dispatch_all`.

    Attributes:
        deliveries: Each consumer that receives messages, once, with its messages in the order they were sent.
        next_wake_ms: When to call again because a message's time will have come; None if none waits for a time, or no
            consumer has permits.
    """

    deliveries: list[tuple[str, list[Delivery]]]
    next_wake_ms: int | None


@final
class Batch:
    """The request of one consumer, and the messages that it receives.

    Attributes:
        consumer: The consumer.
        now_ms: The present.
        deliveries: The messages that it receives; grows.
        permits: How many more messages it may receive. The last entry may be a batch of more messages than that: then
            the number is below 0.
    """

    __slots__ = ("_begin", "_end", "consumer", "deliveries", "now_ms", "permits")

    def __init__(self, consumer: str, wanted: int, now_ms: int, *, permits: int = _UNLIMITED) -> None:
        self.consumer, self.now_ms, self.permits = consumer, now_ms, permits
        self.deliveries: list[Delivery] = []
        self._begin, self._end = 0, wanted

    @property
    def room(self) -> int:
        """How many more entries it takes at most."""
        return max(0, min(self._end - len(self.deliveries), self.permits))

    @property
    def turn_count(self) -> int:
        """Number of entries that it has received since the last `begin_turn`."""
        return len(self.deliveries) - self._begin

    def begin_turn(self, count: int) -> None:
        """Begin another turn, in which it takes this many more entries at most."""
        self._begin = len(self.deliveries)
        self._end = self._begin + count

    def fitting(self, message_counts: Sequence[int]) -> int:
        """Return how many of the first entries it takes; the arguments are the numbers of their messages.

        Complexity: O(entries).
        """
        room = min(len(message_counts), self.room)
        if sum(message_counts[:room]) == room:
            return room
        left = self.permits
        for count, messages in enumerate(message_counts[:room]):
            if left <= 0:
                return count
            left -= messages
        return room
