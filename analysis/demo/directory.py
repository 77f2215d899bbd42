"""Where a broker lives, and whose directory that is: a store and a recording that one process at a time may have."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.trace.recorder import check_segment, read_recording, segments
from ackstate.cursor.stores.sqlite import SqliteStore
from ackstate.cursor.stores.sqlite_database import STORE_FILES
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from ackstate.analysis.trace.recorder import Frame


class DirectoryInUseError(AckStateError):
    """A directory holds something that is not ours, or is in use; nothing in it was changed."""


@dataclass(frozen=True, slots=True)
class BrokerDirectory:
    """Where a broker lives: its store and its recording.

    Attributes:
        path: The directory.
    """

    path: Path

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self.path / "store"

    @property
    def recording(self) -> Path:
        """The recording's directory."""
        return self.path / "recording"

    def check_replaceable(self) -> None:
        """Make sure that what stands here, if anything, was left by a broker that is over, and is nothing else.

        Raises:
            DirectoryInUseError: There is something else here.
            StoreLockedError: A broker is running here.
            TraceError, StoreError, CorruptStateError: What stands in the place of recording or store is none of ours.
            UnsupportedVersionError: A newer release wrote it.
            OSError: It cannot be read.
        """
        if not os.path.lexists(self.path):
            return
        if self.path.is_symlink() or not self.path.is_dir():
            raise DirectoryInUseError(f"{self.path}: not a broker's directory")
        for stranger in self._strangers():
            raise DirectoryInUseError(f"{self.path}: not a broker's directory, it holds {stranger!r}")
        for segment in segments(self.recording):
            check_segment(segment)
        if self.store.exists():
            SqliteStore(self.store).close()

    def clear(self) -> None:
        """Remove what an earlier broker left here, after `check_replaceable`."""
        self.check_replaceable()
        if self.path.exists():
            shutil.rmtree(self.path)

    @contextmanager
    def begun(self) -> Iterator[tuple[SqliteStore, list[Frame]]]:
        """Open the store of a broker that ran here and is over, with its recording.

        A recording that cannot be read is refused before the store is touched.

        Raises:
            DirectoryInUseError: No broker was here.
            TraceError, UnsupportedVersionError: As `read_recording`.
            StoreError, CorruptStateError: As `SqliteStore`.
            OSError: As `read_recording`.
        """
        if not self.store.is_dir() or not any(self.store.iterdir()):
            raise DirectoryInUseError(f"{self.path}: no broker was here, expected a store in {self.store}")
        size = _size(self.recording)
        frames = list(read_recording(self.recording))
        store = SqliteStore(self.store)
        try:
            # A broker that was alive until now may have gone on writing meanwhile.
            if _size(self.recording) != size:
                frames = list(read_recording(self.recording))
            yield store, frames
        finally:
            store.close()

    @contextmanager
    def begun_or_new(self) -> Iterator[tuple[SqliteStore, list[Frame]]]:
        """Open the store of a broker that begins here, or that goes on; without a recording there are no frames.

        Raises:
            DirectoryInUseError: There is something else here, or one of store and recording without the other.
            AckStateError, OSError: As `begun`.
        """
        if segments(self.recording):
            with self.begun() as found:
                yield found
            return
        if os.path.lexists(self.path) and not self.path.is_dir():
            raise DirectoryInUseError(f"{self.path}: not a directory")
        if self.path.is_dir() and not self.store.exists():
            for entry in sorted(self.path.iterdir()):
                raise DirectoryInUseError(f"{self.path}: no broker was here, and it holds {entry.name!r}")
        store = SqliteStore(self.store)
        try:
            if store.metadata.children("/"):
                raise DirectoryInUseError(f"{self.path}: there is a store, and no recording of what was done to it")
            yield store, []
        finally:
            store.close()

    def _strangers(self) -> Iterator[str]:
        ours = {self.store: STORE_FILES, self.recording: {segment.name for segment in segments(self.recording)}}
        for entry in sorted(self.path.iterdir()):
            if entry not in ours or entry.is_symlink() or not entry.is_dir():
                yield entry.name
            else:
                yield from sorted(inside.name for inside in entry.iterdir() if not _is_one_of(ours[entry], inside))


def _is_one_of(names: Collection[str], entry: Path) -> bool:
    """Tell whether an entry of a directory is a file, and no link, with one of these names."""
    return entry.name in names and entry.is_file() and not entry.is_symlink()


def _size(recording: Path) -> int:
    return sum(segment.stat().st_size for segment in segments(recording))
