"""Groups calls from many threads into one sync.

A mutating call joins the open group. The first call of a group to get the group's lock is its leader: it waits for the
store, closes the group, and executes all of its calls with one sync. Calls that arrive meanwhile form the next group.
So a single call never waits for others, and concurrent calls share a sync. The other calls of a group return their own
outcomes without waiting for the store.

Locks are taken in this order: the group's, the store's, the one for joining. An interrupted leader
(`KeyboardInterrupt`) releases all of them; unless the group is over by then, its next call becomes the leader.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Executor

_Medium = TypeVar("_Medium")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Call(Generic[_Medium]):
    """One caller's change, and its outcome.

    Attributes:
        change: Applies the change to the medium. Runs in any thread, and again if that thread is interrupted.
        result: The result of `change`.
        error: Why the change was refused; None if it was not.
        is_withdrawn: The change must not be executed, or not again: it was committed, or its caller was interrupted and
            has returned.
    """

    change: Callable[[_Medium], Any]
    result: Any = None
    error: Exception | None = None
    is_withdrawn: bool = False


@final
class SyncGroup(Generic[_Medium]):
    """Calls that share a sync.

    Attributes:
        lock: Held by the leader of the group.
        calls: In order of execution.
        is_over: Each call has its outcome, and the group needs no leader any more.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: list[Call[_Medium]] = []
        self.is_over = False


@final
class GroupCommit(Generic[_Medium]):
    """The open group, and the way to join it; thread-safe."""

    def __init__(self) -> None:
        self._joining = threading.Lock()  # Held briefly, to join the open group or to close it.
        self._open_group: SyncGroup[_Medium] = SyncGroup()

    def write(self, change: Callable[[_Medium], _Result], lead: Callable[[SyncGroup[_Medium]], None]) -> _Result:
        """Execute a change together with others, and return its result or raise its error.

        Args:
            change: See `Call`.
            lead: Closes a group and gives each of its calls an outcome; called with the group's lock held.
        """
        call = Call(change)
        try:
            with self._joining:
                group = self._open_group
                group.calls.append(call)
            with group.lock:
                if not group.is_over:
                    lead(group)
        except BaseException:
            call.is_withdrawn = True
            raise
        if call.error is not None:
            raise call.error
        result: _Result = call.result
        return result

    def write_all(
        self, changes: Sequence[Callable[[_Medium], Any]], lead: Callable[[SyncGroup[_Medium]], None]
    ) -> list[Any]:
        """Execute changes in one group, and return the result of each, or its error.

        Args:
            changes: Each is refused or executed by itself.
            lead: As for `write`.
        """
        calls = [Call(change) for change in changes]
        try:  # As in `write`, where one call more would show.
            with self._joining:
                group = self._open_group
                group.calls.extend(calls)
            with group.lock:
                if not group.is_over:
                    lead(group)
        except BaseException:
            for call in calls:
                call.is_withdrawn = True
            raise
        return [call.result if call.error is None else call.error for call in calls]

    def closed(self, group: SyncGroup[_Medium]) -> list[Call[_Medium]]:
        """Close a group to further calls, and return its calls that are to be executed."""
        with self._joining:
            if self._open_group is group:
                self._open_group = SyncGroup()
        calls = [call for call in group.calls if not call.is_withdrawn]
        for call in calls:
            call.error = None  # The error under an interrupted leader.
        return calls


THREADS_MAX = 64
"""How many threads write at once for the caller of many writes that do not depend on each other."""


def call_each(
    call: Callable[[_Item], _Result], items: Sequence[_Item], executor: Executor | None = None
) -> list[_Result | AckStateError]:
    """Call a function with each item, in threads, so that their writes share syncs; a single one in this thread.

    Args:
        call: What one sequence of writes does.
        items: Of sequences that do not depend on each other.
        executor: Runs them; None for a pool of `THREADS_MAX` threads that lives for this call.

    Returns:
        For each, in order, the result or the `AckStateError`. Any other error is raised, when all calls are over.
    """

    def outcome(item: _Item) -> _Result | AckStateError:
        try:
            return call(item)
        except AckStateError as error:
            return error

    if len(items) <= 1:
        return [outcome(item) for item in items]
    if executor is None:
        with ThreadPoolExecutor(min(THREADS_MAX, len(items)), thread_name_prefix="ackstate-writer") as pool:
            return call_each(call, items, pool)
    futures = [executor.submit(outcome, item) for item in items]
    try:
        wait(futures)
    except BaseException:
        for future in futures:
            future.cancel()
        wait(futures)
        raise
    return [future.result() for future in futures]


def fail(calls: list[Call[_Medium]], make_error: Callable[[], Exception]) -> None:
    """Give each call without an error its own error instance, because raising an error changes it."""
    for call in calls:
        call.error = call.error or make_error()
