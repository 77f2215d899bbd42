"""One subscription, for asyncio."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from copy import copy
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, final

from ackstate.aio.workers import finished
from ackstate.cursor.listener import CursorListener
from ackstate.dispatch.options import dead_letter
from ackstate.errors import AckStateError, CursorFencedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ackstate.aio.topic import AsyncTopic
    from ackstate.cursor.results import PersistResult, Receipt
    from ackstate.dispatch.options import Delivery, DispatchRound, Start, StartTime
    from ackstate.dispatch.subscription import Subscription
    from ackstate.position import Position

_LOG = logging.getLogger(__name__)


@final
class AsyncSubscription(CursorListener):
    """A subscription whose calls are awaited. Opened by `AsyncTopic.subscribe`; to be used in one event loop.

    Each method does the same as that of `Subscription`, at the time of the clock, and raises the same errors. A call
    that is cancelled while it waits for its turn has no effect.

    Attributes:
        subscription: The subscription. It may be read; calls that change it go through `AsyncTopic.alone`.
    """

    def __init__(self, subscription: Subscription, name: str, topic: AsyncTopic) -> None:
        self.subscription = subscription
        self._name = name
        self._topic = topic
        self._loop = asyncio.get_running_loop()
        self._may_send = asyncio.Event()
        self._persisted = asyncio.Event()
        self._fenced: CursorFencedError | None = None
        self._hand_overs: set[asyncio.Task[None]] = set()
        self._calling = asyncio.Lock()  # held while `hand_over` runs in a thread
        subscription.cursor.add_listener(self)
        self._dead_letters = subscription._hand_over_by(self._begin_hand_over)

    async def next_round(self) -> DispatchRound:
        """Wait until messages may be sent to consumers with permits, and send them; see `Subscription.dispatch_all`.

        One task at a time may wait. If it is cancelled, nothing was sent: messages, permits and the numbers of
        deliveries are as before.

        Raises:
            CursorClosedError: The subscription is closed, or was closed meanwhile.
            StoreError: The log could not be read; nothing was sent.
            As `AsyncTopics.close`, if that has failed.
        """
        while True:
            self._may_send.clear()
            sent = await self._dispatch_all()
            if sent.deliveries:
                return sent
            wait_s = None if sent.next_wake_ms is None else max(0, sent.next_wake_ms - self._topic.clock()) / 1_000
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._may_send.wait()

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
            CursorClosedError: The cursor was closed without it: the subscription or the topic was deleted. `close`
                persists everything, so it is durable then.
            CursorFencedError: Another owner has the cursor: the ack will not be stored.
            AckStateError: A seek came after the ack, which does not count any more.
            As `AsyncTopics.close`, if that has failed.
        """
        cursor = self.subscription.cursor
        while not cursor.durable(receipt):
            if cursor.view.is_void(receipt):
                raise AckStateError(f"subscription {self._name!r}: a seek came after the ack, which does not count now")
            if self._fenced is not None:
                raise copy(self._fenced)
            self._check_open()
            self._persisted.clear()
            self._topic.waiting.add(self._persisted)
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
        """Persist everything and close; see `Subscription.close`. After an error or a cancelled call, close again."""
        if self.subscription.cursor.view.is_closed:
            return None
        await self.end_hand_overs()
        async with self._topic.workers.persisting:  # as `AsyncTopic.unsubscribe`
            return await self._topic.call(self.subscription.close, now_ms=self._topic.clock())

    def closed(self) -> None:
        """Wake all that wait for something: the subscription was closed or deleted, or that has failed."""
        self._may_send.set()
        self._persisted.set()
        for each in self._hand_overs:
            each.cancel()

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """Wake those that wait for an ack to be durable; called by the thread that persists."""
        if isinstance(outcome, CursorFencedError):
            self._fenced = outcome
        self._call_soon(self._persisted.set)

    async def end_hand_overs(self) -> None:
        """Wait until dead letters under way are published and acked; call others off, which may take any time."""
        if self._dead_letters is not None and self._dead_letters.topic is None:
            for each in self._hand_overs:
                each.cancel()
        if self._hand_overs:
            await asyncio.wait(self._hand_overs)

    async def _dispatch_all(self) -> DispatchRound:
        sent: list[DispatchRound] = []

        def dispatch() -> None:
            sent.append(self.subscription.dispatch_all(now_ms=self._topic.clock(), waiter=self._wake))

        async with self._topic.alone:
            self._check_open()
            try:
                await self._topic.workers.run(dispatch)
            except asyncio.CancelledError:
                if sent:
                    self.subscription._take_back_round()
                raise
        return sent[0]

    def _check_open(self) -> None:
        self.subscription.cursor.check_open()
        if self._topic.failure is not None:
            raise copy(self._topic.failure)

    def _begin_hand_over(self, delivery: Delivery) -> None:
        """Hand a dead letter over in a task of its own; called by the thread that dispatches."""

        def begin() -> None:
            task = self._loop.create_task(self._hand_over(delivery))
            self._hand_overs.add(task)
            task.add_done_callback(ended)

        def ended(task: asyncio.Task[None]) -> None:
            self._hand_overs.discard(task)
            self.subscription._hand_over_failed(delivery)

        self._call_soon(begin)

    async def _hand_over(self, delivery: Delivery) -> None:
        """Hand a dead letter over and ack it. One that fails stays queued, and comes again."""
        try:
            await self._pass_on(delivery)
            ended = self.subscription._hand_over_ended
            await finished(self._topic.call(ended, delivery, now_ms=self._topic.clock()))
        except Exception as error:
            if not self.subscription.cursor.view.is_closed:
                _LOG.warning(
                    "dead letter %s of topic %r could not be handed over for subscription %r, and waits: %s",
                    delivery.position, self._topic.name, self._name, error,
                )  # fmt: skip

    async def _pass_on(self, delivery: Delivery) -> None:
        policy = self._dead_letters
        assert policy is not None
        if policy.topic is not None:
            topic = await self._topic.open_topic(policy.topic)
            await topic.publish([dead_letter(delivery, topic=self._topic.name, subscription=self._name)])
        elif iscoroutinefunction(policy.hand_over):
            await policy.hand_over(delivery)
        else:
            assert policy.hand_over is not None
            # In a thread of the loop's own: those of the workers must stay free for what it may wait for.
            async with self._calling:
                outcome = await asyncio.to_thread(policy.hand_over, delivery)
            if isawaitable(outcome):
                await outcome

    def _wake(self) -> None:
        self._call_soon(self._may_send.set)

    def _call_soon(self, call: Callable[[], object]) -> None:
        """Call a function in the loop, from any thread."""
        with suppress(RuntimeError):  # The loop is closed: no one waits.
            self._loop.call_soon_threadsafe(call)
