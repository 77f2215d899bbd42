"""A consumer of a client: sends it messages, and reports its acks to the subscription."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ackstate import AckStateError, Position
from examples.broker.errors import RefusedRequestError
from examples.broker.framing import decode_metadata

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ackstate import Delivery
    from examples.broker.connection import Connection
    from examples.broker.dispatcher import SubscriptionDispatcher


@dataclass(frozen=True, eq=False)
class Consumer:
    """One consumer.

    Attributes:
        connection: Its client.
        consumer_id: Its number there.
        name: Its name in the subscription, which no other consumer of this process ever has.
        priority: With Failover, the consumer of the lowest number is active.
        dispatcher: That of its subscription.
    """

    connection: Connection
    consumer_id: int
    name: str
    priority: int
    dispatcher: SubscriptionDispatcher

    def send(self, deliveries: Iterable[Delivery]) -> None:
        """Send messages to the client, each entry as it was published."""
        for position, message, redelivery_count, unacked_words in deliveries:
            self.connection.send(
                "message",
                message.payload,
                consumer_id=self.consumer_id,
                message_id=position._asdict(),
                redelivery_count=redelivery_count,
                ack_set=unacked_words,
            )

    async def ack(self, message_ids: Sequence[Any]) -> None:
        """Ack entries and messages of batches.

        Raises:
            AckStateError: An ack was refused, the last one for this reason. The others count.
        """
        subscription, error = self.dispatcher.subscription, None
        whole = [position_of(each) for each in message_ids if not each.ack_set]
        parts = [(position_of(each), each.ack_set) for each in message_ids if each.ack_set]
        try:
            await subscription.ack_many(whole)
        except AckStateError:  # One is refused; without the others, it would be acked by none.
            parts += [(position, ()) for position in whole]
        for position, unacked_words in parts:
            try:
                await subscription.ack_batch(position, unacked_words)
            except AckStateError as refused:
                error = refused
        if error is not None:
            raise error

    async def ack_cumulative(self, message_id: Any) -> None:
        """Ack everything up to a message, which may be in a batch.

        Raises:
            RefusedRequestError: Several consumers share the messages.
            AckStateError: The ack was refused.
        """
        subscription, position = self.dispatcher.subscription, position_of(message_id)
        if not self.dispatcher.kind.is_single_active:
            raise RefusedRequestError(f"a {self.dispatcher.kind.value} subscription has no cumulative acks")
        cursor = subscription.subscription.cursor
        last = cursor.ledgers.previous(position) if message_id.ack_set else position
        if last > cursor.mark_delete_position:
            await subscription.ack_cumulative(last)
        if message_id.ack_set:
            await subscription.ack_batch(position, message_id.ack_set)

    async def redeliver(self, message_ids: Sequence[Any]) -> None:
        """Take messages back, to be sent again: these, or all that the consumer has if there are none."""
        if message_ids:
            await self.dispatcher.subscription.nack_many([*map(position_of, message_ids)])
        else:
            await self.dispatcher.subscription.redeliver_all(self.name)

    async def last_message_id(self) -> dict[str, int]:
        """Return the id of the last message of the topic: if the entry is a batch, that of the batch's last one."""
        topic, batch_index = self.dispatcher.topic, -1
        last = topic.topic.log.ledgers.last_confirmed
        if last in topic.topic.log.ledgers:  # Else there is none, or it was deleted.
            (message,) = await topic.call(lambda: list(topic.topic.log.read([last])))
            metadata = decode_metadata(message.payload)
            batch_index = metadata.num_messages_in_batch - 1 if metadata.HasField("num_messages_in_batch") else -1
        return {**last._asdict(), "batch_index": batch_index}


def position_of(message_id: Any) -> Position:
    """Return the position of an entry."""
    return Position(message_id.ledger_id, message_id.entry_id)
