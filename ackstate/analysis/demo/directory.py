"""The directory of a broker: a store and a recording, owned by one process at a time."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.trace.recorder import read_recording, segments
from ackstate.errors import AckStateError
from ackstate.stores.sqlite import SqliteStore

if TYPE_CHECKING:
    from collections.abc import Iterator
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

    def check_closed(self) -> None:
        """Check that no broker is running here.

        Raises:
            StoreLockedError: One is.
            AckStateError: The store cannot be opened.
        """
        if self.store.exists():
            SqliteStore(self.store).close()

    def clear(self) -> None:
        """Remove the leftovers of an earlier broker, after `check_closed`."""
        self.check_closed()
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


def _size(recording: Path) -> int:
    return sum(segment.stat().st_size for segment in segments(recording))
