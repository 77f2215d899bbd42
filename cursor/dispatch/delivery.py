"""What a consumer asks for and gets, and what becomes of messages that nobody acks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ackstate.integers import check_count

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.cursor.topic.message_log import Message
    from ackstate.position import Position


class Delivery(NamedTuple):
    """One message on its way to a consumer.

    Attributes:
        position: Where it is in the log.
        message: What was published.
        redelivery_count: How often it was sent before.
        unacked_words: Of a batch that is partly acked, which messages are not, as `BatchIndexes` has them; else empty.
    """

    position: Position
    message: Message
    redelivery_count: int = 0
    unacked_words: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeadLetterPolicy:
    """What to do with a message that is given back again and again.

    Attributes:
        max_redelivery_count: So often it is sent again, 0 or more; the next time it is handed over instead.
        hand_over: Takes it; when this returns the message is acked. What it raises passes through `dispatch`, and the
            message waits for a second before it is tried again. So it does if its ack would pass a limit by then, and
            will be handed over once more.

    Raises:
        TypeError: The count is no integer, or what takes the message cannot be called.
        ValueError: The count is negative.
    """

    max_redelivery_count: int
    hand_over: Callable[[Delivery], object]

    def __post_init__(self) -> None:
        check_count("max_redelivery_count", self.max_redelivery_count, least=0)
        if not callable(self.hand_over):
            raise TypeError(f"hand_over must take a delivery, got {self.hand_over!r}")


class Batch(NamedTuple):
    """What one consumer asked for, and what it gets.

    Attributes:
        consumer: Who.
        wanted: How many messages at most.
        now_ms: The present.
        deliveries: What it gets; grows.
    """

    consumer: str
    wanted: int
    now_ms: int
    deliveries: list[Delivery]

    @property
    def room(self) -> int:
        """How many more messages it wants."""
        return self.wanted - len(self.deliveries)
