"""The metadata of a standalone Pulsar broker that is down: the RocksDB database in its metadata directory.

::

    41, 4 bytes | 1, 4 bytes | version, 8 | owner, 8 | created, 8 | changed, 8 | ephemeral, 1 | value

Numbers are big-endian, times in milliseconds since 1970. A key is a path. The database can be opened once at a time, so
a running broker keeps this library out, and this library a broker.

Source: ``RocksdbMetadataStore`` of Apache Pulsar.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

from ackstate.cursor.store import (
    ABSENT,
    LedgerNotFoundError,
    StoreError,
    StoreLockedError,
    Versioned,
    VersionMismatchError,
    check_owner,
)
from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores.bookkeeper_class_path import find_jars
from ackstate.stores.bookkeeper_frames import FrameReader, frame
from ackstate.stores.java_child import start_child
from ackstate.stores.pulsar_message_log import UnknownSizeError
from ackstate.wire.pulsar.loose_fields import loose_fields
from ackstate.wire.pulsar.strict_fields import read_varint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ackstate.cursor.store import LedgerStore
    from ackstate.stores.pulsar_nodes import PulsarNodes

_WORKER = "ackstate.stores.pulsar_rocksdb_worker"
_HEADER = struct.Struct(">iiqqqqB")
_FORMAT = 1
_ENDS_WITHIN_S = 5.0
_LEDGER_MARK = b"BookieMetadataFormatVersion\t3\n"
_CLOSED = 3


@dataclass(frozen=True, slots=True)
class RocksDbValue:
    """A value of the database.

    Attributes:
        data: The value that Pulsar stored.
        version: Counts the changes of the value, from 0.
        owner: The process that an ephemeral value belongs to.
        created_ms: When it was created, in milliseconds since 1970.
        changed_ms: When it was last changed.
        is_ephemeral: Whether it disappears with its owner.
    """

    data: bytes
    version: int
    owner: int = 0
    created_ms: int = 0
    changed_ms: int = 0
    is_ephemeral: bool = False


def encode_value(value: RocksDbValue) -> bytes:
    """Return the bytes of a value, as Pulsar writes them."""
    header = _HEADER.pack(
        _HEADER.size, _FORMAT, value.version, value.owner, value.created_ms, value.changed_ms, value.is_ephemeral
    )
    return header + value.data


def decode_value(encoded: bytes, *, what: str) -> RocksDbValue:
    """Decode a value.

    Args:
        encoded: Its bytes.
        what: Its name, for errors.

    Raises:
        CorruptStateError: They are not a value of Pulsar.
        UnsupportedVersionError: A newer release of Pulsar wrote it.
    """
    if len(encoded) < _HEADER.size:
        raise CorruptStateError(
            what, offset=len(encoded), expected=f"a header of {_HEADER.size} bytes", found="the end"
        )
    size, version_of_format, version, owner, created_ms, changed_ms, is_ephemeral = _HEADER.unpack_from(encoded)
    if version_of_format != _FORMAT:
        raise UnsupportedVersionError(f"{what}: value format {version_of_format}; this release reads {_FORMAT}")
    if not _HEADER.size <= size <= len(encoded):
        raise CorruptStateError(what, offset=0, expected=f"a header of {_HEADER.size} bytes", found=size)
    return RocksDbValue(encoded[size:], version, owner, created_ms, changed_ms, bool(is_ephemeral))


@final
class PulsarRocksDb:
    """The metadata of one standalone broker, as `PulsarNodes`; thread-safe.

    Args:
        directory: The metadata directory, the broker's ``--metadata-dir``.
        class_path: Where RocksDB's and BookKeeper's Java classes are; None for the environment's.
        call_timeout_s: How long a call waits for an answer.
        only_reads: Refuse every change.

    Raises:
        StoreError: There is no database, or Java or its classes are missing.
        StoreLockedError: A broker is running.
    """

    is_shared = False

    def __init__(
        self, directory: Path, *, class_path: str | None = None, call_timeout_s: float = 30.0, only_reads: bool = False
    ) -> None:
        if not (directory / "CURRENT").is_file():
            raise StoreError(f"{directory} is not the metadata directory of a standalone broker: it has no RocksDB")
        self.name = f"rocksdb:{directory}"
        self._only_reads, self._calling = only_reads, threading.Lock()
        self._refusal = ""
        self._requests, request_socket = socket.socketpair()
        self._requests.settimeout(call_timeout_s)
        self._replies = FrameReader(self._requests)
        jars = find_jars(class_path)
        with request_socket:
            self._child = start_child(_WORKER, request_socket)
        try:
            self._call("start", jars, str(directory.resolve()), only_reads)
        except StoreError as error:
            self.close()
            if "lock" in str(error).lower():
                raise StoreLockedError(f"{self.name}: a broker has it open: stop the broker first ({error})") from error
            raise

    def get(self, path: str) -> Versioned | None:
        """See `PulsarNodes.get`."""
        found = self._find(path)
        return None if found is None or found.is_ephemeral else Versioned(found.data, found.version)

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """See `PulsarNodes.put`."""
        found = self._expected(path, expected_version)
        now_ms = time.time_ns() // 1_000_000
        if found is None:
            value = RocksDbValue(data, 0, created_ms=now_ms, changed_ms=now_ms)
        else:
            value = replace(found, data=data, version=found.version + 1, changed_ms=now_ms)
        self._call("put", path.encode(), encode_value(value))
        return value.version

    def delete(self, path: str, *, expected_version: int) -> None:
        """See `PulsarNodes.delete`."""
        self._expected(path, expected_version)
        self._call("delete", path.encode())

    def children(self, path: str) -> list[str]:
        """See `PulsarNodes.children`."""
        prefix = f"{path.rstrip('/')}/".encode()
        found = self._call("keys", prefix)
        return sorted({key[len(prefix) :].split(b"/")[0].decode(errors="replace") for key in found})

    def create_ephemeral(self, path: str, data: bytes) -> bool:  # noqa: ARG002
        """See `PulsarNodes.create_ephemeral`: the lock of the database replaces ephemeral nodes."""
        return True

    def delete_ephemeral(self, path: str) -> None:
        """See `PulsarNodes.delete_ephemeral`."""

    def close(self) -> None:
        """See `PulsarNodes.close`."""
        with suppress(StoreError):
            self._call("close")
        self._refusal = self._refusal or "it is closed"
        self._requests.close()
        try:
            self._child.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _find(self, path: str) -> RocksDbValue | None:
        encoded = self._call("get", path.encode())
        return None if encoded is None else decode_value(encoded, what=f"{self.name}, {path}")

    def _expected(self, path: str, expected_version: int) -> RocksDbValue | None:
        """Return the value of a path, None if there is none, if it is at a version."""
        if self._only_reads:
            raise StoreError(f"{self.name}: it was opened to read; nothing was written")
        found = self._find(path)
        version = ABSENT if found is None else found.version
        if version != expected_version:
            raise VersionMismatchError(f"{path} is at version {version}, not {expected_version}")
        return found

    def _call(self, operation: str, *arguments: Any) -> Any:
        with self._calling:
            if self._refusal:
                raise StoreError(f"{self.name}: {self._refusal}")
            try:
                self._requests.sendall(frame((operation, arguments)))
                reply = self._replies.read()
            except OSError as error:
                reply, self._refusal = None, f"the Java process does not answer: {error}"
            if reply is None:
                self._refusal = self._refusal or "the Java process has ended, or did not answer in time; open it again"
                self._child.kill()
                raise StoreError(f"{self.name}: {self._refusal}")
        succeeded, result = reply
        if not succeeded:
            raise StoreError(f"{self.name}: {result}")
        return result


@final
class SealedLedgers:
    """The ledgers of a standalone broker that is down, and its bookie with it: only their sizes are known.

    See `ackstate.cursor.store.LedgerStore`. Entries cannot be read or appended, so a cursor's state must be in its
    record, as it is after the broker was stopped. It is written there, too.
    """

    def __init__(self, nodes: PulsarRocksDb) -> None:
        self._nodes = nodes

    def create(self, owner: str) -> int:
        """Refuse."""
        check_owner(owner)
        raise self._unavailable("a ledger cannot be created")

    def append(self, ledger_id: int, entry: bytes) -> int:  # noqa: ARG002
        """Refuse."""
        raise self._unavailable(f"ledger {ledger_id} cannot be appended to")

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        """Refuse, unless there is nothing to append."""
        if not entries:
            return []
        raise self._unavailable(f"ledger {entries[0][0]} cannot be appended to")

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """Refuse, unless there is nothing to read."""
        if first == end:
            return []
        raise self._unavailable(f"ledger {ledger_id} cannot be read")

    def last(self, ledger_id: int) -> int:
        """Return the last entry of a ledger that was closed.

        Raises:
            LedgerNotFoundError: There is no such ledger.
            UnknownSizeError: It was not closed, so that only its bookies know.
        """
        path = ledger_path(ledger_id)
        found = self._nodes.get(path)
        if found is None:
            raise LedgerNotFoundError(f"{self._nodes.name}: there is no ledger {ledger_id}")
        last = closed_ledger_last(found.data, what=path)
        if last is None:
            raise UnknownSizeError(
                f"{self._nodes.name}: ledger {ledger_id} was not closed, so only its bookie has its last entry"
            )
        return last

    def delete(self, ledger_id: int) -> None:
        """Refuse: the entries are on the bookie."""
        raise self._unavailable(f"ledger {ledger_id} cannot be deleted")

    def fence(self, ledger_id: int) -> int:
        """Refuse: see `read`."""
        raise self._unavailable(f"ledger {ledger_id} cannot be taken over")

    def owned_by(self, owner: str) -> list[int]:
        """Return none: it is known by the bookie's metadata of each ledger alone."""
        check_owner(owner)
        return []

    def owners(self) -> list[str]:
        """Return none."""
        return []

    def _unavailable(self, what: str) -> StoreError:
        return StoreError(
            f"{self._nodes.name}: {what}, because the bookie of a standalone broker is down with it; a cursor whose"
            " state is in a cursor ledger needs the broker: start and stop it, which moves up to 1,000 ranges into the"
            " metadata"
        )


