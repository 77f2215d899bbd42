"""Small values in ZooKeeper, for a `BookKeeperStore` and for Pulsar's own layout, and the session that both use.

A write is sent once, only while there is a connection, and never after its call has returned (kazoo repeats requests
only by its `retry`, which is not used here): whether one without an answer has happened is unknown. Reads are sent
again after a lost connection.

An unanswered write cannot take effect after a later read of the same session: when a session reconnects, the server
drops the remaining requests of its old connection. Each read follows a `sync` on the same connection, because a
follower may lag, and a value that another process has written must not look absent.

A node of ours holds a frame whose checksum covers the node's path, so that a node that was damaged, cut, or written for
another place is recognised. `docs/wire-format.md` draws the tree and the frame. Paths here are below the store's root.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
import time
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final
from urllib.parse import quote, unquote

import google_crc32c
from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    ConfigurationError,
    ConnectionLoss,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.protocol.serialization import Transaction
from kazoo.protocol.states import KazooState

from ackstate.errors import CorruptStateError, UnsupportedVersionError
from ackstate.stores.base import (
    ABSENT,
    DamagedValueError,
    MetadataStore,
    PayloadTooLargeError,
    StoreError,
    Versioned,
    check_path,
    other_version,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_Result = TypeVar("_Result")

_LOG = logging.getLogger("ackstate.zookeeper")
_LOG.addHandler(logging.NullHandler())  # Without a handler, each attempt to connect would be a line of stderr.
REQUEST_BYTES_MAX = 1_000_000
"""The largest request that a server accepts, its ``jute.maxbuffer``, less some reserve."""
_REQUEST_BYTES_MIN = 32 * 1024
# How often a call is retried because others were faster. Each lost race is the progress of another call, so the limit
# is reached only if something is wrong.
_ATTEMPTS_MAX = 200
# kazoo wakes its sender with one byte per request through a socket pair, which has room for some 270.
_REQUESTS_AT_ONCE = 64
# kazoo waits for the answer to a connection as long as the session lasts, divided by the number of servers. A server
# that loads its data may accept a connection and forget it (seen in 3.9.5); one attempt must not cost the session.
_CONNECTIONS_PER_SESSION = 3
_REQUEST_BYTES = 12  # The length of a request, its number and its type.

STORE = ""
"""The root itself."""
DELETIONS = "/deletions"
METADATA = "/metadata"
_VERSION = 2
_MAGIC = b"ACKZ"
_HEADER = struct.Struct("<4sBBHI")  # magic, version, kind, reserved, body size
_CHECKSUM = struct.Struct("<I")
FRAME_BYTES = _HEADER.size + _CHECKSUM.size
"""The size of a frame without its body."""


class LostRaceError(Exception):
    """A transaction found a state other than the expected one; it did nothing, and may be built again and retried."""


class _ConnectionLostError(StoreError):
    """The connection was lost before the answer came."""


class Node(NamedTuple):
    """A node as read."""

    data: bytes
    version: int  # counts its changes from 0; restarts at 0 if the node is deleted and created again
    changed_zxid: int  # the transaction that last changed its data: never the same for two changes of one path
    child_count: int  # the number of nodes directly below it


# One step of a transaction: the name of a method of kazoo's transaction, a path, and its other arguments.
# ("check", path, version): the node is at this version. ("create", path, data): it must not exist, but its parent must.
# ("set_data", path, data, version). ("delete", path) at any version, or ("delete", path, version): without children.
Step = tuple[Any, ...]


@final
class ZooKeeperSession:
    """One session with a cluster, which refuses calls once it is closed or lost; thread-safe."""

    def __init__(  # noqa: PLR0913 - the store's own arguments, passed on by name
        self,
        hosts: str,
        *,
        root: str = "",
        session_timeout_s: float = 30.0,
        call_timeout_s: float = 30.0,
        request_bytes_max: int = REQUEST_BYTES_MAX,
        client_options: Mapping[str, Any] | None = None,
        only_reads: bool = False,
    ) -> None:
        if root:
            check_path(root)
        if "/" in hosts:
            raise ValueError(f"hosts must be host:port pairs without a path, got {hosts!r}; the path goes into root")
        if not (session_timeout_s > 0 and call_timeout_s > 0):
            raise ValueError(f"timeouts must be positive, got {session_timeout_s} s and {call_timeout_s} s")
        if request_bytes_max < _REQUEST_BYTES_MIN:
            raise ValueError(f"request_bytes_max must be at least {_REQUEST_BYTES_MIN}, got {request_bytes_max}")
        self.name = f"{hosts}{root}"
        self._root = root  # the prefix of every path; empty for none
        self._call_timeout_s = call_timeout_s  # how long a call waits for a connection, and again for an answer
        self._request_bytes_max = request_bytes_max
        self._only_reads = only_reads
        self._refusal = ""  # Why every call is refused; empty while the session is usable.
        self._usable = threading.Event()  # Set while there is a connection, and permanently after a refusal.
        self._stopping = threading.Lock()
        repeated_hosts = ",".join([hosts] * math.ceil(_CONNECTIONS_PER_SESSION / (hosts.count(",") + 1)))
        options = {
            "connection_retry": {"max_tries": -1, "delay": 0.05, "max_delay": 1.0},
            "logger": _LOG,
            **(client_options or {}),
        }
        try:
            self._client = KazooClient(repeated_hosts, timeout=session_timeout_s, **options)
        except ConfigurationError as error:
            # Only the names of the options: their values may include passwords.
            raise ValueError(f"client_options {sorted(client_options or {})}: {error}") from error
        self._client.add_listener(self._on_state)
        try:
            self._client.start(timeout=call_timeout_s)
        except Exception as error:
            self.close()
            raise StoreError(f"{self.name}: no server answered within {call_timeout_s} s") from error

    def make_root(self) -> None:
        """Create the root's node, without data, and its missing parents."""
        names = self._root.split("/")
        for end in range(2, len(names) + 1):
            self._exchange([partial(self._client.create_async, "/".join(names[:end]), b"")])

    def read(self, *paths: str) -> list[Node | None]:
        """Return the current nodes, read in this order but not at one instant; None for a missing node."""
        requests = [partial(self._client.get_async, self._root + path) for path in paths]
        answers = self._read(requests)
        return [answer and Node(answer[0], answer[1].version, answer[1].mzxid, answer[1].numChildren)
                for answer in answers]  # fmt: skip

    def children(self, path: str) -> list[str]:
        """Return the names of the nodes below a node, unordered; none if the node does not exist."""
        (names,) = self._read([partial(self._client.get_children_async, self._root + path)])
        return list(names or [])

    def commit(self, steps: Sequence[Step]) -> list[Any]:
        """Execute steps, all or none, durably; `LostRaceError` if a node was in another state."""
        # After a lost connection (`StoreError`) it is unknown whether they were executed.
        transaction = self._client.transaction()
        for verb, path, *arguments in steps:
            getattr(transaction, verb)(self._root + path, *arguments)
        size_bytes = _REQUEST_BYTES + len(Transaction(transaction.operations).serialize())
        if size_bytes > self._request_bytes_max:
            raise PayloadTooLargeError(
                f"{self.name}: a request must have at most {self._request_bytes_max} bytes, got {size_bytes};"
                " nothing was sent"
            )
        (results,) = self._exchange([transaction.commit_async])
        if results is None:
            raise StoreError(f"{self.name}: the servers refuse to carry out a transaction")
        for result in results:
            # These two are the errors of the operations before and after the one that failed.
            if not isinstance(result, Exception) or isinstance(result, (RolledBackError, RuntimeInconsistency)):
                continue
            if isinstance(result, (BadVersionError, NoNodeError, NodeExistsError, NotEmptyError)):
                raise LostRaceError from result
            raise StoreError(f"{self.name}: {result!r}; nothing was written") from result
        return list(results)

    def settle(self, attempt: Callable[[], _Result]) -> _Result:
        """Call a mutating function until it loses no race, and return its result."""
        self.check_writable()
        for _ in range(_ATTEMPTS_MAX):
            with suppress(LostRaceError):
                return attempt()
        raise StoreError(f"{self.name}: others were faster {_ATTEMPTS_MAX} times; nothing was written")

    def create_ephemeral(self, path: str, data: bytes) -> bool:
        """Create a node that disappears with the session, and its missing parents; return False if it exists."""
        # After a lost connection (`StoreError`) it is unknown whether it was created.
        self.check_writable()
        request = partial(self._client.create_async, self._root + path, data, ephemeral=True, makepath=True)
        (created,) = self._exchange([request])
        return created is not None

    def delete_ephemeral(self, path: str) -> None:
        """Delete a node of `create_ephemeral`; no-op if it is gone, as it is after a lost session."""
        with suppress(StoreError):
            self._exchange([partial(self._client.delete_async, self._root + path)])

    def check_usable(self) -> None:
        """Raise `StoreError` if the session was closed or lost."""
        if self._refusal:
            raise StoreError(f"{self.name}: {self._refusal}")

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection at present, and the session was neither closed nor lost."""
        return self._usable.is_set() and not self._refusal

    def check_writable(self) -> None:
        """Raise `StoreError` if changes are refused, or the session was closed or lost."""
        self.check_usable()
        if self._only_reads:
            raise StoreError(f"{self.name}: the store was opened to read; nothing was written")

    def close(self) -> None:
        """End the session; no-op if closed."""
        self._refuse("the store is closed")
        with self._stopping:
            # If this fails, the session still ends after its timeout.
            with suppress(Exception):
                self._client.stop()
            with suppress(Exception):
                self._client.close()

    def _on_state(self, state: str) -> None:
        # kazoo calls this from its connection's thread, which must not wait.
        if state == KazooState.CONNECTED:
            self._usable.set()
        elif state == KazooState.SUSPENDED:
            if not self._refusal:
                self._usable.clear()
        else:
            self._refuse("the session was lost; close the store and open it again")

    def _refuse(self, refusal: str) -> None:
        self._refusal = self._refusal or refusal
        self._usable.set()

    def _read(self, requests: Sequence[Callable[[], Any]]) -> list[Any]:
        deadline_s = time.monotonic() + self._call_timeout_s
        sync = partial(self._client.sync_async, self._root or "/")
        while True:
            try:
                return self._exchange([sync, *requests])[1:]
            except _ConnectionLostError:
                if time.monotonic() >= deadline_s:
                    raise

    def _exchange(self, requests: Sequence[Callable[[], Any]]) -> list[Any]:
        """Send requests in order, several at once, and return the answers."""
        # The answer is None if a node to read is missing, or a node to create exists.
        answers: list[Any] = []
        for begin in range(0, len(requests), _REQUESTS_AT_ONCE):
            connected = self._usable.wait(self._call_timeout_s)
            self.check_usable()
            if not connected:
                raise StoreError(f"{self.name}: no connection for {self._call_timeout_s} s; nothing was sent")
            sent = [request() for request in requests[begin : begin + _REQUESTS_AT_ONCE]]
            deadline_s = time.monotonic() + self._call_timeout_s
            answers += [self._answer(result, deadline_s) for result in sent]
        return answers

    def _answer(self, result: Any, deadline_s: float) -> Any:
        try:
            return result.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except (NoNodeError, NodeExistsError):
            return None
        except self._client.handler.timeout_exception as error:
            # No later request is sent: the caller may soon check whether this call happened.
            self._refuse("a call was not answered; close the store and open it again")
            self.close()
            raise StoreError(f"{self.name}: no answer within {self._call_timeout_s} s") from error
        except ConnectionLoss as error:
            raise _ConnectionLostError(f"{self.name}: the connection was lost before the answer came") from error
        except Exception as error:
            self.check_usable()
            raise StoreError(f"{self.name}: {error!r}") from error


class NodeKind(IntEnum):
    """The kind of a node's contents."""

    DIRECTORY = 2
    VALUE = 6
    BOOKKEEPER_STORE = 7
    BOOKKEEPER_LEDGER = 8


