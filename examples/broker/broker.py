"""The broker: listens for clients, and stops in order."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, final

from ackstate.topic_name import parse_topic
from examples.broker.connection import Connection
from examples.broker.dispatcher import SubscriptionDispatcher
from examples.broker.errors import RefusedRequestError
from examples.broker.pulsar_api_pb2 import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate import AckStateError, Start, Subscription, SubscriptionType
    from ackstate.aio import AsyncSubscription, AsyncTopic, AsyncTopics

_LAST_ACKS_S = 0.3  # Clients collect acks for a tenth of a second before they send them.


@final
class Broker:
    """Topics, and the clients that use them.

    Args:
        topics: The topics; `run` closes them.
        follow: Called with each subscription when it is opened, and the names of the topic and the subscription.
    """

    def __init__(self, topics: AsyncTopics, *, follow: Callable[[Subscription, str, str], None] | None = None) -> None:
        self._topics = topics
        self._follow = follow
        self._dispatchers: dict[AsyncSubscription, SubscriptionDispatcher] = {}
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._stopping = asyncio.Event()
        self._failure: AckStateError | None = None

    async def run(self, port: int) -> None:
        """Serve clients on 127.0.0.1 until `stop` is called; when this returns, every ack that has come is durable.

        Raises:
            AckStateError: The store has failed; open it again.
        """
        async with self._topics:
            server = await asyncio.start_server(self._serve, "127.0.0.1", port)
            print("listening on", *server.sockets[0].getsockname(), flush=True)  # noqa: T201
            await self._stopping.wait()
            server.close()
            for dispatcher in self._dispatchers.values():
                dispatcher.stop()
            await asyncio.sleep(_LAST_ACKS_S)
            for connection in self._connections:
                connection.close()
            await asyncio.gather(*self._connections.values(), return_exceptions=True)
            if self._failure is not None:
                raise self._failure

    def stop(self) -> None:
        """End `run` soon: send nothing more, and receive the acks that are on their way."""
        self._stopping.set()

    def fail(self, error: AckStateError) -> None:
        """End `run` with an error of the store, which cannot be used any more."""
        self._failure = error
        self.stop()

    async def topic(self, name: str) -> AsyncTopic:
        """Return a topic, which is created if necessary.

        Raises:
            RefusedRequestError: The broker does not have such topics, or is about to end.
        """
        if self._stopping.is_set():
            raise RefusedRequestError("the broker ends", ServerError.ServiceNotReady)
        if not name.startswith("persistent://") or parse_topic(name) is None:
            raise RefusedRequestError(f"a topic must be named persistent://tenant/namespace/name, got {name}")
        return await self._topics.open(name)

    async def subscribe(
        self, topic: AsyncTopic, name: str, *, start: Start, kind: SubscriptionType | None = None
    ) -> SubscriptionDispatcher:
        """Return a subscription, which is created if necessary; without a type, it is Shared.

        Raises:
            SubscriptionTypeError: It has another type.
        """
        subscription = await topic.subscribe(name, start=start, kind=kind)
        if subscription not in self._dispatchers:
            if self._follow is not None:
                self._follow(subscription.subscription, topic.name, name)
            self._dispatchers[subscription] = SubscriptionDispatcher(topic, name, subscription, fail=self.fail)
        return self._dispatchers[subscription]

    async def unsubscribe(self, dispatcher: SubscriptionDispatcher) -> None:
        """Delete a subscription with its acks."""
        await dispatcher.topic.unsubscribe(dispatcher.name)
        del self._dispatchers[dispatcher.subscription]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection, task = Connection(self, reader, writer), asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await connection.serve()
        finally:
            del self._connections[connection]
