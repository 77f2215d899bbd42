"""Ownership of a topic's message log: a record in the metadata store names the owner's term and its open ledger.

Opening a log to write raises the term by compare-and-set and fences the ledger that the record names. An owner appends
to no ledger before the record names it, and closes it, by a fence, before the record names the next one. So an earlier
owner can neither append nor begin a ledger, at any step, and an open fences one ledger however many the log has.

A trim names the first ledger that stays in the record, and deletes the ledgers below it after that. So an earlier
owner cannot trim either, ledgers that a crash leaves over are no longer part of the log, and it does not matter when
they are deleted. The record also has the sizes of closed ledgers, so that no open needs to read them, and the times of
the last publish to each, which no message has: its own time is the producer's.

An owner that finds out that it is none any more deletes nothing, not even a ledger that it has just created: the next
owner has it in its log, as an empty one, or will. Its trims delete it.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, final
from urllib.parse import quote

import google_crc32c

from ackstate.errors import AckStateError, CorruptStateError, LogFencedError, UnsupportedVersionError
from ackstate.stores.base import ABSENT, DamagedValueError, LedgerNotFoundError, StoreError, VersionMismatchError
from ackstate.wire.native import CHECKSUM, check_version, corrupt

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.stores.base import MetadataStore, Store

ROOT = "/message-logs"
MAGIC = b"ACKL"
VERSION = 2
LEDGER_SIZES_MAX = 4_096
"""The most ledgers whose sizes and times a record has, 128 KiB: it is written whenever a ledger begins."""

_RECORD = struct.Struct("<4sB3xQQ")  # magic, version, reserved, term, open ledger
_TRIMMED = struct.Struct("<QI")  # first ledger, number of sizes
_OF_LEDGER = struct.Struct("<QQ")  # ledger, and its bytes or its time
_SIZE_MIN = _RECORD.size + CHECKSUM.size
_NO_LEDGER = 2**64 - 1
_WHAT = "message log record"
_TAKEOVER_ATTEMPTS = 10


class LogRecord(NamedTuple):
    """The record of a message log in the metadata store.

    Attributes:
        term: Rises whenever the log is opened to write: a record of another term is another owner's.
        open_ledger_id: The only ledger that may be appended to; None if all are closed.
        first_ledger_id: Ledgers below it were trimmed; those that are left of them are to be deleted.
        ledger_sizes: Bytes of the entries of closed ledgers, by ledger id, rising. Any may be missing.
        published_ms: The owner's time at the last publish to a closed ledger, likewise.
    """

    term: int
    open_ledger_id: int | None
    first_ledger_id: int = 0
    ledger_sizes: tuple[tuple[int, int], ...] = ()
    published_ms: tuple[tuple[int, int], ...] = ()


def encode_log_record(record: LogRecord) -> bytes:
    """Return the bytes of a record."""
    ledger_id = _NO_LEDGER if record.open_ledger_id is None else record.open_ledger_id
    covered = _RECORD.pack(MAGIC, VERSION, record.term, ledger_id)
    covered += _TRIMMED.pack(record.first_ledger_id, len(record.ledger_sizes))
    covered += b"".join(_OF_LEDGER.pack(*each) for each in (*record.ledger_sizes, *record.published_ms))
    return covered + CHECKSUM.pack(google_crc32c.value(covered))


def decode_log_record(data: bytes) -> LogRecord:
    """Read back what `encode_log_record` wrote.

    Raises:
        UnsupportedVersionError: The record has another version.
        CorruptStateError: Anything else is wrong. No other exception can escape.
    """
    if len(data) < _SIZE_MIN:
        corrupt(len(data), f"at least {_SIZE_MIN} bytes", f"{len(data)} bytes", what=_WHAT)
    magic, version, term, ledger_id = _RECORD.unpack_from(data)
    if magic != MAGIC:
        corrupt(0, MAGIC, magic, what=_WHAT)
    check_version(version, VERSION, what=_WHAT)
    end = len(data) - CHECKSUM.size
    computed, (stored,) = google_crc32c.value(data[:end]), CHECKSUM.unpack_from(data, end)
    if stored != computed:
        corrupt(end, f"checksum {computed:#010x}", f"{stored:#010x}", what=_WHAT)
    if not version or any(data[5:8]):
        corrupt(4, f"version {VERSION}, then three zero bytes", data[4:8].hex(), what=_WHAT)
    return LogRecord(term, None if ledger_id == _NO_LEDGER else ledger_id, *_decode_trimmed(data[:end]))


def _decode_trimmed(covered: bytes) -> tuple[int, tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Return the first ledger, the sizes and the times of a record."""
    at = _RECORD.size + _TRIMMED.size
    if len(covered) < at:
        corrupt(len(covered), f"at least {at} bytes", f"{len(covered)} bytes", what=_WHAT)
    first_ledger_id, count = _TRIMMED.unpack_from(covered, _RECORD.size)
    times_at = at + count * _OF_LEDGER.size
    if len(covered) < times_at or (len(covered) - times_at) % _OF_LEDGER.size:
        corrupt(at, f"the sizes of {count} ledgers, then times", f"{len(covered) - at} bytes", what=_WHAT)
    return first_ledger_id, _decode_ledgers(covered, at, times_at), _decode_ledgers(covered, times_at, len(covered))


