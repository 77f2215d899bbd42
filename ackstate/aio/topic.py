"""One topic, for asyncio."""

from __future__ import annotations

import asyncio
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar, Unpack, final

from ackstate.aio.subscription import AsyncSubscription
from ackstate.aio.workers import finished
from ackstate.errors import AckStateError, TopicClosedError
from ackstate.message import CheckedMessages, checked_messages

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from ackstate.aio.workers import Workers
    from ackstate.dispatch.subscription import Subscription
    from ackstate.message import Message
    from ackstate.position import Position
    from ackstate.topic.log import Publication
    from ackstate.topic.topic import RequestedFields
    from ackstate.topic.topic import Topic

_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Request(NamedTuple):
    """Messages that wait to be published, and the future of their positions."""

    messages: CheckedMessages
    positions: asyncio.Future[list[Position]]


@final
class AsyncTopic:
    """A topic whose calls are awaited. Opened by `AsyncTopics.open`; to be used in one event loop.

    The calls of a topic and its subscriptions come one after the other; a sync holds up none of them but publishes of
    this topic, which share the next one.

    Attributes:
        topic: The topic. Its parts may be read; a call that changes one goes through `alone`.
        alone: Held while a call is made: no other one of this topic overlaps with it.
        open_topic: Opens another topic; see `AsyncTopics.open`.
        waiting: Set after the next `call`: each is of a caller that waits for what that may have changed.
        failure: Why the last `AsyncTopics.close` failed; None if it did not.
    """

    def __init__(
        self,
        topic: Topic,
        workers: Workers,
        clock: Callable[[], int],
        open_topic: Callable[[str], Coroutine[Any, Any, AsyncTopic]],
    ) -> None:
        self.topic = topic
        self.alone = asyncio.Lock()
        self.clock = clock
        self.workers = workers
        self.open_topic = open_topic
        self.waiting: set[asyncio.Event] = set()
        self.failure: Exception | None = None
        self._requests: list[_Request] = []
        self._publishing: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._subscriptions: dict[str, AsyncSubscription] = {}

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self.topic.name

    async def publish(self, messages: Sequence[Message]) -> list[Position]:
        """Append messages, all or none, and return their positions in order once they are synced.

        Publishes that come while another one is being synced are appended together, each of them all or none.

        Raises:
            As `Topic.publish`.
            CancelledError: The caller was cancelled; the messages may be stored nevertheless.
        """
        if self._is_stopped:
            raise TopicClosedError(f"topic {self.name!r} is closed")
        loop = asyncio.get_running_loop()
        request = _Request(checked_messages(messages), loop.create_future())
        self._requests.append(request)
        if self._publishing is None:
            self._publishing = loop.create_task(self._publish_requests())
            # Not by the task itself: a loop that ends cancels all its tasks, also one that has not begun.
            self._publishing.add_done_callback(self._answer_left)
        return await finished(request.positions)

    async def subscribe(self, name: str, **wanted: Unpack[RequestedFields]) -> AsyncSubscription:
        """Open a subscription, or create it; return the same object if it is open. See `Topic.subscribe`."""
        subscribe = partial(self.topic.subscribe, name, now_ms=self.clock(), **wanted)
        return self.of(name, await self.call(subscribe))

    def of(self, name: str, subscription: Subscription) -> AsyncSubscription:
        """Return the subscription of this topic that has a name, for asyncio; the same object for the same one."""
        known = self._subscriptions.get(name)
        if known is None or known.subscription is not subscription:
            known = self._subscriptions[name] = AsyncSubscription(subscription, name, self)
        return known

    async def unsubscribe(self, name: str) -> bool:
        """Delete a subscription, and return whether there was one; see `Topic.unsubscribe`."""
        async with self.workers.persisting:  # A persist meanwhile would report that the cursor is fenced.
            try:
                return await self.call(self.topic.unsubscribe, name, now_ms=self.clock())
            finally:
                known = self._subscriptions.get(name)
                if known is not None and known.subscription.cursor.view.is_closed:
                    del self._subscriptions[name]
                    known.closed()

    async def trim(self) -> int:
        """Delete ledgers that no one needs, and return how many; see `Topic.trim`. It also happens by itself."""
        async with self.workers.persisting:
            return await self.call(self.topic.trim, now_ms=self.clock())

    async def call(self, function: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
        """Call a function in a worker thread, while nothing else of this topic is called.

        Raises:
            CancelledError: The caller was cancelled. The call is over when this is raised; its outcome is lost.
        """
        async with self.alone:
            try:
                return await self.workers.run(function, *args, **named)
            finally:
                while self.waiting:
                    self.waiting.pop().set()

    async def end_hand_overs(self) -> None:
        for subscription in list(self._subscriptions.values()):
            await subscription.end_hand_overs()

    async def stop_publishing(self) -> None:
        """Refuse every later publish, and wait for those under way."""
        self._is_stopped = True
        if self._publishing is not None:
            await asyncio.wait({self._publishing})

    def closed(self, failure: Exception | None = None) -> None:
        """Wake all that wait for something: the topic was closed or deleted, or its close failed."""
        self._is_stopped = True
        self.failure = failure
        for subscription in self._subscriptions.values():
            subscription.closed()

    async def _publish_requests(self) -> None:
        while self._requests:
            taken, self._requests = self._requests, []
            await self._publish(taken)
        self._publishing = None

    def _answer_left(self, publishing: asyncio.Task[None]) -> None:
        if self._publishing is publishing:
            self._publishing = None
            for each in self._requests:
                each.positions.cancel()
            self._requests.clear()

    async def _publish(self, requests: Sequence[_Request]) -> None:
        """Publish requests together; one by one if one of them is refused."""
        try:
            messages = CheckedMessages(message for each in requests for message in each.messages)
            async with self.alone:
                publication = await self._prepare(messages)
            appended = await self.workers.append(publication)
            async with self.alone:
                outcome = publication.finish(appended)
        except AckStateError as error:
            if len(requests) == 1:
                requests[0].positions.set_exception(error)
            else:
                for each in requests:
                    await self._publish([each])
        except Exception as error:
            for each in requests:
                each.positions.set_exception(error)
        except BaseException:
            for each in requests:
                each.positions.cancel()
            raise
        else:
            _answer(requests, outcome)

    async def _prepare(self, messages: CheckedMessages) -> Publication:
        now_ms = self.clock()
        prepare = partial(self.topic.prepare, messages, now_ms=now_ms)
        if self.topic.prepares_at_once(len(messages), now_ms=now_ms):
            return prepare()
        return await self.workers.run(prepare)


def _answer(requests: Sequence[_Request], outcome: Sequence[Position] | AckStateError) -> None:
    at = 0
    for request in requests:
        if isinstance(outcome, AckStateError):
            request.positions.set_exception(copy(outcome))
        else:
            end = at + len(request.messages)
            request.positions.set_result(list(outcome[at:end]))
            at = end
