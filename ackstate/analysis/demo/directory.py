"""The directory of a broker: a store and a recording, owned by one process at a time."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.trace.recorder import check_segment, read_recording, segments
from ackstate.errors import AckStateError
from ackstate.stores.sqlite import SqliteStore
from ackstate.stores.sqlite_database import STORE_FILES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from ackstate.analysis.trace.recorder import Frame


class DirectoryInUseError(AckStateError):
    """A directory has foreign contents, or is in use; it was not changed."""


@dataclass(frozen=True, slots=True)
class BrokerDirectory:
    """The directory of a broker: its store and its recording.

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
        """Check that the directory is missing, or contains only the leftovers of a dead broker.

        Raises:
            DirectoryInUseError: There are other contents.
            StoreLockedError: A broker is running here.
            TraceError, StoreError, CorruptStateError: The recording or the store is foreign or damaged.
            UnsupportedVersionError: A newer release wrote it.
            OSError: It cannot be read.
        """
        if not os.path.lexists(self.path):
            return
        if self.path.is_symlink() or not self.path.is_dir():
            raise DirectoryInUseError(f"{self.path}: not a broker's directory")
        for stranger in self._strangers():
            raise DirectoryInUseError(f"{self.path}: not a broker's directory, it contains {stranger!r}")
        for segment in segments(self.recording):
            check_segment(segment)
        if self.store.exists():
            SqliteStore(self.store).close()

    def clear(self) -> None:
        """Remove the leftovers of an earlier broker, after `check_replaceable`."""
        self.check_replaceable()
        if self.path.exists():
            shutil.rmtree(self.path)

    @contextmanager
    def begun(self) -> Iterator[tuple[SqliteStore, list[Frame]]]:
        """Open the store of a dead broker, with its recording.

        A recording that cannot be read is refused before the store is touched.

        Raises:
            DirectoryInUseError: There is no broker's store.
            TraceError, UnsupportedVersionError: As `read_recording`.
            StoreError, CorruptStateError: As `SqliteStore`.
            OSError: As `read_recording`.
        """
        if not self.store.is_dir() or not any(self.store.iterdir()):
            raise DirectoryInUseError(f"{self.path}: not a broker's directory, expected a store in {self.store}")
        size = _size(self.recording)
        frames = list(read_recording(self.recording))
        store = SqliteStore(self.store)
        try:
            # A broker that was alive until now may have written meanwhile.
            if _size(self.recording) != size:
                frames = list(read_recording(self.recording))
            yield store, frames
        finally:
            store.close()

    @contextmanager
    def begun_or_new(self) -> Iterator[tuple[SqliteStore, list[Frame]]]:
        """Open the store of a new or a continuing broker; a new one has no recording and no frames.

        Raises:
            DirectoryInUseError: There are other contents, or a store without a recording, or a recording without a
                store.
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
                raise DirectoryInUseError(f"{self.path}: not a broker's directory, it contains {entry.name!r}")
        store = SqliteStore(self.store)
        try:
            if store.metadata.children("/"):
                raise DirectoryInUseError(f"{self.path}: there is a store without its recording")
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
    """Return whether an entry of a directory is a file, not a link, with one of these names."""
    return entry.name in names and entry.is_file() and not entry.is_symlink()


def _size(recording: Path) -> int:
    return sum(segment.stat().st_size for segment in segments(recording))
