"""Rewrites a Parquet trace of version 1 or 2 as one of the present version."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.analysis.trace.check import check_events, read_chunks
from ackstate.analysis.trace.chunk_writer import ChunkWriter
from ackstate.analysis.trace.events import CHUNK_EVENTS, TraceError
from ackstate.analysis.trace.parquet import new_trace
from ackstate.stores.directory_lock import sync_path

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.location import Location
    from ackstate.analysis.trace.check import CheckedChunk


def rewrite_trace(source: Location, target: Location) -> int:
    """Write the events of a trace as a new trace, and return their number; the source is only read.

    The new trace appears when it is complete, has been read back, and is synced.

    Args:
        source: A trace of exact times, of any version.
        target: A path or URL where nothing is.

    Raises:
        TraceError: An event of the source is invalid, or the copy has other events.
        UnsupportedVersionError: A newer release wrote the source.
        OSError: The disk is full or failed; there is no new trace.
    """
    before = check_events(source)
    with new_trace(target) as files:
        with ChunkWriter(files.file()) as writer:
            for chunk in _in_order(read_chunks(source)):
                for begin in range(0, len(chunk.events.kind), CHUNK_EVENTS):
                    writer.write(chunk.key, chunk.events.where(slice(begin, begin + CHUNK_EVENTS)))
        after = check_events(files.file())
        if (after.kinds, after.first_ts_ms, after.last_ts_ms) != (before.kinds, before.first_ts_ms, before.last_ts_ms):
            raise TraceError(f"{source}: its events changed while they were copied; nothing was written")
        for each in (files.file(), files.directory):
            if isinstance(each, Path):
                sync_path(each)
    if isinstance(target, Path):
        sync_path(target.absolute().parent)
    return after.events


def _in_order(chunks: Iterator[CheckedChunk]) -> Iterator[CheckedChunk]:
    """Yield the chunks of each subscription in their order; files may hold them in another one."""
    following: dict[tuple[str, str], int] = defaultdict(int)
    early: dict[tuple[str, str], dict[int, CheckedChunk]] = defaultdict(dict)
    for chunk in chunks:
        waiting = early[chunk.key]
        waiting[chunk.number] = chunk
        while following[chunk.key] in waiting:
            yield waiting.pop(following[chunk.key])
            following[chunk.key] += 1
