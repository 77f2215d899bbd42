"""Converts recordings and logs of other brokers into a Parquet trace, for `ackstate trace convert`.

A log of the ACK commands that real brokers received has one run per line, an object with these fields; others are
ignored.

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
from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.trace.broker_recording import BrokerRows, entries_row, published_entries, recording_files
from ackstate.analysis.trace.broker_recording import read_recording as read_broker_recording
from ackstate.analysis.trace.check import (
    BadRows,
    BadRowsMax,
    EventOrder,
    PublishedEntries,
    Wrong,
    count_wrong,
)
from ackstate.analysis.trace.chunks import ChunkWriter, Events, Gatherer, TraceClock
from ackstate.analysis.trace.events import EventKind, TraceError
from ackstate.analysis.trace.parquet import new_trace, opened_parquet, write_trace
from ackstate.analysis.trace.recording import EntrySet, read_recording, segments
from ackstate.analysis.trace.rows import (
    NO_SEQ,
    ROW_SCHEMA,
    STANDARD_INPUT,
    TEXT_BYTES_MAX,
    TraceRows,
    checked_rows,
    open_text,
    table_of_lines,
    text_blocks,
)
from ackstate.analysis.wording import counted, dropped_line
from ackstate.pulsar_conf import BATCH_INDEX_ACKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.chunks import Int64s, Mask


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


def log_tables(
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
            yield {**topic, **entries_row(run)}
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
                yield {**event, "ts_ms": ts_ms, "kind": "batch", **entries_row(run)}
            for run in runs:
                yield {**event, "ts_ms": ts_ms, "kind": name, **entries_row(run)}
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


_NEEDED = ("topic", "subscription", "ts_ms", "kind", "ledger_id", "first_entry")
_NAMES = ("topic", "subscription")
_BATCH_ROWS = 1 << 17


def tables(file: Path) -> Iterator[tuple[pa.Table, Int64s, float]]:
    """Yield tables with columns as `ROW_SCHEMA`, the number of each row from 1, and the share of the file so far.

    A file with text that is not UTF-8, or with a number that exceeds 64 bits with a sign, is refused as a whole.
    """
    with opened_parquet(file) as parquet:
        columns = _columns(file, parquet.schema_arrow)
        row_count, end = parquet.metadata.num_rows, 1
        for batch in parquet.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
            batch.validate(full=True)  # Parquet requires UTF-8, but readers do not check it.
            table = pa.Table.from_batches([batch])
            for at, each in enumerate(table.schema):
                if each.type == pa.uint64():
                    table = table.set_column(at, each.name, table[at].cast(pa.int64()))
            first, end = end, end + batch.num_rows
            yield table, np.arange(first, end), (end - 1) / row_count


def _columns(file: Path, schema: pa.Schema) -> list[str]:
    """Return the columns to read; check their types."""
    if schema.get_field_index("first_seq") >= 0 and schema.get_field_index("chunk") >= 0:
        raise TraceError(f"{file}: this is already a trace, whose rows are chunks of events")
    for name in ROW_SCHEMA.names:
        indexes = schema.get_all_field_indices(name)
        if len(indexes) > 1:
            raise TraceError(f"{file}: column {name!r} occurs several times")
        if indexes:
            _check_type(file, schema.field(indexes[0]))
        elif name in _NEEDED:
            raise TraceError(f"{file}: column {name!r} is missing; it needs {', '.join(_NEEDED)}")
    return [name for name in ROW_SCHEMA.names if schema.get_field_index(name) >= 0]


def _check_type(file: Path, field: pa.Field) -> None:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    fits = is_text if field.name in _NAMES else pa.types.is_integer(field.type)
    if not (fits or (field.name == "kind" and is_text)):
        wanted = ROW_SCHEMA.field(field.name).type
        raise TraceError(f"{file}: column {field.name!r} must be {wanted}, got {field.type}; cast it")


# At 72 bytes each, about 300 MB; if there are too many subscriptions for whole chunks, chunks are cut short.
WAITING_MAX = 1 << 22


@final
class SeqOrder:
    """Checks `seq`, which counts a subscription's events without gaps, from any start."""

    def __init__(self) -> None:
        self._highest: int | None = None

    def judge(self, seq: Int64s) -> tuple[Mask, Mask]:
        """Return which of the next rows do not come after all others, and which follow a gap, which are valid."""
        again, gap = np.zeros(len(seq), np.bool_), np.zeros(len(seq), np.bool_)
        given = np.flatnonzero(seq != NO_SEQ)
        if len(given):
            said = seq[given]
            first = int(said[0]) - 1 if self._highest is None else self._highest
            before = np.maximum.accumulate(np.concatenate(([first], said)))[:-1]
            self._highest = max(first, int(said.max()))
            again[given], gap[given] = said <= before, said > before + 1
        return again, gap


