"""Converts logs of the ACK commands that real brokers received, one run per line, into rows of one event each.

A run is an object with these fields; others are ignored.

==================  ====================================================================================================
field               meaning
==================  ====================================================================================================
topic               a name
subscription        a name; may be missing if the topic's ends with it, after a slash
config              keys of ``broker.conf`` that differ from the defaults of Pulsar 4.2; may be missing
entries             runs of entries in the order of publishing, ``[ledger, first entry, last entry]``; entry index k is
                    the k-th entry of that list
batch_sizes         messages in each entry; null or missing for 1 each. Message i is the i-th of that concatenation
index_ack           false if the client acked no parts of batches; may be missing
broker_acks_ms      the ACK commands, ``[received, handled, [index | [index, [words]]], type]``: entry indexes; words of
                    the batch ack set, 1 is not acknowledged; type ``Individual``, or ``Cumulative`` for an ack of
                    everything up to its last entry. Without a type it is individual
cursor_opened_ms    ``[earliest, latest]`` time at which the cursor was opened; may be missing
t_end_ms            when the broker ended; may be missing
end                 ``kill``, or ``term`` if it closed its cursors: that is no crash; may be missing for ``kill``
==================  ====================================================================================================

Times are ms of one clock, truncated. The trace begins at the first time of a run, or at 0 if that is not negative.

An ack counts from the time when the broker had handled it. Batches are split: an event's entries are then messages,
numbered from 0 in each ledger, so that redelivery is counted in messages; a BATCH event names the messages of a batch
that is acked in parts. Parts count unless the broker or the client ignores them, by ``config`` or ``index_ack``.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ackstate.analysis.trace.check import BadRows, Wrong
from ackstate.analysis.trace.entry_set import EntrySet
from ackstate.analysis.trace.rows import ROW_SCHEMA
from ackstate.pulsar_conf import BATCH_INDEX_ACKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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
            bad_rows.add(Wrong.WRONG_TYPE, 1, [f"{place(number)} ({said})"])
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
        self._named: set[int] = set()
        # By entry index: ledger, first message, and end (exclusive).
        self._messages: list[_Run] = (
            [(ledger, entry, entry + 1) for ledger, entry in entries] if sizes is None else _numbered(entries, sizes)
        )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the publishes, the opening, the acks and the crash."""
        said = self._said
        commands = sorted(said[MARK], key=lambda command: command[1])
        opened = [said["cursor_opened_ms"][1]] if "cursor_opened_ms" in said else []
        ended = [said["t_end_ms"]] if "t_end_ms" in said and said.get("end", "kill") == "kill" else []
        begin_ms = min([0, *opened, *ended, *(command[1] for command in commands[:1])])
        ts_ms = 0
        topic = {"topic": said["topic"], "ts_ms": 0, "kind": "publish", "subscription": ""}
        for run in EntrySet.of(self._messages).runs():
            yield {**topic, **_entries(run)}
        event = {"topic": said["topic"], "subscription": said.get("subscription") or said["topic"].rpartition("/")[2]}
        for opened_ms in opened:
            ts_ms = opened_ms - begin_ms
            yield {**event, "ts_ms": ts_ms, "kind": "recover"}
        for number, (_, handled, acked, *kind) in enumerate(commands):
            if number and handled - begin_ms <= ts_ms:
                yield {**event, "ts_ms": ts_ms, "kind": "command"}
            ts_ms = max(ts_ms, handled - begin_ms)
            listed, name = _listed(acked, *kind)
            runs = list(EntrySet.of(run for entry in listed for run in self._acked(entry)).runs())
            for run in self._batches_in_parts(listed):
                yield {**event, "ts_ms": ts_ms, "kind": "batch", **_entries(run)}
            for run in runs:
                yield {**event, "ts_ms": ts_ms, "kind": name, **_entries(run)}
        for end_ms in ended:
            yield {**event, "ts_ms": max(ts_ms, end_ms - begin_ms), "kind": "crash"}

    @property
    def _counts_parts(self) -> bool:
        is_off = str(self._said.get("config", {}).get(BATCH_INDEX_ACKS, "")).lower() == "false"
        return self._said.get("index_ack", True) and not is_off

    def _batches_in_parts(self, listed: Sequence[Any]) -> Iterator[_Run]:
        """Yield the batches of which a command acks parts, if no earlier one did."""
        for entry in listed if self._counts_parts else ():
            if not isinstance(entry, int) and any(entry[1]) and entry[0] not in self._named:
                self._named.add(entry[0])
                yield self._at(entry[0])

    def _acked(self, entry: int | Sequence[Any]) -> Iterator[_Run]:
        """Yield the messages acked by an ack of an entry or of some of its messages."""
        if isinstance(entry, int):
            yield self._at(entry)
            return
        index, words = entry
        ledger, first, end = self._at(index)
        if not any(words):
            yield ledger, first, end
        elif self._counts_parts:
            for offset in range(end - first):
                word, bit = divmod(offset, _WORD_BITS)
                if word >= len(words) or not words[word] >> bit & 1:
                    yield ledger, first + offset, first + offset + 1

    def _at(self, index: int) -> _Run:
        if not 0 <= index < len(self._messages):
            raise IndexError(f"entry index {index} of {len(self._messages)}")
        return self._messages[index]


def _listed(acked: Sequence[Any], kind: str = "individual") -> tuple[Sequence[Any], str]:
    """Return every entry acked by a command, as an index or with its words, and the kind of its events."""
    match kind.lower():
        case "individual":
            return acked, "ack"
        case "cumulative":
            last = acked[-1]
            return [*range(last if isinstance(last, int) else last[0]), last], "mark_delete"
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


def _entries(run: _Run) -> dict[str, int]:
    ledger, first, end = run
    return {"ledger_id": ledger, "first_entry": first, "last_entry": end - 1}
