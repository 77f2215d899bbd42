"""What a `BookKeeperStore` has in ZooKeeper: its root, its values, and the index of its ledgers.

Each node holds a frame whose checksum covers the node's path. So a node that was damaged, cut, or written for another
place is recognised when it is read. `docs/wire-format.md` draws the tree and the frame. All paths here are below the
store's root.
"""

from __future__ import annotations

import struct
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, final
from urllib.parse import quote, unquote

import google_crc32c

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores.base import (
    ABSENT,
    MetadataStore,
    StoreError,
    Versioned,
    VersionMismatchError,
    check_owner,
    check_path,
    children_prefix,
)
from ackstate.stores.zookeeper_session import (
    Node,
    SessionOperation,
    ZooKeeperSession,
    check,
    create,
    delete,
    set_data,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

STORE = ""
"""The root itself."""
LEDGER_COUNTER = "/last-ledger"
DELETIONS = "/deletions"
METADATA = "/metadata"
LEDGERS = "/ledgers"
OWNERS = "/owners"
GARBAGE = "/garbage"
WRITERS = "/writers"
"""The directory of the writers of groups."""

_REQUEST_BYTES_MIN = 32 * 1024

_VERSION = 1
_MAGIC = b"ACKZ"
_HEADER = struct.Struct("<4sBBHI")  # magic, version, kind, reserved, body size
_CHECKSUM = struct.Struct("<I")
FRAME_BYTES = _HEADER.size + _CHECKSUM.size
"""The size of a frame without its body."""

_COUNTER = struct.Struct("<Q")


class NodeKind(IntEnum):
    """The kind of a node's contents."""

    DIRECTORY = 2
    COUNTER = 3
    VALUE = 6
    BOOKKEEPER_STORE = 7
    BOOKKEEPER_LEDGER = 8
    BOOKKEEPER_WRITER = 9


class LedgerStatus(IntEnum):
    """The status of a ledger. A deleted one is invisible to every caller; its entries are still being removed."""

    OPEN = 0
    FENCED = 1
    DELETED = 2


def ledger_path(ledger_id: int) -> str:
    """Return the path of a ledger's state."""
    return f"{LEDGERS}/{ledger_id:d}"


def owner_path(owner: str) -> str:
    """Return the directory that names an owner's ledgers."""
    return f"{OWNERS}/{_node_name(owner)}"


def value_path(path: str) -> str:
    """Return the path of the node with a metadata path's value; ``/`` is the directory of all values."""
    names = path.split("/")[1:] if path != "/" else []
    return METADATA + "".join(f"/{_node_name(name)}" for name in names)


def directories_above(value: str) -> list[str]:
    """Return the nodes between a value and `METADATA`, both excluded, the nearest first."""
    parts = value.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts) - 1, 2, -1)]


def name_in_metadata(node_name: str) -> str:
    """Return the name that a node below `METADATA` encodes.

    Raises:
        CorruptStateError: The node encodes no name.
    """
    return _unquoted(node_name, METADATA)


def owner_in_owners(node_name: str) -> str:
    """Return the owner that a node below `OWNERS` encodes.

    Raises:
        CorruptStateError: The node encodes no owner.
    """
    return "" if node_name == _node_name("") else _unquoted(node_name, OWNERS)


def _unquoted(node_name: str, directory: str) -> str:
    name = unquote(node_name)
    if _node_name(name) != node_name:
        raise CorruptStateError(directory, offset=0, expected="a name percent-encoded by us", found=node_name)
    return name


def _node_name(name: str) -> str:
    # ZooKeeper allows no empty name, and treats one or two dots as a file system does.
    return quote(name, safe="").replace(".", "%2E") if name in {".", ".."} else quote(name, safe="") or "%"


def existing(found: Node | None, path: str) -> Node:
    """Return a node that must exist.

    Raises:
        CorruptStateError: It does not exist.
    """
    if found is None:
        raise CorruptStateError(f"node {path or '/'}", offset=0, expected="a node", found="none")
    return found


