"""Finds threads that use one object at once although its calls must come one after the other."""

from __future__ import annotations

from threading import RLock, get_ident
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from types import TracebackType


@final
class SoleUse:
    """A context for one thread at a time; another thread is refused, not held up.

    The check costs a fraction of a microsecond. It finds calls that really overlap, and so most mistakes, not all.

    Args:
        name: The name of the object, for the error.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = RLock()
        self._depth = 0
        self._user: int | None = None  # the thread in the context

    def __enter__(self) -> None:
        """Begin.

        Raises:
            RuntimeError: Another thread is in the context.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(f"{self._name} is used by two threads at once; see the threading rules")
        self._depth += 1
        self._user = get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._user = None
        self._lock.release()

    def check(self) -> None:
        """Raise `RuntimeError` if another thread is in the context. Any number of threads may check at once."""
        user = self._user
        if user is not None and user != get_ident():
            raise RuntimeError(f"{self._name} is used by two threads at once; see the threading rules")
