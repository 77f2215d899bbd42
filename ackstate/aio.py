"""Topics and subscriptions for asyncio: the same objects, with calls to await.

Calls that wait for the disk do so in a worker thread, so no topic delays another. The calls of one topic come one after
the other, as the threading rules demand (docs/guides/threads-and-asyncio.md).
"""

from __future__ import annotations

import asyncio
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from copy import copy
from functools import partial
from inspect import isawaitable, iscoroutinefunction
from typing import TYPE_CHECKING, Generic, ParamSpec, Self, TypeVar, Unpack, final

from ackstate.checks import check_count
from ackstate.cursor.persist import tick_all
from ackstate.cursor.results import CursorListener
from ackstate.dispatch.options import dead_letter
from ackstate.errors import AckStateError, CursorFencedError, TopicClosedError
from ackstate.message import CheckedMessages, checked_messages
from ackstate.topic.settings import wall_clock
from ackstate.topic.topics import Topics, append_publications

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor

    from ackstate.cursor.results import PersistResult, Receipt
    from ackstate.dispatch.explain import BlockReason, DispatchStats, HoleReport
    from ackstate.dispatch.options import Delivery, DispatchRound, Start, StartTime
    from ackstate.dispatch.subscription import Subscription
    from ackstate.limits.gate import GateLimits
    from ackstate.message import Message
    from ackstate.position import Position
    from ackstate.stores.base import Store
    from ackstate.topic.log import Publication
    from ackstate.topic.settings import TopicSettings
    from ackstate.topic.topic import RequestedFields, SubscriptionRequest, Topic

    _Request = tuple[CheckedMessages, asyncio.Future[list[Position]]]

__all__ = ["AsyncSubscription", "AsyncTopic"]

_P = ParamSpec("_P")
_S = TypeVar("_S")
_T = TypeVar("_T")
_THREADS_MAX = 16
_LOG = logging.getLogger(__name__)


async def finished(awaited: Awaitable[_T]) -> _T:
    """Wait for something to end even if this is cancelled meanwhile, and only then raise `CancelledError`."""
    task = asyncio.ensure_future(awaited)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from None if task.cancelled() else task.exception()
    return task.result()


