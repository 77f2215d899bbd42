"""Reads from the footer of a Parquet file how many values and bytes its columns have.

Arrow has the numbers too, but a damaged statistic beside them ends the whole process there (`terminate called`). When
Arrow reads the columns themselves, the same damage is an error as any other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Callable

_MAGIC = b"PAR1"
_DEPTH_MAX = 16
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13
_SIZES = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8, _UUID: 16}
"""Bytes of values of a fixed size; a truth has a byte in a list alone."""
# Fields of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData.
_ROW_GROUPS, _COLUMNS, _ROW_COUNT, _META_DATA = 4, 1, 3, 3
_PATH, _VALUE_COUNT, _UNCOMPRESSED_BYTES = 3, 5, 6


class ColumnSize(NamedTuple):
    """The size of a column in a row group.

    Attributes:
        row_group: Index of the row group.
        row_count: Its number of rows.
        name: The first part of the column's path.
        value_count: Number of values.
        uncompressed_bytes: Their size, uncompressed.
    """

    row_group: int
    row_count: int
    name: str
    value_count: int
    uncompressed_bytes: int


def column_sizes(footer: bytes) -> list[ColumnSize]:
    """Return the sizes of all columns in all row groups.

    Args:
        footer: The end of the file: the footer, its length and the magic.

    Raises:
        ValueError: The bytes are not a footer.
    """
    if not footer.endswith(_MAGIC):
        raise ValueError("it does not end as a Parquet file does")
    found = _Reader(footer[: -len(_MAGIC) - 4]).struct()
    try:
        return [
            ColumnSize(
                number, group[_ROW_COUNT], meta[_PATH][0].decode(), meta[_VALUE_COUNT], meta[_UNCOMPRESSED_BYTES]
            )
            for number, group in enumerate(found.get(_ROW_GROUPS, []))
            for meta in (column[_META_DATA] for column in group[_COLUMNS])
        ]
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"its footer lacks a size: {error!r}") from None


@final
class _Reader:
    """Decodes values of the compact protocol: a struct is a dict by the numbers of its fields."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return the struct at the present place."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._take(1)[0]:
            step, kind = head >> 4, head & 0x0F
            number = number + step if step else self._signed()
            fields[number] = kind == _TRUE if kind in {_TRUE, _FALSE} else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _DEPTH_MAX:
            raise ValueError("its footer is nested too deeply")
        if _BYTE < kind <= _I64:
            return self._signed()
        if kind in _SIZES:
            return self._take(_SIZES[kind])
        if kind == _BINARY:
            return self._take(self._unsigned())
        readers: dict[int, Callable[[int], Any]] = {
            _STRUCT: self.struct,
            _LIST: self._list,
            _SET: self._list,
            _MAP: self._map,
        }
        if kind not in readers:
            raise ValueError(f"its footer has a value of type {kind}")
        return readers[kind](depth + 1)

    def _list(self, depth: int) -> list[Any]:
        head = self._take(1)[0]
        count = head >> 4 if head >> 4 < 15 else self._unsigned()
        self._check_count(count)
        return [self._value(head & 0x0F, depth) for _ in range(count)]

    def _map(self, depth: int) -> list[tuple[Any, Any]]:
        count = self._unsigned()
        self._check_count(count)
        kinds = self._take(1)[0] if count else 0
        return [(self._value(kinds >> 4, depth), self._value(kinds & 0x0F, depth)) for _ in range(count)]

    def _check_count(self, count: int) -> None:
        # Each element has at least a byte.
        if count > len(self._data) - self._at:
            raise ValueError("its footer is cut short")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._data):
            raise ValueError("its footer is cut short")
        taken, self._at = self._data[self._at : end], end
        return taken

    def _unsigned(self) -> int:
        number = shift = 0
        while True:
            byte = self._take(1)[0]
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
            shift += 7
            if shift > 63:
                raise ValueError("its footer has a number of more than 64 bits")

    def _signed(self) -> int:
        number = self._unsigned()
        return (number >> 1) ^ -(number & 1)
