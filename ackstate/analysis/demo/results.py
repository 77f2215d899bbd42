"""The directory of the demo's results: written by one demo at a time, which replaces only its own files."""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.demo.directory import BrokerDirectory, DirectoryInUseError
from ackstate.analysis.trace.parquet import check_replaceable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Marks of our own summary and report; the title of the page is within this many bytes.
_SUMMARY_KEY = "kill_ts_ms"
_REPORT_TITLE = "<title>ackstate demo"
_PAGE_HEAD_CHARACTERS = 4_096


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
        """Lock the directory, and check that only results of an earlier demo would be replaced.

        The directory is created if it is missing. The kernel releases the lock when the process ends, in any way.

        Raises:
            DirectoryInUseError: Another demo writes here, or a foreign file is in the way.
            AckStateError: As `BrokerDirectory.check_replaceable` and `check_replaceable`.
            OSError: The directory cannot be created or read.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise DirectoryInUseError(f"{self.path}: not a directory") from None
        # The directory itself is locked, because a lock file would stay behind, even in a foreign directory.
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(descriptor)
            self._check()
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DirectoryInUseError(f"{self.path}: another demo is running here") from None

    def _check(self) -> None:
        self.broker.check_replaceable()
        if self.trace.is_symlink():
            raise DirectoryInUseError(f"{self.trace}: a symbolic link, and in the way of the demo's trace")
        check_replaceable(self.trace)
        for file, is_ours in ((self.summary, _is_summary), (self.report, _is_report)):
            if os.path.lexists(file) and not (file.is_file() and is_ours(file)):
                raise DirectoryInUseError(f"{file}: not a demo's, and in the way of its results")


def _is_summary(file: Path) -> bool:
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and _SUMMARY_KEY in found


def _is_report(file: Path) -> bool:
    with file.open(encoding="utf-8", errors="replace") as page:
        return _REPORT_TITLE in page.read(_PAGE_HEAD_CHARACTERS)
