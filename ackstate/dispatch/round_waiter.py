"""Calls the waiter of a subscription as soon as another round of dispatches may send something."""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, final

from ackstate.limits.waiters import call_all

if TYPE_CHECKING:
    from collections.abc import Callable

    Waiter = Callable[[], object]


@final
class RoundWaiter:
    """At most one waiter, which is called once, and the kinds of events for which it is called.

    A round takes the waiter away, sends, and then arms it for every event that could change the outcome of the next
    round. Events that happen during the round are not lost: then the waiter is called as soon as it is armed.

    The callers of `room_made` and `messages_came` may hold any lock, also that of another subscription; a waiter runs
    under these locks, and not under the one here.

    Attributes:
        wants_room: Whether a decrease of the usage of a limit is such an event.
        wants_messages: Whether a message that became ready is one.
        wake_ms: When whoever waits will dispatch anyway, because a message's time will have come; None if never.
    """

    def __init__(self) -> None:
        self.wants_room = self.wants_messages = False
        self.wake_ms: int | None = None
        self._lock = Lock()
        self._waiter: Waiter | None = None
        self._is_in_round = self._was_missed = False

    def begin_round(self) -> Waiter | None:
        """Take the waiter away, and remember from now on whether room was made; return the waiter."""
        with self._lock:
            waiter, self._waiter = self._waiter, None
            self._is_in_round = self.wants_room = True
            self._was_missed = self.wants_messages = False
        return waiter

    def arm(self, waiter: Waiter | None, *, messages: bool, room: bool) -> None:
        """End the round: call the waiter once at the next event; at once if there was one during the round."""
        with self._lock:
            self._is_in_round = False
            self._waiter = waiter
            self.wants_messages = messages and waiter is not None
            self.wants_room = room and waiter is not None
            was_missed = self._was_missed
        if was_missed:
            self.wake()

    def messages_came(self, *_: object) -> None:
        """Note that messages were published, or became ready, or have another owner than before."""
        if self.wants_messages:
            self.wake()

    def room_made(self) -> None:
        """Note that the usage of a limit decreased, or that the limit changed."""
        if self.wants_room:
            self.wake()

    def time_comes(self, next_ms: int | None) -> None:
        """Note when the time of a message comes next; None if none waits for a time."""
        if self.wants_messages and next_ms is not None and (self.wake_ms is None or next_ms < self.wake_ms):
            self.wake()

    def wake(self) -> None:
        """Call the waiter for an event that always counts: permits, consumers, a gate that opened, a seek, a close."""
        with self._lock:
            waiter, self._waiter = self._waiter, None
            self.wants_room, self.wants_messages = self._is_in_round, False
            self._was_missed = self._is_in_round
        if waiter is not None:
            call_all((waiter,))