@final
class Batches(Generic[_S, _T]):
    """Answers requests in a task, all that come meanwhile together; for one event loop.

    Args:
        handle: Sets the result or the error of each request.
    """

    def __init__(self, handle: Callable[[list[tuple[_S, asyncio.Future[_T]]]], Awaitable[None]]) -> None:
        self._handle = handle
        self._waiting: list[tuple[_S, asyncio.Future[_T]]] = []
        self._handling: asyncio.Task[None] | None = None

    async def ask(self, request: _S) -> _T:
        """Return the answer to a request, also if this is cancelled meanwhile; see `finished`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[_T] = loop.create_future()
        self._waiting.append((request, answer))
        if self._handling is None:
            self._handling = loop.create_task(self._handle_waiting())
            # Not by the task itself: a loop that ends cancels all its tasks, also one that has not begun.
            self._handling.add_done_callback(self._answer_left)
        return await finished(answer)

    async def end(self) -> None:
        """Wait for all requests under way."""
        if self._handling is not None:
            await asyncio.wait({self._handling})

    async def _handle_waiting(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                await self._handle(taken)
            except Exception as error:
                for _, answer in taken:
                    answer.set_exception(error)
            except BaseException:
                self._waiting += taken
                raise
        self._handling = None

    def _answer_left(self, handling: asyncio.Task[None]) -> None:
        if self._handling is handling:
            self._handling = None
            for _, answer in self._waiting:
                answer.cancel()
            self._waiting.clear()


@final
class Workers:
    """The threads of one store, for one event loop: one that appends publications, some for all else that blocks."""

    def __init__(self) -> None:
        self.persisting = asyncio.Lock()  # held while cursors are persisted or deleted, or a log is trimmed
        self.appends: Batches[Publication, int | AckStateError] = Batches(self._append)
        self._pool = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="ackstate")
        self.is_closed = False

    async def run(self, call: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
        """Call a function in a thread, and return its result; a cancelled caller waits for its end, too."""
        if self.is_closed:
            raise TopicClosedError("the topics of this store are closed")
        loop = asyncio.get_running_loop()
        return await finished(loop.run_in_executor(self._pool, partial(call, *args, **named)))

    async def close(self) -> None:
        await self.appends.end()
        self.is_closed = True
        await asyncio.to_thread(self._pool.shutdown)

    async def _append(self, batch: Sequence[tuple[Publication, asyncio.Future[int | AckStateError]]]) -> None:
        outcomes = await self.run(append_publications, [publication for publication, _ in batch])
        for (_, answer), outcome in zip(batch, outcomes, strict=True):
            answer.set_result(outcome)


@final
class AsyncTopics:
    """The topics of a store, persisted in the background from ``async with`` on.

    To be used in one event loop. At the end of ``async with``, also if the task is cancelled as by Ctrl-C, no publish
    is accepted any more, those under way are finished, and everything is persisted: nothing that was acked is
    redelivered. With `stop_on_signals` SIGTERM and SIGINT do the same.

    Args:
        store: Where they are stored; stays open. It must be safe for concurrent use, as all stores of this package are.
        settings: The settings of every topic; None for the defaults.
        clock: Returns the present, in milliseconds; any thread may call it.
        tick_ms: How often to look which subscriptions are due to be persisted, in milliseconds.
        executor: As for `Topics`.

    Attributes:
        topics: The topics, to be read: by `analysis.admin`, for example.
    """

    def __init__(
        self,
        store: Store,
        *,
        settings: TopicSettings | None = None,
        clock: Callable[[], int] = wall_clock,
        tick_ms: int = 100,
        executor: Executor | None = None,
    ) -> None:
        self.topics = Topics(store, settings=settings, executor=executor, clock=clock)
        check_count("tick_ms", tick_ms, least=1)
        self.clock = clock
        self._tick_s = tick_ms / 1_000
        self._workers = Workers()
        self._opened: dict[str, AsyncTopic] = {}
        self._alone = asyncio.Lock()
        self._ticking: asyncio.Task[None] | None = None
        self._is_closed = self._is_stopped = False
        self._signals: tuple[int, ...] = ()

    def stop_on_signals(self) -> Self:
        """Let SIGTERM and SIGINT end ``async with``, and return this.

        In ``async with AsyncTopics(store).stop_on_signals() as topics`` a signal cancels the body, everything is
        persisted, and the program goes on after the block. For the main thread of a system with POSIX signals.
        """
        self._signals = signal.SIGTERM, signal.SIGINT
        return self

    async def __aenter__(self) -> Self:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        for number in self._signals:
            loop.add_signal_handler(number, self._stop, task)
        self._ticking = loop.create_task(self._tick_for_ever())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        try:
            await self.close()
        except asyncio.CancelledError as error:
            if error.__cause__ is not None or not self._is_stopped:
                raise
            kind = asyncio.CancelledError
        finally:
            for number in self._signals:
                asyncio.get_running_loop().remove_signal_handler(number)
        task = asyncio.current_task()
        # A caller that cancelled the task as well is still told.
        return self._is_stopped and kind is asyncio.CancelledError and task is not None and task.uncancel() == 0

    def _stop(self, task: asyncio.Task[object]) -> None:
        if not self._is_stopped and not self._is_closed:
            self._is_stopped = True
            task.cancel()

    async def open(self, name: str) -> AsyncTopic:
        """Open a topic, or create it; return the same object if it is open. See `Topics.open`."""
        self._check_open(f"topic {name!r}")
        async with self._alone:
            self._check_open(f"topic {name!r}")
            return self._of(await self._workers.run(self.topics.open, name))

    async def open_all(self, names: Iterable[str]) -> dict[str, AsyncTopic | AckStateError]:
        """Open or create many topics, which share syncs, and return each or its error. See `Topics.open_all`."""
        async with self._alone:
            self._check_open("topics")
            found = await self._workers.run(self.topics.open_all, list(names))
            return {name: each if isinstance(each, AckStateError) else self._of(each) for name, each in found.items()}

    async def subscribe_all(
        self, requests: Mapping[str, Iterable[SubscriptionRequest]]
    ) -> dict[tuple[str, str], AsyncSubscription | AckStateError]:
        """Open or create subscriptions of many open topics, which share syncs. See `Topics.subscribe_all`."""
        async with self._alone, AsyncExitStack() as held:
            self._check_open("subscriptions")
            topics = {name: self._opened[name] for name in requests}
            for topic in topics.values():
                await held.enter_async_context(topic.alone)
            found = await self._workers.run(self.topics.subscribe_all, requests)
        return {
            names: each if isinstance(each, AckStateError) else topics[names[0]]._of(names[1], each)
            for names, each in found.items()
        }

    def _check_open(self, what: str) -> None:
        if self._is_closed:
            raise TopicClosedError(f"{what} cannot be opened: the topics are closed")

    def _of(self, topic: Topic) -> AsyncTopic:
        known = self._opened.get(topic.name)
        if known is None or known.topic is not topic:
            known = self._opened[topic.name] = AsyncTopic(topic, self)
        return known

    async def delete(self, name: str) -> bool:
        """Delete a topic with its subscriptions, and return whether there was one. See `Topics.delete`."""
        async with self._alone, self._workers.persisting:  # as `AsyncTopic.unsubscribe`
            topic = self._opened.get(name)
            if topic is None:
                return await self._workers.run(self.topics.delete, name)
            try:
                return await topic.call(self.topics.delete, name)
            finally:
                if topic.topic.is_closed:
                    del self._opened[name]
                    topic._closed()

    async def tick(self) -> None:
        """Persist the subscriptions that are due, and trim the logs, as the background task does.

        Failures are logged, and a later tick tries again.
        """
        async with self._workers.persisting:
            cursors = [each for topic in self._opened.values() for each in topic.topic.cursors]
            executor = self.topics.executor
            outcomes = await self._workers.run(tick_all, cursors, now_ms=self.clock(), executor=executor)
        for (topic_name, name), outcome in outcomes.items():
            if isinstance(outcome, AckStateError):
                _LOG.warning("subscription %r of topic %r could not be persisted: %s", name, topic_name, outcome)
        for topic in list(self._opened.values()):
            if topic.topic.may_trim():
                try:
                    await topic.trim()
                except AckStateError as error:
                    _LOG.warning("the log of topic %r could not be trimmed: %s", topic.name, error)

    async def close(self) -> None:
        """Finish all publishes, persist everything, and close all topics; closing twice does nothing.

        Raises:
            As `Topics.close`. Nothing is accepted or sent any more, all who wait get the error, and what failed stays
                open: another `close` tries again.
            CancelledError: The caller was cancelled; everything is closed nevertheless. If that failed, the error is
                its cause.
        """
        cancelled: asyncio.CancelledError | None = None
        while not self._workers.is_closed:
            closing = asyncio.ensure_future(self._close())
            try:
                await finished(closing)
            except asyncio.CancelledError as error:
                cancelled = error
                if not closing.cancelled():
                    break
                # A loop that ends cancels all its tasks, also this one.
        if cancelled is not None:
            raise cancelled

    async def _close(self) -> None:
        self._is_closed = True
        for topic in list(self._opened.values()):
            await topic._end_hand_overs()
        async with self._alone:
            if self._workers.is_closed:
                return
            if self._ticking is not None:
                self._ticking.cancel()
                await asyncio.wait({self._ticking})
            topics = list(self._opened.values())
            for topic in topics:
                await topic._stop_publishing()
            failure: Exception | None = None
            try:
                async with AsyncExitStack() as held:
                    for topic in topics:
                        await held.enter_async_context(topic.alone)
                    await self._workers.run(self.topics.close)
            except Exception as error:
                failure = error
                raise
            finally:
                for topic in topics:
                    topic._closed(failure)
            await self._workers.close()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                await self.tick()
            except Exception:
                _LOG.exception("a tick failed")


@final
class AsyncTopic:
    """A topic whose calls are awaited. Opened by `AsyncTopics.open`; to be used in one event loop.

    The calls of a topic and its subscriptions come one after the other; a sync holds up none of them but publishes of
    this topic, which share the next one.

    Attributes:
        topic: The topic. Its parts may be read; a call that changes one goes through `alone`.
        name: The name of the topic.
        alone: Held while a call is made: no other one of this topic overlaps with it.
    """

    def __init__(self, topic: Topic, topics: AsyncTopics) -> None:
        self.topic = topic
        self.name = topic.name
        self.alone = asyncio.Lock()
        self._topics = topics
        self.clock = topics.clock
        self._workers = topics._workers
        self._waiting: set[asyncio.Event] = set()  # of callers that wait for what the next `call` may change
        self._failure: Exception | None = None  # of the last `AsyncTopics.close`
        self._publishing = Batches(self._publish)
        self._is_stopped = False
        self._subscriptions: dict[str, AsyncSubscription] = {}

    async def publish(self, messages: Sequence[Message]) -> list[Position]:
        """Append messages, all or none, and return their positions in order once they are synced.

        Publishes that come while another one is being synced are appended together, each of them all or none.

        Raises:
            As `Topic.publish`.
            CancelledError: The caller was cancelled; the messages may be stored nevertheless.
        """
        if self._is_stopped:
            raise TopicClosedError(f"topic {self.name!r} is closed")
        return await self._publishing.ask(checked_messages(messages))

    async def subscribe(self, name: str, **wanted: Unpack[RequestedFields]) -> AsyncSubscription:
        """Open a subscription, or create it; return the same object if it is open. See `Topic.subscribe`."""
        subscribe = partial(self.topic.subscribe, name, **wanted)
        return self._of(name, await self.call(subscribe))

    def _of(self, name: str, subscription: Subscription) -> AsyncSubscription:
        """Return the subscription of this topic that has a name, for asyncio; the same object for the same one."""
        known = self._subscriptions.get(name)
        if known is None or known.subscription is not subscription:
            known = self._subscriptions[name] = AsyncSubscription(subscription, name, self)
        return known

    async def unsubscribe(self, name: str) -> bool:
        """Delete a subscription, and return whether there was one; see `Topic.unsubscribe`."""
        async with self._workers.persisting:  # A persist meanwhile would report that the cursor is fenced.
            try:
                return await self.call(self.topic.unsubscribe, name)
            finally:
                known = self._subscriptions.get(name)
                if known is not None and known.subscription.cursor.view.is_closed:
                    del self._subscriptions[name]
                    known._closed()

    async def cancel(self, position: Position) -> None:
        """Take a delayed message back before it is due; see `Topic.cancel`."""
        await self.call(self.topic.cancel, position)

    async def reschedule(self, position: Position, *, deliver_at_ms: int) -> None:
        """Change when a delayed message is delivered, before it is due; see `Topic.reschedule`."""
        await self.call(self.topic.reschedule, position, deliver_at_ms=deliver_at_ms)

    async def trim(self) -> int:
        """Delete ledgers that no one needs, and return how many; see `Topic.trim`. It also happens by itself."""
        async with self._workers.persisting:
            return await self.call(self.topic.trim)

    async def call(self, function: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
        """Call a function in a worker thread, while nothing else of this topic is called.

        Raises:
            CancelledError: The caller was cancelled. The call is over when this is raised; its outcome is lost.
        """
        async with self.alone:
            try:
                return await self._workers.run(function, *args, **named)
            finally:
                while self._waiting:
                    self._waiting.pop().set()

    async def _end_hand_overs(self) -> None:
        for subscription in list(self._subscriptions.values()):
            await subscription._end_hand_overs()

    async def _stop_publishing(self) -> None:
        """Refuse every later publish, and wait for those under way."""
        self._is_stopped = True
        await self._publishing.end()

    def _closed(self, failure: Exception | None = None) -> None:
        """Wake all that wait for something: the topic was closed or deleted, or its close failed."""
        self._is_stopped = True
        self._failure = failure
        for subscription in self._subscriptions.values():
            subscription._closed()

    async def _publish(self, requests: Sequence[_Request]) -> None:
        """Publish requests together; one by one if one of them is refused."""
        messages = CheckedMessages(message for batch, _ in requests for message in batch)
        try:
            async with self.alone:
                publication = await self._prepare(messages)
            appended = await self._workers.appends.ask(publication)
            async with self.alone:
                outcome = publication.finish(appended)
        except AckStateError:
            if len(requests) == 1:
                raise
            for each in requests:
                try:
                    await self._publish([each])
                except Exception as error:
                    each[1].set_exception(error)
            return
        at = 0
        for batch, positions in requests:
            if isinstance(outcome, AckStateError):
                positions.set_exception(copy(outcome))
            else:
                positions.set_result(outcome[at : at + len(batch)])
                at += len(batch)

    async def _prepare(self, messages: CheckedMessages) -> Publication:
        now_ms = self.clock()
        prepare = partial(self.topic.prepare, messages, now_ms=now_ms)
        if self.topic.prepares_at_once(len(messages), now_ms=now_ms):
            return prepare()
        return await self._workers.run(prepare)


@final
class AsyncSubscription:
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
        subscription.cursor.add_listener(_Persisted(self))
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
            return self.subscription.ack(position)

    async def ack_many(self, positions: Sequence[Position]) -> Receipt:
        """Ack a list of entries, all or none; see `Subscription.ack_many`."""
        async with self._topic.alone:
            return self.subscription.ack_many(positions)

    async def ack_batch(self, position: Position, unacked_words: Iterable[int]) -> Receipt:
        """Ack messages of a batch; see `Subscription.ack_batch`."""
        async with self._topic.alone:
            return self.subscription.ack_batch(position, unacked_words)

    async def ack_cumulative(self, position: Position, *, properties: Mapping[str, int] | None = None) -> Receipt:
        """Ack everything up to a position; see `Subscription.ack_cumulative`."""
        async with self._topic.alone:
            return self.subscription.ack_cumulative(position, properties=properties)

    async def skip(self, count: int) -> Receipt:
        """Ack the next entries; see `Subscription.skip`."""
        async with self._topic.alone:
            return self.subscription.skip(count)

    async def clear_backlog(self) -> Receipt:
        """Ack all messages of the log; see `Subscription.clear_backlog`."""
        async with self._topic.alone:
            return self.subscription.clear_backlog()

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
            self._topic._waiting.add(self._persisted)
            await self._persisted.wait()

    async def nack(self, position: Position, *, delay_ms: int | None = None) -> bool:
        """Give a message back; see `Subscription.nack`."""
        async with self._topic.alone:
            return self.subscription.nack(position, delay_ms=delay_ms)

    async def nack_many(self, positions: Iterable[Position], *, delay_ms: int | None = None) -> int:
        """Give messages back; see `Subscription.nack_many`."""
        async with self._topic.alone:
            return self.subscription.nack_many(positions, delay_ms=delay_ms)

    async def redeliver_all(self, consumer: str) -> int:
        """Give all messages of a consumer back; see `Subscription.redeliver_all`."""
        async with self._topic.alone:
            return self.subscription.redeliver_all(consumer)

    async def consumer_opened(self, consumer: str, *, priority: int = 0, permits: int = 0) -> None:
        """Open a consumer; see `Subscription.consumer_opened`."""
        async with self._topic.alone:
            self.subscription.consumer_opened(consumer, priority=priority, permits=permits)

    async def consumer_closed(self, consumer: str) -> int:
        """Close a consumer; see `Subscription.consumer_closed`."""
        async with self._topic.alone:
            return self.subscription.consumer_closed(consumer)

    async def add_permits(self, consumer: str, count: int) -> None:
        """Allow a consumer to receive more messages; see `Subscription.add_permits`."""
        async with self._topic.alone:
            self.subscription.add_permits(consumer, count)

    async def seek(self, position: Position | Start | StartTime | str) -> PersistResult:
        """Restart at a position, an end of the log, or a time; see `Subscription.seek`."""
        return await self._topic.call(self.subscription.seek, position)

    async def change_limits(self, limits: GateLimits) -> None:
        """Put other limits in force; see `Subscription.change_limits`."""
        async with self._topic.alone:
            self.subscription.change_limits(limits)

    async def stats(self) -> DispatchStats:
        """Return the numbers of the subscription and its cursor; see `Subscription.stats`."""
        async with self._topic.alone:
            return self.subscription.stats()

    async def why_blocked(self, *, top: int = 3) -> tuple[BlockReason, ...]:
        """Return the rules that keep new messages back; see `Subscription.why_blocked`."""
        return await self._topic.call(self.subscription.why_blocked, top=top)

    async def explain_holes(self, top: int = 10) -> list[HoleReport]:
        """Explain the costliest ack holes; see `Subscription.explain_holes`."""
        return await self._topic.call(self.subscription.explain_holes, top)

    @property
    def redelivery_if_crashed(self) -> int:
        """How many acked messages a crash would redeliver now; see `ManagedCursor.redelivery_if_crashed`."""
        return self.subscription.cursor.redelivery_if_crashed

    async def close(self) -> PersistResult | None:
        """Persist everything and close; see `Subscription.close`. After an error or a cancelled call, close again."""
        if self.subscription.cursor.view.is_closed:
            return None
        await self._end_hand_overs()
        async with self._topic._workers.persisting:  # as `AsyncTopic.unsubscribe`
            return await self._topic.call(self.subscription.close)

    def _closed(self) -> None:
        """Wake all that wait for something: the subscription was closed or deleted, or that has failed."""
        self._may_send.set()
        self._persisted.set()
        for each in self._hand_overs:
            each.cancel()

    async def _end_hand_overs(self) -> None:
        """Wait until dead letters under way are published and acked; call others off, which may take any time."""
        if self._dead_letters is not None and self._dead_letters.topic is None:
            for each in self._hand_overs:
                each.cancel()
        if self._hand_overs:
            await asyncio.wait(self._hand_overs)

    async def _dispatch_all(self) -> DispatchRound:
        sent: list[DispatchRound] = []

        def dispatch() -> None:
            sent.append(self.subscription.dispatch_all(waiter=self._wake))

        async with self._topic.alone:
            self._check_open()
            try:
                await self._topic._workers.run(dispatch)
            except asyncio.CancelledError:
                if sent:
                    self.subscription._take_back_round()
                raise
        return sent[0]

    def _check_open(self) -> None:
        self.subscription.cursor.check_open()
        if self._topic._failure is not None:
            raise copy(self._topic._failure)

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
            await finished(self._topic.call(ended, delivery))
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
            topic = await self._topic._topics.open(policy.topic)
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


@final
class _Persisted(CursorListener):
    """Wakes those that wait for an ack of a subscription to be durable; called by the thread that persists."""

    def __init__(self, subscription: AsyncSubscription) -> None:
        self._subscription = subscription

    def persisted(self, outcome: PersistResult | AckStateError) -> None:
        """Note that another owner has the cursor, and wake all."""
        if isinstance(outcome, CursorFencedError):
            self._subscription._fenced = outcome
        self._subscription._call_soon(self._subscription._persisted.set)
