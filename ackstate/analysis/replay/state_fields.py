"""Fields of a stored state: JSON values and roaring bitmaps under explicit names, checked when they are read."""

from __future__ import annotations

import base64
import binascii
import re
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import numpy as np
from pyroaring import BitMap

from ackstate.errors import AckStateError, UnsupportedVersionError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ackstate.analysis.replay.acked import Int64s

_Result = TypeVar("_Result")

VERSION = 7
"""The version of each record in a state, and of its manifest."""
NUMBER_MAX = 2**61
"""Limit for the absolute value of counts and times in a state, so that adding a day still fits 64 bits."""
ENTRY_COUNT_MAX = ENTRY_ID_MAX + 1
"""A ledger has at most this many entries."""
_SHOWN_MAX = 40


class CheckpointError(AckStateError):
    """A state that cannot be continued; the message has its name and the remedy."""


def check_version(version: object, what: str) -> None:
    """Refuse a state of another version; a value that is not a version passes.

    Args:
        version: The version in the state.
        what: The name of the state, for the message.

    Raises:
        CheckpointError: An older release wrote it.
        UnsupportedVersionError: A newer release wrote it.
    """
    if type(version) is not int or version == VERSION:
        return
    if version > VERSION:
        raise UnsupportedVersionError(f"{what} has version {_shown(version)}; this release reads up to {VERSION}")
    raise CheckpointError(
        f"{what} has version {_shown(version)}, which only older releases can continue; read all days again, with "
        "another --state"
    )


def text_of(data: bytes) -> str:
    """Encode bytes for `Fields.data`."""
    return base64.b64encode(data).decode()


def compact_entries(bitmaps: Iterable[tuple[int, BitMap]]) -> list[list[Any]]:
    """Encode entries by ledger for `Fields.entries`, in as few bytes as possible."""
    compact = [(ledger_id, bitmap.copy()) for ledger_id, bitmap in bitmaps]
    for _, bitmap in compact:
        bitmap.run_optimize()
    return exact_entries(compact)


def exact_entries(bitmaps: Iterable[tuple[int, BitMap]]) -> list[list[Any]]:
    """Encode entries by ledger for `Fields.entries`, preserving the kinds of containers of each bitmap.

    Two bitmaps with the same entries may be written to a cursor ledger in different sizes.
    """
    return [[ledger_id, text_of(bitmap.serialize())] for ledger_id, bitmap in sorted(bitmaps, key=itemgetter(0))]


