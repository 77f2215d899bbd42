"""Cursor ledgers in a Pulsar cluster's BookKeeper, created and read as a broker creates and reads them.

A ledger has the digest CRC32C, the empty password, and custom metadata that names the topic's message log and the
cursor. Its last entry counts, whether or not BookKeeper has confirmed it to readers.

Source: ``LedgerMetadataUtils``, ``ManagedCursorImpl`` of Apache Pulsar.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING, final

from ackstate.cursor.journal.recovery import decode_record
from ackstate.errors import AckStateError
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, StoreError, check_owner
from ackstate.stores.bookkeeper_appends import append_all
from ackstate.stores.bookkeeper_reads import last_readable, read_entries
from ackstate.stores.pulsar_names import pulsar_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.stores.bookkeeper_client import BookKeeperClient
    from ackstate.stores.bookkeeper_ledger import Replication
    from ackstate.stores.pulsar_zookeeper import PulsarZooKeeper

_OWNER_PREFIX = "cursor "
_OPEN_TO_READ_MAX = 16


@final
class PulsarLedgers:
    """See the module, and `ackstate.stores.base.LedgerStore`; thread-safe.

    `owned_by` returns the ledger that a cursor's record names, if that ledger is the cursor's, and those that this
    object has created. A ledger that a broker's crash left over is not found: BookKeeper has no index of them.

    Args:
        client: A client of the cluster's BookKeeper.
        nodes: The cluster's metadata.
        replication: Replication of new ledgers.
        only_reads: Refuse every change.
    """

    def __init__(
        self, client: BookKeeperClient, nodes: PulsarZooKeeper, replication: Replication, *, only_reads: bool
    ) -> None:
        self._client, self._nodes, self._replication, self._only_reads = client, nodes, replication, only_reads
        self._reading = threading.Lock()  # Held while a handle of `_readers` is used: another read may close it.
        self._lock = threading.Lock()  # Guards the next three.
        self._made: dict[int, str] = {}  # ledgers created here, with their owners
        self._writers: dict[int, tuple[int, int]] = {}  # ledger -> its writer's handle, and its last entry
        self._readers: dict[int, int] = {}  # ledger -> handle, the one opened last at the end

    def create(self, owner: str) -> int:
        """See `LedgerStore.create`. The owner must be a cursor."""
        self._check_writable()
        check_owner(owner)
        metadata = cursor_metadata(owner)
        if metadata is None:
            raise StoreError(f"{self._nodes.name}: only cursors have ledgers here, got {owner!r}; nothing was created")
        opened = self._client.create(self._replication, custom_metadata=metadata).wait()
        with self._lock:
            self._made[opened.ledger_id] = owner
            self._writers[opened.ledger_id] = (opened.handle, -1)
        return opened.ledger_id

    def append(self, ledger_id: int, entry: bytes) -> int:
        return self.append_all([(ledger_id, entry)])[0]

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        """Append entries to ledgers created here, all under way at once.

        Not all or nothing, as BookKeeper has no transactions: if this raises, some entries may be there. In Pulsar's
        format each entry is a cursor's whole state, so any part of them is a valid outcome.
        """
        self._check_writable()
        with self._lock:
            missing = [ledger_id for ledger_id, _ in entries if ledger_id not in self._writers]
            handles = [(self._writers[ledger_id][0], entry) for ledger_id, entry in entries if not missing]
        if missing:
            for ledger_id in missing:
                self.last(ledger_id)  # LedgerNotFoundError if there is none
            raise LedgerFencedError(f"ledger {missing[0]} was not created here; nothing was appended")
        outcomes = append_all(self._client, handles)
        appended: list[int] = []
        failure: StoreError | None = None
        with self._lock:
            for (ledger_id, _), outcome in zip(entries, outcomes, strict=True):
                if isinstance(outcome, StoreError):
                    failure = failure or outcome
                    continue
                appended.append(outcome)
                if ledger_id in self._writers:  # Not deleted or taken over meanwhile.
                    self._writers[ledger_id] = (self._writers[ledger_id][0], outcome)
        if failure is not None:
            raise failure
        return appended

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        if first < 0 or end < first:
            raise ValueError(f"first must be at least 0 and end not below it, got {first} and {end}")
        if first == end:
            return []
        with self._reading:
            return list(read_entries(self._client, self._reader(ledger_id), first, end))

    def last(self, ledger_id: int) -> int:
        """Return the last entry that can be read, confirmed or not; -1 if there is none.

        Raises:
            LedgerNotFoundError: There is no such ledger.
        """
        with self._lock:
            if ledger_id in self._writers:
                return self._writers[ledger_id][1]
        with self._reading:
            return last_readable(self._client, ledger_id, self._reader(ledger_id))

    def delete(self, ledger_id: int) -> None:
        self._check_writable()
        with self._lock:
            # Before the deletion, of which it may remain unknown whether it has happened.
            self._writers.pop(ledger_id, None)
            self._readers.pop(ledger_id, None)
        with suppress(LedgerNotFoundError):
            self._client.delete(ledger_id).wait()
        with self._lock:
            self._made.pop(ledger_id, None)

    def seal(self) -> None:
        """Close the ledgers that were created here, so that their next reader need not recover them.

        Nothing can be appended to them afterwards. No-op for a ledger that another client has taken over.
        """
        with self._lock:
            writers, self._writers = self._writers, {}
        for handle, _ in writers.values():
            with suppress(StoreError):
                self._client.close_ledger(handle).wait()

    def fence(self, ledger_id: int) -> int:
        """See `LedgerStore.fence`: BookKeeper's recovery, as by a broker that opens the cursor."""
        self._check_writable()
        opened = self._client.open_and_fence(ledger_id, self._replication).wait()
        with self._lock:
            self._writers.pop(ledger_id, None)
            self._readers[ledger_id] = opened.handle
        return opened.last_confirmed

    def owned_by(self, owner: str) -> list[int]:
        """Return the ledger that the owner's record names, and those created here in the owner's name.

        Raises:
            ValueError: The owner holds a lone surrogate.
        """
        check_owner(owner)
        with self._lock:
            found = {ledger_id for ledger_id, name in self._made.items() if name == owner}
        expected = cursor_metadata(owner)
        named = None if expected is None else self._named_by(owner)
        if named is not None and expected is not None and self._has_metadata(named, expected):
            found.add(named)
        return sorted(found)

    def owners(self) -> list[str]:
        """Return the owners of ledgers created here."""
        with self._lock:
            return sorted(set(self._made.values()))

    def _named_by(self, owner: str) -> int | None:
        path = pulsar_path(owner.removeprefix(_OWNER_PREFIX))
        found = None if path is None else self._nodes.get(path)
        try:
            return None if found is None else decode_record(found.data).record.cursor_ledger_id
        except AckStateError:
            return None

    def _has_metadata(self, ledger_id: int, expected: Mapping[str, bytes]) -> bool:
        try:
            found = self._client.metadata(ledger_id).wait().custom_metadata
        except LedgerNotFoundError:
            return False
        return all(found.get(name) == value for name, value in expected.items())

    def _reader(self, ledger_id: int) -> int:
        with self._lock:
            if ledger_id in self._writers:
                return self._writers[ledger_id][0]
            handle = self._readers.pop(ledger_id, None)
        if handle is None:
            handle = self._client.open_to_read(ledger_id, self._replication).wait().handle
        with self._lock:
            self._readers[ledger_id] = handle
            surplus = [self._readers.pop(next(iter(self._readers)))] if len(self._readers) > _OPEN_TO_READ_MAX else []
        for each in surplus:
            self._client.close_ledger(each).wait()
        return handle

    def _check_writable(self) -> None:
        if self._only_reads:
            raise StoreError(f"{self._nodes.name}: the cluster was opened to read; nothing was written")


def cursor_metadata(owner: str) -> dict[str, bytes] | None:
    """Return the custom metadata of the ledgers of a cursor; None if the owner is not a cursor."""
    path = pulsar_path(owner.removeprefix(_OWNER_PREFIX)) if owner.startswith(_OWNER_PREFIX) else None
    names = path.split("/") if path else []
    if len(names) != 7:
        return None
    return {
        "application": b"pulsar",
        "component": b"managed-ledger",
        "pulsar/managed-ledger": "/".join(names[2:6]).encode(),
        "pulsar/cursor": names[6].encode(),
    }
