"""Reads JSON lines, one event each, block by block into tables; `docs/traces.md` has the schema."""

from __future__ import annotations

import gzip
import io
import json
import sys
import zlib
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from ackstate.analysis.trace.bad_rows import BadRows, Wrong
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.rows import ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ackstate.analysis.trace.rows import Int64s

STANDARD_INPUT = "-"
_BLOCK_BYTES = 8 << 20
_LINE_BYTES_MAX = 64 << 20
TEXT_BYTES_MAX = 16 << 30
"""The default limit for the text of one file, decompressed: about 100 million events."""
_GZIP = b"\x1f\x8b"
_INT64_MAX = 2**63 - 1
_TEXT = frozenset(("topic", "subscription", "kind"))


class Block(NamedTuple):
    """Whole lines.

    Attributes:
        data: The bytes.
        first_number: Number of the first line, from 1.
        done: Bytes of the file read for this block and those before it.
    """

    data: bytes
    first_number: int
    done: int


@contextmanager
def opened(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open text, possibly compressed with gzip, or standard input; also return a counter of the bytes read."""
    is_standard_input = str(path) == STANDARD_INPUT
    if path.is_dir() and not is_standard_input:
        raise TraceError(f"{path}: a directory with neither a recording nor Parquet files in it")
    raw: Any = sys.stdin.buffer if is_standard_input else path.open("rb")
    try:
        buffered = raw if isinstance(raw, io.BufferedReader) else io.BufferedReader(raw)
        is_gzip = buffered.peek(2)[:2] == _GZIP
        text: Any = gzip.GzipFile(fileobj=buffered) if is_gzip else buffered
        yield text, (lambda: 0) if is_standard_input else buffered.tell
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: the gzip file is cut short or damaged: {error}") from error
    finally:
        if not is_standard_input:
            raw.close()


def blocks(
    path: Path, text: IO[bytes], position: Callable[[], int], *, bytes_max: int = TEXT_BYTES_MAX
) -> Iterator[Block]:
    """Cut text into blocks of whole lines.

    Raises:
        TraceError: A line is too long, or the text is larger than `bytes_max`, decompressed.
    """
    number, rest, size = 1, b"", 0
    while data := text.read(_BLOCK_BYTES):
        size += len(data)
        if size > bytes_max:
            raise TraceError(f"{path}: more than {bytes_max} bytes of text; --text-bytes-max allows more")
        whole, newline, rest = (rest + data).rpartition(b"\n")
        if newline:
            yield Block(whole + newline, number, position())
            number += whole.count(b"\n") + 1
        elif len(rest) > _LINE_BYTES_MAX:
            raise TraceError(f"{path}: line {number} is longer than {_LINE_BYTES_MAX >> 20} MB: not JSON lines")
    if rest:
        yield Block(rest + b"\n", number, position())


def table_of(block: Block, *, bad_rows: BadRows, place: Callable[[int], str]) -> tuple[pa.Table, Int64s]:
    """Parse lines; return a table with columns as `ROW_SCHEMA`, and the number of each row's line.

    Blank lines are ignored. Lines that cannot be parsed are counted as bad.
    """
    line_count = block.data.count(b"\n")
    try:
        table = _parsed(block.data)
        if table.num_rows == line_count:
            return table, np.arange(block.first_number, block.first_number + line_count)
    except (pa.ArrowException, ValueError, UnicodeDecodeError):
        pass
    return _line_by_line(block, bad_rows=bad_rows, place=place)


def _parsed(data: bytes) -> pa.Table:
    options = pj.ParseOptions(explicit_schema=ROW_SCHEMA, unexpected_field_behavior="ignore")
    reading = pj.ReadOptions(use_threads=True, block_size=max(1 << 20, len(data)))
    table = pj.read_json(io.BytesIO(data), read_options=reading, parse_options=options)
    table.validate(full=True)
    return table


def _line_by_line(block: Block, *, bad_rows: BadRows, place: Callable[[int], str]) -> tuple[pa.Table, Int64s]:
    """Parse a block that has an invalid line, one line at a time, to find its number."""
    rows: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, line in enumerate(block.data.split(b"\n")[:-1], start=block.first_number):
        if not line.strip():
            continue
        try:
            rows.append(_row(line))
            numbers.append(number)
        except _WrongLineError as error:
            bad_rows.rows += 1
            bad_rows.add(error.wrong, 1, [f"{place(number)} ({error})"])
    return pa.Table.from_pylist(rows, ROW_SCHEMA), np.array(numbers, np.int64)


class _WrongLineError(Exception):
    """A line that is not a row."""

    def __init__(self, wrong: Wrong, text: str) -> None:
        super().__init__(text)
        self.wrong = wrong


def _row(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.removeprefix(b"\xef\xbb\xbf").decode())
    except UnicodeDecodeError as error:
        raise _WrongLineError(Wrong.NOT_UTF8, f"byte {error.start + 1} of the line") from None
    except (ValueError, RecursionError) as error:
        raise _WrongLineError(Wrong.NOT_JSON, str(error)) from None
    if not isinstance(row, dict):
        raise _WrongLineError(Wrong.NOT_JSON, type(row).__name__)
    return {name: _value(name, row.get(name)) for name in ROW_SCHEMA.names}


def _value(name: str, value: Any) -> Any:
    if value is None or (name in _TEXT and isinstance(value, str)):
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise _WrongLineError(Wrong.NOT_UTF8, f"{name} {value!r}") from None
        return value
    if name in _TEXT or isinstance(value, bool) or not isinstance(value, int):
        kind = "text" if name in _TEXT else "an integer"
        raise _WrongLineError(Wrong.WRONG_TYPE, f"{name} {json.dumps(value)[:40]} is not {kind}")
    if not -_INT64_MAX <= value <= _INT64_MAX:
        raise _WrongLineError(Wrong.BEYOND if value > 0 else Wrong.NEGATIVE, f"{name} {value}"[:60])
    return value
