"""Converts logs of the ACK commands that real brokers received, one run per line, into rows of one event each.

A run is an object with `topic`, `subscription`, `entries` (the published entries, as runs of ledger, first and last
entry), `batch_sizes` (messages in each entry, null for one each) and `broker_acks_ms` (a row for each command:
received, handled, and acked: an entry's index, or the index and the words of its batch ack set; optionally the type of
the ack, `Individual` or `Cumulative`, which acks everything up to its last entry). Times are ms since the first
command. `t_end_ms`, if present, is the time when the broker was killed. Other fields are ignored.

An ack counts from the time when the broker had handled it. Batches are split: an event's entries are then messages,
numbered from 0 in each ledger, so that redelivery is counted in messages.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ackstate.analysis.trace.bad_rows import BadRows, Wrong
from ackstate.analysis.trace.entry_set import EntrySet
from ackstate.analysis.trace.rows import ROW_SCHEMA

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MARK = "broker_acks_ms"
_WORD_BITS = 64
_ENTRIES_MAX = 1 << 22
_BATCH_MAX = 1 << 20
_Run = tuple[int, int, int]


def is_ack_log(first_line: bytes) -> bool:
    """Return whether a line is a run of such a log."""
    try:
        row = json.loads(first_line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and MARK in row


def tables(
    lines: Sequence[bytes], first_number: int, *, bad_rows: BadRows, place: Callable[[int], str]
) -> Iterator[tuple[pa.Table, np.ndarray[Any, np.dtype[np.int64]]]]:
    """Yield, for each line, a table with columns as `ROW_SCHEMA`, and the line's number for each of its rows.

    A line that is not a run is counted as one bad row.
    """
    for number, line in enumerate(lines, start=first_number):
        if not line.strip():
            continue
        try:
            rows = list(_BrokerRun(json.loads(line)).rows())
            table = pa.Table.from_pylist(rows, ROW_SCHEMA)
        except (
            ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError,
        ) as error:  # fmt: skip
            # Arrow's own errors have these types, too.
            said = f"no {error}" if isinstance(error, KeyError) else str(error)
            bad_rows.rows += 1
            problem = Wrong.NOT_IN_THE_LOG if isinstance(error, IndexError) else Wrong.WRONG_TYPE
            bad_rows.add(problem, 1, [f"{place(number)} ({said})"])
            continue
        yield table, np.full(len(rows), number)


class _BrokerRun:
    """One run, with the positions of the messages of each entry."""

    def __init__(self, said: dict[str, Any]) -> None:
        self._said = said
        if sum(max(0, last - first + 1) for _, first, last in said["entries"]) > _ENTRIES_MAX:
            raise ValueError(f"a run must have at most {_ENTRIES_MAX} entries")
        entries = [(ledger, entry) for ledger, first, last in said["entries"] for entry in range(first, last + 1)]
        sizes = said.get("batch_sizes")
        if sizes is not None and any(not 0 <= size <= _BATCH_MAX for size in sizes):
            raise ValueError(f"a batch must have at most {_BATCH_MAX} messages")
        # By entry index: ledger, first message, and end (exclusive).
        self._messages: list[_Run] = (
            [(ledger, entry, entry + 1) for ledger, entry in entries] if sizes is None else _numbered(entries, sizes)
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the publishes, the acks and the crash."""
        said = self._said
        commands = sorted(said[MARK], key=lambda command: command[1])
        topic = {"topic": said["topic"], "ts_ms": 0, "kind": "publish", "subscription": ""}
        for run in _gathered(self._messages):
            yield {**topic, **_entries(run)}
        event = {"topic": said["topic"], "subscription": said["subscription"]}
        ts_ms = 0
        for _, handled, acked, *kind in commands:
            ts_ms = max(ts_ms, handled)
            for run in _gathered(run for entry in _listed(acked, *kind) for run in self._acked(entry)):
                yield {**event, "ts_ms": ts_ms, "kind": "ack", **_entries(run)}
        if "t_end_ms" in said:
            yield {**event, "ts_ms": max(ts_ms, said["t_end_ms"]), "kind": "crash"}

    def _acked(self, entry: int | Sequence[Any]) -> Iterator[_Run]:
        """Yield the messages acked by an ack of an entry or of some of its messages."""
        if isinstance(entry, int):
            yield self._at(entry)
            return
        index, words = entry
        ledger, first, end = self._at(index)
        if not any(words):
            yield ledger, first, end
        elif self._said.get("index_ack", True):
            for offset in range(end - first):
                word, bit = divmod(offset, _WORD_BITS)
                if word >= len(words) or not words[word] >> bit & 1:
                    yield ledger, first + offset, first + offset + 1

    def _at(self, index: int) -> _Run:
        if not 0 <= index < len(self._messages):
            raise IndexError(f"entry index {index} of {len(self._messages)}")
        return self._messages[index]


def _listed(acked: Sequence[Any], kind: str = "individual") -> Sequence[Any]:
    """Return every entry acked by a command, as an index or with its words."""
    match kind.lower():
        case "individual":
            return acked
        case "cumulative":
            last = acked[-1]
            return [*range(last if isinstance(last, int) else last[0]), last]
    raise ValueError(f"ack type must be Individual or Cumulative, got {kind[:40]!r}")


def _numbered(entries: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[_Run]:
    """Number the messages of each ledger from 0."""
    if len(sizes) != len(entries):
        raise ValueError(f"{len(sizes)} batch sizes for {len(entries)} entries")
    messages: list[_Run] = []
    ends: dict[int, int] = {}
    for (ledger, _), size in zip(entries, sizes, strict=True):
        first = ends.get(ledger, 0)
        ends[ledger] = first + size
        messages.append((ledger, first, first + size))
    return messages


def _gathered(runs: Iterable[_Run]) -> Iterator[_Run]:
    """Merge adjacent runs; in order of position."""
    gathered = EntrySet()
    for run in runs:
        gathered.add_run(*run)
    return gathered.runs()


def _entries(run: _Run) -> dict[str, int]:
    ledger, first, end = run
    return {"ledger_id": ledger, "first_entry": first, "last_entry": end - 1}
