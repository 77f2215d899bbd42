"""Reads what is durable of the cursors of a live Pulsar cluster: what a broker that loads them now begins with.

A cursor's record in the metadata store has its state, or names the cursor ledger whose last entry has it. Both are read
without fencing and without recovery: nothing in the cluster changes, and no broker notices.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, final

from ackstate.cursor.formats import PulsarFormat, state_in
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.ledger_map import LedgerMap
from ackstate.stores.base import ABSENT, LedgerNotFoundError, StoreError
from ackstate.stores.bookkeeper_client import BookKeeperOptions
from ackstate.stores.pulsar import managed_ledger_name, open_cluster, parse_pulsar_url
from ackstate.topic_name import ROOT, persistence_name
from ackstate.wire.pulsar import decode_position_info
from ackstate.wire.pulsar.codec import decode_ledger_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ackstate.batch_indexes import BatchIndexes
    from ackstate.cursor.formats import CursorState
    from ackstate.deleted_ranges import DeletedRanges
    from ackstate.position import Position
    from ackstate.stores.base import Versioned
    from ackstate.stores.bookkeeper import Tail
    from ackstate.stores.pulsar import PulsarLayout

_AT_ONCE = 32
_ANSWERS_WITHIN_S = 2.0
_TRIED_AGAIN_S = 10.0
_ATTEMPTS = 5
_OF_TRANSACTIONS = "__transaction_pending_ack"  # after the names of topic and subscription
# Room for tens of thousands of open ledgers; one compiler, as most readers live for seconds.
_JVM_OPTIONS = ("-Xmx512m", "-XX:MaxDirectMemorySize=256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

Name: TypeAlias = tuple[str, str]
"""A cursor's topic, with its full name, and subscription."""


class DurableState(NamedTuple):
    """The durable state of one cursor."""

    mark_delete: Position  # inclusive
    deleted: DeletedRanges  # acked entries above it; must not be changed
    batch: BatchIndexes  # partly acked batches; must not be changed
    # The version of the record, the cursor ledger or -1, the last entry of that or -1. Equal in two reads if nothing
    # was written between them.
    version: tuple[int, int, int]
    # Whether it has had acks in transactions: of those that were committed, a log of their own restores what is lost.
    has_transactions: bool = False


class CursorGoneError(AckStateError):
    """The metadata store has no record of the cursor: it was deleted, or is not durable."""


@dataclass(slots=True)
class _Cursor:
    """What earlier reads have left of a cursor."""

    tail: Tail | None = None  # of the ledger that its record named
    content: CursorState | None = None  # in the last entry, or None if that was not decoded
    content_of: tuple[int, int, int] = (ABSENT, ABSENT, ABSENT)  # that ledger and entry, and the version of the log


@final
class DurableReader:
    """Reads cursors, many at once. Threads may share it, but each cursor is for one of them at a time.

    The cursor ledgers stay open between reads: a later read of a cursor costs two requests if nothing was written.
    After a lost connection the next read connects again.

    Args:
        url: Where the metadata is: ``pulsar+zk://HOST:PORT`` or ``zk:HOST:PORT``, as `parse_pulsar_url`.
        class_path: Where BookKeeper's Java client is; None for the environment's.
        open_store: Opens the cluster instead of these.

    Raises:
        ValueError: The URL is malformed, or names a metadata store other than ZooKeeper.
        StoreError: A server does not answer, or a package, Java or its classes are missing.
        OSError: The file with the password cannot be read.
    """

    def __init__(
        self,
        url: str,
        *,
        class_path: str | None = None,
        open_store: Callable[[], PulsarLayout] | None = None,
    ) -> None:
        self._open_store = open_store or partial(_opened, url, class_path)
        self._opening = Lock()  # guards the next two while they change
        self._store = self._open_store()
        self._cursors: dict[Name, _Cursor] = {}
        self._threads = ThreadPoolExecutor(_AT_ONCE, "durable-state")
        self._tried_s = -_TRIED_AGAIN_S  # when the metadata store did not answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connections; no-op if closed."""
        self._threads.shutdown(cancel_futures=True)
        self._store.close()

    def read(self, cursors: Iterable[Name]) -> dict[Name, DurableState | AckStateError]:
        """Read cursors, given as topic and subscription.

        Returns:
            For each cursor a state that was the durable one at some moment of this call, or the reason why there is
            none: `CursorGoneError`; `CorruptStateError`, if it is damaged or its ledger is lost; `StoreError`, if a
            bookie that is needed does not answer; or another `AckStateError`.

        Raises:
            ValueError: A topic is not persistent.
            StoreError: The metadata store does not answer.

        Complexity: O(size of the states), and a few requests for each cursor.
        """
        paths = {name: f"{_log_path(name[0])}/{persistence_name(name[1])}" for name in sorted(set(cursors))}
        session = self._store.nodes.session
        if not session.is_connected and time.monotonic() - self._tried_s < _TRIED_AGAIN_S:
            # Many readers do not wait for the same dead server.
            raise StoreError(f"{session.name}: the metadata store did not answer a moment ago")
        try:
            with self._opening:
                store = self._usable_store()
                known = {name: self._cursors.setdefault(name, _Cursor()) for name in paths}
            topics = sorted({topic for topic, _ in paths})
            get = store.nodes.get_many
            now = dict(zip(paths, get([*paths.values()]), strict=True))
            logs = dict(zip(topics, get([*map(_log_path, topics)]), strict=True))
            found: dict[Name, DurableState | AckStateError] = {}
            left = list(paths)
            for _ in range(_ATTEMPTS):
                reading = [
                    self._threads.submit(_outcome, store, each, known[each], now[each], logs[each[0]]) for each in left
                ]
                found |= {each: outcome.result() for each, outcome in zip(left, reading, strict=True)}
                again = dict(zip(left, get([paths[each] for each in left]), strict=True))
                # Else its owner has continued in another ledger, or has deleted it.
                left = [each for each in left if again[each] != now[each]]
                if not left:
                    break
                now |= again
            states = {name: state for name, state in found.items() if isinstance(state, DurableState)}
            of_transactions = get([
                f"{_log_path(topic)}-{persistence_name(name)}{_OF_TRANSACTIONS}" for topic, name in states
            ])  # fmt: skip
            for (name, state), record in zip(states.items(), of_transactions, strict=True):
                found[name] = state._replace(has_transactions=record is not None)
            return found | {name: StoreError(f"{_what(name)}: its record kept changing") for name in left}
        except StoreError:
            self._tried_s = time.monotonic()
            raise

    def _usable_store(self) -> PulsarLayout:
        """Open the cluster again if a connection was lost."""
        try:
            self._store.nodes.session.check_usable()
            self._store.ledgers.check_usable()
        except StoreError:
            self._store.close()
            self._cursors = {}
            self._store = self._open_store()
        return self._store


