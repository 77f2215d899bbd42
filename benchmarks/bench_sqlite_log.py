"""The commits lost by a flipped bit in SQLite's write-ahead log, with the check of the log and without."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import NamedTuple

from ackstate.errors import CorruptStateError
from ackstate.stores.sqlite_log import check_log
from benchmarks.measurement import Against, BenchmarkReport, Spread

COMMITS = 100
FLIPS = 400
SEED = 5
ABOUT = (
    f"A database with the log of {COMMITS} commits of 3,000 bytes, each synced, as a killed process leaves it. Each "
    "time one random bit of the log is flipped, and the database is opened. SQLite ends the log at the first frame "
    "whose checksum is wrong and reports nothing; the last commit may have been torn by the crash, so its loss proves "
    "no damage."
)


class OpenResult(NamedTuple):
    """The result of opening a damaged database.

    Attributes:
        lost: Commits that SQLite dropped.
        is_whole: Whether its `integrity_check` reported no error.
        is_refused: Whether `check_log` refused the log.
    """

    lost: int
    is_whole: bool
    is_refused: bool


def make_database(directory: Path, chance: random.Random) -> None:
    """Write the database and the log, and leave them as they are on the disk."""
    made = directory / "made"
    made.mkdir()
    with closing(sqlite3.connect(made / "x", isolation_level=None)) as connection:
        for pragma in ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 0"):
            connection.execute(f"PRAGMA {pragma}")
        connection.execute("CREATE TABLE entries (id INTEGER PRIMARY KEY, content BLOB)")
        for number in range(COMMITS):
            connection.execute("INSERT INTO entries VALUES (?, ?)", (number, chance.randbytes(3_000)))
        for name in ("x", "x-wal"):
            shutil.copy(made / name, directory / name)


def outcome(directory: Path, log: bytes) -> OpenResult:
    """Open the database with a damaged log."""
    with TemporaryDirectory(dir=directory) as copy:
        database, damaged = Path(copy, "x"), Path(copy, "x-wal")
        shutil.copy(directory / "x", database)
        damaged.write_bytes(log)
        is_refused = False
        try:
            check_log(damaged, database)
        except CorruptStateError:
            is_refused = True
        with closing(sqlite3.connect(database)) as connection:
            exists = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            held = connection.execute("SELECT count(*) FROM entries").fetchone()[0] if exists else 0
            is_whole = connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    return OpenResult(COMMITS - held, is_whole, is_refused)


def flipped(log: bytes, chance: random.Random) -> bytes:
    """Return the log with one bit of a frame flipped; its header takes the first 32 bytes."""
    damaged = bytearray(log)
    damaged[chance.randrange(32, len(log))] ^= 1 << chance.randrange(8)
    return bytes(damaged)


def check_ms(directory: Path) -> Spread:
    """Return the CPU time of a check."""
    taken = []
    for _ in range(8):
        begun = process_time()
        check_log(directory / "x-wal", directory / "x")
        taken.append(1e3 * (process_time() - begun))
    return Spread.of(taken[1:])


def measure(report: BenchmarkReport) -> None:
    """Flip bits, and time the check of an undamaged log."""
    chance = random.Random(SEED)
    with TemporaryDirectory() as name:
        directory = Path(name)
        make_database(directory, chance)
        log = (directory / "x-wal").read_bytes()
        found = [outcome(directory, flipped(log, chance)) for _ in range(FLIPS)]
        report.count("flipped bits", "logs", FLIPS)
        lossy = [each for each in found if each.lost]
        report.count("commits lost by SQLite alone, mean", "commits", sum(each.lost for each in found) / FLIPS)
        report.count("of which its integrity_check found nothing", "logs", sum(each.is_whole for each in lossy))
        unnoticed = [each for each in lossy if not each.is_refused]
        report.count("commits lost and not refused by check_log, most", "commits", max(e.lost for e in unnoticed),
                     Against("limit", 1))  # fmt: skip
        report.count("refused by check_log", "logs", sum(each.is_refused for each in found))
        report.time(f"check_log of {len(log) / 1e6:.1f} MB, CPU", "ms", check_ms(directory))


if __name__ == "__main__":
    report = BenchmarkReport("sqlite_log", ABOUT)
    measure(report)
    report.publish()
