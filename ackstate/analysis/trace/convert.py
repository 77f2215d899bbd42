"""Converts recordings, and events of other brokers, into a Parquet trace, for `ackstate trace convert`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.trace.broker_recording import BrokerRows, published_entries, recording_files
from ackstate.analysis.trace.broker_recording import read_recording as read_broker_recording
from ackstate.analysis.trace.check import (
    BadRows,
    BadRowsMax,
    PublishedEntries,
    Wrong,
    count_wrong,
)
from ackstate.analysis.trace.chunks import ChunkWriter, EventOrder, Events, Gatherer, TraceClock
from ackstate.analysis.trace.events import EventKind, TraceError
from ackstate.analysis.trace.parquet import new_trace, opened_parquet, write_trace
from ackstate.analysis.trace.recording import read_recording, segments
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

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.chunks import Int64s, Mask


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
                conversion.run(conversion.of_brokers(of_broker.rows(events)))
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


_Read: TypeAlias = tuple[int, TraceRows, int]
"""Rows with the number of their file, and the bytes that were read until then."""


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

    def run(self, read: Iterable[_Read]) -> None:
        """Read all rows."""
        for source, rows, done in read:
            self._sorter.add(rows, source=source)
            self._check(finished=False)
            self._progress(done, self._total)
        self._sorter.finish()
        self._check(finished=True)

    def of_files(self, text_bytes_max: int) -> Iterator[_Read]:
        """Yield the rows of all files; `text_bytes_max` bounds the decompressed text of each."""
        before = 0
        for source, file in enumerate(self._files):
            size = 0 if self._total is None else file.stat().st_size
            if self._is_parquet(file):
                for table, numbers, share in tables(file):
                    yield source, self._checked(source, table, numbers), before + int(share * size)
            else:
                place = partial(self._place, source)
                with open_text(file) as (text, position):
                    for block in text_blocks(file, text, position, bytes_max=text_bytes_max):
                        found = table_of_lines(block, bad_rows=self._bad_rows, place=place)
                        yield source, self._checked(source, *found), before + block.done
            before += size

    def of_brokers(self, read: Iterable[tuple[Path, TraceRows]]) -> Iterator[_Read]:
        """Yield rows, given with their file; the files need not be read in order."""
        numbers = {file: number for number, file in enumerate(self._files)}
        seen: dict[Path, int] = {}
        for file, rows in read:
            seen.setdefault(file, file.stat().st_size)
            self._bad_rows.rows += len(rows.key)
            yield numbers[file], rows, sum(seen.values())

    def _checked(self, source: int, table: pa.Table, numbers: Int64s) -> TraceRows:
        place = partial(self._place, source)
        return checked_rows(table, numbers, clock=self._clock, bad_rows=self._bad_rows, place=place)

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
