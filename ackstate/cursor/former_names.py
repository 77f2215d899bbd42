"""Serves attributes of a cursor under their former names, for one release."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from ackstate.renamed import warn_renamed

_NAMES_OF = {
    "view": (
        "batch", "properties", "acked_count", "unpersisted_record_bytes", "is_persist_due", "has_young",
        "holds_back_young", "counts_entries_to_persist", "range_count_to_persist", "is_unacked", "discard_acked",
        "unacked_between", "acked_runs", "hole_at", "holes", "ack_effect", "unpersisted_bytes_added",
        "unpersisted_bytes_freed",
    ),
    "reader": ("read", "rewind", "has_unread", "next_unread"),
}  # fmt: skip
_PLACES = {name: f"{part}.{name}" for part, names in _NAMES_OF.items() for name in names} | {
    f"{what}_internal_property": f"attached.{what}_internal" for what in ("put", "remove")
}


class FormerNames:
    """Has a property for each attribute that moved to a part of `ManagedCursor`, such as `view`.

    A `__getattr__` would do with less, but its class looks up every attribute in three times the time.
    """

    __slots__ = ()


def _moved(name: str, place: str) -> property:
    found = attrgetter(place)

    def get(cursor: Any) -> Any:
        warn_renamed(f"ManagedCursor.{name}", f"ManagedCursor.{place}")
        return found(cursor)

    return property(get, doc=f"See `ManagedCursor.{place}`.")


# Not for type checkers, which are to point at the new places.
for _name, _place in _PLACES.items():
    setattr(FormerNames, _name, _moved(_name, _place))
