"""The values of a dispatch: a delivery, a batch or a round of them, and the policy for dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.integers import check_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.cursor.topic.message_log import Message
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
    """The policy for a message that is given back again and again.

    Attributes:
        max_redelivery_count: How often it is sent again, 0 or more; the next time it is handed over instead.
        hand_over: Receives it; the message is acked when this returns. Its errors pass through `dispatch`, and the
            message waits for a second before the next attempt. The same happens if its ack would exceed a limit by
            then: it will be handed over once more.

    Raises:
        TypeError: The count is not an integer, or `hand_over` cannot be called.
        ValueError: The count is negative.
    """

    max_redelivery_count: int
    hand_over: Callable[[Delivery], object]

    def __post_init__(self) -> None:
        check_count("max_redelivery_count", self.max_redelivery_count, least=0)
        if not callable(self.hand_over):
            raise TypeError(f"hand_over must take a delivery, got {self.hand_over!r}")


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
