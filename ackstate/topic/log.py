"""The message log of a topic, in ledgers of a store, and who owns it.

A record in the metadata store names the owner's term and its open ledger. Opening a log to write raises the term by
compare-and-set and fences the ledger that the record names. An owner appends to no ledger before the record names it,
and closes it, by a fence, before the record names the next one. So an earlier owner can neither append nor begin a
ledger, at any step, and an open fences one ledger however many the log has.

A trim names the first ledger that stays in the record, and deletes the ledgers below it after that. So an earlier
owner cannot trim either, ledgers that a crash leaves over are no longer part of the log, and it does not matter when
they are deleted. The record also has the sizes of closed ledgers, so that no open needs to read them, and the times of
the last publish to each, which no message has: its own time is the producer's.

An owner that finds out that it is none any more deletes nothing, not even a ledger that it has just created: the next
owner has it in its log, as an empty one, or will. Its trims delete it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from contextlib import suppress
from itertools import pairwise
from operator import index as operator_index
from threading import RLock, get_ident
from typing import TYPE_CHECKING, NamedTuple, final
from urllib.parse import quote
from weakref import WeakSet

from ackstate.checks import LONG_MAX, check_count, check_within, integer
from ackstate.errors import AckStateError, CorruptStateError, LogFencedError, UnsupportedVersionError, corrupt
from ackstate.ledger_map import LedgerMap
from ackstate.message import CheckedMessages, checked_messages, decode_messages, encode_message
from ackstate.position import Position, positions_of
from ackstate.sealed import seal, unseal
from ackstate.stores.base import (
    ABSENT,
    DamagedValueError,
    LedgerFencedError,
    LedgerNotFoundError,
    StoreError,
    VersionMismatchError,
    outcome_of,
)
from ackstate.topic_name import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from ackstate.delay.view import SharedDelayIndex
    from ackstate.dispatch.admission import RoundWaiter
    from ackstate.message import Message
    from ackstate.position_set import PositionSet
    from ackstate.stores.base import MetadataStore, Store

ROOT = "/message-logs"
MAGIC = b"ACKL"
VERSION = 2
LEDGER_SIZES_MAX = 4_096
"""The most ledgers whose sizes and times a record has, 128 KiB: it is written whenever a ledger begins."""

BYTES_PER_LEDGER_MAX = 2_048 << 20
"""The bytes after which a ledger is closed, unless the caller that opens a log sets another limit."""

_RECORD = struct.Struct("<4sB3xQQ")  # magic, version, reserved, term, open ledger
_TRIMMED = struct.Struct("<QI")  # first ledger, number of sizes
_OF_LEDGER = struct.Struct("<QQ")  # ledger, and its bytes or its time
_NO_LEDGER = 2**64 - 1
_WHAT = "message log record"
_TAKEOVER_ATTEMPTS = 10
_ENTRIES_AT_ONCE = 1_000


class LogRecord(NamedTuple):
    """The record of a message log in the metadata store."""

    term: int  # rises whenever the log is opened to write: a record of another term is another owner's
    open_ledger_id: int | None  # the only ledger that may be appended to; None if all are closed
    first_ledger_id: int = 0  # those below it were trimmed; what is left of them is to be deleted
    ledger_sizes: tuple[tuple[int, int], ...] = ()  # bytes of closed ledgers, by ledger id, rising; any may be missing
    published_ms: tuple[tuple[int, int], ...] = ()  # the owner's time at the last publish to each, likewise


def encode_log_record(record: LogRecord) -> bytes:
    """Return the bytes of a record."""
    ledger_id = _NO_LEDGER if record.open_ledger_id is None else record.open_ledger_id
    return seal(
        _RECORD.pack(MAGIC, VERSION, record.term, ledger_id),
        _TRIMMED.pack(record.first_ledger_id, len(record.ledger_sizes)),
        *(_OF_LEDGER.pack(*each) for each in (*record.ledger_sizes, *record.published_ms)),
    )


def decode_log_record(data: bytes) -> LogRecord:
    """Return a record; raises `UnsupportedVersionError`, or `CorruptStateError` if anything else is wrong."""
    (term, ledger_id), reader = unseal(data, _RECORD, MAGIC, VERSION, what=_WHAT)
    first_ledger_id, count = _TRIMMED.unpack(reader.take(_TRIMMED.size, "first ledger and number of sizes"))
    at, end = reader.offset, reader.end
    times_at = at + count * _OF_LEDGER.size
    if end < times_at or (end - times_at) % _OF_LEDGER.size:
        corrupt(_WHAT, at, f"the sizes of {count} ledgers, then times", f"{end - at} bytes")
    open_ledger_id = None if ledger_id == _NO_LEDGER else ledger_id
    sizes, times = _decode_ledgers(data, at, times_at), _decode_ledgers(data, times_at, end)
    return LogRecord(term, open_ledger_id, first_ledger_id, sizes, times)


def _decode_ledgers(data: bytes, at: int, end: int) -> tuple[tuple[int, int], ...]:
    found = tuple(_OF_LEDGER.iter_unpack(data[at:end]))
    if any(one[0] >= other[0] for one, other in pairwise(found)):
        corrupt(_WHAT, at, "ledger ids that rise", f"{[ledger_id for ledger_id, _ in found][:8]}")
    return found


@final
class LogOwnership:
    """The right to write one topic's message log, until another owner takes it over. Created by `take_over`."""

    def __init__(self, store: Store, topic: str, *, record: LogRecord, version: int) -> None:
        self._store = store
        self._topic = topic
        self.record = record  # as this owner wrote it last
        self._version = version  # of the record, as far as this owner has seen
        self._in_doubt: list[bytes] = []  # records that may have been written since
        self._open_ledger_id: int | None = None  # none before `begin_ledger`: all that the log has are closed
        self._created: int | None = None  # a ledger that the record does not name yet, or whose naming is unknown
        self._is_fenced = False

    @classmethod
    def take_over(cls, store: Store, topic: str) -> LogOwnership:
        """Become the owner of a log, which need not exist, and stop every earlier one; errors as `MessageLog.open`."""
        # A record that cannot be read is replaced: it holds nothing that the ledgers lack, and all of them are fenced.
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

    def begin_ledger(
        self, ledger_sizes: Mapping[int, int], published_ms: Mapping[int, int], *, first_ledger_id: int
    ) -> int:
        """Create a ledger that this owner may append to until it is closed, and return its id."""
        # After a `StoreError`, the next call tries again with the same ledger.
        assert self._open_ledger_id is None
        if self._is_fenced:
            raise self.fenced()
        if self._created is None:
            self._created = self._store.ledgers.create(log_owner(self._topic))
        self._write(self._created, ledger_sizes, published_ms, first_ledger_id)
        self._open_ledger_id, self._created = self._created, None
        return self._open_ledger_id

    def trim(self, ledger_sizes: Mapping[int, int], published_ms: Mapping[int, int], *, first_ledger_id: int) -> None:
        """Note that the ledgers below one are no longer part of the log: from then on they may be deleted."""
        # It is written even if the record names that ledger already: so the log is still this owner's.
        if self._is_fenced:
            raise self.fenced()
        self._write(self._open_ledger_id, ledger_sizes, published_ms, first_ledger_id)

    def close_ledger(self) -> int | None:
        """Refuse every later append to the open ledger, and return the id of its last entry; None if none is open."""
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
        """Delete the log: all of it is trimmed, then its ledgers are deleted, the lowest first, and then its record."""
        # A crash leaves the log as it was, or an empty one, or nothing. An owner that opens it after the trim has a new
        # one.
        ledgers = self._store.ledgers
        owned = ledgers.owned_by(log_owner(self._topic))
        self.trim({}, {}, first_ledger_id=max((self.record.first_ledger_id, *(each + 1 for each in owned))))
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
            self.record.term, open_ledger_id, first_ledger_id, sizes[-LEDGER_SIZES_MAX:], times[-LEDGER_SIZES_MAX:]
        )
        try:
            self._version = self._put(encode_log_record(record))
        except CorruptStateError as error:
            raise StoreError(f"{log_path(self._topic)}: the record cannot be written: {error}") from error
        self.record = record
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
    """Read the record of a topic's log, if there is one, for the errors of `decode_log_record`."""
    # With another version the log cannot be opened to write; a damaged one is replaced by the next open.
    found = metadata.get(log_path(topic))
    if found is not None:
        decode_log_record(found.data)


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