def _decode_ledgers(covered: bytes, at: int, end: int) -> tuple[tuple[int, int], ...]:
    found = tuple(_OF_LEDGER.iter_unpack(covered[at:end]))
    if any(one[0] >= other[0] for one, other in pairwise(found)):
        corrupt(at, "ledger ids that rise", f"{[ledger_id for ledger_id, _ in found][:8]}", what=_WHAT)
    return found


@final
class LogOwnership:
    """The right to write one topic's message log, until another owner takes it over. Created by `take_over`.

    Not safe for concurrent use.
    """

    def __init__(self, store: Store, topic: str, *, record: LogRecord, version: int) -> None:
        self._store = store
        self._topic = topic
        self._record = record  # the last that was written
        self._version = version  # of the record, as far as this owner has seen
        self._in_doubt: list[bytes] = []  # records that may have been written since
        self._open_ledger_id: int | None = None  # none before `begin_ledger`: all that the log has are closed
        self._created: int | None = None  # a ledger that the record does not name yet, or whose naming is unknown
        self._is_fenced = False

    @classmethod
    def take_over(cls, store: Store, topic: str) -> LogOwnership:
        """Become the owner of a log and stop every earlier owner. The log need not exist.

        A record that cannot be read is replaced: it holds nothing that the ledgers lack, and all of them are fenced.

        Raises:
            UnsupportedVersionError: The record has another version; nothing was changed.
            CorruptStateError: A ledger cannot be read.
            StoreError: The storage failed.
        """
        path = log_path(topic)
        for _ in range(_TAKEOVER_ATTEMPTS):
            record, version = _find(store.metadata, path)
            if record is None:
                # Before the record is replaced: the owner after this one has no reason to fence them.
                for ledger_id in store.ledgers.owned_by(log_owner(topic)):
                    _fence(store, ledger_id)
                record = LogRecord(0, None)
            record = record._replace(term=record.term + 1)
            with suppress(VersionMismatchError):
                version = store.metadata.put(path, encode_log_record(record), expected_version=version)
                if record.open_ledger_id is not None:
                    _fence(store, record.open_ledger_id)
                return cls(store, topic, record=record, version=version)
        raise StoreError(f"{path}: the record kept changing while the message log was opened")

    @property
    def record(self) -> LogRecord:
        """The record as this owner wrote it last."""
        return self._record

    def begin_ledger(
        self, ledger_sizes: Mapping[int, int], published_ms: Mapping[int, int], *, first_ledger_id: int
    ) -> int:
        """Create a ledger that this owner may append to until it is closed, and return its id.

        Args:
            ledger_sizes: The known sizes of ledgers, in bytes, by ledger id.
            published_ms: The known times of the last publishes to them.
            first_ledger_id: The first ledger that was not trimmed.

        Raises:
            LogFencedError: Another owner has opened the log.
            StoreError: The storage failed; the next call tries again with the same ledger.
        """
        assert self._open_ledger_id is None
        if self._is_fenced:
            raise self.fenced()
        if self._created is None:
            self._created = self._store.ledgers.create(log_owner(self._topic))
        self._write(self._created, ledger_sizes, published_ms, first_ledger_id)
        self._open_ledger_id, self._created = self._created, None
        return self._open_ledger_id

    def trim(self, ledger_sizes: Mapping[int, int], published_ms: Mapping[int, int], *, first_ledger_id: int) -> None:
        """Note that the ledgers below one are no longer part of the log: from then on they may be deleted.

        It is written even if the record names that ledger already: so the log is still this owner's.

        Args:
            ledger_sizes: As for `begin_ledger`.
            published_ms: Likewise.
            first_ledger_id: The first ledger that stays.

        Raises:
            LogFencedError: Another owner has opened the log.
            StoreError: The storage failed; whether the record was written is unknown.
        """
        if self._is_fenced:
            raise self.fenced()
        self._write(self._open_ledger_id, ledger_sizes, published_ms, first_ledger_id)

    def close_ledger(self) -> int | None:
        """Refuse every later append to the open ledger, and return the id of its last entry; None if none is open.

        Raises:
            LogFencedError: Another owner has opened the log, and deleted the ledger.
            StoreError: The storage failed; whether the ledger is closed is unknown.
        """
        if self._open_ledger_id is None:
            return None
        try:
            last = self._store.ledgers.fence(self._open_ledger_id)
        except LedgerNotFoundError as error:
            raise self.fenced() from error
        self._open_ledger_id = None
        return last

    def check(self) -> None:
        """Raise `LogFencedError` if another owner has opened the log, `StoreError` if it cannot be found out."""
        found = self._store.metadata.get(log_path(self._topic))
        if found is None or (found.version != self._version and found.data not in self._in_doubt):
            raise self.fenced()

    def delete(self) -> None:
        """Delete the log: all of it is trimmed, then its ledgers are deleted, the lowest first, and then its record.

        A crash leaves the log as it was, or an empty one, or nothing. An owner that opens the log after the trim has a
        new one.

        Raises:
            LogFencedError: Another owner has opened the log meanwhile; nothing was deleted.
            CorruptStateError, StoreError: The storage failed; a part may be deleted.
        """
        ledgers = self._store.ledgers
        owned = ledgers.owned_by(log_owner(self._topic))
        self.trim({}, {}, first_ledger_id=max((self._record.first_ledger_id, *(each + 1 for each in owned))))
        for ledger_id in owned:
            ledgers.delete(ledger_id)
        with suppress(VersionMismatchError):
            self._store.metadata.delete(log_path(self._topic), expected_version=self._version)
        self._is_fenced = True

    def fenced(self) -> LogFencedError:
        """Give up the log for good, and return the error for its callers."""
        self._is_fenced = True
        if self._created is not None:
            # The record of another owner may name it, or its log may have it.
            self._created = None
            with suppress(AckStateError):
                self._delete_if_deleted()
        return LogFencedError(f"the message log of topic {self._topic!r} has been opened by another owner since")

    def _delete_if_deleted(self) -> None:
        """Delete the empty ledgers of a topic that has been deleted: no one may ever open it again."""
        ledgers = self._store.ledgers
        if self._store.metadata.get(log_path(self._topic)) is None:
            owned = ledgers.owned_by(log_owner(self._topic))
            if owned and all(ledgers.last(ledger_id) < 0 for ledger_id in owned):
                LogOwnership(self._store, self._topic, record=LogRecord(1, None), version=ABSENT).delete()

    def _write(
        self,
        open_ledger_id: int | None,
        ledger_sizes: Mapping[int, int],
        published_ms: Mapping[int, int],
        first_ledger_id: int,
    ) -> None:
        sizes, times = (
            tuple(sorted((ledger_id, number) for ledger_id, number in known.items() if ledger_id != open_ledger_id))
            for known in (ledger_sizes, published_ms)
        )
        record = LogRecord(
            self._record.term, open_ledger_id, first_ledger_id, sizes[-LEDGER_SIZES_MAX:], times[-LEDGER_SIZES_MAX:]
        )
        try:
            self._version = self._put(encode_log_record(record))
        except CorruptStateError as error:
            raise StoreError(f"{log_path(self._topic)}: the record cannot be written: {error}") from error
        self._record = record
        self._in_doubt.clear()

    def _put(self, encoded: bytes) -> int:
        """Replace the record of this owner, and return the new version."""
        path = log_path(self._topic)
        if encoded not in self._in_doubt:
            self._in_doubt.append(encoded)
        try:
            return self._store.metadata.put(path, encoded, expected_version=self._version)
        except VersionMismatchError as error:
            # An earlier attempt may have happened although the store reported a failure. No one else writes these
            # bytes: the term is this owner's, and the ledger, too.
            found = self._store.metadata.get(path)
            if found is None or found.data not in self._in_doubt:
                raise self.fenced() from error
            if found.data == encoded:
                return found.version
        try:
            return self._store.metadata.put(path, encoded, expected_version=found.version)
        except VersionMismatchError as error:
            raise self.fenced() from error


