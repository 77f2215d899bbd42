"""The properties of a cursor and of its mark-delete position, and the ones that may be on the disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.promises import Promise, hold

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


@final
class Properties:
    """The properties of one cursor, those of the mark-delete position and its own.

    Attributes:
        marked: Properties of the latest mark-delete.
    """

    def __init__(self) -> None:
        self.marked: dict[str, int] = {}
        self._durable: list[Mapping[str, int]] = [{}]  # the possible states of the disk
        self._attached: list[Mapping[str, str]] = [{}]

    def mark(self, properties: dict[str, int]) -> None:
        """Record the properties of a mark-delete."""
        self.marked = properties
        self._durable.append(properties)

    def attach(self, properties: dict[str, str], *, is_certain: bool) -> None:
        """Record properties of the cursor that are now, or may be, on the disk."""
        self._attached = [properties] if is_certain else [*self._attached, properties]

    def reset(self, *, is_certain: bool) -> None:
        """Record a reset, whose outcome may be unknown."""
        self._durable.append({})
        if is_certain:
            self.marked, self._durable = {}, [{}]

    def wrote(self, marked: Mapping[str, int], instants: Iterable[Mapping[str, int]]) -> None:
        """Check the written properties of a persist against those of the possible instants."""
        hold(Promise.I9, marked in instants, f"mark-delete properties {marked} were written, there were {self.marked}")
        self._durable = [marked, self.marked]

    def check_attached(self, found: Mapping[str, str]) -> None:
        """Check the properties in the record."""
        hold(Promise.I6, found in self._attached, f"cursor properties are {found}, not one of {self._attached}")

    def recovered(self, marked: Mapping[str, int], attached: Mapping[str, str]) -> None:
        """Check the recovered properties, and continue with them."""
        self.check_attached(attached)
        found = f"mark-delete properties are {dict(marked)}, not one of {self._durable}"
        hold(Promise.I2, dict(marked) in self._durable, found)
        self.marked = dict(marked)
        self._durable, self._attached = [self.marked], [dict(attached)]
