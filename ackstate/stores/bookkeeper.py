"""A store in an Apache BookKeeper cluster, with its metadata in ZooKeeper: ``pip install 'ackstate[bookkeeper]'``.

BookKeeper 4.14 or newer, as Pulsar has it; Java 11 or newer, and the jars of BookKeeper's client, such as Pulsar's. The
client runs in a child process: `ackstate.stores.bookkeeper_client`.

Each ledger of the store is one ledger of BookKeeper, with the same id. Many processes may open one root at the same
time; the unit of ownership is a ledger, which is taken over by `fence`. BookKeeper then refuses the former owner's
appends, however late they arrive.

Durability. An append has happened when as many bookies as `ack_quorum` have synced it (``journalSyncData``, on by
default). It needs one round trip to the bookies and none to ZooKeeper. A change of the metadata has happened when a
majority of the ZooKeeper servers have synced it (``forceSync``, on by default). One that loses its connection may have
happened; once a later call of the same store has returned, it will not happen any more.

ZooKeeper's client reconnects automatically; calls wait for the connection, up to a limit. After its session is lost,
the Java child ends, or a call gets no answer, every call is refused until the store is opened again.

Reading. A ledger that another process is appending to has at least the entries that were confirmed to that process,
and perhaps its last append, which a crash may still undo. All other entries stay.

What a crash leaves behind is found by the next process that opens the store to write. Names and bytes of the nodes and
entries: `docs/wire-format.md`.
"""

from __future__ import annotations

