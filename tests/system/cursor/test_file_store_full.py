"""A file store on a disk that is full, for a while or for good: dead bytes never keep it from being written."""

from __future__ import annotations

import os
import subprocess
from contextlib import closing, suppress

import pytest

from ackstate import LedgerMap
from ackstate.cursor import CursorConfig, FileStore, ManagedCursor
from ackstate.cursor.store import ABSENT, StoreFullError

DISK_SIZE = 2 << 20
VALUE_SIZE = 20_000

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")]


@pytest.fixture
def disk(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_SIZE}", "tmpfs", tmp_path], check=False, capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def fill(disk, *, free=0):
    """Fill the free space with another file, but for some bytes."""
    found = os.statvfs(disk)
    with (disk / "other").open("ab", buffering=0) as file:
        file.write(bytes(found.f_bavail * found.f_bsize - free))


def put_many(store, count):
    """Replace a value again and again: all but the last is dead."""
    found = store.metadata.get("/a")
    version = ABSENT if found is None else found.version
    for number in range(count):
        version = store.metadata.put("/a", bytes([number % 256]) * VALUE_SIZE, expected_version=version)


def log_size(disk):
    return sum(path.stat().st_size for path in (disk / "store").glob("log-*"))


def test_a_store_is_compacted_soon_after_the_disk_was_full(disk):
    with closing(FileStore(disk / "store")) as store:
        put_many(store, 45)
        fill(disk)
        with suppress(StoreFullError):
            put_many(store, 100)
        (disk / "other").unlink()
        put_many(store, 300)
        assert log_size(disk) < DISK_SIZE * 3 // 4


def test_a_log_below_the_size_for_compaction_does_not_fill_the_disk_with_dead_bytes(disk):
    with closing(FileStore(disk / "store", compaction_size_min=1 << 30)) as store:
        put_many(store, 500)
    with closing(FileStore(disk / "store", compaction_size_min=1 << 30)) as store:
        assert store.metadata.get("/a").data == bytes([499 % 256]) * VALUE_SIZE


@pytest.mark.parametrize("compaction_size_min", [1 << 16, 1 << 30])
def test_a_store_of_dead_bytes_opens_and_recovers_while_the_disk_is_full(disk, compaction_size_min):
    log = LedgerMap.from_counts({1: 1_000})

    def open_cursor(store):
        config = CursorConfig(compaction_bytes_min=1_000)
        return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=0)

    with closing(FileStore(disk / "store", compaction_size_min=1 << 30)) as store:
        cursor = open_cursor(store)
        put_many(store, 30)
        for entry_id in range(1, 200, 2):
            cursor.ack_entries(1, [entry_id], now_ms=0)
            cursor.persist(now_ms=0)
    fill(disk)
    with closing(FileStore(disk / "store", compaction_size_min=compaction_size_min)) as store:
        cursor = open_cursor(store)
        assert cursor.deleted.range_count == 100
        for entry_id in range(201, 900, 2):
            cursor.ack_entries(1, [entry_id], now_ms=0)
            cursor.persist(now_ms=0)
        assert cursor.redelivery_if_crashed == 0
        if compaction_size_min < DISK_SIZE:  # Else the log uses up the space laid out before it has to be compacted.
            put_many(store, 100)


@pytest.mark.parametrize("compaction_size_min", [1 << 16, 1 << 30])
@pytest.mark.parametrize("reopenings", [0, 1, 2])
@pytest.mark.parametrize("live_share", [1 / 8, 1 / 4, 1 / 3])
def test_a_store_works_for_good_once_the_disk_has_room_again(disk, compaction_size_min, reopenings, live_share):
    """Whatever was written while another file had the disk, and however often the store was opened meanwhile."""
    count = int(DISK_SIZE * live_share) // VALUE_SIZE

    def opened():
        return FileStore(disk / "store", compaction_size_min=compaction_size_min)

    def put(store, number):
        path = f"/{number % count}"
        found = store.metadata.get(path)
        store.metadata.put(path, bytes(VALUE_SIZE), expected_version=ABSENT if found is None else found.version)

    def put_some(store):
        for number in range(50):
            with suppress(StoreFullError):
                put(store, number)
        return versions(store)

    def versions(store):
        return {path: store.metadata.get(f"/{path}").version for path in store.metadata.children("/")}

    with closing(opened()) as store:
        for number in range(count + 5):
            put(store, number)
        fill(disk)
        before = put_some(store)
    for _ in range(reopenings):
        fill(disk)
        with closing(opened()) as store:
            assert versions(store) == before
            before = put_some(store)
    with closing(opened()) as store:
        assert versions(store) == before
        (disk / "other").unlink()
        for number in range(400):
            put(store, number)
        before = versions(store)
    with closing(opened()) as store:
        assert versions(store) == before
