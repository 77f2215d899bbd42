"""The topics of one store, for asyncio."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Self, final

from ackstate.aio.topic import AsyncTopic
from ackstate.aio.workers import Workers, finished
from ackstate.checks import check_count
from ackstate.cursor.persist import tick_all
from ackstate.errors import AckStateError, TopicClosedError
from ackstate.topic.topics import Topics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from concurrent.futures import Executor
    from types import TracebackType

    from ackstate.aio.subscription import AsyncSubscription
    from ackstate.stores.base import Store
    from ackstate.topic.settings import TopicSettings
    from ackstate.topic.topic import SubscriptionRequest
    from ackstate.topic.topic import Topic

_LOG = logging.getLogger(__name__)


@final
class AsyncTopics:
    """The topics of a store, persisted in the background from ``async with`` on.

    To be used in one event loop. At the end of ``async with``, also if the task is cancelled as by Ctrl-C, no publish
    is accepted any more, those under way are finished, and everything is persisted: nothing that was acked is
    redelivered. SIGTERM cancels no task by itself: docs/embedding.md has a handler that does.

    Args:
        store: Where they are stored; stays open. It must be safe for concurrent use, as all stores of this package are.
        settings: The settings of every topic; None for the defaults.
        clock: Returns the present, in milliseconds: for example `lambda: time.time_ns() // 1_000_000`.
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
        clock: Callable[[], int],
        tick_ms: int = 100,
        executor: Executor | None = None,
    ) -> None:
        self.topics = Topics(store, settings=settings, executor=executor)
        check_count("tick_ms", tick_ms, least=1)
        self._clock = clock
        self._tick_s = tick_ms / 1_000
        self._workers = Workers()
        self._opened: dict[str, AsyncTopic] = {}
        self._alone = asyncio.Lock()
        self._ticking: asyncio.Task[None] | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.get_running_loop().create_task(self._tick_for_ever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self, name: str) -> AsyncTopic:
        """Open a topic, or create it; return the same object if it is open. See `Topics.open`."""
        self._check_open(name)
        async with self._alone:
            self._check_open(name)
            return self._of(await self._workers.run(self.topics.open, name, now_ms=self._clock()))

    async def open_all(self, names: Iterable[str]) -> dict[str, AsyncTopic | AckStateError]:
        """Open or create many topics, which share syncs, and return each or its error. See `Topics.open_all`."""
        async with self._alone:
            if self._is_closed:
                raise TopicClosedError("topics cannot be opened: the topics are closed")
            found = await self._workers.run(self.topics.open_all, list(names), now_ms=self._clock())
            return {name: each if isinstance(each, AckStateError) else self._of(each) for name, each in found.items()}

    async def subscribe_all(
        self, requests: Mapping[str, Iterable[SubscriptionRequest]]
    ) -> dict[tuple[str, str], AsyncSubscription | AckStateError]:
        """Open or create subscriptions of many open topics, which share syncs. See `Topics.subscribe_all`."""
        async with self._alone, AsyncExitStack() as held:
            if self._is_closed:
                raise TopicClosedError("subscriptions cannot be opened: the topics are closed")
            topics = {name: self._opened[name] for name in requests}
            for topic in topics.values():
                await held.enter_async_context(topic.alone)
            found = await self._workers.run(self.topics.subscribe_all, requests, now_ms=self._clock())
        return {
            names: each if isinstance(each, AckStateError) else topics[names[0]].of(names[1], each)
            for names, each in found.items()
        }

    def _check_open(self, name: str) -> None:
        if self._is_closed:
            raise TopicClosedError(f"topic {name!r} cannot be opened: the topics are closed")

    def _of(self, topic: Topic) -> AsyncTopic:
        known = self._opened.get(topic.name)
        if known is None or known.topic is not topic:
            known = self._opened[topic.name] = AsyncTopic(topic, self._workers, self._clock, self.open)
        return known

    async def delete(self, name: str) -> bool:
        """Delete a topic with its subscriptions, and return whether there was one. See `Topics.delete`."""
        async with self._alone, self._workers.persisting:  # as `AsyncTopic.unsubscribe`
            topic = self._opened.get(name)
            if topic is None:
                return await self._workers.run(self.topics.delete, name, now_ms=self._clock())
            try:
                return await topic.call(self.topics.delete, name, now_ms=self._clock())
            finally:
                if topic.topic.is_closed:
                    del self._opened[name]
                    topic.closed()

    async def tick(self) -> None:
        """Persist the subscriptions that are due, and trim the logs, as the background task does.

        Failures are logged, and a later tick tries again.
        """
        async with self._workers.persisting:
            cursors = [each for topic in self._opened.values() for each in topic.topic.cursors]
            executor = self.topics.executor
            outcomes = await self._workers.run(tick_all, cursors, now_ms=self._clock(), executor=executor)
        for (topic_name, name), outcome in outcomes.items():
            if isinstance(outcome, AckStateError):
                _LOG.warning("subscription %r of topic %r could not be persisted: %s", name, topic_name, outcome)
        for topic in list(self._opened.values()):
            if topic.topic.may_trim(now_ms=self._clock()):
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
            await topic.end_hand_overs()
        async with self._alone:
            if self._workers.is_closed:
                return
            if self._ticking is not None:
                self._ticking.cancel()
                await asyncio.wait({self._ticking})
            topics = list(self._opened.values())
            for topic in topics:
                await topic.stop_publishing()
            failure: Exception | None = None
            try:
                async with AsyncExitStack() as held:
                    for topic in topics:
                        await held.enter_async_context(topic.alone)
                    await self._workers.run(self.topics.close, now_ms=self._clock())
            except Exception as error:
                failure = error
                raise
            finally:
                for topic in topics:
                    topic.closed(failure)
            await self._workers.close()

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            try:
                await self.tick()
            except Exception:
                _LOG.exception("a tick failed")
