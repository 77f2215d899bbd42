"""The directory of the demo's results: written by one demo at a time, empty before the first one."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.demo.directory import BrokerDirectory, DirectoryInUseError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MARKER = ".ackstate-demo"
"""A file that tells a directory of a demo from one of somebody else's."""


@dataclass(frozen=True, slots=True)
class DemoDirectory:
    """The demo's results.

    Attributes:
        path: The directory.
    """

    path: Path

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

        Raises:
            DirectoryInUseError: Another demo writes here, or the directory has foreign contents.
            AckStateError: As `BrokerDirectory.check_closed`.
            OSError: The directory cannot be created or read.
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
