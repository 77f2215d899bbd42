"""The base of the delay indexes that all subscriptions of a topic share.

Each subscription has a view of the index. The message log reports each delayed message when it is published; a view
whose reader comes to a message that the index does not know, as after a restart, offers it, for all views.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING

from ackstate.delay.due_log import DueLog
from ackstate.delay.position_set import PositionSet
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

_ABOVE_ALL = Position(2**63, 0)
_AT_ONCE: AbstractContextManager[object] = nullcontext()


class SharedDelayIndex(ABC):
    """The messages of a topic that are not yet due, as its views and its message log use them.

    All methods but `learn`, `reading` and `memory_bytes` are called with the lock held.

    Args:
        due_log_bytes_max: About how much memory the due log may take before views that lag are cut off from it.

    Attributes:
        held: The messages that are not yet due; to be read, not changed.
        lock: Guards the index and the calls of its views; no callback of a view runs under it.
        due_log: The messages that have fallen due.
        is_fed: Whether messages are fed explicitly, for all views.
        complete_from: From this position on, the log reports every delayed message when it is published.
    """

    def __init__(self, *, due_log_bytes_max: int) -> None:
        self.held = PositionSet()
        self.lock = threading.Lock()
        self.due_log = DueLog(bytes_max=due_log_bytes_max)
        self.is_fed = False
        self.complete_from = _ABOVE_ALL
        self._reading = threading.Lock()

    @property
    @abstractmethod
    def now_ms(self) -> int:
        """The latest time seen."""

    @property
    @abstractmethod
    def next_due_ms(self) -> int | None:
        """When the next message falls due, at the earliest; None if none is held."""

    @property
    @abstractmethod
    def memory_bytes(self) -> int:
        """About how much memory the messages take that are not yet due or that some view has yet to read."""

    @abstractmethod
    def hold(self, position: Position, deliver_at_ms: int) -> bool:
        """Hold a message until it is due, after `move_due`; False if it is due already. Neither is checked."""

    @abstractmethod
    def move_due(self, now_ms: int) -> None:
        """Move the messages that have fallen due to the due log."""

    @abstractmethod
    def drop_before(self, ledger_id: int) -> None:
        """Drop the messages of the ledgers before one: every subscription has acked them.

        A later call may name a lower ledger. A subscription that restarts there offers the messages once more.
        """

    def learn(self, delayed: Iterable[tuple[Position, int]]) -> None:
        """Hold messages that were just published, each with the time at which to deliver it.

        No reader has come to them yet. The positions and times are not checked.
        """
        with self.lock:
            for position, deliver_at_ms in delayed:
                self.hold(position, deliver_at_ms)

    def reading(self, first: Position) -> AbstractContextManager[object]:
        """Return a context in which to read unread messages; see `DelayedDeliveryTracker.reading`."""
        return self._reading if first < self.complete_from else _AT_ONCE
