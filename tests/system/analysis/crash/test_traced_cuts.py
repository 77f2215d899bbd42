"""L6: without root, a power cut takes back what a subject did not sync, by whatever call it was written."""

import ctypes
import json
import mmap
import os
import threading

import pytest

from ackstate.analysis.crash.oracle import Promise
from ackstate.analysis.crash.runs import UNSEEN
from ackstate.analysis.crash.subject import EntryRun, OperationKind, Report
from ackstate.analysis.crash.traced_disk import traced_cuts
from crash import first_runs

SIZE = 1 << 15
NAME = os.fsdecode(b"st\xff\n \xe2\x9c\x93")


class StoresItsState:
    """The whole state as JSON, padded to one size; a subclass chooses the calls that store it."""

    persists_in_background = False
    name = NAME

    def start(self, directory, ledgers):
        self.recover(directory, ledgers)

    def recover(self, directory, ledgers):
        self.directory, self.ledgers = directory, ledgers
        self.unsaved, self.saved = [], []
        path = directory / self.name
        stored = path.read_bytes().strip(b" \0") if path.exists() else b""
        self.runs = [tuple(run) for run in json.loads(stored or b"[]")]
        return self.report()

    def apply(self, operation):
        if operation.kind is OperationKind.PERSIST:
            self.store(json.dumps(sorted(set(self.runs))).encode().ljust(SIZE))
            self.saved, self.unsaved = self.saved + self.unsaved, []
            return
        is_ack = operation.kind is OperationKind.ACK
        self.runs.append((operation.ledger_id, operation.entry_id if is_ack else 0, operation.entry_id + 1))
        if not is_ack:
            self.runs += [(lower, 0, count) for lower, count in self.ledgers.items() if lower < operation.ledger_id]
        self.unsaved.append(operation.number)

    def receipts(self):
        saved, self.saved = self.saved, []
        return saved

    def report(self):
        return Report([EntryRun(*run) for run in self.runs])

    def store(self, content):
        self.replace(self.directory, self.name, lambda file: os.write(file, content))

    def replace(self, directory, name, write, flags=0):
        """Write a new file, sync it, rename it and sync its directory."""
        file = os.open(directory / "new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | flags, 0o600)
        write(file)
        self.sync(file)
        os.close(file)
        self.rename(directory / "new", directory / name)

    def sync(self, file):
        os.fsync(file)

    def rename(self, old, new):
        old.rename(new)
        self.sync_names(new.parent)

    def sync_names(self, directory):
        names = os.open(directory, os.O_RDONLY)
        os.fsync(names)
        os.close(names)


class NeverSyncsItsDirectory(StoresItsState):
    def sync_names(self, directory):
        pass


class NeverSyncsItsFile(StoresItsState):
    def sync(self, file):
        pass


class OpensToSync(NeverSyncsItsFile):
    """O_DSYNC stands for the sync of each write."""

    def store(self, content):
        self.replace(self.directory, self.name, lambda file: os.write(file, content), os.O_DSYNC)


class WritesAround(StoresItsState):
    """Without the cache and from several buffers, each at its place."""

    def store(self, content):
        buffer = mmap.mmap(-1, SIZE)
        buffer.write(content)
        views = [memoryview(buffer)[:4096], memoryview(buffer)[4096:]]
        self.replace(self.directory, self.name, lambda file: os.pwritev(file, views, 0), os.O_DIRECT)


class WritesAroundUnsynced(WritesAround):
    def sync(self, file):
        pass


class CutsAndLinks(StoresItsState):
    """A subdirectory, ftruncate, and a hard link in place of the rename."""

    name = f"sub/{NAME}"

    def recover(self, directory, ledgers):
        (directory / "sub").mkdir(exist_ok=True)
        self.sync_names(directory)
        return super().recover(directory, ledgers)

    def store(self, content):
        def write(file):
            os.ftruncate(file, 3 * SIZE)
            os.pwrite(file, content, 0)
            os.ftruncate(file, SIZE)

        self.replace(self.directory / "sub", NAME, write)

    def rename(self, old, new):
        spare = new.with_name("spare")
        spare.unlink(missing_ok=True)
        os.link(old, spare)
        old.unlink()
        super().rename(spare, new)


class NeverSyncsItsParent(CutsAndLinks):
    def sync_names(self, directory):
        if directory.name == "sub":
            super().sync_names(directory)


class StoresInAnotherThread(StoresItsState):
    def store(self, content):
        thread = threading.Thread(target=super().store, args=(content,))
        thread.start()
        thread.join()


class StoresInAChild(StoresItsState):
    def store(self, content):
        if (child := os.fork()) == 0:
            super().store(content)
            os._exit(0)
        os.waitpid(child, 0)


class MapsItsFile(StoresItsState):
    """Sound, but its stores are no calls."""

    def store(self, content):
        def write(file):
            os.ftruncate(file, SIZE)
            with mmap.mmap(file, SIZE) as mapped:
                mapped.write(content)

        self.replace(self.directory, self.name, write)


class ProtectsItsMap(StoresItsState):
    """Mapped for reading only, and then made writable."""

    def store(self, content):
        def write(file):
            os.ftruncate(file, SIZE)
            libc = ctypes.CDLL(None, use_errno=True)
            libc.mmap.restype = ctypes.c_void_p
            address = libc.mmap(None, ctypes.c_size_t(SIZE), mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(0))
            libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(SIZE), mmap.PROT_READ | mmap.PROT_WRITE)
            ctypes.memmove(address, content, SIZE)
            libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(SIZE))

        self.replace(self.directory, self.name, write)


def outcomes_of(subject, count=6):
    return first_runs(traced_cuts(1, subject=subject, shrink_tries=0), count)


SOUND = [StoresItsState, OpensToSync, WritesAround, CutsAndLinks, StoresInAnotherThread, StoresInAChild]
LOSSES = {
    NeverSyncsItsDirectory: "the disk lost: rename new to ",
    NeverSyncsItsFile: "the disk lost: write bytes 0 to ",
    WritesAroundUnsynced: "the disk lost: write bytes 0 to ",
    NeverSyncsItsParent: "the disk lost: create sub/ (the directory . was not synced",
}


@pytest.mark.parametrize("subject", SOUND)
def test_a_subject_that_syncs_what_it_wrote_and_named_passes(subject):
    (outcome,) = outcomes_of(subject, count=1)
    assert not outcome.broken
    assert not [name for name in outcome.counts if name.startswith(UNSEEN)]
    assert outcome.counts["durable_receipts"] > 0


@pytest.mark.parametrize("subject", LOSSES)
def test_a_missing_sync_is_found_and_the_story_lists_what_the_disk_lost(subject):
    (broken, *_) = outcomes_of(subject)[-1].broken
    assert broken.promise in {Promise.I2, Promise.I5}
    assert any(line.startswith(LOSSES[subject]) for line in broken.story), broken.story


@pytest.mark.parametrize("subject", [MapsItsFile, ProtectsItsMap])
def test_a_file_that_is_written_through_memory_is_named_as_not_seen(subject):
    (outcome,) = outcomes_of(subject, count=1)
    assert [name for name in outcome.counts if name.startswith(f"{UNSEEN}new ")]