@final
class LedgerSizes:
    """Bytes of the entries of each ledger of one log."""

    # They are counted as they are appended, and the log's record has those of ledgers that were closed. A ledger whose
    # owner crashed has no size there: it is read, once.

    def __init__(self, store: Store, ledgers: LedgerMap, known: Iterable[tuple[int, int]]) -> None:
        self._store = store
        self._ledgers = ledgers
        # The sizes that are known, by ledger id, rising: to be read, not changed.
        self.known = {each: size for each, size in known if ledgers.has_ledger(each)}
        self._whole: int | None = None  # bytes of the log; None while the size of a ledger may be unknown
        self._below = (-1, 0)  # a ledger, and the bytes of those before it

    def appended(self, ledger_id: int, byte_count: int) -> None:
        """Count entries that were appended to a ledger."""
        if ledger_id in self.known:
            self.known[ledger_id] += byte_count
            if self._whole is not None:
                self._whole += byte_count

    def forget(self, ledger_id: int) -> None:
        """Note that a ledger has entries that were not counted."""
        self.known.pop(ledger_id, None)
        self._whole = None

    def trim(self) -> None:
        """Forget ledgers that the log no longer has."""
        self.known = {each: size for each, size in self.known.items() if self._ledgers.has_ledger(each)}
        self._whole, self._below = None, (-1, 0)

    def of(self, ledger_id: int) -> int:
        """Return the bytes of a ledger; O(1), but the first time O(entries) of one whose size is not known."""
        if ledger_id not in self.known:
            self.known[ledger_id] = self._read(ledger_id)
            self.known = dict(sorted(self.known.items()))
        return self.known[ledger_id]

    @property
    def whole(self) -> int:
        """The bytes of the log. O(1), but the first time after a trim."""
        if self._whole is None:
            self._whole = sum(map(self.of, self._ledgers))
        return self._whole

    def from_ledger(self, ledger_id: int) -> int:
        """Return the bytes of a ledger of the log and of all later ones; O(ledgers since that of the last call)."""
        known_id, size = self._below
        if ledger_id != known_id:
            known_id, size = (known_id, size) if ledger_id > known_id else (-1, 0)
            size += sum(map(self.of, self._ledgers.ledgers_between(known_id - 1, ledger_id)))
            self._below = ledger_id, size
        return self.whole - size

    def _read(self, ledger_id: int) -> int:
        read, count = self._store.ledgers.read, self._ledgers.entry_count(ledger_id)
        try:
            return sum(
                len(entry)
                for first in range(0, count, _ENTRIES_AT_ONCE)
                for entry in read(ledger_id, first, min(first + _ENTRIES_AT_ONCE, count))
            )
        except CorruptStateError:
            return 0  # so that it does not count as space that is used