def reader_of(url: str | None, found: str) -> tuple[DurableReader | None, str]:
    """Return a reader of the metadata store that the user names, or else of that which the broker names.

    Args:
        url: As `DurableReader`; None for that of the broker, "none" or empty to read none.
        found: That of the broker, if it is ZooKeeper, else empty.

    Returns:
        The reader, or None and the reason why there is none.

    Raises:
        AckStateError: The store that the user names cannot be opened.
    """
    if url in {"none", ""}:
        return None, "the metadata store is not read"
    if url is not None:
        try:
            return DurableReader(url), ""
        except (ValueError, OSError) as error:
            raise AckStateError(f"metadata {url}: {error}") from error
    if not found:
        return None, "the broker names no ZooKeeper as its metadata store (--metadata)"
    try:
        _check_reachable(parse_pulsar_url(found).hosts)
        return DurableReader(found), ""
    except (AckStateError, ValueError, OSError) as error:
        return None, f"the broker's metadata store {found} cannot be read (--metadata): {error}"


def _opened(url: str, class_path: str | None) -> PulsarLayout:
    try:
        bookkeeper = BookKeeperOptions(class_path=class_path, jvm_options=_JVM_OPTIONS)
        return open_cluster(url, only_reads=True, bookkeeper=bookkeeper)
    except ImportError as error:
        raise StoreError(f"{error.name} is missing: install ackstate[bookkeeper]") from error


def _check_reachable(hosts: str) -> None:
    """Raise `OSError` unless a server accepts connections: a broker may name hosts that only brokers know."""
    failure = OSError("no server")
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        try:
            socket.create_connection((name.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN_S).close()
        except OSError as error:
            failure = error
        else:
            return
    raise failure


def _log_path(topic: str) -> str:
    return f"{ROOT}/{managed_ledger_name(topic)}"


def _what(name: Name) -> str:
    return f"cursor {name[1]!r} of {name[0]}"


def _outcome(
    store: PulsarLayout, name: Name, cursor: _Cursor, record: Versioned | None, log: Versioned | None
) -> DurableState | AckStateError:
    """Return the state of one cursor by its record and that of its topic's log, or why there is none."""
    try:
        if record is None:
            _release(store, cursor, None)
            return CursorGoneError(f"{_what(name)} has no record in the metadata store")
        # Ranges across ledgers need those of the topic, but not the size of the open one.
        counts = {each.ledger_id: each.entry_count for each in decode_ledger_info(log.data)} if log else {}
        ledgers = LedgerMap.from_counts(counts) if counts else None
        decoded = PulsarFormat().decode_record(record.data, ledgers)
        ledger_id = decoded.cursor_ledger_id
        _release(store, cursor, ledger_id)
        if ledger_id is None:
            assert decoded.content is not None
            return DurableState(*decoded.content[:3], version=(record.version, ABSENT, ABSENT))
        cursor.tail = tail = store.ledgers.read_tail(ledger_id, cursor.tail)
        content_of = (ledger_id, tail.last, ABSENT if log is None else log.version)
        if cursor.content is None or cursor.content_of != content_of:
            cursor.content, what = None, f"{_what(name)}, entry {tail.last} of ledger {ledger_id}"
            if tail.last < 0:
                raise CorruptStateError(what, offset=0, expected="an entry", found="none")
            info = decode_position_info(tail.entry, ledgers, what=what)
            cursor.content, cursor.content_of = state_in(info.position, info), content_of
        return DurableState(*cursor.content[:3], version=(record.version, ledger_id, tail.last))
    except LedgerNotFoundError as error:
        return CorruptStateError(_what(name), offset=0, expected="the cursor ledger of its record", found=str(error))
    except AckStateError as error:
        return error


def _release(store: PulsarLayout, cursor: _Cursor, ledger_id: int | None) -> None:
    """Close the ledger that a cursor no longer has."""
    if cursor.tail is not None and cursor.tail.ledger_id != ledger_id:
        store.ledgers.release_tail(cursor.tail)
        cursor.tail = cursor.content = None
