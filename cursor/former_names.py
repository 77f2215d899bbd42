"""Serves attributes of a cursor under their former names, for one release."""

from __future__ import annotations

from operator import attrgetter

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
    """Has a property for each attribute that moved to `ManagedCursor.view` or `ManagedCursor.reader`.

    A `__getattr__` would do with less, but its class looks up every attribute in three times the time.
    """

    __slots__ = ()


# Not for type checkers, which are to point at the new places.
for _name, _part in _PART_OF.items():
    setattr(FormerNames, _name, property(attrgetter(f"{_part}.{_name}"), doc=f"See `ManagedCursor.{_part}`."))
