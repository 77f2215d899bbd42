"""Serves attributes of a cursor under their former names, for one release."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_PART_OF = {
    **dict.fromkeys(
        (
            "batch", "properties", "acked_count", "unpersisted_record_bytes", "is_persist_due", "has_young",
            "holds_back_young", "counts_entries_to_persist", "range_count_to_persist", "is_unacked", "discard_acked",
            "unacked_between", "acked_runs", "hole_at", "holes", "ack_effect", "unpersisted_bytes_added",
            "unpersisted_bytes_freed",
        ),
        "view",
    ),
    **dict.fromkeys(("read", "rewind", "has_unread", "next_unread"), "reader"),
}  # fmt: skip


class FormerNames:
    """Finds an attribute that moved to `ManagedCursor.view` or `ManagedCursor.reader`."""

    __slots__ = ()

    if not TYPE_CHECKING:  # A type checker is to point at the new place.

        def __getattr__(self, name: str) -> Any:
            if name not in _PART_OF:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
            return getattr(getattr(self, _PART_OF[name]), name)