def ledger_path(ledger_id: int) -> str:
    """Return the path of BookKeeper's metadata of a ledger.

    >>> ledger_path(12_345)
    '/ledgers/00/0001/L2345'

    Source: ``StringUtils.getHybridHierarchicalLedgerPath`` of Apache BookKeeper.
    """
    if ledger_id < 10**10:
        digits = f"{ledger_id:010d}"
        return f"/ledgers/{digits[:2]}/{digits[2:6]}/L{digits[6:]}"
    digits = f"{ledger_id:019d}"
    return f"/ledgers/{digits[:3]}/{digits[3:7]}/{digits[7:11]}/{digits[11:15]}/L{digits[15:]}"


def closed_ledger_last(data: bytes, *, what: str) -> int | None:
    """Return the last entry of a ledger, -1 if it is empty, by BookKeeper's metadata; None if it was not closed.

    Args:
        data: The metadata.
        what: Its name, for errors.

    Raises:
        CorruptStateError: The bytes are not the metadata of a ledger.
        UnsupportedVersionError: They have another format than BookKeeper 4.8 to 4.17.
    """
    if not data.startswith(b"BookieMetadataFormatVersion\t"):
        raise CorruptStateError(what, offset=0, expected="a ledger's metadata", found=repr(data[:30]))
    if not data.startswith(_LEDGER_MARK):
        raise UnsupportedVersionError(f"{what}: {data[:31]!r}; this release reads version 3")
    size, begin = read_varint(data, len(_LEDGER_MARK), len(data), what)
    end = begin + size
    if end > len(data):
        raise CorruptStateError(what, offset=begin, expected=f"{size} bytes", found=len(data) - begin)
    numbers = {field.number: field.value for field in loose_fields(data, begin, end, what=what)}
    return numbers.get(4, -1) if numbers.get(5) == _CLOSED else None


if TYPE_CHECKING:
    _nodes: type[PulsarNodes] = PulsarRocksDb
    _ledgers: type[LedgerStore] = SealedLedgers
