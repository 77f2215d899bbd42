"""Reads rows of one event each, as other tools write them, into columns, and checks each value by itself.

Columns are those of `ackstate.analysis.trace.events` for events, with `topic`, `subscription` and `seq`. Columns that a
kind does not need may be missing; `last_entry` defaults to `first_entry`. A kind is its name in small letters, or its
number.
"""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ackstate.analysis.trace.bad_rows import SAMPLES_MAX, BadRows, Wrong
from ackstate.analysis.trace.events import EVENT_COLUMNS, NAMES_ENTRIES, POLLED_ONLY, EventKind
from ackstate.position import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.analysis.trace.times import TraceClock

Int64s = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

KINDS = {kind.name.lower(): kind.value for kind in EventKind if kind not in POLLED_ONLY}
NO_SEQ = -1
ROW_SCHEMA = pa.schema(
    [("topic", pa.string()), ("subscription", pa.string()), ("ts_ms", pa.int64()), ("kind", pa.string())]
    + [(name, pa.int64()) for name in ("ledger_id", "first_entry", "last_entry", "number", "seq")]
)
_OTHER_KIND = 0  # not the kind of any event
_NAMING = np.array(sorted(NAMES_ENTRIES))


class Events(NamedTuple):
    """Events of one subscription, or of a topic, in parallel arrays; columns as in the trace."""

    ts_ms: Int64s
    kind: Int64s
    ledger_id: Int64s
    first_entry: Int64s
    last_entry: Int64s
    number: Int64s

    def where(self, chosen: Int64s | Mask | slice) -> Events:
        """Return the events selected by indexes, a mask or a slice."""
        return Events(*(column[chosen] for column in self))


class PolledEvents(NamedTuple):
    """Events of one subscription, or of a topic, in a trace of polls; columns as in the trace."""

    ts_ms: Int64s
    kind: Int64s
    ledger_id: Int64s
    first_entry: Int64s
    last_entry: Int64s
    number: Int64s
    until_ms: Int64s

    def exact(self) -> Events:
        """Return the columns that exact traces have as well."""
        return Events(*self[:-1])


class TraceRows(NamedTuple):
    """Rows that are valid by themselves, in the order in which they were read.

    Attributes:
        keys: Every (topic, subscription) that occurs; the latter is empty for events of the topic itself.
        key: The index in `keys` of each row.
        values: The columns of `Events`, then the rows' `seq`, or `NO_SEQ` if a row lacks it, then the number of the
            line or row of each, from 1.
    """

    keys: list[tuple[str, str]]
    key: Int64s
    values: Int64s


def checked_rows(
    table: pa.Table, numbers: Int64s, *, clock: TraceClock, bad_rows: BadRows, place: Callable[[int], str]
) -> TraceRows:
    """Return the rows of a table that are valid by themselves, and count the others.

    Args:
        table: Columns as `ROW_SCHEMA`, which may be missing, or the kind a number.
        numbers: The number of each row in its file.
        clock: The clock of the trace.
        bad_rows: Receives the bad rows, and the number of all.
        place: Returns the place of a row by its number.
    """
    bad_rows.rows += table.num_rows
    topic, subscription = (_names(table, name) for name in ("topic", "subscription"))
    kind, kind_text = _kinds(table)
    values = {name: _numbers(table, name) for name in ("ts_ms", "ledger_id", "first_entry", "last_entry", "number")}
    no_last = _nulls(table, "last_entry")
    values["last_entry"] = np.where(no_last, values["first_entry"], values["last_entry"])
    events = Events(kind=kind, **values)
    of_topic = kind == EventKind.PUBLISH
    wrong = {
        Wrong.UNKNOWN_KIND: (kind == _OTHER_KIND) & ~_nulls(table, "kind"),
        Wrong.MISSING: _missing(table, events, of_topic=of_topic),
        **_out_of_bounds(events),
        Wrong.NEGATIVE: _negative(table, events),
    }
    wrong[Wrong.TIME_OUTSIDE] = clock.judge(events.ts_ms)
    wrong[Wrong.BACKWARDS] = events.last_entry < events.first_entry

    def shown(problem: Wrong, row: int) -> str:
        if problem is Wrong.TIME_OUTSIDE:
            return f"{place(int(numbers[row]))} ({clock.wrong(int(events.ts_ms[row]))})"
        return f"{place(int(numbers[row]))} ({_what(problem, table, row, kind_text)})"

    good = np.flatnonzero(~count_wrong(wrong, bad_rows, shown))
    keys, key = _keys(topic, subscription, good, of_topic)
    rows = np.column_stack((*events, _numbers(table, "seq"), numbers))
    return TraceRows(keys, key, rows[good])


