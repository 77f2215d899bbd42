"""Sends the messages of a subscription to the consumers that are connected to it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, final

from ackstate import AckStateError, CursorClosedError, SubscriptionType

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate import Position, Start, StartTime
    from ackstate.aio import AsyncSubscription, AsyncTopic
    from examples.broker.consumer import Consumer

_OF_THE_BROKER = 2**64 - 1  # the request id of a command that no client has requested


@final
class SubscriptionDispatcher:
    """One subscription with its connected consumers.

    Args:
        topic: The topic.
        name: The name of the subscription.
        subscription: The subscription.
        fail: Called if messages cannot be read.
    """

    def __init__(
        self, topic: AsyncTopic, name: str, subscription: AsyncSubscription, *, fail: Callable[[AckStateError], None]
    ) -> None:
        self.topic = topic
        self.name = name
        self.subscription = subscription
        self.kind = subscription.subscription.kind
        self.consumers: dict[str, Consumer] = {}
        self._active: Consumer | None = None
        self._fail = fail
        self._sending = asyncio.create_task(self._send_rounds())

    async def add(self, consumer: Consumer) -> None:
        """Connect a consumer; it receives nothing before it gives permits.

        Raises:
            ConsumerBusyError: The subscription is Exclusive and has one.
        """
        await self.subscription.consumer_opened(consumer.name, priority=consumer.priority)
        self.consumers[consumer.name] = consumer

    async def remove(self, consumer: Consumer) -> None:
        """Disconnect a consumer: the others receive its unacked messages. No-op if it is not connected."""
        if self.consumers.pop(consumer.name, None) is not None:
            await self.subscription.consumer_closed(consumer.name)
            self.announce()

    def announce(self) -> None:
        """Report to the consumers of a Failover subscription which of them is active, if that has changed."""
        if self.kind is not SubscriptionType.FAILOVER:
            return
        active = min(self.consumers.values(), key=lambda each: (each.priority, each.name), default=None)
        if active is not self._active:
            self._active = active
            for each in self.consumers.values():
                each.connection.send("active_consumer_change", consumer_id=each.consumer_id, is_active=each is active)

    async def seek(self, position: Position | Start | StartTime) -> None:
        """Restart at a position. All consumers are disconnected, and their clients subscribe again.

        So an ack of a message that was sent before the seek cannot be taken for one of the same message after it.
        """
        await self.subscription.seek(position)
        for each in list(self.consumers.values()):
            await self.remove(each)
            each.connection.send("close_consumer", consumer_id=each.consumer_id, request_id=_OF_THE_BROKER)

    def stop(self) -> None:
        """Send nothing more; acks still count."""
        self._sending.cancel()

    async def _send_rounds(self) -> None:
        try:
            while True:
                for name, deliveries in (await self.subscription.next_round()).deliveries:
                    # One that was disconnected meanwhile has given its messages back.
                    if name in self.consumers:
                        self.consumers[name].send(deliveries)
        except CursorClosedError:
            pass  # The subscription was deleted.
        except AckStateError as error:
            self._fail(error)