@final
class SoleUse:
    """A context for one thread at a time; another is refused, not held up. It finds most mistakes, not all."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = RLock()
        self._depth = 0
        self._user: int | None = None  # the thread in the context

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise self._overlap()
        self._depth += 1
        self._user = get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._depth -= 1
        if not self._depth:
            self._user = None
        self._lock.release()

    def check(self) -> None:
        """Raise `RuntimeError` if another thread is in the context. Any number of threads may check at once."""
        user = self._user
        if user is not None and user != get_ident():
            raise self._overlap()

    def _overlap(self) -> RuntimeError:
        return RuntimeError(f"{self._name} is used by two threads at once; see the threading rules")


class Publication(NamedTuple):
    """Messages that are about to be appended to a log; made by `MessageLog.prepare`."""

    log: MessageLog
    messages: Sequence[Message]
    ledger_id: int
    entries: list[bytes]
    on_stored: Callable[[], object] | None = None

    def append(self) -> list[Position]:
        """Append them with a sync of their own, and return their positions; errors as `MessageLog.publish`."""
        if not self.entries:
            return []
        with self.log._publishing:
            outcome = self.finish(outcome_of(self.log.store.ledgers.append, self.ledger_id, self.entries))
        if isinstance(outcome, AckStateError):
            raise outcome
        return outcome

    def finish(self, appended: int | AckStateError) -> list[Position] | AckStateError:
        """Note the last entry or the error of the append; return the positions or the error for the publisher."""
        # This is a part of publishing: no call of a subscription may overlap with it.
        with self.log.sole_use:
            if isinstance(appended, AckStateError):
                return self.log._append_failed(appended)
            positions = self.log._published(self, appended) if self.entries else []
        if self.on_stored is not None:
            self.on_stored()
        return positions


@final
class MessageLog:
    """The messages of one topic, appended in batches with one sync each, in ledgers of a bounded number of entries.

    Created by `open`. After an open the first batch begins a new ledger, as in Pulsar.

    `read`, `feed` and the attributes may be used by any thread while nothing is published or trimmed. A publish or a
    trim overlaps with no other call, nor with one of a cursor or subscription of the topic but a persist; a trim not
    even with that. Overlaps that are noticed raise `RuntimeError`.

    Attributes:
        topic: The name of the topic.
        ledgers: How many entries each ledger holds; the topic's cursors are opened with it.
        sizes: How many bytes each ledger holds.
        published_ms: The latest time at which a publish to a ledger was begun, by the clock of the log's owner; without
            the ledgers whose time is not known.
        cancelled: Messages that no subscription receives, None before the first change; see `ackstate.topic.schedule`.
        rescheduled: When others are due instead of at their own time; `read` returns them with it.
        store: Where the ledgers live.
        sole_use: Held while `ledgers` is changed.
    """

    def __init__(
        self, store: Store, topic: str, counts: dict[int, int], record: LogRecord, ownership: LogOwnership | None
    ) -> None:
        self.topic = topic
        self.ledgers = LedgerMap.from_counts(counts)
        self.sizes = LedgerSizes(store, self.ledgers, record.ledger_sizes)
        self.published_ms = {each: time_ms for each, time_ms in record.published_ms if self.ledgers.has_ledger(each)}
        self.cancelled: PositionSet | None = None
        self.rescheduled: dict[Position, int] = {}
        self.store = store
        self.sole_use = SoleUse(f"the message log of topic {topic!r}")
        self._publishing = SoleUse(f"publish of topic {topic!r}")
        self._ownership = ownership  # None for a log that is only read
        self._trimmed: list[int] = []  # ledgers that are to be deleted once the record names a later one, lowest first
        self._entries_per_ledger_max = 0
        self._bytes_per_ledger_max = 0
        self._room = 0  # how many entries the open ledger may still take; 0 after a recovery
        # Weak, since an index lives as long as its views, and a listener as long as its subscription.
        self._fed: WeakSet[SharedDelayIndex] = WeakSet()
        self._listeners: WeakSet[RoundWaiter] = WeakSet()

    @classmethod
    def open(
        cls,
        store: Store,
        *,
        topic: str,
        entries_per_ledger_max: int = 50_000,
        bytes_per_ledger_max: int = BYTES_PER_LEDGER_MAX,
        now_ms: int | None = None,
    ) -> MessageLog:
        """Open a topic's log and take it over from its owner, or create it if the store has none.

        From then on no earlier owner can append, and all messages that any of them has published are in this log.

        Args:
            store: Where the ledgers live; stays open.
            topic: Any text but an empty one.
            entries_per_ledger_max: A ledger that has this many is closed and a new one begun; Pulsar's
                ``managedLedgerMaxEntriesPerLedger``.
            bytes_per_ledger_max: Likewise for a ledger whose entries have this many bytes; Pulsar's
                ``managedLedgerMaxSizePerLedgerMbytes``, whose default is 2,048 MiB.
            now_ms: The present. A ledger of which it is not known when the last publish was, as the owner before
                crashed, counts as published to until now, or until the next one of which it is known.

        Raises:
            TypeError: The topic is no text, or a number no integer.
            ValueError: The topic is empty, or a limit below 1, or that on entries above 2**32, or the time negative.
            UnsupportedVersionError: Its record has another version; nothing was changed.
            CorruptStateError: The length of a ledger cannot be read.
            StoreError: The storage failed.
        """
        check_name("topic", topic)
        check_within("entries_per_ledger_max", entries_per_ledger_max, least=1, most=2**32)
        check_count("bytes_per_ledger_max", bytes_per_ledger_max, least=1)
        now_ms = checked_time(now_ms)
        ownership = LogOwnership.take_over(store, topic)
        record = ownership.record
        trimmed, ledger_ids = _split(store.ledgers.owned_by(log_owner(topic)), record.first_ledger_id)
        counts = {ledger_id: store.ledgers.last(ledger_id) + 1 for ledger_id in ledger_ids}
        room = 0
        if not counts:
            first = ownership.begin_ledger({}, {}, first_ledger_id=record.first_ledger_id)
            counts, room, record = {first: 0}, entries_per_ledger_max, record._replace(ledger_sizes=((first, 0),))
        log = cls(store, topic, counts, record, ownership)
        log._entries_per_ledger_max, log._room, log._trimmed = entries_per_ledger_max, room, trimmed
        log._bytes_per_ledger_max = bytes_per_ledger_max
        if now_ms is not None:
            log.date_ledgers(now_ms=now_ms)
        with suppress(StoreError, CorruptStateError):  # Garbage, which the next trim deletes.
            log._delete_trimmed()
        return log

    @classmethod
    def find(cls, store: Store, *, topic: str) -> MessageLog | None:
        """Return a topic's log to be read only, None if the store has none. Its owner keeps it; nothing is written.

        Raises:
            TypeError, ValueError: The topic is no text, or is empty.
            CorruptStateError: The length of a ledger cannot be read.
            StoreError: The storage failed.
        """
        check_name("topic", topic)
        record = None
        with suppress(UnsupportedVersionError):
            record, _ = _find(store.metadata, log_path(topic))
        record = record or LogRecord(0, None)
        _, ledger_ids = _split(store.ledgers.owned_by(log_owner(topic)), record.first_ledger_id)
        counts = {}
        for ledger_id in ledger_ids:
            with suppress(LedgerNotFoundError):  # Its owner may trim the log meanwhile.
                counts[ledger_id] = store.ledgers.last(ledger_id) + 1
        return cls(store, topic, counts, record, None) if counts else None

    def feed(self, index: SharedDelayIndex) -> None:
        """Report to a delay index, from now on, when each delayed message is due, as soon as it is published.

        A subscription with a view of the index calls this when it is created. Messages that were published before are
        offered to the index by the first reader that comes to them. The log holds no reference to the index.
        """
        if index not in self._fed:
            self._fed.add(index)
            last = self.ledgers.last_confirmed
            index.complete_from = Position(last.ledger_id, last.entry_id + 1)

    def add_listener(self, listener: RoundWaiter) -> None:
        """Report each later publish to a listener; no-op if it is registered. The log holds no reference to it."""
        self._listeners.add(listener)

    def publish(self, messages: Sequence[Message], *, now_ms: int | None = None) -> list[Position]:
        """Append messages with one sync, all or nothing, and return their positions in order.

        A batch that does not fit into the open ledger begins a new one, and may itself be larger than a ledger's limit.

        Args:
            messages: They are stored as they are.
            now_ms: The present, from which a `Retention` counts the age of the ledger. Without it, the age counts from
                the next trim.

        Raises:
            TypeError: `messages` is no sequence of `Message`, or a field of a message or the time is of another type.
            ValueError: A number is out of range, or the log was opened by `find`.
            LogFencedError: Another owner has opened the log; nothing was appended, and nothing ever will be.
            StoreError: The append failed, or its outcome is unknown. The log's ledgers are as before; messages that
                were stored nevertheless are in the log from the next append, or the next open, on.
        """
        with self._publishing:
            return self.prepare(messages, now_ms=now_ms).append()

    def prepare(self, messages: Sequence[Message], *, now_ms: int | None = None) -> Publication:
        """Return the next messages, encoded for the open ledger; one with too little room for them is closed.

        Raises: As `publish`; nothing is stored.
        """
        return self.prepare_checked(checked_messages(messages), checked_time(now_ms))

    def prepare_checked(self, messages: CheckedMessages, now_ms: int | None) -> Publication:
        """As `prepare`, without its checks."""
        contents = [encode_message(message) for message in messages]
        ownership = self._owned("publish")
        with self.sole_use:
            if contents and self._room < len(contents):
                self._begin_ledger(ownership)
        ledger_id = self.ledgers.current_ledger_id
        if contents and now_ms is None:
            self.published_ms.pop(ledger_id, None)
        elif contents and now_ms is not None:
            # Now, since an append whose outcome is unknown may have happened.
            self.published_ms[ledger_id] = max(now_ms, self.published_ms.get(ledger_id, now_ms))
        return Publication(self, messages, ledger_id, contents)

    def check_owned(self) -> None:
        """Raise `LogFencedError` if another owner has opened the log, `StoreError` if it cannot be found out.

        A log that was opened by `find` has no owner: `ValueError`.
        """
        self._owned("write").check()

    def has_room_for(self, count: int) -> bool:
        """Return whether a number of entries fits into the open ledger; else publishing them begins another."""
        return self._room >= count

    def date_ledgers(self, *, now_ms: int) -> None:
        """Note that all publishes so far were before a time.

        From then on a ledger of unknown time counts as published to until now, or until the next one of known time. So
        does one of a later time, as the clock went back: else it would be kept for as long as the clock was wrong.
        """
        latest_ms = now_ms
        for ledger_id in reversed(list(self.ledgers)):
            latest_ms = self.published_ms[ledger_id] = min(now_ms, self.published_ms.get(ledger_id, latest_ms))

    def end_ledger(self) -> None:
        """Make the next batch begin a new ledger, unless the open one is empty. It costs nothing until then."""
        if self.ledgers.entry_count(self.ledgers.current_ledger_id):
            self._room = 0

    def trim(self, before_ledger_id: int) -> int:
        """Delete the closed ledgers below a ledger, acked or not, and return how many ledgers left the log.

        `ackstate.topic.retention.trim_log` decides which ledgers may go. A cursor whose mark-delete position is
        in such a ledger continues at the first entry that is left. No call of a subscription or cursor of the topic may
        run meanwhile.

        Once this returns, the log has none of them after any crash. If it raises, they are no longer in `ledgers`, and
        the next trim or open deletes those that are left; or the next open finds all of them again.

        Args:
            before_ledger_id: Any ledger id; the last ledger of the log stays in any case.

        Raises:
            TypeError: The id is not an integer.
            ValueError: The log was opened by `find`.
            LogFencedError: Another owner has opened the log; nothing was deleted.
            StoreError: The storage failed.
            CorruptStateError: A ledger is damaged in such a way that it cannot be deleted.

        Source: ``ManagedLedgerImpl.internalTrimLedgers`` of Apache Pulsar. Complexity: O(ledgers), and one write.
        """
        ownership, before = self._owned("trim"), min(operator_index(before_ledger_id), self.ledgers.current_ledger_id)
        with self.sole_use:
            leaving = [ledger_id for ledger_id in self.ledgers if ledger_id < before]
            if leaving:
                # In memory before the record: if it is unknown whether that was written, no cursor can go back to them.
                self.ledgers.trim(before)
                self.sizes.trim()
                for ledger_id in leaving:
                    self.published_ms.pop(ledger_id, None)
                self._trimmed += leaving
            if self._trimmed:
                first_ledger_id = self.ledgers.first_ledger_id
                ownership.trim(self.sizes.known, self.published_ms, first_ledger_id=first_ledger_id)
                self._delete_trimmed()
        return len(leaving)

    def _delete_trimmed(self) -> None:
        while self._trimmed:
            self.store.ledgers.delete(self._trimmed[0])
            del self._trimmed[0]

    def _owned(self, verb: str) -> LogOwnership:
        if self._ownership is None:
            raise ValueError(f"the message log of topic {self.topic!r} was opened to be read; open it to {verb}")
        return self._ownership

    def _published(self, publication: Publication, last: int) -> list[Position]:
        ledger_id, count = publication.ledger_id, len(publication.entries)
        self.ledgers.append(count)
        self.sizes.appended(ledger_id, sum(map(len, publication.entries)))
        self._room -= count
        if self.sizes.known.get(ledger_id, 0) >= self._bytes_per_ledger_max:
            self._room = 0
        positions = list(positions_of(ledger_id, range(last + 1 - count, last + 1)))
        if self._fed:
            delayed = [
                (position, operator_index(message.deliver_at_ms))
                for position, message in zip(positions, publication.messages, strict=True)
                if message.deliver_at_ms > 0
            ]
            for index in self._fed if delayed else ():
                index.learn(delayed)
        for listener in self._listeners:
            listener.messages_came()
        return positions

    def _append_failed(self, error: AckStateError) -> AckStateError:
        """Use the open ledger no more, as the append may have happened; return the error for the publisher."""
        self._room = 0
        if not isinstance(error, LedgerFencedError | LedgerNotFoundError):
            return error
        assert self._ownership is not None
        fenced = self._ownership.fenced()
        fenced.__cause__ = error
        return fenced

    def _begin_ledger(self, ownership: LogOwnership) -> None:
        self._room = 0  # From here on it is closed, or may be.
        last = ownership.close_ledger()
        if last is not None:
            self._count_up_to(last)
        first_ledger_id = self.ledgers.first_ledger_id
        ownership.check()  # A former owner would leave behind the ledger that it creates.
        ledger_id = ownership.begin_ledger(self.sizes.known, self.published_ms, first_ledger_id=first_ledger_id)
        self.ledgers.roll(ledger_id)
        self.sizes.known[ledger_id] = 0
        self._room = self._entries_per_ledger_max

    def _count_up_to(self, last: int) -> None:
        """Count the entries of the closed ledger up to its last one: an append that failed may have happened."""
        ledger_id = self.ledgers.current_ledger_id
        new = last + 1 - self.ledgers.entry_count(ledger_id)
        if new:
            self.ledgers.append(new)
            self.sizes.forget(ledger_id)
            for index in self._fed:  # It lacks the messages of that append: their first reader offers them.
                index.complete_from = Position(ledger_id, last + 1)

    def can_read(self, ledger_id: int) -> bool:
        """Return whether the messages of a ledger are in the store."""
        return self.ledgers.has_ledger(ledger_id)

    def read(self, positions: Sequence[Position]) -> Iterator[Message]:
        """Yield the messages at positions, in their order; neighbours are read from the store together.

        Raises:
            TypeError: `positions` is a single position.
            LedgerNotFoundError: A position is not in the log.
            CorruptStateError: The entry there is not a message.
        """
        if isinstance(positions, Position):
            raise TypeError(f"positions must be a list of Position, got a single one, {positions}")
        read = self.store.ledgers.read
        found = decode_messages((ledger_id, read(ledger_id, first, end)) for ledger_id, first, end in _runs(positions))
        return self._at_present_times(positions, found) if self.rescheduled else found

    def _at_present_times(self, positions: Sequence[Position], found: Iterable[Message]) -> Iterator[Message]:
        for position, message in zip(positions, found, strict=True):
            due_ms = self.rescheduled.get(position)
            yield message if due_ms is None else message._replace(deliver_at_ms=due_ms)


def _runs(positions: Iterable[Position]) -> Iterator[tuple[int, int, int]]:
    """Yield the ledger, the first entry and the end (exclusive) of neighbours, in the order of the positions."""
    recent_id, first, end = -1, 0, 0
    for ledger_id, entry_id in positions:
        if ledger_id != recent_id or entry_id != end:
            if recent_id >= 0:
                yield recent_id, first, end
            recent_id, first = ledger_id, entry_id
        end = entry_id + 1
    if recent_id >= 0:
        yield recent_id, first, end


def checked_time(now_ms: int | None) -> int | None:
    """Return the present, if it is given, as a plain integer; refuse one that is out of range."""
    if now_ms is not None and not (type(now_ms) is int and 0 <= now_ms <= LONG_MAX):  # without a call for a valid one
        now_ms = integer("now_ms", now_ms)
        check_within("now_ms", now_ms, least=0, most=LONG_MAX, unit="milliseconds")
    return now_ms


def _split(ledger_ids: Sequence[int], first: int) -> tuple[list[int], list[int]]:
    at = bisect_left(ledger_ids, first)
    return list(ledger_ids[:at]), list(ledger_ids[at:])
