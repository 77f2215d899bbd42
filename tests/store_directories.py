"""The directory of a store: its files, whether a store works there, and another process that has it open."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from ackstate import SqliteStore, StoreError

_HOLDER = """
import sys
from ackstate import SqliteStore
store = SqliteStore(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def contents_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def assert_works(directory: Path) -> None:
    """A store opens there, takes an entry and still has it after a reopen."""
    with closing(SqliteStore(directory)) as store:
        ledger_id = store.ledgers.create("works")
        store.ledgers.append(ledger_id, [b"entry"])
    with closing(SqliteStore(directory)) as store:
        assert store.ledgers.read(ledger_id, 0, 1) == [b"entry"]


def start(program: str, directory: Path) -> subprocess.Popen[str]:
    """Run a program on a store in another process, which has printed a line when this returns."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert child.stdout.readline()
    return child


def hold(directory: Path) -> subprocess.Popen[str]:
    """Open a store in another process until that is killed or its input ends."""
    return start(_HOLDER, directory)


def append_until(store: SqliteStore, ledger_id: int, error: type[StoreError]) -> list[bytes]:
    """Append until it fails; return the appended entries."""
    entries: list[bytes] = []

    def append_on():
        while True:
            entry = b"%d" % len(entries) * 500
            assert store.ledgers.append(ledger_id, [entry]) == len(entries)
            entries.append(entry)

    with pytest.raises(error) as caught:
        append_on()
    assert type(caught.value) is error
    return entries


def check_disk(disk):
    """Assert every invariant of a `MemoryDisk`."""
    assert all(0 < ledger_id < disk.next_ledger_id for ledger_id in disk.ledgers)
    assert all(type(entry) is bytes for ledger in disk.ledgers.values() for entry in ledger.entries)
    assert disk.first_version >= 0
    for path, (data, version) in disk.values.items():
        assert path.startswith("/")
        assert type(data) is bytes
        assert version >= 0
