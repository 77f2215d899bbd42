"""What an application attached to a cursor and to its mark-delete position, and what of it may be on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.promises import Promise, hold

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@final
class Properties:
    """The properties of one cursor, those of the mark-delete position and its own.

    Attributes:
        marked: What the latest mark-delete carried.
    """

    def __init__(self) -> None:
        self.marked: dict[str, int] = {}
        self._durable: list[Mapping[str, int]] = [{}]  # what may be on the disk
        self._attached: list[Mapping[str, str]] = [{}]

    def mark(self, properties: dict[str, int]) -> None:
        """Note those of a mark-delete."""
        self.marked = properties
        self._durable.append(properties)

    def attach(self, properties: dict[str, str], *, is_certain: bool) -> None:
        """Note those of the cursor that are on the disk now, or may be."""
        self._attached = [properties] if is_certain else [*self._attached, properties]

    def reset(self, *, is_certain: bool) -> None:
        """Note a reset, or one of which nobody knows whether it happened."""
        self._durable.append({})
        if is_certain:
            self.marked, self._durable = {}, [{}]

    def wrote(self, marked: Mapping[str, int], instants: Iterable[Mapping[str, int]]) -> None:
        """Compare what a persist wrote with what was, at the instants that it may be of."""
        hold(Promise.I9, marked in instants, f"mark-delete properties {marked} were written, there were {self.marked}")
        self._durable = [marked, self.marked]

    def check_attached(self, found: Mapping[str, str]) -> None:
        """Compare what the record holds."""
        hold(Promise.I6, found in self._attached, f"cursor properties are {found}, not one of {self._attached}")

    def recovered(self, marked: Mapping[str, int], attached: Mapping[str, str]) -> None:
        """Compare what came back, and go on from it."""
        self.check_attached(attached)
        found = f"mark-delete properties are {dict(marked)}, not one of {self._durable}"
        hold(Promise.I2, dict(marked) in self._durable, found)
        self.marked = dict(marked)
        self._durable, self._attached = [self.marked], [dict(attached)]