def check_log_record(metadata: MetadataStore, topic: str) -> None:
    """Make sure that the record of a topic's log, if there is one, can be read.

    Raises:
        UnsupportedVersionError: The record has another version; the log cannot be opened to write.
        CorruptStateError: The record is damaged; the next open to write replaces it.
        StoreError: The storage failed.
    """
    found = metadata.get(log_path(topic))
    if found is not None:
        decode_log_record(found.data)


def find_log_record(metadata: MetadataStore, topic: str) -> LogRecord:
    """Return the record of a topic's log; one without contents if there is none, or if it cannot be read.

    Raises:
        StoreError: The storage failed.
    """
    try:
        record, _ = _find(metadata, log_path(topic))
    except UnsupportedVersionError:
        record = None
    return record or LogRecord(0, None)


def log_owner(topic: str) -> str:
    """Return in whose name the ledgers of a topic's log are created."""
    return f"topic {quote(topic, safe='')}"


def log_path(topic: str) -> str:
    """Return the metadata path of the record of a topic's log."""
    return f"{ROOT}/{quote(topic, safe='')}"


def _find(metadata: MetadataStore, path: str) -> tuple[LogRecord | None, int]:
    """Return the record, None if there is none or it cannot be read, and the version that a `put` must expect."""
    try:
        found = metadata.get(path)
    except DamagedValueError as error:
        return None, error.version
    if found is None:
        return None, ABSENT
    try:
        return decode_log_record(found.data), found.version
    except CorruptStateError:
        return None, found.version


def _fence(store: Store, ledger_id: int) -> None:
    # One that was deleted takes no appends either.
    with suppress(LedgerNotFoundError):
        store.ledgers.fence(ledger_id)
