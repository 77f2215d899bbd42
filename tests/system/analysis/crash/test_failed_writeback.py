"""A sync that really fails: ext4 on a loop device whose bytes lie in memory, of which there is no more.

Linux then (6.18, ext4 in its default mode) raises at the first sync, not at the second; the written data can still be
read, and is not on the disk. Told to drop the clean pages, it reads zeros there. Without that error, it loses even data
that is added to such a page and synced later, without an error: the extent still counts as never written. Two facts
about the device: the error is ENOSPC, not EIO, and a write of several blocks of which the first could be stored is
reported as a success as a whole; so the part that must fail begins at the border of a block here.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from ackstate.analysis.crash import loop_disk
from ackstate.analysis.crash.layer import LayerSkippedError
from ackstate.analysis.crash.loop_disk import SIZE_BYTES, LoopDisk
from ackstate.analysis.crash.private_mounts import with_private_mounts
from ackstate.cursor.store import StoreError
from ackstate.stores.file import FileStore
from ackstate.stores.kernel_directory import KernelFile
from fake_directory import end_of

BLOCK = 4096
LOST = b"lost" * BLOCK
# linux/fs.h, linux/mount.h
FITRIM = 0xC0185879
MNT_DETACH = 2

pytestmark = [pytest.mark.root, pytest.mark.slow]


def apart(story, *args):
    """Run a story that yields its findings in a process with mounts of its own."""
    try:
        with closing(with_private_mounts(lambda: story(*args))) as found:
            return list(found)
    except LayerSkippedError as reason:
        pytest.skip(str(reason))


class ThinDisk:
    """A disk that takes its blocks from a memory file system when they are first written."""

    def __init__(self, memory):
        self._image = os.open(memory / "image", os.O_RDWR | os.O_CREAT)
        self._filler = os.open(memory / "filler", os.O_RDWR | os.O_CREAT)
        os.truncate(self._image, SIZE_BYTES)
        loop_disk._empty_image = lambda: os.dup(self._image)
        self.disk = LoopDisk()
        self.directory = self.disk.directory

    def use_up(self):
        """Leave no memory for blocks of which the file system says that they are free; all others have theirs.

        Blocks that are set aside for a file that was written do not count as free, until the next mount.
        """
        os.posix_fallocate(self._image, 0, SIZE_BYTES)
        names = os.open(self.directory, os.O_RDONLY)
        os.fsync(names)
        fcntl.ioctl(names, FITRIM, struct.pack("=QQQ", 0, 2**63, BLOCK))
        os.close(names)
        with suppress(OSError):
            while os.write(self._filler, bytes(BLOCK)):
                pass

    def give_room(self):
        os.ftruncate(self._filler, 0)

    def close(self):
        self.disk.close()
        os.close(self._image)
        os.close(self._filler)


@contextmanager
def thin_disk():
    with tempfile.TemporaryDirectory() as name:
        loop_disk._call("mount", "none", Path(name), "tmpfs", 0, f"size={SIZE_BYTES + (2 << 20)}")
        try:
            with closing(ThinDisk(Path(name))) as disk:
                yield disk
        finally:
            loop_disk._call("umount2", Path(name), MNT_DETACH)


def failed(call, *args):
    try:
        call(*args)
    except OSError:
        return True
    return False


def refused(call, *args):
    try:
        call(*args)
    except StoreError as error:
        return "a write failed" in str(error)
    return False


def syncing_again():
    with thin_disk() as disk:
        path = disk.directory / "file"
        path.write_bytes(b"a" * BLOCK)
        disk.disk.power_on()
        disk.use_up()
        file = os.open(path, os.O_RDWR | os.O_APPEND)
        os.write(file, b"b" * BLOCK)
        yield failed(os.fdatasync, file), failed(os.fdatasync, file)
        again = os.open(path, os.O_RDONLY)
        yield failed(os.fsync, again), os.pread(again, 2 * BLOCK, 0) == b"a" * BLOCK + b"b" * BLOCK
        os.posix_fadvise(again, 0, 0, os.POSIX_FADV_DONTNEED)
        yield os.pread(again, 2 * BLOCK, 0) == b"a" * BLOCK + bytes(BLOCK)
        os.close(file)
        os.close(again)


def test_a_failed_sync_that_is_repeated_succeeds_and_proves_nothing():
    assert apart(syncing_again) == [(True, False), (False, True), True]


def end_at_a_block(store, log):
    """Append such that nothing is laid out behind the log, and it ends where a block does."""
    store.ledgers.append(1, bytes(BLOCK))
    begin = end_of(log.read_bytes())
    store.ledgers.append(1, b"")
    end = end_of(log.read_bytes())
    store.ledgers.append(1, bytes(log.stat().st_size - end - (end - begin)))
    assert end_of(log.read_bytes()) == log.stat().st_size
    assert log.stat().st_size % BLOCK == 0


def entries(store):
    """The entries behind those which only make the log as long as it has to be."""
    return store.ledgers.read(1, 3, store.ledgers.last(1) + 1)


def reopening_a_file_store(plant):
    if plant:
        KernelFile.settle = KernelFile.sync
    with thin_disk() as disk:
        place = disk.directory / "store"
        with closing(FileStore(place)) as store:
            store.ledgers.create("orders")
            end_at_a_block(store, place / "log-0000000000000001")
        disk.disk.power_on()
        with closing(FileStore(place)) as store:
            # Now, because opening frees the block of the lock, which has its memory.
            disk.use_up()
            yield refused(store.ledgers.append, 1, LOST)
        with closing(FileStore(place)) as store:
            yield entries(store) == []
            disk.give_room()
            store.ledgers.append(1, b"later")
        disk.disk.cut_power()
        disk.disk.power_on()
        with closing(FileStore(place)) as store:
            yield entries(store)


def test_a_file_store_that_is_opened_after_a_failed_sync_invents_nothing_and_loses_nothing():
    assert apart(reopening_a_file_store, False) == [True, True, [b"later"]]


def test_a_file_store_that_trusts_the_cache_shows_what_is_lost_and_loses_what_it_syncs_after_that():
    assert apart(reopening_a_file_store, True) == [True, False, []]
