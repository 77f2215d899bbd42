"""The threads that wait for the disk."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar, final

from ackstate.errors import TopicClosedError
from ackstate.topic.topics import append_publications

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ackstate.errors import AckStateError
    from ackstate.topic.log import Publication

_P = ParamSpec("_P")
_T = TypeVar("_T")
_THREADS_MAX = 16


@final
class Workers:
    """The threads of one store: one that appends publications, and some for everything else that may block.

    To be used in one event loop.

    Attributes:
        persisting: Held while cursors are persisted or deleted, or a log is trimmed: one at a time.
        is_closed: Whether these were closed.
    """

    def __init__(self) -> None:
        self.persisting = asyncio.Lock()
        self._pool = ThreadPoolExecutor(_THREADS_MAX, thread_name_prefix="ackstate")
        self._waiting: list[tuple[Publication, asyncio.Future[int | AckStateError]]] = []
        self._appending: asyncio.Task[None] | None = None
        self.is_closed = False

    async def run(self, call: Callable[_P, _T], *args: _P.args, **named: _P.kwargs) -> _T:
        """Call a function in a thread, and return its result. A cancelled caller still waits for its end.

        Raises:
            TopicClosedError: These were closed; nothing was called.
            CancelledError: The caller was cancelled; the call is over nevertheless, and its outcome is lost.
        """
        if self.is_closed:
            raise TopicClosedError("the topics of this store are closed")
        loop = asyncio.get_running_loop()
        return await finished(loop.run_in_executor(self._pool, partial(call, *args, **named)))

    async def append(self, publication: Publication) -> int | AckStateError:
        """Append a publication; all that come while others are being synced share the next sync.

        Returns:
            As `append_publications` for each.
        """
        loop = asyncio.get_running_loop()
        appended: asyncio.Future[int | AckStateError] = loop.create_future()
        self._waiting.append((publication, appended))
        if self._appending is None:
            self._appending = loop.create_task(self._append_waiting())
            # Not by the task itself: a loop that ends cancels all its tasks, also one that has not begun.
            self._appending.add_done_callback(self._answer_left)
        return await finished(appended)

    async def close(self) -> None:
        """Wait for all calls, and end the threads."""
        if self._appending is not None:
            await asyncio.wait({self._appending})
        self.is_closed = True
        await asyncio.to_thread(self._pool.shutdown)

    async def _append_waiting(self) -> None:
        while self._waiting:
            taken, self._waiting = self._waiting, []
            try:
                outcomes = await self.run(append_publications, [publication for publication, _ in taken])
            except Exception as error:
                for _, appended in taken:
                    appended.set_exception(error)
            except BaseException:
                self._waiting += taken
                raise
            else:
                for (_, appended), outcome in zip(taken, outcomes, strict=True):
                    appended.set_result(outcome)
        self._appending = None

    def _answer_left(self, appending: asyncio.Task[None]) -> None:
        if self._appending is appending:
            self._appending = None
            for _, appended in self._waiting:
                appended.cancel()
            self._waiting.clear()


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
