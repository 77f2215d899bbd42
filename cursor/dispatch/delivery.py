"""The values of a dispatch: a delivery, a batch of them, and the policy for dead letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ackstate.integers import check_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.cursor.topic.message_log import Message
    from ackstate.position import Position


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


class Batch(NamedTuple):
    """The request of one consumer, and the messages that it receives.

    Attributes:
        consumer: The consumer.
        wanted: How many entries it wants at most.
        now_ms: The present.
        deliveries: The messages that it receives; grows.
    """

    consumer: str
    wanted: int
    now_ms: int
    deliveries: list[Delivery]

    @property
    def room(self) -> int:
        """How many more entries it wants."""
        return self.wanted - len(self.deliveries)