import struct
import threading
from contextlib import ExitStack, contextmanager, suppress
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.stores.base import (
    LedgerFencedError,
    LedgerNotFoundError,
    LedgerStore,
    PayloadTooLargeError,
    Store,
    StoreError,
    call_each,
    check_path,
    fenced,
    no_ledger,
)
from ackstate.stores.bookkeeper_client import BOOKIE_UNREACHABLE, BookKeeperError, BookKeeperOptions
from ackstate.stores.zookeeper import (
    DELETIONS,
    METADATA,
    REQUEST_BYTES_MAX,
    STORE,
    LostRaceError,
    NodeKind,
    ZooKeeperMetadata,
    ZooKeeperSession,
    create_directory,
    decode_as,
    encode,
    existing,
    name_of_node,
    node_damage,
    node_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.stores.bookkeeper_client import BookKeeperClient, LedgerMetadata, OpenLedger, Replication, Reply

__all__ = ["BookKeeperOptions", "BookKeeperStore"]

LEDGERS = "/ledgers"
OWNERS = "/owners"
GARBAGE = "/garbage"

_ENTRY_VERSION = 1
_HEADER = struct.Struct("<BBI")  # version, kind, index in the batch

_FIRST_READ_ENTRIES = 8
_READ_BYTES = 4 << 20
"""A read of more entries at once than have this many bytes is followed by a smaller one."""
_READ_ENTRIES_MAX = 4_096
_PROBES_AT_ONCE = 16
_UNCONFIRMED_MAX = 10_000
"""More entries than a writer has under way: a reader that is slower than the writer must come to an end."""


class EntryKind(IntEnum):
    """The place of an entry in its batch, the entries of one append."""

    CONTINUED = 1  # another entry of the same batch follows
    END = 2  # it ends its batch


def encode_batch(payloads: Sequence[bytes]) -> list[bytes]:
    """Return the entries of a batch as BookKeeper stores them."""
    # Only the last one ends the batch, so that a batch whose end was never written can be recognised and cut off.
    last = len(payloads) - 1
    return [
        _HEADER.pack(_ENTRY_VERSION, EntryKind.CONTINUED if index < last else EntryKind.END, index) + payload
        for index, payload in enumerate(payloads)
    ]


def decode_entry(data: bytes, what: str) -> tuple[bytes, int | None]:
    """Return the payload of an entry, and its index in its batch if more entries of the batch follow."""
    if len(data) < _HEADER.size:
        raise CorruptStateError(
            what, offset=len(data), expected=f"at least {_HEADER.size} bytes", found=f"{len(data)} bytes"
        )
    version, kind, index = _HEADER.unpack_from(data)
    if version > _ENTRY_VERSION:
        raise UnsupportedVersionError(f"{what} has format version {version}; this release reads {_ENTRY_VERSION}")
    if version != _ENTRY_VERSION or kind not in set(EntryKind):
        raise CorruptStateError(
            what, offset=0, expected=f"version {_ENTRY_VERSION}, a known kind", found=(version, kind)
        )
    return data[_HEADER.size :], index if kind == EntryKind.CONTINUED else None


class Tail(NamedTuple):
    """The last entry of a ledger that another process may be appending to; see `BookKeeperLedgers.read_tail`."""

    ledger_id: int
    last: int  # the id of the entry, -1 if there is none
    entry: bytes = b""  # its bytes
    is_closed: bool = False  # whether it stays the last one
    handle: int = -1  # of the client


class LedgerRegistry(Protocol):
    """The names and owners of ledgers: ours, or Pulsar's."""

    # Whether entries are those of `encode_batch`. In Pulsar's layout an entry is the caller's bytes, so that a crash
    # may leave a part of an append; there each entry is a whole state.
    has_batch_marks: bool

    def check_usable(self) -> None:
        """Raise `StoreError` if calls are refused."""

    def check_writable(self) -> None:
        """Raise `StoreError` if changes are refused."""

    def create(self, owner: str) -> OpenLedger:
        """Create a ledger that `owned_by` finds."""

    def check(self, ledger_id: int) -> None:
        """Raise `LedgerNotFoundError` if there is no such ledger, perhaps since another process has deleted it."""

    def missing(self, ledger_id: int) -> AckStateError:
        """Return the error for a ledger, or a part of it, that BookKeeper does not have."""

    def delete(self, ledger_id: int) -> None:
        """Delete a ledger that this process does not append to; no-op if it does not exist."""

    def owned_by(self, owner: str) -> Iterable[int]:
        """As `LedgerStore.owned_by`, in any order."""

    def owners(self) -> Iterable[str]:
        """As `LedgerStore.owners`, in any order."""


class _Writer:
    """A ledger that this opening of the store has created, and may append to."""

    __slots__ = ("handle", "is_failed", "is_open", "last", "lock")

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.last = -1
        self.is_open = True
        self.is_failed = False  # It is unknown whether its last append has happened.
        self.lock = threading.Lock()  # Held from the begin of an append to its outcome.


@final
class BookKeeperLedgers(LedgerStore):
    """The ledgers of one store; thread-safe. An id is above every one that was returned before `create` was called."""

    def __init__(self, client: BookKeeperClient, replication: Replication, registry: LedgerRegistry) -> None:
        self._client, self._replication, self._registry = client, replication, registry
        self._writers: dict[int, _Writer] = {}

    def _create(self, owner: str) -> int:
        self._check_writable()
        opened = self._registry.create(owner)
        self._writers[opened.ledger_id] = _Writer(opened.handle)
        return opened.ledger_id

    def _append_many(self, appends: list[tuple[int, list[bytes]]]) -> list[int | AckStateError]:
        self._check_writable()
        batches = dict(appends)
        writers: dict[int, _Writer] = {}
        outcomes: dict[int, int | AckStateError] = {}
        with ExitStack() as held:
            for ledger_id in sorted(batches):  # All callers lock in this order.
                try:
                    writer = self._writer(ledger_id)
                    held.enter_context(writer.lock)
                    self._check_appendable(ledger_id, writer, batches[ledger_id])
                    writers[ledger_id] = writer
                except AckStateError as error:
                    outcomes[ledger_id] = error
            results = iter(self._results(writers, batches) if writers else ())
            for ledger_id, writer in writers.items():
                of_ledger = [next(results) for _ in batches[ledger_id]]
                outcomes[ledger_id] = self._outcome(ledger_id, writer, of_ledger)
        return [outcomes[ledger_id] for ledger_id, _ in appends]

    def _read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        self.check_usable()
        writer = self._writers.get(ledger_id)
        if writer is not None and not writer.is_failed:
            try:
                return [each for each, _ in self._entries(ledger_id, writer.handle, first, min(end, writer.last + 1))]
            except LedgerNotFoundError as error:
                raise self._registry.missing(ledger_id) from error
            except StoreError:
                if self._writers.get(ledger_id) is writer:
                    raise
        # It was created by another opening of the store, or its handle was closed meanwhile.
        self._registry.check(ledger_id)
        if first == end:
            return []
        with self._opened(ledger_id) as (handle, _, _):
            try:
                found = list(self._entries(ledger_id, handle, first, end))
            except LedgerNotFoundError as error:
                if end - 1 <= self._last_readable(ledger_id, handle):
                    raise self._registry.missing(ledger_id) from error
                return []
            # All entries before the end of an append are there for ever; one whose end is missing may be cut off.
            if found[-1][1] is not None:
                del found[max(0, self._last_completed(ledger_id, handle) + 1 - first) :]
        return [entry for entry, _ in found]

    def _last(self, ledger_id: int) -> int:
        self.check_usable()
        self._registry.check(ledger_id)
        writer = self._writers.get(ledger_id)
        if writer is not None and not writer.is_failed:
            return writer.last
        with self._opened(ledger_id) as (handle, _, _):
            return self._last_completed(ledger_id, handle)

    def _delete(self, ledger_id: int) -> None:
        self._check_writable()
        # Before the deletion, of which it may remain unknown whether it has happened.
        self._end_writer(ledger_id)
        self._registry.delete(ledger_id)

    def _fence(self, ledger_id: int) -> int:
        self._check_writable()
        self._registry.check(ledger_id)
        last = self._end_writer(ledger_id)
        return self._recovered_last(ledger_id) if last is None else last

    def _owned_by(self, owner: str) -> Iterable[int]:
        self.check_usable()
        return self._registry.owned_by(owner)

    def _owners(self) -> Iterable[str]:
        self.check_usable()
        return self._registry.owners()

    def read_tail(self, ledger_id: int, before: Tail | None = None) -> Tail:
        """Return the last entry of a ledger as it is now; its writer does not notice. An earlier result is used up."""
        self.check_usable()
        if before is not None and before.is_closed:
            return before
        if before is not None:
            return self._tail(before, confirmed=before.last)
        with self._present(ledger_id):
            opened = self._client.open_to_read(ledger_id, self._replication).wait()
        before = Tail(ledger_id, -1, handle=opened.handle)
        try:
            return self._tail(before, confirmed=opened.last_confirmed)
        except BaseException:
            self.release_tail(before)
            raise

    def release_tail(self, tail: Tail) -> None:
        """Release what the client keeps for the next `read_tail`."""
        with suppress(StoreError):
            self._client.close_ledger(tail.handle)

    def seal(self) -> None:
        """Close the ledgers of this opening, as far as BookKeeper answers, so that no reader needs to recover them."""
        # Nothing can be appended to them afterwards. No-op for those that another process has taken over.
        writers = list(self._writers.values())
        for writer in writers:
            writer.is_open = False
        call_each(self._end_writer, list(self._writers))

    def check_usable(self) -> None:
        """Raise `StoreError` if every call is refused until the store is opened again."""
        self._registry.check_usable()
        self._client.check_usable()

    def _check_writable(self) -> None:
        self._registry.check_writable()
        self._client.check_usable()

    def _writer(self, ledger_id: int) -> _Writer:
        writer = self._writers.get(ledger_id)
        if writer is None:
            self._registry.check(ledger_id)
            raise fenced(ledger_id)
        return writer

    def _check_appendable(self, ledger_id: int, writer: _Writer, entries: Sequence[bytes]) -> None:
        """Raise the error of an append that cannot be sent."""
        if not writer.is_open:
            raise fenced(ledger_id)
        if writer.is_failed:
            raise StoreError(f"an append to ledger {ledger_id} has failed: fence it, or begin another ledger")
        bytes_max = self._client.entry_bytes_max - _HEADER.size
        if (largest := max(map(len, entries), default=0)) > bytes_max:
            raise PayloadTooLargeError(
                f"an entry must have at most {bytes_max} bytes (BookKeeper's nettyMaxFrameSizeBytes less the headers),"
                f" got {largest}; nothing was sent"
            )
        if not entries and self._metadata(ledger_id).last_entry_id is not None:
            raise fenced(ledger_id)

    def _results(
        self, writers: Mapping[int, _Writer], batches: Mapping[int, Sequence[bytes]]
    ) -> list[int | StoreError]:
        """Append a batch to each ledger, and return the outcome of each entry."""
        encode = encode_batch if self._registry.has_batch_marks else list
        entries = [
            (writer.handle, entry) for ledger_id, writer in writers.items() for entry in encode(batches[ledger_id])
        ]
        try:
            return self._client.append_all(entries)
        except BaseException as error:
            for writer in writers.values():
                writer.is_failed = True
            if not isinstance(error, StoreError):
                raise
            return [StoreError(str(error)) for _ in entries]

    def _outcome(self, ledger_id: int, writer: _Writer, results: Sequence[int | StoreError]) -> int | AckStateError:
        last = writer.last + len(results)
        error = next((each for each in results if isinstance(each, StoreError)), None)
        if isinstance(error, LedgerFencedError | LedgerNotFoundError):
            # Another process has taken the ledger over, and its recovery may have found all of these entries.
            self._forget(ledger_id, writer)
            try:
                return last if self._recovered_last(ledger_id) >= last else fenced(ledger_id)
            except AckStateError as unknown:
                return unknown
        if error is not None:
            writer.is_failed = True
            return error
        writer.last = last
        return last

    def _end_writer(self, ledger_id: int) -> int | None:
        """Append no more to a ledger, and return its last entry for ever; None if this opening cannot tell it."""
        writer = self._writers.get(ledger_id)
        if writer is None:
            return None
        writer.is_open = False  # At once, so that no further append is waited for.
        with writer.lock:
            is_closed = self._forget(ledger_id, writer)
            return writer.last if is_closed and not writer.is_failed else None

    def _forget(self, ledger_id: int, writer: _Writer) -> bool:
        """Close a ledger that is appended to, and return whether this has succeeded."""
        writer.is_open = False
        if self._writers.pop(ledger_id, None) is None:
            return False
        with suppress(StoreError):
            self._client.close_ledger(writer.handle).wait()
            return True
        return False

    @contextmanager
    def _present(self, ledger_id: int) -> Iterator[None]:
        """Raise the error for a ledger, or a part of it, that BookKeeper turns out not to have."""
        try:
            yield
        except LedgerNotFoundError as error:
            raise self._registry.missing(ledger_id) from error

    def _metadata(self, ledger_id: int) -> LedgerMetadata:
        with self._present(ledger_id):
            return self._client.metadata(ledger_id).wait()

    @contextmanager
    def _opened(self, ledger_id: int, *, fences: bool = False) -> Iterator[OpenLedger]:
        """Open a ledger that another process may be writing to; that does not notice unless the ledger is fenced."""
        open_ledger = self._client.open_and_fence if fences else self._client.open_to_read
        with self._present(ledger_id):
            opened = open_ledger(ledger_id, self._replication).wait()
        try:
            yield opened
        finally:
            with suppress(StoreError):
                self._client.close_ledger(opened.handle)

    def _recovered_last(self, ledger_id: int) -> int:
        """Fence a ledger, and return its last entry for ever."""
        # That yields every entry that was ever confirmed to its writer, and perhaps some that were not.
        with self._opened(ledger_id, fences=True) as opened:
            return self._cut(ledger_id, opened.handle, opened.last_confirmed)

    def _last_completed(self, ledger_id: int, handle: int) -> int:
        return self._cut(ledger_id, handle, self._last_readable(ledger_id, handle))

    def _cut(self, ledger_id: int, handle: int, last: int) -> int:
        """Return the last entry whose append has ended, given the last entry."""
        if last < 0 or not self._registry.has_batch_marks:
            return last
        with self._present(ledger_id):
            ((_, index),) = self._entries(ledger_id, handle, last, last + 1)
        return last if index is None else last - 1 - index

    def _entries(self, ledger_id: int, handle: int, first: int, end: int) -> Iterator[tuple[bytes, int | None]]:
        """Yield entries, confirmed or not, each with its index in its append if the end of that is in a later one."""
        count = _FIRST_READ_ENTRIES
        while first < end:
            entries = self._client.read_unconfirmed(handle, first, min(first + count, end)).wait()
            for entry_id, entry in enumerate(entries, first):
                is_ours = self._registry.has_batch_marks
                yield decode_entry(entry, f"entry {entry_id} of ledger {ledger_id}") if is_ours else (entry, None)
            first += len(entries)
            fits = sum(map(len, entries)) <= _READ_BYTES
            count = min(2 * count, _READ_ENTRIES_MAX) if fits else max(1, count // 4)

    def _last_readable(self, ledger_id: int, handle: int) -> int:
        """Return the last entry that can be read, confirmed or not; -1 if there is none."""
        # BookKeeper confirms an entry to readers with the next one. Every entry that was acknowledged to the writer
        # before can be read. `StoreError`: bookies that do not answer may have a further entry.
        ledger = self._metadata(ledger_id)
        if ledger.last_entry_id is not None:
            return ledger.last_entry_id
        end = self._client.last_confirmed(handle).wait() + 1
        limit = end + _UNCONFIRMED_MAX
        while end < limit:
            probed = range(end, end + _PROBES_AT_ONCE)
            probes = [self._probe(handle, entry_id) for entry_id in probed]
            found = self._readable_count(probes, ledger)
            end += found
            if found < _PROBES_AT_ONCE:
                break
        return end - 1

    def _tail(self, before: Tail, *, confirmed: int) -> Tail:
        """Return the last entry that can be read, given an entry up to which all are confirmed."""
        ledger_id, last, entry, _, handle = before
        is_first = last < 0
        asked, probe = self._client.metadata(ledger_id), self._probe(handle, confirmed + 1)
        with self._present(ledger_id):
            ledger = asked.wait()
            end = confirmed + _UNCONFIRMED_MAX
            if ledger.last_entry_id is not None:
                end = confirmed = ledger.last_entry_id
            while confirmed < end and self._readable_count([probe], ledger):
                last, entry = confirmed + 1, probe.wait()[0]
                # Since an earlier look many may have been appended.
                confirmed = last if is_first else max(last, self._client.last_confirmed(handle).wait())
                is_first, probe = True, self._probe(handle, confirmed + 1)
            if confirmed != last:
                last, entry = confirmed, self._probe(handle, confirmed).wait()[0] if confirmed >= 0 else b""
        return Tail(ledger_id, last, entry, ledger.last_entry_id is not None, handle)

    def _probe(self, handle: int, entry_id: int) -> Reply[list[bytes]]:
        return self._client.read_unconfirmed(handle, entry_id, entry_id + 1)

    def _readable_count(self, probes: Sequence[Reply[list[bytes]]], ledger: LedgerMetadata) -> int:
        """Return the number of entries before the first one that does not exist."""
        for number, probe in enumerate(probes):
            try:
                probe.wait()
            except LedgerNotFoundError:
                return number
            except BookKeeperError as error:
                if error.code != BOOKIE_UNREACHABLE:
                    raise
                # All bookies of the entry that can be reached do not have it. An acknowledged one would be on one of
                # these, unless too many are missing. None is missing if one has returned meanwhile: it may have it.
                missing = set(self._client.missing_bookies().wait()) & set(ledger.ensemble)
                if not 0 < len(missing) < ledger.ack_quorum:
                    raise
                return number
        return len(probes)


@final
class LedgerNodes:
    """The names and owners of a store's ledgers in ZooKeeper."""

    # A ledger has a node with its owner, and one below its owner. While it is created or deleted in BookKeeper, it has
    # neither, but one below `GARBAGE`: so a crash leaves no ledger that nothing names, and every ledger that is named
    # exists, unless BookKeeper has lost it.
    has_batch_marks = True

    def __init__(
        self, session: ZooKeeperSession, client: BookKeeperClient, replication: Replication, root: str
    ) -> None:
        self._session, self._client, self._replication = session, client, replication
        self._custom_metadata = {"application": b"ackstate", "ackstate/root": root.encode()}
        self.check_usable, self.check_writable = session.check_usable, session.check_writable

    def create(self, owner: str) -> OpenLedger:
        return self._session.settle(lambda: self._try_create(owner))

    def check(self, ledger_id: int) -> None:
        if self._owner(ledger_id) is None:
            raise no_ledger(ledger_id)

    def missing(self, ledger_id: int) -> AckStateError:
        if self._owner(ledger_id) is None:
            return no_ledger(ledger_id)
        expected = f"ledger {ledger_id} of BookKeeper"
        return CorruptStateError(f"ledger {ledger_id}", offset=0, expected=expected, found="none, or only a part of it")

    def delete(self, ledger_id: int) -> None:
        if self._session.settle(lambda: self._try_remove(ledger_id)):
            self._session.settle(lambda: self._try_clear(ledger_id))

    def owned_by(self, owner: str) -> Iterable[int]:
        return self._numbers(_owner_path(owner))

    def owners(self) -> Iterable[str]:
        return [name_of_node(name, OWNERS) for name in self._session.children(OWNERS)]

    def finish(self) -> None:
        """Delete what crashes have left behind, as far as BookKeeper answers."""
        for ledger_id in self._numbers(GARBAGE):
            with suppress(StoreError, LostRaceError):
                self._try_clear(ledger_id)

    def _owner(self, ledger_id: int) -> str | None:
        """Return the owner of a ledger, None if there is none."""
        path = _ledger_path(ledger_id)
        (found,) = self._session.read(path)
        if found is None:
            return None
        try:
            return decode_as(NodeKind.BOOKKEEPER_LEDGER, path, found.data).decode()
        except UnicodeDecodeError as error:
            raise node_damage(path, error.start, "an owner in UTF-8", error.object) from error

    def _try_create(self, owner: str) -> OpenLedger:
        ledger_id = self._client.new_ledger_id().wait()
        self._session.commit([create_directory(_garbage_path(ledger_id))])
        try:
            opened = self._client.create(
                self._replication, ledger_id=ledger_id, custom_metadata=self._custom_metadata
            ).wait()
            if not self._session.settle(lambda: self._try_add(ledger_id, owner)):
                self._client.close_ledger(opened.handle)
                raise LostRaceError
        except BaseException:
            with suppress(AckStateError, LostRaceError):
                self._try_clear(ledger_id)
            raise
        return opened

    def _try_add(self, ledger_id: int, owner: str) -> bool:
        """Name a new ledger; False if another opening of the store is deleting it as the remains of a crash."""
        garbage, path, directory = _garbage_path(ledger_id), _ledger_path(ledger_id), _owner_path(owner)
        unnamed, owned = self._session.read(garbage, directory)
        if unnamed is None or unnamed.version:
            return False
        self._session.commit([
            ("delete", garbage, unnamed.version),
            ("create", path, encode(NodeKind.BOOKKEEPER_LEDGER, path, owner.encode())),
            *([] if owned else [create_directory(directory)]),
            create_directory(f"{directory}/{ledger_id}"),
        ])  # fmt: skip
        return True

    def _try_remove(self, ledger_id: int) -> bool:
        """Make a ledger garbage; False if there is none."""
        owner = self._owner(ledger_id)
        if owner is None:
            return False
        directory = _owner_path(owner)
        (owned,) = self._session.read(directory)
        self._session.commit([
            ("delete", _ledger_path(ledger_id)),
            ("delete", f"{directory}/{ledger_id}"),
            *([("delete", directory)] if existing(owned, directory).child_count == 1 else []),
            create_directory(_garbage_path(ledger_id)),
        ])  # fmt: skip
        return True

    def _try_clear(self, ledger_id: int) -> None:
        """Delete a ledger without a name."""
        path = _garbage_path(ledger_id)
        (found,) = self._session.read(path)
        if found is not None:
            # From here on its creator, if there is one, cannot name it.
            self._session.commit([("set_data", path, found.data, found.version)])
            self._client.destroy(ledger_id, self._replication)
            self._session.commit([("delete", path)])

    def _numbers(self, path: str) -> list[int]:
        names = self._session.children(path)
        for name in names:
            if not (name.isascii() and name.isdecimal()):
                raise node_damage(path, 0, "numbers of ledgers", name)
        return list(map(int, names))


def _ledger_path(ledger_id: int) -> str:
    return f"{LEDGERS}/{ledger_id}"


def _owner_path(owner: str) -> str:
    return f"{OWNERS}/{node_name(owner)}"


def _garbage_path(ledger_id: int) -> str:
    return f"{GARBAGE}/{ledger_id}"


@final
class BookKeeperStore:
    """A store in BookKeeper and below one node of ZooKeeper; thread-safe, but not usable across a fork.

    Args:
        hosts: ZooKeeper's ``host:port`` pairs separated by commas; a path belongs into `root`.
        root: The path of the store's node. A missing one is created; an empty one becomes a store.
        bookkeeper: How BookKeeper is used.
        only_reads: Open an existing store for reading: nothing is ever created, changed, deleted or fenced. Other
            processes may write to it at the same time; the module's description lists the visible entries. Every
            mutating call raises `StoreError`, even if it would change nothing.
        session_timeout_s: How long ZooKeeper keeps the session without a message from it. The servers may bound it.
        call_timeout_s: How long a call waits for a connection, and again for an answer.
        request_bytes_max: The largest request to ZooKeeper.
        client_options: More arguments for `kazoo.client.KazooClient`: ``auth_data``, ``default_acl``, ``use_ssl``, ...

    Raises:
        StoreError: JPype, Java or BookKeeper's client is missing, no server answered in time, or the node is not a
            store; nothing in it was changed.
        CorruptStateError: The store holds damaged bytes.
        UnsupportedVersionError: Another release wrote the store; nothing was changed.
        ValueError: An argument is invalid.
    """

    def __init__(  # noqa: PLR0913 - settings are named, not packed
        self,
        hosts: str,
        *,
        root: str = "/ackstate",
        bookkeeper: BookKeeperOptions | None = None,
        only_reads: bool = False,
        session_timeout_s: float = 10.0,
        call_timeout_s: float = 30.0,
        request_bytes_max: int = REQUEST_BYTES_MAX,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_path(root)
        options = bookkeeper or BookKeeperOptions()
        session = ZooKeeperSession(
            hosts,
            root=root,
            session_timeout_s=session_timeout_s,
            call_timeout_s=call_timeout_s,
            request_bytes_max=request_bytes_max,
            client_options=client_options,
            only_reads=only_reads,
        )
        with ExitStack() as opened:
            opened.callback(session.close)
            _prepare(session, only_reads=only_reads)
            client = options.client or options.connect(hosts, call_timeout_s=call_timeout_s)
            if options.client is None:
                opened.callback(client.close)
            nodes = LedgerNodes(session, client, options.replication, root)
            if not only_reads:
                nodes.finish()
            self._closing = opened.pop_all()
        self._session, self._client = session, client
        self.ledgers = BookKeeperLedgers(client, options.replication, nodes)
        """The logs."""
        self.metadata = ZooKeeperMetadata(session)
        """The small values."""

    def __repr__(self) -> str:
        return f"BookKeeperStore({self._session.name!r})"

    def close(self) -> None:
        """End the child and the session; no-op if closed.

        As far as the cluster answers, the ledgers of this opening are closed first: their next owner then needs no
        recovery.
        """
        if self._session.is_connected:
            self.ledgers.seal()
        self._closing.close()


def _prepare(session: ZooKeeperSession, *, only_reads: bool) -> None:
    """Create the nodes of a store at an empty root, unless it is only read, and refuse a root that is no store."""
    (found,) = session.read(STORE)
    if only_reads:
        if found is None or not found.data:
            state = "missing" if found is None else "empty"
            raise StoreError(f"{session.name} is not an ackstate store: its node is {state}")
        decode_as(NodeKind.BOOKKEEPER_STORE, STORE, found.data)
        return
    if found is None:
        session.make_root()
    session.settle(lambda: _make_if_empty(session))


def _make_if_empty(session: ZooKeeperSession) -> None:
    found = existing(session.read(STORE)[0], STORE)
    if found.data:
        decode_as(NodeKind.BOOKKEEPER_STORE, STORE, found.data)
        return
    if found.child_count:
        raise StoreError(f"{session.name} is not an ackstate store: it has children and no data")
    directories = (DELETIONS, METADATA, LEDGERS, OWNERS, GARBAGE)
    session.commit([
        ("set_data", STORE, encode(NodeKind.BOOKKEEPER_STORE, STORE), found.version),
        *(create_directory(path) for path in directories),
    ])  # fmt: skip


if TYPE_CHECKING:
    _: type[Store] = BookKeeperStore
