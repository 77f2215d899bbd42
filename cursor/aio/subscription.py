"""One subscription, for asyncio."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, final

from ackstate.cursor.listener import CursorListener

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ackstate.cursor.aio.topic import AsyncTopic
    from ackstate.cursor.dispatch.delivery import DispatchRound
    from ackstate.cursor.results import PersistResult, Receipt
    from ackstate.cursor.subscription import Subscription
    from ackstate.cursor.topic.start import Start, StartTime
    from ackstate.errors import AckStateError
    from ackstate.position import Position


@final
class AsyncSubscription(CursorListener):
    """A subscription whose calls are awaited. Opened by `AsyncTopic.subscribe`; to be used in one event loop.

    Each method does the same as that of `Subscription`, at the time of the clock, and raises the same errors. A call
    that is cancelled while it waits for its turn has no effect.

    Attributes:
        subscription: The subscription. It may be read; calls that change it go through `AsyncTopic.alone`.
    """

    def __init__(self, subscription: Subscription, topic: AsyncTopic) -> None:
        self.subscription = subscription
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self._may_send = asyncio.Event()
        self._persisted = asyncio.Event()
        subscription.cursor.add_listener(self)

    async def next_round(self) -> DispatchRound:
        """Wait until messages may be sent to consumers with permits, and send them; see `Subscription.dispatch_all`.

        One task at a time may wait. If it is cancelled, messages that were just sent are given back.

        Raises:
            CursorClosedError: The subscription is closed, or was closed meanwhile.
        """
        while True:
            self._may_send.clear()
            sent = await self._dispatch_all()
            if sent.deliveries:
                return sent
            wait_s = None if sent.next_wake_ms is None else max(0, sent.next_wake_ms - self._topic.clock()) / 1_000
            with suppress(TimeoutError):
                await asyncio.wait_for(self._may_send.wait(), wait_s)

    async def ack(self, position: Position) -> Receipt:
        """Ack one entry; see `Subscription.ack`."""
        async with self._topic.alone:
            return self.subscription.ack(position, now_ms=self._topic.clock())

    async def ack_many(self, positions: Sequence[Position]) -> Receipt:
        """Ack a list of entries, all or none; see `Subscription.ack_many`."""
        async with self._topic.alone:
            return self.subscription.ack_many(positions, now_ms=self._topic.clock())

    async def ack_batch(self, position: Position, unacked_words: Iterable[int]) -> Receipt:
        """Ack messages of a batch; see `Subscription.ack_batch`."""
        async with self._topic.alone:
            return self.subscription.ack_batch(position, unacked_words, now_ms=self._topic.clock())

    async def ack_cumulative(self, position: Position, *, properties: Mapping[str, int] | None = None) -> Receipt:
        """Ack everything up to a position; see `Subscription.ack_cumulative`."""
        async with self._topic.alone:
            return self.subscription.ack_cumulative(position, properties=properties, now_ms=self._topic.clock())

    async def durable(self, receipt: Receipt) -> None:
        """Wait until an ack survives a crash; see `ManagedCursor.durable`.

        Raises:
            ValueError: The receipt is of another opening of the cursor.
            CursorClosedError: The cursor was closed before; `close` persists everything, so it is durable then.
        """
        cursor = self.subscription.cursor
        while not cursor.durable(receipt):
            self._persisted.clear()
            cursor.check_open()
            await self._persisted.wait()

    async def nack(self, position: Position, *, delay_ms: int = 0) -> bool:
        """Give a message back; see `Subscription.nack`."""
        async with self._topic.alone:
            return self.subscription.nack(position, delay_ms=delay_ms, now_ms=self._topic.clock())

    async def nack_many(self, positions: Iterable[Position], *, delay_ms: int = 0) -> int:
        """Give messages back; see `Subscription.nack_many`."""
        async with self._topic.alone:
            return self.subscription.nack_many(positions, delay_ms=delay_ms, now_ms=self._topic.clock())

    async def redeliver_all(self, consumer: str) -> int:
        """Give all messages of a consumer back; see `Subscription.redeliver_all`."""
        async with self._topic.alone:
            return self.subscription.redeliver_all(consumer, now_ms=self._topic.clock())

    async def consumer_opened(self, consumer: str, *, priority: int = 0, permits: int = 0) -> None:
        """Open a consumer; see `Subscription.consumer_opened`."""
        async with self._topic.alone:
            self.subscription.consumer_opened(consumer, priority=priority, permits=permits)

    async def consumer_closed(self, consumer: str) -> int:
        """Close a consumer; see `Subscription.consumer_closed`."""
        async with self._topic.alone:
            return self.subscription.consumer_closed(consumer, now_ms=self._topic.clock())

    async def add_permits(self, consumer: str, count: int) -> None:
        """Allow a consumer to receive more messages; see `Subscription.add_permits`."""
        async with self._topic.alone:
            self.subscription.add_permits(consumer, count)

    async def seek(self, position: Position | Start | StartTime) -> PersistResult:
        """Restart at a position, an end of the log, or a time; see `Subscription.seek`."""
        return await self._topic.call(self.subscription.seek, position, now_ms=self._topic.clock())

    async def close(self) -> PersistResult | None:
        """Persist everything and close; see `Subscription.close`."""
        result = await self._topic.call(self.subscription.close, now_ms=self._topic.clock())
        self.closed()
        return result

    def closed(self) -> None:
        """Wake all that wait for something: the subscription was closed or deleted."""
        self._may_send.set()
        self._persisted.set()

    def persisted(self, outcome: PersistResult | AckStateError) -> None:  # noqa: ARG002 - as `CursorListener`
        """Wake those that wait for an ack to be durable; called by the thread that persists."""
        self._set(self._persisted)

    async def _dispatch_all(self) -> DispatchRound:
        sent: list[DispatchRound] = []

        def dispatch() -> None:
            sent.append(self.subscription.dispatch_all(now_ms=self._topic.clock(), waiter=self._wake))

        async with self._topic.alone:
            self.subscription.cursor.check_open()
            try:
                await self._topic.workers.run(dispatch)
            except asyncio.CancelledError:
                for consumer_deliveries in (each for one in sent for _, each in one.deliveries):
                    self.subscription.nack_many([each.position for each in consumer_deliveries])
                raise
        return sent[0]

    def _wake(self) -> None:
        self._set(self._may_send)

    def _set(self, event: asyncio.Event) -> None:
        """Set an event from any thread."""
        with suppress(RuntimeError):  # The loop is closed: no one waits.
            self._loop.call_soon_threadsafe(event.set)
