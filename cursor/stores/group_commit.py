"""How do calls from many threads share one sync?

A mutating call joins the group that is open. The first of a group to get the group's lock leads it: it waits for the
store, closes the group, and carries all of it out with one sync. Calls that come meanwhile make the next group. So a
lone call waits for nobody, and calls that would wait for each other's syncs share one. The others of a group then find
it over and go, each with its own outcome, without waiting for the store; but what the leader does for the store after
the sync, such as the compaction of a `FileStore`, they wait for as it does.

Locks are taken in this order: a group's, the store's own, the one for joining. A leader that is interrupted
(`KeyboardInterrupt`) lets go of them; unless the group is over by then, the next of it leads it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

if TYPE_CHECKING:
    from collections.abc import Callable

_Medium = TypeVar("_Medium")
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Call(Generic[_Medium]):
    """What one caller wants done, and what became of it.

    Attributes:
        change: Does it to the medium, in any thread, and anew if that one is interrupted.
        result: What `change` returned.
        error: Why it was not done; None if it was.
        is_withdrawn: Its caller was interrupted: it is not to be done any more behind its back.
    """

    change: Callable[[_Medium], Any]
    result: Any = None
    error: Exception | None = None
    is_withdrawn: bool = False


@final
class Group(Generic[_Medium]):
    """Calls that share a sync.

    Attributes:
        lock: Held by whoever leads the group.
        calls: In the order in which they are carried out.
        is_over: Each call has its outcome, and nobody is to lead the group any more.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: list[Call[_Medium]] = []
        self.is_over = False


@final
class GroupCommit(Generic[_Medium]):
    """The group that is open, and how to join it; thread-safe."""

    def __init__(self) -> None:
        self._joining = threading.Lock()  # Held for an instant, to join the open group or to close it.
        self._open_group: Group[_Medium] = Group()

    def write(self, change: Callable[[_Medium], _Result], lead: Callable[[Group[_Medium]], None]) -> _Result:
        """Have a change carried out with others, and return what it returned, or raise what it met.

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

    def closed(self, group: Group[_Medium]) -> list[Call[_Medium]]:
        """Let nobody join a group any more, and return the calls of it that are to be carried out."""
        with self._joining:
            if self._open_group is group:
                self._open_group = Group()
        calls = [call for call in group.calls if not call.is_withdrawn]
        for call in calls:
            call.error = None  # What it met under a leader that was interrupted.
        return calls


def fail(calls: list[Call[_Medium]], make_error: Callable[[], Exception]) -> None:
    """Give each call that has no error yet one of its own, because raising an error changes it."""
    for call in calls:
        call.error = call.error or make_error()
