"""Converts recordings and logs of other brokers into a Parquet trace, for `ackstate trace convert`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.trace import ack_log, jsonl, row_parquet
from ackstate.analysis.trace.bad_rows import BadRows, BadRowsMax
from ackstate.analysis.trace.broker_recording import published_entries, recording_files
from ackstate.analysis.trace.broker_recording import read_recording as read_broker_recording
from ackstate.analysis.trace.broker_rows import BrokerRows
from ackstate.analysis.trace.chunk_writer import ChunkWriter
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.parquet import new_trace, write_trace
from ackstate.analysis.trace.recorder import read_recording, segments
from ackstate.analysis.trace.rows import checked_rows
from ackstate.analysis.trace.sorter import EventSorter
from ackstate.analysis.trace.times import TraceClock
from ackstate.analysis.wording import counted, dropped_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    import pyarrow as pa

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.rows import Int64s

_PARQUET = b"PAR1"
_HINT = "correct them, or skip them with --bad-rows-max"


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion.

    Attributes:
        events: Number of events in the trace.
        bad_rows: The rows that were skipped; a recording has none.
        dropped: Events that recorders of brokers dropped.
        transactions: ACK commands of transactions in recordings of brokers, which are left out.
    """

    events: int
    bad_rows: BadRows = field(default_factory=BadRows)
    dropped: int = 0
    transactions: int = 0

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
    text_bytes_max: int = jsonl.TEXT_BYTES_MAX,
    progress: Callable[[int, int | None], None] = lambda _done, _total: None,
) -> Converted:
    """Write one trace from all sources, read in order; it appears at `out` when it is complete.

    Args:
        sources: One recording; or any number of files of JSON lines, logs of ACK commands (both possibly compressed
            with gzip, ``-`` for standard input) and Parquet files with one row an event, or directories of these; or
            files of the broker interceptor, or directories of these.
        out: The trace; an existing one is replaced.
        bad_rows_max: Limit on the bad rows that are skipped; by default none.
        text_bytes_max: Most bytes of text in each file, decompressed.
        progress: Called with the bytes read so far, and the total if known.

    Raises:
        TraceError: A source is missing, damaged or none of these, too many rows are bad, or there is no event.
        UnsupportedVersionError: It has another version.
        OSError: A file cannot be read, or the trace not written; `out` is unchanged.
    """
    of_brokers = [recording_files(source) if _is_file(source) else [] for source in sources]
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
                conversion.run_tables(of_broker.tables(events))
            else:
                conversion.run(text_bytes_max)
            writer.dropped_events = of_broker.dropped
        if not writer.events:
            raise TraceError(f"{', '.join(map(str, sources))}: no events, so there is no trace to write")
    return Converted(writer.events, bad_rows, of_broker.dropped, of_broker.transactions)


def _is_file(source: Path) -> bool:
    return str(source) != jsonl.STANDARD_INPUT and source.exists()


def _files(source: Path) -> list[Path]:
    if source.is_dir():
        files = sorted(source.glob("*.parquet"))
        if not files:
            raise TraceError(f"{source}: a directory with neither a recording nor Parquet files in it")
        return files
    if str(source) != jsonl.STANDARD_INPUT and not source.exists():
        raise TraceError(f"{source}: no such file")
    return [source]


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
        is_known = all(str(file) != jsonl.STANDARD_INPUT for file in files)
        self._total = sum(file.stat().st_size for file in files) if is_known else None
        self._done = 0

    def run(self, text_bytes_max: int) -> None:
        """Read all inputs; `text_bytes_max` bounds the decompressed text of each file."""
        for source, file in enumerate(self._files):
            if self._is_parquet(file):
                self._read_parquet(source, file)
            else:
                self._read_text(source, file, text_bytes_max)
            self._done += file.stat().st_size if self._total is not None else 0
        self._sorter.finish()
        self._check(finished=True)

    def run_tables(self, tables: Iterable[tuple[Path, pa.Table, Int64s]]) -> None:
        """Read tables, each with its file and the line of each row; their files need not be read in order."""
        numbers = {file: number for number, file in enumerate(self._files)}
        seen: set[Path] = set()
        for file, table, lines in tables:
            if file not in seen:
                seen.add(file)
                self._done += file.stat().st_size
            self._take(numbers[file], table, lines, done=0)
        self._sorter.finish()
        self._check(finished=True)

    def _read_parquet(self, source: int, file: Path) -> None:
        size = file.stat().st_size

        def place(number: int) -> str:
            return self._place(source, number)

        for table, numbers, share in row_parquet.tables(file, bad_rows=self._bad_rows, place=place):
            self._take(source, table, numbers, done=int(share * size))

    def _read_text(self, source: int, file: Path, text_bytes_max: int) -> None:
        def place(number: int) -> str:
            return self._place(source, number)

        is_log: bool | None = None
        with jsonl.opened(file) as (text, position):
            for block in jsonl.blocks(file, text, position, bytes_max=text_bytes_max):
                if is_log is None:
                    is_log = ack_log.is_ack_log(block.data.lstrip().partition(b"\n")[0])
                if is_log:
                    lines = block.data.split(b"\n")
                    for run in ack_log.tables(lines, block.first_number, bad_rows=self._bad_rows, place=place):
                        self._take(source, *run, done=block.done)
                else:
                    table, numbers = jsonl.table_of(block, bad_rows=self._bad_rows, place=place)
                    self._take(source, table, numbers, done=block.done)

    def _take(self, source: int, table: pa.Table, numbers: Int64s, *, done: int) -> None:
        rows = checked_rows(
            table, numbers, clock=self._clock, bad_rows=self._bad_rows,
            place=lambda number: self._place(source, number),
        )  # fmt: skip
        self._sorter.add(rows, source=source)
        self._check(finished=False)
        self._progress(self._done + done, self._total)

    def _check(self, *, finished: bool) -> None:
        what = ", ".join(map(str, self._files))
        self._bad_rows.check(self._bad_rows_max, what=what, hint=_HINT, finished=finished)

    def _place(self, source: int, number: int) -> str:
        """Return the name of a row, with the file if there are several."""
        row = f"row {number}" if self._files[source].suffix == ".parquet" else f"line {number}"
        return f"{self._files[source]} {row}" if len(self._files) > 1 else row

    def _is_parquet(self, file: Path) -> bool:
        if str(file) == jsonl.STANDARD_INPUT or file.is_dir():
            return False
        with file.open("rb") as opened:
            return opened.read(len(_PARQUET)) == _PARQUET or file.suffix == ".parquet"