@final
class Fields:
    """The fields of one object of a state. Each is read once; `end` refuses unread fields.

    Every method raises `CheckpointError`, which names the field, if the value is invalid.

    Args:
        value: The decoded JSON object.
        path: Its path in the state; empty for the state itself.
    """

    def __init__(self, value: object, path: str = "") -> None:
        if type(value) is not dict:
            raise CheckpointError(f"the state is damaged: {path or 'it'} must be an object, got {_shown(value)}")
        self._values: dict[str, object] = dict(value)
        self._path = path

    def refuse(self, name: str, rule: str, value: object) -> NoReturn:
        """Raise the error for a field."""
        raise CheckpointError(f"the state is damaged: {self._named(name)} must be {rule}, got {_shown(value)}")

    def end(self) -> None:
        """Refuse fields that were not read."""
        if self._values:
            name = _shown(min(self._values))
            raise CheckpointError(f"the state is damaged: {self._path or 'it'} has an unknown field, {name}")

    def check(self, check: Callable[[], None]) -> None:
        """Refuse fields that contradict each other.

        Args:
            check: Asserts every invariant of the restored object.
        """
        try:
            check()
        except AssertionError as error:
            reason = f": {error}" if str(error) else ""
            raise CheckpointError(
                f"the state is damaged: fields of {self._path or 'it'} contradict each other{reason}"
            ) from error

    def integer(self, name: str, *, least: int = 0, most: int = NUMBER_MAX) -> int:
        """Return an integer between two others, both included."""
        value = self._take(name)
        if type(value) is not int or not least <= value <= most:
            self.refuse(name, f"an integer from {least} to {most}", value)
        return value

    def signed(self, name: str) -> int:
        """Return an integer that may be negative."""
        return self.integer(name, least=-NUMBER_MAX)

    def optional_integer(self, name: str, *, least: int = -NUMBER_MAX, most: int = NUMBER_MAX) -> int | None:
        """Return an integer, or None for null."""
        if self._values.get(name, 0) is None:
            del self._values[name]
            return None
        return self.integer(name, least=least, most=most)

    def flag(self, name: str) -> bool:
        """Return true or false."""
        value = self._take(name)
        if type(value) is not bool:
            self.refuse(name, "true or false", value)
        return value

    def word(self, name: str, *expected: str) -> str:
        """Return a text that must be one of some."""
        value = self._take(name)
        if value not in expected:
            self.refuse(name, " or ".join(map(repr, expected)), value)
        return str(value)

    def text(self, name: str, pattern: str) -> str:
        """Return a text that a regular expression matches as a whole."""
        value = self._take(name)
        if type(value) is not str or re.fullmatch(pattern, value) is None:
            self.refuse(name, f"a text that matches {pattern}", value)
        return value

    def texts(self, name: str) -> dict[str, str]:
        """Return an object of texts."""
        return self._texts(name, self._take(name))

    def all_texts(self, name: str) -> list[dict[str, str] | None]:
        """Return a list of objects of texts, or None where one is null."""
        return [None if each is None else self._texts(name, each) for each in self._list(name)]

    def integers(
        self, name: str, *, least: int = -NUMBER_MAX, most: int = NUMBER_MAX, count: int | None = None
    ) -> list[int]:
        """Return a list of integers, of a given length unless that is None."""
        values = self._list(name)
        if count is not None and len(values) != count:
            self.refuse(name, f"a list of {count} values", values)
        for value in values:
            if type(value) is not int or not least <= value <= most:
                self.refuse(name, f"a list of integers from {least} to {most}", value)
        return values

    def array(self, name: str, *, least: int = -NUMBER_MAX, most: int = NUMBER_MAX, count: int | None = None) -> Int64s:
        """Return a list of integers as an array."""
        return np.array(self.integers(name, least=least, most=most, count=count), np.int64)

    def position(self, name: str) -> Position:
        """Return a position; its entry id is -1 before the first entry of a ledger."""
        values = self._list(name)
        if len(values) != 2 or not all(type(value) is int for value in values):
            self.refuse(name, "a ledger id and an entry id", values)
        ledger_id, entry_id = values
        if not (0 <= ledger_id <= LEDGER_ID_MAX and -1 <= entry_id <= ENTRY_ID_MAX):
            self.refuse(name, "a position", values)
        return Position(ledger_id, entry_id)

    def log(self, name: str) -> dict[int, int]:
        """Return a message log: ledger id -> entry count, rising."""
        counts: dict[int, int] = {}
        last = -1
        for pair in self._list(name):
            if type(pair) is not list or len(pair) != 2 or not all(type(value) is int for value in pair):
                self.refuse(name, "a list of pairs of a ledger id and an entry count", pair)
            ledger_id, count = pair
            if not last < ledger_id <= LEDGER_ID_MAX or not 0 <= count <= ENTRY_COUNT_MAX:
                self.refuse(name, "rising ledger ids with entry counts up to 2**32", pair)
            counts[ledger_id], last = count, ledger_id
        return counts

    def entries(self, name: str) -> dict[int, BitMap]:
        """Return entries by ledger, rising; bitmaps may be empty."""
        found: dict[int, BitMap] = {}
        last = -1
        for pair in self._list(name):
            if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not int:
                self.refuse(name, "a list of pairs of a ledger id and a bitmap", pair)
            if not last < pair[0] <= LEDGER_ID_MAX:
                self.refuse(name, f"rising ledger ids, the next above {last}", pair[0])
            last = pair[0]
            found[last] = self._bitmap(name, pair[1])
        return found

    def data(self, name: str) -> bytes:
        """Return bytes."""
        return self._bytes(name, self._take(name))

    def all_data(self, name: str) -> list[bytes]:
        """Return a list of bytes."""
        return [self._bytes(name, each) for each in self._list(name)]

    def one(self, name: str, read: Callable[[Fields], _Result]) -> _Result:
        """Return the result of reading an object.

        Args:
            name: The field.
            read: Reads all fields of the object; its other errors are reported as `CheckpointError` as well.
        """
        return self._read(self._named(name), self._take(name), read)

    def optional(self, name: str, read: Callable[[Fields], _Result]) -> _Result | None:
        """Return the result of reading an object, or None for null."""
        if self._values.get(name, 0) is None:
            del self._values[name]
            return None
        return self.one(name, read)

    def each(self, name: str, read: Callable[[Fields], _Result]) -> list[_Result]:
        """Return the results of reading each object of a list."""
        path = self._named(name)
        return [self._read(f"{path}[{index}]", each, read) for index, each in enumerate(self._list(name))]

    @staticmethod
    def _read(path: str, value: object, read: Callable[[Fields], _Result]) -> _Result:
        fields = Fields(value, path)
        try:
            result = read(fields)
        except CheckpointError:
            raise
        except (AckStateError, ValueError, TypeError) as error:
            raise CheckpointError(f"the state is damaged: {path}: {error}") from error
        fields.end()
        return result

    def _take(self, name: str) -> Any:
        if name not in self._values:
            raise CheckpointError(f"the state is damaged: {self._named(name)} is missing")
        return self._values.pop(name)

    def _list(self, name: str) -> list[Any]:
        value = self._take(name)
        if type(value) is not list:
            self.refuse(name, "a list", value)
        return value

    def _bytes(self, name: str, value: object) -> bytes:
        try:
            return base64.b64decode(value, validate=True) if type(value) is str else self.refuse(name, "a text", value)
        except (binascii.Error, ValueError):
            self.refuse(name, "bytes in base64", value)

    def _texts(self, name: str, value: object) -> dict[str, str]:
        if type(value) is not dict or not all(type(each) is str for each in value.values()):
            self.refuse(name, "an object of texts", value)
        return value

    def _bitmap(self, name: str, value: object) -> BitMap:
        portable = self._bytes(name, value)
        try:
            bitmap = BitMap.deserialize(portable)
        except (ValueError, IndexError):
            self.refuse(name, "a portable roaring bitmap", value)
        # The library ignores bytes after the bitmap.
        if len(bitmap.serialize()) != len(portable):
            self.refuse(name, "a portable roaring bitmap and nothing after it", value)
        return bitmap

    def _named(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name


def is_part(entries: Mapping[int, BitMap], whole: Mapping[int, BitMap]) -> bool:
    """Return whether some entries are a subset of others."""
    return all(not bitmap or (each in whole and bitmap <= whole[each]) for each, bitmap in entries.items())


def _shown(value: object) -> str:
    text = repr(value) if type(value) is not int or abs(value) < 10**_SHOWN_MAX else "a larger number"
    return text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}..."
