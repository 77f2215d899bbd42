"""Executes the commands of one client, each in a method of its name."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, final

from ackstate import CursorClosedError, Start, StartTime, SubscriptionType
from examples.broker.consumer import Consumer, position_of
from examples.broker.errors import ProtocolError, RefusedRequestError, refuse_if
from examples.broker.framing import decode_metadata, message_of
from examples.broker.pulsar_api_pb2 import ServerError

if TYPE_CHECKING:
    from ackstate import Position
    from ackstate.aio import AsyncTopic
    from examples.broker.broker import Broker
    from examples.broker.connection import Connection

_TYPES = dict(enumerate([
    SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED, SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED,
]))  # fmt: skip
_CUMULATIVE = 1
_ENDS = {-1: Start.EARLIEST, 2**63 - 1: Start.LATEST}  # by the ledger id
_numbers = count()


@final
class Commands:
    """The producers and consumers of one client, and the commands that concern them.

    A command whose method raises is answered with the error.

    Args:
        broker: The broker.
        connection: The client.
    """

    def __init__(self, broker: Broker, connection: Connection) -> None:
        self._broker = broker
        self._connection = connection
        self._answer = connection.send
        self._producers: dict[int, AsyncTopic] = {}
        self._consumers: dict[int, Consumer] = {}

    async def close_all(self) -> None:
        """Close all consumers."""
        for consumer_id in list(self._consumers):
            with suppress(CursorClosedError):
                await self._close(consumer_id)

    async def ping(self, _: Any) -> None:
        """Show that the broker lives."""
        self._answer("pong")

    async def pong(self, _: Any) -> None:
        """Do nothing: every command shows that the client lives."""

    async def partition_metadata(self, command: Any) -> None:
        """Answer that the topic has no partitions."""
        self._answer("partition_metadata_response", request_id=command.request_id, partitions=0, response=0)

    async def lookup(self, command: Any) -> None:
        """Answer that this broker has the topic."""
        self._answer("lookup_response", request_id=command.request_id, response=1, authoritative=True,
                     broker_service_url=f"pulsar://{self._connection.address}")  # fmt: skip

    async def producer(self, command: Any) -> None:
        """Open a producer."""
        refuse_if(command.HasField("schema"), "schemas", ServerError.IncompatibleSchema)
        refuse_if(command.access_mode != 0, "exclusive producers")
        refuse_if(command.txn_enabled, "transactions")
        topic = await self._broker.topic(command.topic)
        if command.initial_subscription_name:
            await self._broker.subscribe(topic, command.initial_subscription_name, start=Start.EARLIEST)
        self._producers[command.producer_id] = topic
        name = command.producer_name or f"{self._connection.client}-{command.producer_id}"
        self._answer("producer_success", request_id=command.request_id, producer_name=name, last_sequence_id=-1,
                     schema_version=b"")  # fmt: skip

    async def close_producer(self, command: Any) -> None:
        """Close a producer; the receipts of its messages are still sent."""
        self._producers.pop(command.producer_id, None)
        self._answer("success", request_id=command.request_id)

    async def send(self, command: Any, entry: bytes) -> None:
        """Have a message stored, and send the receipt when it is; wait while too many wait for the disk."""
        topic = self._producers.get(command.producer_id)
        if topic is None:
            raise ProtocolError(f"there is no producer {command.producer_id}")
        metadata = decode_metadata(entry)
        refuse_if(metadata.HasField("txnid_most_bits"), "transactions")
        receipt = {
            "producer_id": command.producer_id,
            "sequence_id": command.sequence_id,
            "highest_sequence_id": metadata.highest_sequence_id,
        }
        await self._connection.send_receipt(topic.publish([message_of(entry, metadata)]), receipt)

    async def subscribe(self, command: Any) -> None:
        """Open a consumer."""
        refuse_if(command.HasField("schema"), "schemas", ServerError.IncompatibleSchema)
        refuse_if(not command.durable, "readers, nor other subscriptions that are not durable")
        refuse_if(command.read_compacted, "compaction")
        refuse_if(command.key_shared.mode != 0, "ranges of hashes that consumers choose")
        if command.type not in _TYPES:
            raise ProtocolError(f"there is no type of subscription {command.type}")
        await self._close(command.consumer_id)
        start = Start.EARLIEST if command.initial_position else Start.LATEST
        topic = await self._broker.topic(command.topic)
        dispatcher = await self._broker.subscribe(topic, command.subscription, start=start, kind=_TYPES[command.type])
        name = f"{command.consumer_name} {next(_numbers)}"
        consumer = Consumer(self._connection, command.consumer_id, name, command.priority_level, dispatcher)
        await dispatcher.add(consumer)
        self._consumers[command.consumer_id] = consumer
        self._answer("success", request_id=command.request_id)
        dispatcher.announce()

    async def close_consumer(self, command: Any) -> None:
        """Close a consumer."""
        await self._close(command.consumer_id)
        self._answer("success", request_id=command.request_id)

    async def flow(self, command: Any) -> None:
        """Allow more messages to be sent to a consumer."""
        consumer = self._consumer(command)
        await consumer.dispatcher.subscription.add_permits(consumer.name, command.permits)

    async def ack(self, command: Any) -> None:
        """Ack messages; the answer, if one is requested, does not mean that the acks are durable, as in Pulsar."""
        refuse_if(command.txnid_most_bits != 0, "transactions")
        consumer = self._consumer(command)
        if not command.message_id:
            raise ProtocolError("an ack must have a message id")
        if command.type == _CUMULATIVE:
            await consumer.ack_cumulative(command.message_id[-1])
        else:
            await consumer.ack(command.message_id)
        if command.HasField("request_id"):
            self._answer("ack_response", consumer_id=command.consumer_id, request_id=command.request_id)

    async def redeliver(self, command: Any) -> None:
        """Take messages back, to be sent again."""
        await self._consumer(command).redeliver(command.message_ids)

    async def seek(self, command: Any) -> None:
        """Restart a subscription at a message, or at the first one that was published at a time or later."""
        position: Position | Start | StartTime = StartTime(command.publish_time)
        if command.HasField("message_id"):
            position = position_of(command.message_id)
            position = _ENDS.get(position.ledger_id, position)
        await self._consumer(command).dispatcher.seek(position)
        self._answer("success", request_id=command.request_id)

    async def unsubscribe(self, command: Any) -> None:
        """Delete the subscription of a consumer, unless it has others."""
        consumer = self._consumer(command)
        if len(consumer.dispatcher.consumers) > 1:
            raise RefusedRequestError("the subscription has other consumers", ServerError.ConsumerBusy)
        await consumer.dispatcher.remove(consumer)
        await self._broker.unsubscribe(consumer.dispatcher)
        self._answer("success", request_id=command.request_id)

    async def get_last_message_id(self, command: Any) -> None:
        """Return the last message of a topic, and how far its subscription is."""
        consumer = self._consumer(command)
        mark_delete = consumer.dispatcher.subscription.subscription.cursor.mark_delete_position
        self._answer("get_last_message_id_response", request_id=command.request_id,
                     last_message_id=await consumer.last_message_id(),
                     consumer_mark_delete_position=mark_delete._asdict())  # fmt: skip

    async def _close(self, consumer_id: int) -> None:
        consumer = self._consumers.pop(consumer_id, None)
        if consumer is not None:
            await consumer.dispatcher.remove(consumer)

    def _consumer(self, command: Any) -> Consumer:
        """Return the consumer of a command, unless it is closed, or was disconnected by a seek."""
        consumer = self._consumers.get(command.consumer_id)
        if consumer is None or consumer.name not in consumer.dispatcher.consumers:
            raise RefusedRequestError(f"there is no consumer {command.consumer_id}", ServerError.ConsumerNotFound)
        return consumer
