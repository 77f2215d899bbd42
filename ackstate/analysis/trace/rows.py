"""Reads rows of one event each, as other tools write them, into columns, and checks each value by itself.

Columns are those of `ackstate.analysis.trace.events` for events, with `topic`, `subscription` and `seq`. Columns that a
kind does not need may be missing; `last_entry` defaults to `first_entry`. A kind is its name in small letters, or its
number. JSON lines are read block by block into tables; `docs/traces.md` has their schema.
"""

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
import pyarrow.compute as pc
import pyarrow.json as pj

from ackstate.analysis.trace.check import NAMING, BadRows, Wrong, count_wrong, wrong_alone
from ackstate.analysis.trace.chunks import Events, Int64s, Mask
from ackstate.analysis.trace.events import EventKind, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ackstate.analysis.trace.chunks import TraceClock


KINDS = {kind.name.lower(): kind.value for kind in EventKind}
NO_SEQ = -1
ROW_SCHEMA = pa.schema(
    [("topic", pa.string()), ("subscription", pa.string()), ("ts_ms", pa.int64()), ("kind", pa.string())]
    + [(name, pa.int64()) for name in ("ledger_id", "first_entry", "last_entry", "number", "seq")]
)
_OTHER_KIND = 0  # not the kind of any event


class TraceRows(NamedTuple):
    """Rows that are valid by themselves, in the order in which they were read."""

    # Every (topic, subscription) that occurs; the latter is empty for events of the topic itself.
    keys: list[tuple[str, str]]
    key: Int64s  # The index in `keys` of each row
    # The columns of `Events`, then the rows' `seq`, or `NO_SEQ` if a row lacks it, then the number of the line or row
    # of each, from 1.
    values: Int64s


def checked_rows(
    table: pa.Table, numbers: Int64s, *, clock: TraceClock, bad_rows: BadRows, place: Callable[[int], str]
) -> TraceRows:
    """Return the rows of a table that are valid by themselves, and count the others."""
    bad_rows.rows += table.num_rows
    for name in set(ROW_SCHEMA.names) - set(table.column_names):
        table = table.append_column(name, pa.nulls(table.num_rows, ROW_SCHEMA.field(name).type))
    topic, subscription = (_encoded(table[name]) for name in ("topic", "subscription"))
    kind, kind_text = _kinds(table["kind"])
    values = {name: _numbers(table[name]) for name in ("ts_ms", "ledger_id", "first_entry", "last_entry", "number")}
    values["last_entry"] = np.where(_nulls(table["last_entry"]), values["first_entry"], values["last_entry"])
    events, seq = Events(kind=kind, **values), _numbers(table["seq"])
    of_topic = kind == EventKind.PUBLISH
    alone = wrong_alone(events)
    wrong = {
        Wrong.UNKNOWN_KIND: (kind == _OTHER_KIND) & ~_nulls(table["kind"]),
        Wrong.MISSING: _missing(table, events, of_topic=of_topic),
        Wrong.BEYOND: alone[Wrong.BEYOND],
        Wrong.NEGATIVE: alone[Wrong.NEGATIVE] | (seq < NO_SEQ),
        Wrong.TIME_OUTSIDE: clock.judge(events.ts_ms),
        Wrong.BACKWARDS: alone[Wrong.BACKWARDS],
    }

    def shown(problem: Wrong, row: int) -> str:
        if problem is Wrong.TIME_OUTSIDE:
            return f"{place(int(numbers[row]))} ({clock.wrong(int(events.ts_ms[row]))})"
        return f"{place(int(numbers[row]))} ({_what(problem, table, row, kind_text)})"

    good = np.flatnonzero(~count_wrong(wrong, bad_rows, shown))
    keys, key = _keys(topic, subscription, good, of_topic)
    return TraceRows(keys, key, np.column_stack((*events, seq, numbers))[good])


def rows_of(keys: Sequence[tuple[str, str]], values: Int64s) -> TraceRows:
    """Return rows that are known to be valid, given the (topic, subscription) of each."""
    topic, subscription = (pa.array(names, pa.string()).dictionary_encode() for names in zip(*keys, strict=True))
    every = np.arange(len(values))
    return TraceRows(*_keys(topic, subscription, every, values[:, 1] == EventKind.PUBLISH), values)