def encode(kind: NodeKind, path: str, body: bytes = b"") -> bytes:
    """Return the bytes of a node, which are valid only at this path."""
    header = _HEADER.pack(_MAGIC, _VERSION, kind, 0, len(body))
    return b"".join((header, _CHECKSUM.pack(_checksum(path, header, body)), body))


def decode(path: str, data: bytes) -> tuple[NodeKind, bytes]:
    """Return the kind and the body of a node; `CorruptStateError` if damaged or written to another path."""
    if len(data) < FRAME_BYTES:
        raise node_damage(path, len(data), f"a frame of at least {FRAME_BYTES} bytes", f"{len(data)} bytes")
    magic, version, kind, reserved, size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise node_damage(path, 0, _MAGIC, magic)
    if version != _VERSION:
        raise UnsupportedVersionError(
            f"node {path or '/'} has format version {version}; this release reads version {_VERSION}"
        )
    body = data[FRAME_BYTES:]
    if size != len(body):
        raise node_damage(path, 8, f"a body of {size} bytes", f"{len(body)} bytes")
    (stored,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    computed = _checksum(path, data[: _HEADER.size], body)
    if stored != computed:
        raise node_damage(path, _HEADER.size, f"CRC-32C {computed:#010x}", f"{stored:#010x}")
    if reserved or kind not in set(NodeKind):
        raise node_damage(path, 5, "a known kind, 0", (kind, reserved))
    return NodeKind(kind), body


def decode_as(kind: NodeKind, path: str, data: bytes) -> bytes:
    """Return the body of a node of the expected kind; errors as `decode`, and for a node of another kind."""
    found, body = decode(path, data)
    if found is not kind:
        raise node_damage(path, 5, f"kind {kind.name}", found.name)
    return body


def create_directory(path: str) -> Step:
    """Create a node that only holds other nodes."""
    return "create", path, encode(NodeKind.DIRECTORY, path)


def existing(found: Node | None, path: str) -> Node:
    """Return a node that must exist, else `CorruptStateError` is raised."""
    if found is None:
        raise node_damage(path, 0, "a node", "none")
    return found


def node_damage(path: str, offset: int, expected: object, found: object) -> CorruptStateError:
    """Return the error for a node that is not as it was written."""
    return CorruptStateError(f"node {path or '/'}", offset=offset, expected=expected, found=found)


def _checksum(path: str, header: bytes, body: bytes) -> int:
    checksum: int = google_crc32c.value(path.encode())
    for part in (header, body):
        checksum = google_crc32c.extend(checksum, part)
    return checksum


def node_name(name: str) -> str:
    """Return a name, such as an owner, as a node has it; it may be empty."""
    # ZooKeeper allows no empty name, and treats one or two dots as a file system does.
    return quote(name, safe="").replace(".", "%2E") if name in {".", ".."} else quote(name, safe="") or "%"


def name_of_node(node: str, directory: str) -> str:
    """Return the name that a node in a directory has; `CorruptStateError` if it is none of `node_name`."""
    name = "" if node == "%" else unquote(node)
    if node_name(name) != node:
        raise node_damage(directory, 0, "a name percent-encoded by us", node)
    return name


class ZooKeeperNodes(MetadataStore):
    """The nodes of a cluster as values, at their own paths, where others may change them, too."""

    # The version of a value is the number of the transaction that wrote it, which never repeats. The servers compare
    # nodes' own versions. `put` refuses a value whose parent does not exist with `StoreError`.

    def __init__(self, session: ZooKeeperSession) -> None:
        super().__init__()
        self.session = session
        self.name = session.name  # the cluster, for errors

    def get_many(self, paths: Sequence[str]) -> list[Versioned | None]:
        """Return values at their own paths as `get` does, many in one round trip; not at one instant."""
        return [found and Versioned(found.data, found.changed_zxid) for found in self.session.read(*paths)]

    def _get(self, path: str) -> Versioned | None:
        node = self._node(path)
        (found,) = self.session.read(node)
        if found is None:
            return None
        try:
            data = self._data(node, found)
        except CorruptStateError as error:
            raise DamagedValueError(error, found.changed_zxid) from error
        return None if data is None else Versioned(data, found.changed_zxid)

    def _put(self, path: str, data: bytes, expected_version: int) -> int:
        return self.session.settle(lambda: self._try_put(path, data, expected_version))

    def _delete(self, path: str, expected_version: int) -> None:
        self.session.settle(lambda: self._try_delete(path, expected_version))

    def _children(self, path: str) -> list[str]:
        return self.session.children(path)

    def _node(self, path: str) -> str:
        return path

    def _data(self, node: str, found: Node) -> bytes | None:  # noqa: ARG002 - for a store of ours
        """Return the value in a node, None if it has none."""
        return found.data

    def _try_put(self, path: str, data: bytes, expected_version: int) -> int:
        (found,) = self.session.read(path)
        self._expect(path, found, expected_version)
        parent = path.rpartition("/")[0]
        if found is None and parent and self.session.read(parent) == [None]:
            raise StoreError(f"{self.name}: there is nothing above {path}; nothing was written")
        return self._commit_put(path, found, data)

    def _commit_put(self, node: str, found: Node | None, data: bytes, *before: Step) -> int:
        """Put a value where a look has found a node, after other operations, and return its version."""
        # Created empty and then set, because only setting returns the transaction's number.
        steps: list[Step] = [("create", node, b"")] if found is None else []
        steps.append(("set_data", node, data, 0 if found is None else found.version))
        version: int = self.session.commit([*before, *steps])[-1].mzxid
        return version

    def _try_delete(self, path: str, expected_version: int) -> None:
        (found,) = self.session.read(path)
        self._expect(path, found, expected_version)
        self.session.commit([("delete", path, existing(found, path).version)])

    def _expect(self, path: str, found: Node | None, version: int) -> None:
        found_version = ABSENT if found is None else found.changed_zxid
        with suppress(CorruptStateError):  # A damaged value has a version, and can be replaced.
            if found is not None and self._data(self._node(path), found) is None:
                found_version = ABSENT
        if found_version != version:
            raise other_version(path, found_version, version)


@final
class ZooKeeperMetadata(ZooKeeperNodes):
    """The values of one store of ours, below `METADATA`, in frames.

    A node's own version restarts at 0 when the node is deleted and created again. So every delete also changes another
    node. Each transaction here reads that node first and names its version, so no delete can happen in between unseen.
    """

    def _children(self, path: str) -> list[str]:
        return [name_of_node(name, METADATA) for name in self.session.children(self._node(path))]

    def _node(self, path: str) -> str:
        return METADATA + "".join(f"/{node_name(name)}" for name in path.split("/")[1:] if path != "/")

    def _data(self, node: str, found: Node) -> bytes | None:
        kind, body = decode(node, found.data)
        if kind not in {NodeKind.DIRECTORY, NodeKind.VALUE}:
            raise node_damage(node, 5, f"kind {NodeKind.VALUE.name}", kind.name)
        return body if kind is NodeKind.VALUE else None

    def _try_put(self, path: str, data: bytes, expected_version: int) -> int:
        node = self._node(path)
        above = _directories_above(node)
        deletions, found, *found_above = self.session.read(DELETIONS, node, *above)
        self._expect(path, found, expected_version)
        missing = [directory for directory, there in zip(above, found_above, strict=True) if there is None]
        guard = "check", DELETIONS, existing(deletions, DELETIONS).version
        directories = map(create_directory, reversed(missing))
        return self._commit_put(node, found, encode(NodeKind.VALUE, node, data), guard, *directories)

    def _try_delete(self, path: str, expected_version: int) -> None:
        node = self._node(path)
        above = _directories_above(node)
        deletions, found, *found_above = self.session.read(DELETIONS, node, *above)
        self._expect(path, found, expected_version)
        found, version = existing(found, node), existing(deletions, DELETIONS).version
        steps: list[Step] = [("set_data", DELETIONS, encode(NodeKind.DIRECTORY, DELETIONS), version)]
        if found.child_count:
            steps.append(("set_data", node, encode(NodeKind.DIRECTORY, node), found.version))
        else:
            steps.append(("delete", node, found.version))
            # With the directories, nearest first, that lead only to this value.
            for directory, there in zip(above, found_above, strict=True):
                if there is None or there.child_count > 1 or self._data(directory, there) is not None:
                    break
                steps.append(("delete", directory, there.version))
        self.session.commit(steps)


def _directories_above(node: str) -> list[str]:
    """Return the nodes between a value and `METADATA`, both excluded, the nearest first."""
    parts = node.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts) - 1, 2, -1)]
