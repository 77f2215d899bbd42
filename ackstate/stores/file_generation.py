"""Finds the log among the files of a store's directory, creates new logs, and removes leftovers.

``log-<n>``: generation n of the log; the highest generation is the current one.
``log-<n>.new``: a log that is being written. It is synced before its rename, so a log is either complete or absent.
``MADE``: the directory has had a log. Without a log, it is a store that lost its log, not a new store. It contains the
identity of the store, as does every group of the log, so that the log of another store is not accepted.

After a failed sync, the kernel may return bytes that are not on the disk, and a later successful sync proves nothing
about them. So the log is settled before it is read (`StoreFile.settle`). A name needs no such care: ext4 allows no
change once its journal could not be written.
"""

from __future__ import annotations

import re
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, final

import google_crc32c

from ackstate.cursor.store import StoreError
from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores.file_log import (
    BASE,
    BASE_END,
    HEADER,
    VERSION,
    DiscardedTail,
    LogOffset,
    LogReader,
    encode_group,
)
from ackstate.stores.file_records import (
    APPEND_SIZE,
    Index,
    begin_record,
    create_record,
    entry_records,
    fence_record,
    put_record,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.errors import AckStateError
    from ackstate.stores.file_records import IndexedLedger
    from ackstate.stores.store_directory import StoreDirectory, StoreFile

MADE = "MADE"
"""The name of the mark: a store was created here."""
_DATABASE = "ackstate.sqlite3"
_NEW = ".new"
_LOG = re.compile(r"log-([0-9]{16})", re.ASCII)
_OURS = re.compile(rf"({_LOG.pattern}|{MADE})(\.new)?", re.ASCII)
_MARK = struct.Struct("<4sIQI")  # magic, version, identity, the checksum of these three
_MARK_MAGIC = b"ACKM"
_BLOCK_SIZE = 1 << 20  # The approximate size of the groups in which a copy of the state is written.
_GAP = 1 << 12  # Entries with at most this many bytes between them are read together.


@final
class Generation:
    """A log that is in use.

    Attributes:
        number: 1, 2, 3, ...
        file: The log, open.
        index: The state that its records produce.
        place: The place of its next group.
        end: The end of its groups; the file holds only synced zeros beyond it.
    """

    def __init__(self, number: int, file: StoreFile, index: Index, place: LogOffset, end: int) -> None:
        self.number = number
        self.file = file
        self.index = index
        self.place = place
        self.end = end


class Opened(NamedTuple):
    """The log of a directory after opening.

    Attributes:
        generation: The log, all of it on the disk.
        discarded: The torn end that was cut off.
    """

    generation: Generation
    discarded: DiscardedTail | None


def log_name(number: int) -> str:
    """Return the name of a generation of the log."""
    return f"log-{number:016d}"


def holds_store(names: Sequence[str]) -> bool:
    """Return whether a directory with these names holds a store, or the remains of one."""
    # A store in SQLite also has a mark of that name.
    return (MADE in names and _DATABASE not in names) or any(map(_LOG.fullmatch, names))


def is_read_by_opening(name: str) -> bool:
    """Return whether opening reads the file of that name. Opening removes our other files."""
    return name == MADE or _LOG.fullmatch(name) is not None


def check_names(names: Sequence[str], *, directory: object) -> None:
    """Raise `StoreError` if a directory holds foreign files and no store."""
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign and not holds_store(names):
        raise StoreError(f"{directory} is not an ackstate store: it holds {foreign[0]} and no log")


def open_generation(directory: StoreDirectory, draw_identity: Callable[[], int]) -> Opened:
    """Read the log of a directory, or create the first one. The returned log survives a power cut.

    Args:
        directory: The directory of the log.
        draw_identity: Returns the identity of a new store.

    Raises:
        StoreError: The directory holds foreign files.
        CorruptStateError: The log is damaged or missing.
        UnsupportedVersionError: A newer release wrote it.
        OSError: See `StoreDirectory`.
    """
    names = directory.names()
    identity = None
    if MADE in names:
        identity = _read_mark(directory)
    else:
        check_names(names, directory=directory)
    # The names are sorted and have the same length: the highest generation is the last.
    logs = [name for name in names if _LOG.fullmatch(name)]
    if logs:
        opened = _load(directory, int(logs[-1][4:]), identity)
    elif MADE in names:
        raise CorruptStateError(
            f"{directory}", offset=0, expected="the log of a store that was made here", found="none"
        )
    else:
        _remove(directory, names)
        opened = Opened(write_generation(directory, 1, LogOffset(draw_identity(), 0, 0)), None)
    try:
        if MADE not in names:
            _make_mark(directory, opened.generation.place.identity)
        kept = {log_name(opened.generation.number), MADE}
        _remove(directory, [name for name in names if name not in kept and _OURS.fullmatch(name)])
    except BaseException:
        opened.generation.file.close()
        raise
    return opened


class NotCopiedError(OSError):
    """A new log could not be written, for lack of room or another reason; the old log is unaffected."""


def write_generation(directory: StoreDirectory, number: int, source: Generation | LogOffset) -> Generation:
    """Write a log that begins with the state of another, or with nothing, and make it the current one.

    Args:
        directory: The directory of the log.
        number: The generation of the new log.
        source: The log whose state it copies, or the place of the first group if there is no such log.

    Raises:
        CorruptStateError: An entry is damaged; the new log is not the current one.
        NotCopiedError: The new log is not the current one, and was removed if possible.
        OSError: Either log may be the current one.
    """
    name = log_name(number)
    file, copy = _write_copy(directory, number, source)
    try:
        directory.rename(f"{name}{_NEW}", name)
        directory.sync()
    except BaseException:
        file.close()
        raise
    return Generation(number, file, copy.index, copy.place, copy.end)


def _write_copy(directory: StoreDirectory, number: int, source: Generation | LogOffset) -> tuple[StoreFile, _Copy]:
    """Write a log under its temporary name and sync it."""
    new, file = f"{log_name(number)}{_NEW}", None
    before, place = (source, source.place) if isinstance(source, Generation) else (None, source)
    try:
        with suppress(FileNotFoundError):
            directory.remove(new)
        file = directory.create(new)
        copy = _Copy(number, file, place)
        copy.write_state(before, f"{directory}/{log_name(number - 1)}")
        file.sync()
    except BaseException as error:
        if file is not None:
            file.close()
        if not isinstance(error, OSError):
            raise
        with suppress(OSError):
            directory.remove(new)
        raise NotCopiedError(*error.args) from error
    return file, copy


def read_entries(file: StoreFile, ledger: IndexedLedger, first: int, end: int, *, name: str) -> list[bytes]:
    """Return the entries from `first` (included) to `end` (excluded) of a ledger that has them.

    Raises:
        CorruptStateError: An entry is damaged.
        OSError: The entries cannot be read.
    """
    found: list[bytes] = []
    while first < end:
        run_end = _run_end(ledger, first, end)
        begin = ledger.offsets[first]
        data = file.read(begin, ledger.offsets[run_end - 1] + ledger.sizes[run_end - 1] - begin)
        columns = (ledger.offsets[first:run_end], ledger.sizes[first:run_end], ledger.checksums[first:run_end])
        for number, (offset, size, checksum) in enumerate(zip(*columns, strict=True), first):
            entry = data[offset - begin : offset - begin + size]
            if google_crc32c.value(entry) != checksum or len(entry) != size:
                raise CorruptStateError(name, offset=offset, expected=f"entry {number} as written", found="other bytes")
            found.append(entry)
        first = run_end
    return found


def _run_end(ledger: IndexedLedger, first: int, end: int) -> int:
    """Return the end of the entries from `first` on that are close enough together for a single read."""
    span = ledger.offsets[end - 1] + ledger.sizes[end - 1] - ledger.offsets[first]
    if span < _BLOCK_SIZE and span == sum(ledger.sizes[first:end]) + APPEND_SIZE * (end - first - 1):
        return end  # Nothing lies between them.
    number = first + 1
    previous_end = ledger.offsets[first] + ledger.sizes[first]
    size_max = ledger.offsets[first] + _BLOCK_SIZE
    while number < end and ledger.offsets[number] - previous_end <= _GAP and previous_end < size_max:
        previous_end = ledger.offsets[number] + ledger.sizes[number]
        number += 1
    return number


@final
class _Copy:
    """Writes the state that a log begins with."""

    def __init__(self, number: int, file: StoreFile, place: LogOffset) -> None:
        self._number = number
        self._file = file
        self._parts: list[bytes] = []
        self._size = 0
        self.index = Index()
        self.place = place
        self.end = 0

    def write_state(self, source: Generation | None, name: str) -> None:
        """Write the whole state of another log, whose name is `name`, or an empty state."""
        index = source.index if source else Index()
        self.index.generation = self._number
        self.index.next_ledger_id, self.index.first_version = index.next_ledger_id, index.first_version
        self._add(begin_record(self._number, index.next_ledger_id, index.first_version))
        for path, value in index.values.items():
            self._add(put_record(path, value))
            self.index.set_value(path, value)
        if source:
            for ledger_id, ledger in index.ledgers.items():
                self._ledger(ledger_id, ledger, source.file, name)
        self._write(BASE_END)

    def _write(self, kind: int) -> None:
        """Write the collected records as one group."""
        data, self.place = encode_group(kind, self.place, b"".join(self._parts), offset=self.end)
        self._file.write(self.end, data)
        self.end += len(data)
        self._parts, self._size = [], 0

    def _ledger(self, ledger_id: int, ledger: IndexedLedger, file: StoreFile, name: str) -> None:
        record = create_record(ledger_id, ledger.owner.encode())
        self.index.add_ledger(ledger_id, ledger.owner, len(record))
        self._add(record)
        copied = self.index.ledgers[ledger_id]
        number, count = 0, len(ledger.sizes)
        while number < count:
            run_end = _run_end(ledger, number, count)
            sizes, checksums = ledger.sizes[number:run_end], ledger.checksums[number:run_end]
            entries = read_entries(file, ledger, number, run_end, name=name)
            offset = self._add(*entry_records(ledger_id, entries, checksums))
            self.index.add_entries(copied, offset + APPEND_SIZE, sizes, checksums)
            number = run_end
        if ledger.fenced:
            self._add(fence_record(ledger_id))
            copied.fenced = True

    def _add(self, *parts: bytes) -> int:
        """Add records and return the offset of the first in the log."""
        if self._size >= _BLOCK_SIZE:
            self._write(BASE)
        offset = self.end + HEADER.size + self._size
        self._parts.extend(parts)
        self._size += sum(map(len, parts))
        return offset


def _load(directory: StoreDirectory, number: int, identity: int | None) -> Opened:
    """Settle a log, read it, and cut off a torn tail."""
    name = f"{directory}/{log_name(number)}"
    file = directory.open(log_name(number))
    try:
        # A killed process may have written bytes without syncing them, or its sync may have failed.
        file.settle()
        directory.sync()
        reader, index = LogReader(file, name, identity), Index()
        for groups in reader.groups():
            index.replay(groups, name=name)
        if index.generation != number:
            raise CorruptStateError(name, offset=0, expected=f"generation {number}", found=index.generation)
        if reader.torn is not None:
            file.truncate(reader.end)
            file.sync()
    except BaseException:
        file.close()
        raise
    return Opened(Generation(number, file, index, reader.place, reader.end), reader.torn)


def _read_mark(directory: StoreDirectory) -> int:
    """Return the identity of the store in this directory; refuse a foreign mark."""
    file = directory.open(MADE)
    try:
        found = file.read(0, file.size)
    finally:
        file.close()
    if len(found) == _MARK.size:
        magic, version, identity, checksum = _MARK.unpack(found)
        if magic == _MARK_MAGIC and version == VERSION and checksum == google_crc32c.value(found[:-4]):
            return int(identity)
    raise _foreign_mark(directory, found)


def _foreign_mark(directory: StoreDirectory, found: bytes) -> AckStateError:
    """Return the error for a mark that this version did not write."""
    version = int.from_bytes(found[4:8], "little")
    if len(found) < 12 or google_crc32c.value(found[:-4]) != int.from_bytes(found[-4:], "little"):
        return CorruptStateError(f"{directory}/{MADE}", offset=0, expected="the mark of a store", found=found[:64])
    if found[:4] != _MARK_MAGIC:
        return StoreError(f"{directory} is not an ackstate store of this kind: another kind of store wrote its {MADE}")
    if version > VERSION:
        return UnsupportedVersionError(
            f"{directory} has format version {version}; this release reads up to version {VERSION}"
        )
    return CorruptStateError(f"{directory}/{MADE}", offset=4, expected=f"version {VERSION}", found=found[4:64])


def _make_mark(directory: StoreDirectory, identity: int) -> None:
    """Record that a store was created here. Called once its log has its name."""
    head = _MARK.pack(_MARK_MAGIC, VERSION, identity, 0)[:-4]
    with suppress(FileNotFoundError):
        directory.remove(f"{MADE}{_NEW}")
    file = directory.create(f"{MADE}{_NEW}")
    try:
        file.write(0, head + google_crc32c.value(head).to_bytes(4, "little"))
        file.sync()
    finally:
        file.close()
    directory.rename(f"{MADE}{_NEW}", MADE)
    directory.sync()


def _remove(directory: StoreDirectory, names: Sequence[str]) -> None:
    for name in names:
        with suppress(FileNotFoundError):
            directory.remove(name)