def encode(kind: NodeKind, path: str, body: bytes = b"") -> bytes:
    """Return the bytes of a node, which are valid only at this path."""
    header = _HEADER.pack(_MAGIC, _VERSION, kind, 0, len(body))
    return b"".join((header, _CHECKSUM.pack(_checksum(path, header, body)), body))


def create_directory(path: str) -> SessionOperation:
    """Create a node that only holds other nodes."""
    return create(path, encode(NodeKind.DIRECTORY, path))


def kind_of(path: str, data: bytes) -> NodeKind:
    """Return the kind of a node.

    Raises:
        CorruptStateError: Its bytes are damaged, or were written to another path.
        UnsupportedVersionError: A newer release wrote them.
    """
    return _open_frame(path, data)[0]


def decode(kind: NodeKind, path: str, data: bytes) -> bytes:
    """Return the body of a node of the expected kind.

    Raises:
        CorruptStateError: The node is of another kind, its bytes are damaged, or they were written to another path.
        UnsupportedVersionError: A newer release wrote them.
    """
    found, body = _open_frame(path, data)
    if found is not kind:
        raise _damage(path, 5, f"kind {kind.name}", found.name)
    return body


def encode_counter(path: str, number: int) -> bytes:
    """Return the bytes of a counter's node."""
    return encode(NodeKind.COUNTER, path, _COUNTER.pack(number))


def decode_counter(path: str, data: bytes) -> int:
    """Return the number in a counter's node; errors as `decode`."""
    body = decode(NodeKind.COUNTER, path, data)
    if len(body) != _COUNTER.size:
        raise _damage(path, FRAME_BYTES, f"{_COUNTER.size} bytes", f"{len(body)} bytes")
    number: int = _COUNTER.unpack(body)[0]
    return number