def _missing(table: pa.Table, events: Events, *, of_topic: Mask) -> Mask:
    """Return the rows without topic, subscription, time or kind, or without the entries that their kind requires."""
    missing = _nulls(table["ts_ms"]) | _nulls(table["kind"]) | _empty(table["topic"])
    missing |= _empty(table["subscription"]) & ~of_topic
    return missing | (np.isin(events.kind, NAMING) & (_nulls(table["ledger_id"]) | _nulls(table["first_entry"])))


def _what(problem: Wrong, table: pa.Table, row: int, kind_text: Callable[[int], str]) -> str:
    if problem is Wrong.UNKNOWN_KIND:
        return kind_text(row)
    found = table.slice(row, 1).to_pylist()[0]
    if problem is Wrong.MISSING:
        needed = ("topic", "subscription", "ts_ms", "kind", "ledger_id", "first_entry")
        return "no " + ", ".join(name for name in needed if found.get(name) in {None, ""})
    numbers = ("ts_ms", "seq", "number") if problem is Wrong.NEGATIVE else ()
    return ", ".join(
        f"{name} {found[name]}"
        for name in (*numbers, "ledger_id", "first_entry", "last_entry")
        if found.get(name) is not None
    )


def _kinds(column: pa.ChunkedArray) -> tuple[Int64s, Callable[[int], str]]:
    """Return each row's kind as a number, and a function that formats an unknown kind."""
    if pa.types.is_integer(column.type):
        numbers = _numbers(column)
        return np.where(np.isin(numbers, list(KINDS.values())), numbers, _OTHER_KIND), lambda row: str(numbers[row])
    encoded = _encoded(column)
    codes = np.array([KINDS.get(text, _OTHER_KIND) for text in encoded.dictionary.to_pylist()] + [_OTHER_KIND])
    return codes[_codes(encoded, len(codes) - 1)].astype(np.int64), lambda row: repr(column[row].as_py())


def _keys(
    topic: pa.DictionaryArray, subscription: pa.DictionaryArray, good: Int64s, of_topic: Mask
) -> tuple[list[tuple[str, str]], Int64s]:
    """Return the distinct (topic, subscription) of the good rows, and the index of each row."""
    topics, subscriptions = topic.dictionary.to_pylist(), [*subscription.dictionary.to_pylist(), ""]
    topic_code = _codes(topic, 0)[good]
    subscription_code = np.where(of_topic, len(subscriptions) - 1, _codes(subscription, len(subscriptions) - 1))[good]
    found, key = np.unique(topic_code * len(subscriptions) + subscription_code, return_inverse=True)
    pairs = [divmod(code, len(subscriptions)) for code in found.tolist()]
    return [(topics[first], subscriptions[second]) for first, second in pairs], key.astype(np.int64)


def _codes(encoded: pa.DictionaryArray, of_null: int) -> Int64s:
    codes: Int64s = encoded.indices.fill_null(of_null).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pa.concat_arrays(column.cast(pa.string()).chunks or [pa.array([], pa.string())]).dictionary_encode()


def _numbers(column: pa.ChunkedArray) -> Int64s:
    return np.asarray(column.cast(pa.int64()).fill_null(-1).to_numpy(), np.int64)


def _nulls(column: pa.ChunkedArray) -> Mask:
    return np.asarray(column.is_null().to_numpy(), np.bool_)


def _empty(column: pa.ChunkedArray) -> Mask:
    return np.asarray(pc.fill_null(pc.equal(column.cast(pa.string()), ""), fill_value=True).to_numpy(), np.bool_)


STANDARD_INPUT = "-"
_BLOCK_BYTES = 8 << 20
_LINE_BYTES_MAX = 64 << 20
TEXT_BYTES_MAX = 16 << 30
"""The default limit for the text of one file, decompressed: about 100 million events."""
_GZIP = b"\x1f\x8b"
_INT64_MAX = 2**63 - 1
_TEXT = frozenset(("topic", "subscription", "kind"))


class Block(NamedTuple):
    """Whole lines."""

    data: bytes  # The bytes
    first_number: int  # Number of the first line, from 1
    done: int  # Bytes of the file read for this block and those before it


@contextmanager
def open_text(path: Path) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
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


def text_blocks(
    path: Path, text: IO[bytes], position: Callable[[], int], *, bytes_max: int = TEXT_BYTES_MAX
) -> Iterator[Block]:
    """Cut text into blocks of whole lines."""
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


def table_of_lines(block: Block, *, bad_rows: BadRows, place: Callable[[int], str]) -> tuple[pa.Table, Int64s]:
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
