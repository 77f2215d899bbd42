"""Opens many cursors of one store, which share syncs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.cursor.managed import ManagedCursor
from ackstate.stores.steps import run_all

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ackstate.cursor.persist.opening import CursorOpening
    from ackstate.errors import AckStateError
    from ackstate.stores.base import Store


def open_cursors(
    store: Store, openings: Iterable[CursorOpening], *, now_ms: int
) -> list[ManagedCursor | AckStateError]:
    """Open or create many cursors, as `ManagedCursor.open` each, in steps: each step of all cursors shares a sync.

    A store without `GroupStore.write_all` needs a sync for each step of each cursor. A crash meanwhile leaves every
    cursor as a crash during its own `ManagedCursor.open` does.

    Args:
        store: Where the cursors' state lives; stays open.
        openings: The cursors.
        now_ms: The present.

    Returns:
        For each, in order, the cursor, or the error that its own `ManagedCursor.open` would have raised: one that
        fails does not keep the others from being opened.

    Raises:
        TypeError, ValueError: A cursor comes twice, or a name is of another type or empty; nothing was written.
    """
    openings = list(openings)
    if len({(each.topic, each.subscription) for each in openings}) < len(openings):
        raise ValueError("cursors that are opened together must be different")
    return run_all(store, [ManagedCursor.opening(store, each, now_ms=now_ms) for each in openings])
