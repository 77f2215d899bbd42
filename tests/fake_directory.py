"""A store directory in memory whose n-th change fails, and a history of small stores."""

import errno
import functools
from contextlib import closing
from math import inf
from pathlib import Path

from ackstate.cursor import FileStore
from ackstate.cursor.store import ABSENT

LOG = "log-0000000000000001"
GOLDEN = Path(__file__).parent / "golden"


class DiedError(Exception):
    """The process that used a directory died at this call."""


class FakeFile:
    def __init__(self, directory, name, content):
        self.directory, self.name, self.content = directory, name, content

    @property
    def size(self):
        return len(self.content)

    def write(self, offset, data):
        def put(part):
            self.content[offset : offset + len(part)] = part

        # Of bytes that are not zeros, which a log is laid out with.
        half = len(data.rstrip(b"\0")) // 2
        self.directory.step("write", self.name, partial=lambda: put(data[:half]))
        put(data)

    def read(self, offset, size):
        return bytes(self.content[offset : offset + size])

    def truncate(self, size):
        self.directory.step("truncate", self.name)
        del self.content[size:]

    def sync(self):
        self.directory.step("sync", self.name)

    def settle(self):
        self.sync()

    def close(self):
        pass


class FakeDirectory:
    """A directory in memory whose n-th change raises `error`; a failing write writes half."""

    def __init__(self, files=None, *, fails_at=None, error=DiedError):
        self.files = {} if files is None else files
        self.fails_at, self.error = fails_at, error
        self.steps = []

    def step(self, kind, name, partial=lambda: None):
        self.steps.append((kind, name))
        if self.fails_at == len(self.steps) - 1:
            partial()
            raise self.error()

    free_size = inf

    def names(self):
        return sorted(self.files)

    def create(self, name):
        self.step("create", name)
        if name in self.files:
            raise FileExistsError(errno.EEXIST, "exists", name)
        self.files[name] = bytearray()
        return FakeFile(self, name, self.files[name])

    def open(self, name):
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        return FakeFile(self, name, self.files[name])

    def rename(self, name, new_name):
        self.step("rename", new_name)
        self.files[new_name] = self.files.pop(name)

    def remove(self, name):
        self.step("remove", name)
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "missing", name)
        del self.files[name]

    def sync(self):
        self.step("sync", "")

    def close(self):
        pass


def full():
    return OSError(errno.ENOSPC, "No space left on device")


def broken():
    return OSError(errno.EIO, "Input/output error")


def opened(files, **faults):
    return FileStore.over(FakeDirectory(files, **faults), compaction_size_min=1_000)


def copied(files, **changed):
    return {name: bytearray(changed.get(name, content)) for name, content in files.items()}


def end_of(log):
    """Where the groups of a log end: the bytes laid out behind are zeros."""
    return len(log.rstrip(b"\0"))


def state_of(store):
    """All that a store holds, as far as its callers can tell."""
    ledgers, metadata = store.ledgers, store.metadata
    held = {
        ledger_id: ledgers.read(ledger_id, 0, ledgers.last(ledger_id) + 1)
        for owner in ledgers.owners()
        for ledger_id in ledgers.owned_by(owner)
    }
    return held, {name: metadata.get(f"/{name}") for name in metadata.children("/")}


def state_in(files):
    with closing(opened(files)) as store:
        return state_of(store)


CALLS = [
    lambda store: store.ledgers.create("billing"),
    lambda store: store.ledgers.append(1, b"first entry"),
    lambda store: store.metadata.put("/ä", b"value", expected_version=ABSENT),
    lambda store: store.ledgers.append_all([(1, b""), (1, bytes(1_300)), (1, b"after the zeros")]),
    lambda store: store.ledgers.create("shipping"),
    lambda store: store.ledgers.delete(2),
    lambda store: store.metadata.delete("/ä", expected_version=0),
    lambda store: store.ledgers.fence(1),
    lambda store: store.ledgers.create("billing"),
    lambda store: store.ledgers.append_all([(3, bytes(range(1, 256))), (3, bytes(600))]),
]


@functools.cache
def history_of_calls():
    """The files and their bytes after each of the calls: the first after none."""
    directory = FakeDirectory()
    with closing(FileStore.over(directory, identity=b"of calls")) as store:
        kept = [(copied(directory.files), state_of(store))]
        for call in CALLS:
            call(store)
            kept.append((copied(directory.files), state_of(store)))
    return kept