@final
class EventSorter:
    """Gathers rows by subscription and writes them chunk by chunk.

    Memory: `WAITING_MAX` rows; for each subscription about a kilobyte; a bitmap of the published and the acked entries
    of each topic.
    """

    def __init__(self, writer: ChunkWriter, bad_rows: BadRows, place: Callable[[int, int], str]) -> None:
        self._writer = writer
        self._bad_rows = bad_rows
        self._place = place
        self._gathered = Gatherer(self._settle)
        self._waiting = 0
        # What the earlier events of each subscription have left.
        self._orders: dict[tuple[str, str], tuple[SeqOrder, EventOrder]] = defaultdict(
            lambda: (SeqOrder(), EventOrder())
        )
        self._published = PublishedEntries()

    def add(self, rows: TraceRows, *, source: int) -> None:
        """Add the next rows of a source."""
        if not len(rows.key):
            return
        values = np.column_stack((rows.values, np.full(len(rows.values), source)))
        order = np.argsort(rows.key, kind="stable")
        values, ends = values[order], np.cumsum(np.bincount(rows.key, minlength=len(rows.keys)))
        for key, begin, end in zip(rows.keys, [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            # A copy, because a view would keep the whole batch in memory.
            self._gathered.add(key, values[begin:end].copy())
        self._waiting += len(values)
        if self._waiting >= WAITING_MAX:
            self._gathered.flush()
            self._waiting = 0

    def finish(self) -> None:
        """Write the waiting rows, and count acks of entries that were never published."""
        self._gathered.flush()
        self._published.count_never(self._bad_rows)

    def _settle(self, key: tuple[str, str], rows: Int64s) -> None:
        """Check rows against earlier ones, and write the valid ones as a chunk."""

        def shown(problem: Wrong, row: int) -> str:
            seq, number, source = rows[row, 6:].tolist()
            what = f"seq {seq}" if problem.name.startswith("SEQ") else EventKind(rows[row, 1]).name.lower()
            return f"{self._place(source, number)} ({what}, {' of '.join(filter(None, reversed(key)))})"

        seqs, order = self._orders[key]
        again, gap = seqs.judge(rows[:, 6])
        count_wrong({Wrong.SEQ_GAP: gap}, self._bad_rows, shown)
        rows = rows[~count_wrong({Wrong.SEQ_AGAIN: again}, self._bad_rows, shown)]
        rows = rows[~count_wrong({Wrong.TIME_BACK: order.judge_times(rows[:, 0])}, self._bad_rows, shown)]
        lives = order.judge_lives(Events.of_rows(rows))
        rows = rows[~count_wrong({Wrong.TWO_CURSORS: lives}, self._bad_rows, shown)]
        events = Events.of_rows(rows)
        self._published.follow(key, events)
        self._writer.write(key, events)


_PARQUET = b"PAR1"
_HINT = "correct them, or skip them with --bad-rows-max"


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion."""

    events: int  # Number of events in the trace
    bad_rows: BadRows = field(default_factory=BadRows)  # The rows that were skipped; a recording has none
    dropped: int = 0  # Events that recorders of brokers dropped
    transactions: int = 0  # ACK commands of transactions in recordings of brokers, which are left out

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON; a recording has no rows."""
        rows = self.bad_rows.to_json() if self.bad_rows.rows else {}
        left_out = {"dropped_events": self.dropped, "transactions": self.transactions}
        return {"events": self.events, **rows, **{name: count for name, count in left_out.items() if count}}

    def lines(self) -> list[str]:
        """Return a line for each kind of bad row, and for the events that a recording of brokers lacks."""
        lines = self.bad_rows.lines()
        if self.dropped:
            lines.append(dropped_line(self.dropped))
        if self.transactions:
            lines.append(f"{counted(self.transactions, 'ACK command')} of transactions left out")
        return lines


def convert(
    sources: Sequence[Path],
    out: Location,
    *,
    bad_rows_max: BadRowsMax | None = None,
    text_bytes_max: int = TEXT_BYTES_MAX,
    progress: Callable[[int, int | None], None] = lambda _done, _total: None,
) -> Converted:
    """Write one trace from all sources, read in order; it appears at `out` when it is complete."""
    of_brokers = [
        recording_files(source) if str(source) != STANDARD_INPUT and source.exists() else [] for source in sources
    ]
    is_of_brokers = any(of_brokers)
    for source, found in zip(sources, of_brokers, strict=True):
        if is_of_brokers and not found:
            raise TraceError(f"{source}: not a recording of a broker; such recordings are converted by themselves")
    recordings = [source for source in sources if source.is_dir() and segments(source)]
    if recordings or (
        not is_of_brokers and len(sources) == 1 and sources[0].is_dir() and not any(sources[0].glob("*.parquet"))
    ):
        if len(sources) > 1:
            raise TraceError(f"{recordings[0]}: a recording is converted alone")
        return Converted(write_trace(read_recording(sources[0]), out))
    files = list(chain.from_iterable(of_brokers)) or list(chain.from_iterable(map(_files, sources)))
    bad_rows = BadRows()
    of_broker = BrokerRows(published_entries(files, text_bytes_max=text_bytes_max) if is_of_brokers else {})
    with new_trace(out) as files_out:
        with ChunkWriter(files_out.file()) as writer:
            conversion = _Conversion(files, writer, bad_rows, bad_rows_max or BadRowsMax(), progress)
            if is_of_brokers:
                events = read_broker_recording(files, text_bytes_max=text_bytes_max)
                conversion.run(conversion.of_brokers(of_broker.tables(events)))
            else:
                conversion.run(conversion.of_files(text_bytes_max))
            writer.dropped_events = of_broker.dropped
        if not writer.events:
            raise TraceError(f"{', '.join(map(str, sources))}: no events, so there is no trace to write")
    return Converted(writer.events, bad_rows, of_broker.dropped, of_broker.transactions)


def _files(source: Path) -> list[Path]:
    if source.is_dir():
        files = sorted(source.glob("*.parquet"))
        if not files:
            raise TraceError(f"{source}: a directory with neither a recording nor Parquet files in it")
        return files
    if str(source) != STANDARD_INPUT and not source.exists():
        raise TraceError(f"{source}: no such file")
    return [source]


_Table: TypeAlias = "tuple[int, pa.Table, Int64s, int]"
"""A table with the number of its file, the number of each row in it, and the bytes that were read until then."""


@final
class _Conversion:
    """Reads files one after the other into one sorter."""

    def __init__(
        self,
        files: Sequence[Path],
        writer: ChunkWriter,
        bad_rows: BadRows,
        bad_rows_max: BadRowsMax,
        progress: Callable[[int, int | None], None],
    ) -> None:
        self._files = files
        self._bad_rows = bad_rows
        self._bad_rows_max = bad_rows_max
        self._progress = progress
        self._clock = TraceClock()
        self._sorter = EventSorter(writer, bad_rows, self._place)
        is_known = all(str(file) != STANDARD_INPUT for file in files)
        self._total = sum(file.stat().st_size for file in files) if is_known else None

    def run(self, tables: Iterable[_Table]) -> None:
        """Read all tables."""
        for source, table, numbers, done in tables:
            place = partial(self._place, source)
            rows = checked_rows(table, numbers, clock=self._clock, bad_rows=self._bad_rows, place=place)
            self._sorter.add(rows, source=source)
            self._check(finished=False)
            self._progress(done, self._total)
        self._sorter.finish()
        self._check(finished=True)

    def of_files(self, text_bytes_max: int) -> Iterator[_Table]:
        """Yield the tables of all files; `text_bytes_max` bounds the decompressed text of each."""
        before = 0
        for source, file in enumerate(self._files):
            size = 0 if self._total is None else file.stat().st_size
            if self._is_parquet(file):
                for table, numbers, share in tables(file):
                    yield source, table, numbers, before + int(share * size)
            else:
                for table, numbers, done in self._of_text(source, file, text_bytes_max):
                    yield source, table, numbers, before + done
            before += size

    def of_brokers(self, tables: Iterable[tuple[Path, pa.Table, Int64s]]) -> Iterator[_Table]:
        """Yield tables, given each with its file and the line of each row; the files need not be read in order."""
        numbers = {file: number for number, file in enumerate(self._files)}
        seen: dict[Path, int] = {}
        for file, table, lines in tables:
            seen.setdefault(file, file.stat().st_size)
            yield numbers[file], table, lines, sum(seen.values())

    def _of_text(self, source: int, file: Path, text_bytes_max: int) -> Iterator[tuple[pa.Table, Int64s, int]]:
        place = partial(self._place, source)
        is_log: bool | None = None
        with open_text(file) as (text, position):
            for block in text_blocks(file, text, position, bytes_max=text_bytes_max):
                if is_log is None:
                    is_log = is_ack_log(block.data.lstrip().partition(b"\n")[0])
                if is_log:
                    lines = block.data.split(b"\n")
                    for run in log_tables(lines, block.first_number, bad_rows=self._bad_rows, place=place):
                        yield *run, block.done
                else:
                    yield *table_of_lines(block, bad_rows=self._bad_rows, place=place), block.done

    def _check(self, *, finished: bool) -> None:
        what = ", ".join(map(str, self._files))
        self._bad_rows.check(self._bad_rows_max, what=what, hint=_HINT, finished=finished)

    def _place(self, source: int, number: int) -> str:
        """Return the name of a row, with the file if there are several."""
        row = f"row {number}" if self._files[source].suffix == ".parquet" else f"line {number}"
        return f"{self._files[source]} {row}" if len(self._files) > 1 else row

    def _is_parquet(self, file: Path) -> bool:
        if str(file) == STANDARD_INPUT or file.is_dir():
            return False
        with file.open("rb") as opened:
            return opened.read(len(_PARQUET)) == _PARQUET or file.suffix == ".parquet"
