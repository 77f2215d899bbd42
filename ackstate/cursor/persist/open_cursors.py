"""Opens many cursors of one store, which share syncs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.cursor.journal.journal import cursor_path
from ackstate.cursor.managed import ManagedCursor
from ackstate.stores.base import call_each

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Executor

    from ackstate.cursor.persist.opening import CursorOpening
    from ackstate.errors import AckStateError
    from ackstate.stores.base import Store


def open_cursors(
    store: Store, openings: Iterable[CursorOpening], *, now_ms: int, executor: Executor | None = None
) -> list[ManagedCursor | AckStateError]:
    """Open or create many cursors, as `ManagedCursor.open` each, in threads: a store on a disk lets them share syncs.

    A crash meanwhile leaves every cursor as a crash during its own `ManagedCursor.open` does.

    Args:
        store: Where the cursors' state lives; stays open.
        openings: The cursors.
        now_ms: The present.
        executor: As for `persist_all`.

    Returns:
        For each, in order, the cursor, or the error that its own `ManagedCursor.open` would have raised: one that
        fails does not keep the others from being opened.

    Raises:
        TypeError, ValueError: A cursor comes twice, or a name is of another type or empty; nothing was written.
    """
    openings = list(openings)
    if len({cursor_path(each.topic, each.subscription) for each in openings}) < len(openings):
        raise ValueError("cursors that are opened together must be different")
    return call_each(lambda each: ManagedCursor._open(store, each, now_ms=now_ms), openings, executor)
