"""The directory of a broker: a store and a recording, owned by one process at a time."""

from __future__ import annotations

import fcntl
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
    """The directory of a broker: its store and its recording."""

    path: Path  # The directory

    @property
    def store(self) -> Path:
        """The store's directory."""
        return self.path / "store"

    @property
    def recording(self) -> Path:
        """The recording's directory."""
        return self.path / "recording"

    def check_closed(self) -> None:
        """Check that no broker is running here."""
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
    def begun_or_new(self) -> Iterator[SqliteStore]:
        """Open the store of a new or a continuing broker; a new one has no recording."""
        if segments(self.recording):
            with self.begun() as (store, _):
                yield store
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
            yield store
        finally:
            store.close()


def _size(recording: Path) -> int:
    return sum(segment.stat().st_size for segment in segments(recording))


MARKER = ".ackstate-demo"
"""A file that tells a directory of a demo from one of somebody else's."""


@dataclass(frozen=True, slots=True)
class DemoDirectory:
    """The demo's results."""

    path: Path  # The directory

    @property
    def broker(self) -> BrokerDirectory:
        """The directory of the broker."""
        return BrokerDirectory(self.path / "broker")

    @property
    def trace(self) -> Path:
        """The Parquet trace."""
        return self.path / "trace.parquet"

    @property
    def summary(self) -> Path:
        """The outcome, for programs."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """The outcome, for people."""
        return self.path / "report.html"

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the directory, which must be empty, missing or that of an earlier demo, and mark it.

        The kernel releases the lock when the process ends, in any way.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise DirectoryInUseError(f"{self.path}: not a directory") from None
        # The directory itself is locked, because a lock file would stay behind, even in a foreign directory.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DirectoryInUseError(f"{self.path}: another demo is running here") from None
            marker = self.path / MARKER
            if not marker.exists() and any(self.path.iterdir()):
                raise DirectoryInUseError(f"{self.path}: not empty, and not the directory of a demo: choose another")
            marker.touch()
            self.broker.check_closed()
            yield
        finally:
            os.close(descriptor)