def count_wrong(wrong: dict[Wrong, Mask], bad_rows: BadRows, shown: Callable[[Wrong, int], str]) -> Mask:
    """Count the bad rows, each under its first reason, and return which rows are bad."""
    bad: Mask = np.zeros(len(next(iter(wrong.values()))), np.bool_)
    for problem, mask in wrong.items():
        fresh = np.flatnonzero(mask & ~bad)
        if len(fresh):
            bad_rows.add(problem, len(fresh), [shown(problem, row) for row in fresh[:SAMPLES_MAX].tolist()])
        bad |= mask
    return bad


def _missing(table: pa.Table, events: Events, *, of_topic: Mask) -> Mask:
    """Return the rows without topic, subscription, time or kind, or without the entries that their kind requires."""
    missing = _nulls(table, "ts_ms") | _nulls(table, "kind") | _empty(table, "topic")
    missing |= _empty(table, "subscription") & ~of_topic
    needs = np.isin(events.kind, _NAMING)
    return missing | (needs & (_nulls(table, "ledger_id") | _nulls(table, "first_entry")))


def _out_of_bounds(events: Events) -> dict[Wrong, Mask]:
    return {Wrong.BEYOND: (events.first_entry > ENTRY_ID_MAX) | (events.last_entry > ENTRY_ID_MAX)}


def _negative(table: pa.Table, events: Events) -> Mask:
    """Return the rows with a negative number, except -1, which means a missing value."""
    negative = (events.ts_ms < 0) | (_numbers(table, "seq") < NO_SEQ) | (events.number < -1)
    entries = (events.ledger_id, events.first_entry, events.last_entry)
    some_entry = np.isin(events.kind, _NAMING) | (events.ledger_id >= 0)
    negative |= reduce(np.logical_or, [column < np.where(some_entry, 0, -1) for column in entries])
    return negative


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


def _kinds(table: pa.Table) -> tuple[Int64s, Callable[[int], str]]:
    """Return each row's kind as a number, and a function that formats an unknown kind."""
    if "kind" not in table.column_names:
        return np.full(table.num_rows, _OTHER_KIND), lambda _: ""
    column = table["kind"]
    if pa.types.is_integer(column.type):
        numbers = _numbers(table, "kind")
        return np.where(np.isin(numbers, list(KINDS.values())), numbers, _OTHER_KIND), lambda row: str(numbers[row])
    encoded = _encoded(column)
    codes = np.array([KINDS.get(text, _OTHER_KIND) for text in encoded.dictionary.to_pylist()] + [_OTHER_KIND])
    indexes = encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)
    return codes[indexes].astype(np.int64), lambda row: repr(column[row].as_py())


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


def _names(table: pa.Table, name: str) -> pa.DictionaryArray:
    if name not in table.column_names:
        return pa.nulls(table.num_rows, pa.string()).dictionary_encode()
    return _encoded(table[name])


def _encoded(column: pa.ChunkedArray) -> pa.DictionaryArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return pa.concat_arrays(column.cast(pa.string()).chunks or [pa.array([], pa.string())]).dictionary_encode()


def _numbers(table: pa.Table, name: str) -> Int64s:
    if name not in table.column_names:
        return np.full(table.num_rows, -1)
    return np.asarray(table[name].cast(pa.int64()).fill_null(-1).to_numpy(), np.int64)


def _nulls(table: pa.Table, name: str) -> Mask:
    if name not in table.column_names:
        return np.ones(table.num_rows, np.bool_)
    return np.asarray(table[name].is_null().to_numpy(), np.bool_)


def _empty(table: pa.Table, name: str) -> Mask:
    if name not in table.column_names:
        return np.ones(table.num_rows, np.bool_)
    return np.asarray(pc.fill_null(pc.equal(table[name].cast(pa.string()), ""), fill_value=True).to_numpy(), np.bool_)


assert set(Events._fields) == set(EVENT_COLUMNS)