def _open_frame(path: str, data: bytes) -> tuple[NodeKind, bytes]:
    if len(data) < FRAME_BYTES:
        raise _damage(path, len(data), f"a frame of at least {FRAME_BYTES} bytes", f"{len(data)} bytes")
    magic, version, kind, reserved, size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise _damage(path, 0, _MAGIC, magic)
    if version > _VERSION:
        raise UnsupportedVersionError(
            f"node {path or '/'} has format version {version}; this release reads up to version {_VERSION}"
        )
    body = data[FRAME_BYTES:]
    if size != len(body):
        raise _damage(path, 8, f"a body of {size} bytes", f"{len(body)} bytes")
    (stored,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    computed = _checksum(path, data[: _HEADER.size], body)
    if stored != computed:
        raise _damage(path, _HEADER.size, f"CRC-32C {computed:#010x}", f"{stored:#010x}")
    if version != _VERSION or reserved or kind not in set(NodeKind):
        raise _damage(path, 4, f"version {_VERSION}, a known kind, 0", (version, kind, reserved))
    return NodeKind(kind), body


def _checksum(path: str, header: bytes, body: bytes) -> int:
    checksum: int = google_crc32c.value(path.encode())
    for part in (header, body):
        checksum = google_crc32c.extend(checksum, part)
    return checksum


def _damage(path: str, offset: int, expected: object, found: object) -> CorruptStateError:
    return CorruptStateError(f"node {path or '/'}", offset=offset, expected=expected, found=found)


def connect(  # noqa: PLR0913 - the store's own arguments, passed on by name
    hosts: str,
    *,
    root: str,
    session_timeout_s: float,
    call_timeout_s: float,
    request_bytes_max: int,
    client_options: Mapping[str, Any] | None,
) -> ZooKeeperSession:
    """Begin a session if the arguments, which are those of the store, are valid.

    Raises:
        StoreError: No server answered in time.
        ValueError: An argument is invalid.
    """
    check_path(root)
    if "/" in hosts:
        raise ValueError(f"hosts must be host:port pairs without a path, got {hosts!r}; the path goes into root")
    if not (session_timeout_s > 0 and call_timeout_s > 0):
        raise ValueError(f"timeouts must be positive, got {session_timeout_s} s and {call_timeout_s} s")
    if request_bytes_max < _REQUEST_BYTES_MIN:
        raise ValueError(f"request_bytes_max must be at least {_REQUEST_BYTES_MIN}, got {request_bytes_max}")
    return ZooKeeperSession(
        hosts,
        root=root,
        session_timeout_s=session_timeout_s,
        call_timeout_s=call_timeout_s,
        request_bytes_max=request_bytes_max,
        client_options=client_options or {},
    )


@contextmanager
def closed_on_error(close: Callable[[], object]) -> Iterator[None]:
    """Close a session or a store if the block fails."""
    try:
        yield
    except BaseException:
        close()
        raise


def check_store(session: ZooKeeperSession, name: str) -> None:
    """Refuse a root that is not a store.

    Raises:
        StoreError: It is missing or empty.
        CorruptStateError: Its bytes are damaged.
        UnsupportedVersionError: A newer release wrote it.
    """
    (found,) = session.read(STORE)
    if found is None or not found.data:
        state = "missing" if found is None else "empty"
        raise StoreError(f"{name} is not an ackstate store: its node is {state}")
    decode(NodeKind.BOOKKEEPER_STORE, STORE, found.data)


def prepare(session: ZooKeeperSession, root: str) -> None:
    """Create the nodes of a store at an empty root, and refuse a root with foreign nodes.

    Raises:
        StoreError: The root has children and no data.
        CorruptStateError: The root's bytes are damaged.
        UnsupportedVersionError: A newer release wrote it.
    """
    (found,) = session.read(STORE)
    if found is None:
        session.make_root()
    session.settle(lambda: _make_if_empty(session, root))


def _make_if_empty(session: ZooKeeperSession, root: str) -> None:
    found = existing(session.read(STORE)[0], STORE)
    if found.data:
        decode(NodeKind.BOOKKEEPER_STORE, STORE, found.data)
        return
    if found.child_count:
        raise StoreError(f"{root} is not an ackstate store: it has children and no data")
    directories = (DELETIONS, METADATA, LEDGERS, OWNERS, GARBAGE, WRITERS)
    session.commit([
        set_data(STORE, encode(NodeKind.BOOKKEEPER_STORE, STORE), found.version),
        create(LEDGER_COUNTER, encode_counter(LEDGER_COUNTER, 0)),
        *(create_directory(path) for path in directories),
    ])  # fmt: skip


@final
class ZooKeeperMetadata:
    """The values of one store. Their versions are transaction numbers, so they rise over the whole store.

    A node's own version restarts at 0 when the node is deleted and created again, and the servers compare only that
    version. So every delete also changes another node. Each transaction here reads that node first and names its
    version, so no delete can happen in between unseen.
    """

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session

    def get(self, path: str) -> Versioned | None:
        check_path(path)
        node = value_path(path)
        (found,) = self._session.read(node)
        if found is None or not _holds_value(node, found):
            return None
        return Versioned(decode(NodeKind.VALUE, node, found.data), found.changed_zxid)

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """See `MetadataStore.put`.

        Raises:
            PayloadTooLargeError: Value and path do not fit into one request.
        """
        check_path(path)
        node = value_path(path)
        encoded = encode(NodeKind.VALUE, node, bytes(memoryview(data)))
        return self._session.settle(lambda: self._try_put(path, encoded, expected_version))

    def delete(self, path: str, *, expected_version: int) -> None:
        check_path(path)
        self._session.settle(lambda: self._try_delete(path, expected_version))

    def children(self, path: str) -> list[str]:
        children_prefix(path)
        names = self._session.children(value_path(path)) or []
        return sorted(map(name_in_metadata, names))

    def _try_put(self, path: str, encoded: bytes, expected_version: int) -> int:
        node = value_path(path)
        above = directories_above(node)
        deletions, found, *found_above = self._session.read(DELETIONS, node, *above)
        _expect(path, found, expected_version)
        operations = [check(DELETIONS, existing(deletions, DELETIONS).version)]
        if found is None:
            missing = [directory for directory, there in zip(above, found_above, strict=True) if there is None]
            operations += [create_directory(directory) for directory in reversed(missing)]
            # Created empty and then set, because only setting returns the transaction's number.
            operations += [create(node, b""), set_data(node, encoded, 0)]
        else:
            operations.append(set_data(node, encoded, found.version))
        version: int = self._session.commit(operations)[-1].mzxid
        return version

    def _try_delete(self, path: str, expected_version: int) -> None:
        node = value_path(path)
        above = directories_above(node)
        deletions, found, *found_above = self._session.read(DELETIONS, node, *above)
        _expect(path, found, expected_version)
        if found is None or expected_version == ABSENT:
            raise VersionMismatchError(f"{path} holds no value to delete")
        version = existing(deletions, DELETIONS).version
        operations = [set_data(DELETIONS, encode(NodeKind.DIRECTORY, DELETIONS), version)]
        if found.child_count:
            operations.append(set_data(node, encode(NodeKind.DIRECTORY, node), found.version))
        else:
            operations.append(delete(node, found.version))
            operations += _deletions_of_the_empty(above, found_above)
        self._session.commit(operations)


def _deletions_of_the_empty(paths: list[str], found: list[Node | None]) -> Iterator[SessionOperation]:
    """Yield the deletions of directories that lead only to a value that is being deleted, nearest first."""
    for path, node in zip(paths, found, strict=True):
        if node is None or node.child_count > 1 or _holds_value(path, node):
            return
        yield delete(path, node.version)


def _holds_value(path: str, found: Node) -> bool:
    return kind_of(path, found.data) is NodeKind.VALUE


def _expect(path: str, found: Node | None, version: int) -> None:
    holds_value = found is not None and _holds_value(value_path(path), found)
    found_version = found.changed_zxid if found is not None and holds_value else ABSENT
    if found_version != version:
        raise VersionMismatchError(f"{path} is at version {found_version}, not {version}")


@final
class LedgerIndex:
    """Ids and owners of ledgers; the caller commits the operations together with those on the ledger's own node."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session

    def additions(self, owners: Sequence[str]) -> tuple[list[int], list[SessionOperation]]:
        """Return a new id for a ledger of each owner, above every one before, and the operations that register them."""
        directories = [*dict.fromkeys(map(owner_path, owners))]
        counter, *found = self._session.read(LEDGER_COUNTER, *directories)
        counter = existing(counter, LEDGER_COUNTER)
        first = decode_counter(LEDGER_COUNTER, counter.data) + 1
        ledger_ids = [*range(first, first + len(owners))]
        encoded = encode_counter(LEDGER_COUNTER, first + len(owners) - 1)
        operations = [set_data(LEDGER_COUNTER, encoded, counter.version)]
        missing = [directory for directory, node in zip(directories, found, strict=True) if node is None]
        operations += map(create_directory, missing)
        operations += [
            create_directory(f"{owner_path(owner)}/{ledger_id}")
            for ledger_id, owner in zip(ledger_ids, owners, strict=True)
        ]
        return ledger_ids, operations

    def removal(self, ledger_id: int, owner: str) -> list[SessionOperation]:
        """Return the operations that make a ledger garbage."""
        directory = owner_path(owner)
        (owned,) = self._session.read(directory)
        operations = [create_directory(garbage_path(ledger_id)), delete(f"{directory}/{ledger_id}")]
        if existing(owned, directory).child_count == 1:
            operations.append(delete(directory))
        return operations

    def garbage(self) -> list[int]:
        """Return the ledgers whose deletion has not finished."""
        return self._numbers(GARBAGE)

    def owned_by(self, owner: str) -> list[int]:
        check_owner(owner)
        return self._numbers(owner_path(owner))

    def owners(self) -> list[str]:
        return sorted(map(owner_in_owners, self._session.children(OWNERS) or []))

    def _numbers(self, path: str) -> list[int]:
        names: Sequence[str] = self._session.children(path) or []
        return sorted(_number(name, path) for name in names)


def garbage_path(ledger_id: int) -> str:
    """Return the node that marks an unfinished deletion."""
    return f"{GARBAGE}/{ledger_id}"


def _number(name: str, path: str) -> int:
    if not (name.isascii() and name.isdecimal()):
        raise CorruptStateError(f"node {path}", offset=0, expected="numbers of ledgers", found=name)
    return int(name)


if TYPE_CHECKING:
    _: type[MetadataStore] = ZooKeeperMetadata
