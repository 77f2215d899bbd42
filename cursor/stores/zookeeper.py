"""A store in a ZooKeeper cluster, for ZooKeeper 3.5 or newer through kazoo: ``pip install 'ackstate[zookeeper]'``.

Many processes may open one root at the same time; the unit of ownership is a ledger, which is taken over by `fence`.
Each append is a transaction that names the version of the ledger's node, and a fence changes that node. So the servers
refuse a former owner's append, however late it arrives.

Durability. ZooKeeper syncs its log on a majority of the servers before it answers (``forceSync``, on by default). A
call that loses its connection raises `StoreError`: it may or may not have happened. Once a later call of the same store
has returned, it will not happen any more. The client reconnects automatically; calls wait for the connection, up to a
limit. After the session is lost, or a call gets no answer, every call is refused until the store is opened again.

Entries of any size are stored in chunks. An `append_all` that fits into one request is one transaction. A larger one
first writes its chunks beyond the end of the ledgers, where no caller reads, and one transaction then moves the ends:
again all or nothing. A value of the metadata must fit into one request.

Names and bytes of the nodes: `ackstate.cursor.stores.zookeeper_nodes`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, final

from ackstate.cursor.store import (
    ABSENT,
    StoreError,
    Versioned,
    VersionMismatchError,
    check_path,
    children_prefix,
)
from ackstate.cursor.stores import zookeeper_nodes as nodes
from ackstate.cursor.stores.zookeeper_group import write_concurrently
from ackstate.cursor.stores.zookeeper_ledgers import CHUNK_ROOM_BYTES, ZooKeeperLedgers
from ackstate.cursor.stores.zookeeper_nodes import NodeKind
from ackstate.cursor.stores.zookeeper_session import (
    Node,
    SessionOperation,
    ZooKeeperSession,
    check,
    create,
    create_directory,
    delete,
    existing,
    set_data,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.cursor.writes import GroupStore, Write
    from ackstate.errors import AckStateError


@final
class ZooKeeperStore:
    """A store below one node of a ZooKeeper cluster; thread-safe, but not usable across a fork.

    Appending costs one round trip and one sync of the servers, reading two round trips. Changes by other processes are
    visible at once.

    Args:
        hosts: ``host:port`` pairs separated by commas; a path belongs into `root`.
        root: The path of the store's node. A missing one is created; an empty one becomes a store.
        session_timeout_s: How long the servers keep the session without hearing from it. The servers may bound it.
        call_timeout_s: How long a call waits for a connection, and again for an answer.
        request_bytes_max: The largest request that is sent. The servers drop the connection at a request larger than
            their ``jute.maxbuffer``, 1,048,575 bytes by default.
        client_options: More arguments for `kazoo.client.KazooClient`: ``auth_data``, ``default_acl``, ``use_ssl``, ...

    Raises:
        StoreError: No server answered in time, or the node is not a store; nothing in it was changed.
        CorruptStateError: The store holds damaged bytes.
        UnsupportedVersionError: A newer release wrote the store; nothing was changed.
        ValueError: An argument is invalid.
    """

    def __init__(  # noqa: PLR0913 - settings are named, not packed
        self,
        hosts: str,
        *,
        root: str = "/ackstate",
        session_timeout_s: float = 10.0,
        call_timeout_s: float = 30.0,
        request_bytes_max: int = 1_000_000,
        client_options: Mapping[str, Any] | None = None,
    ) -> None:
        session = _connect(
            hosts,
            root=root,
            session_timeout_s=session_timeout_s,
            call_timeout_s=call_timeout_s,
            request_bytes_max=request_bytes_max,
            client_options=client_options,
        )
        self._use(session)
        with _closed_on_error(session):
            _prepare(session, root)
            self._ledgers.finish_deletions()

    @classmethod
    def open_to_read(  # noqa: PLR0913 - the constructor's arguments
        cls,
        hosts: str,
        *,
        root: str = "/ackstate",
        session_timeout_s: float = 10.0,
        call_timeout_s: float = 30.0,
        request_bytes_max: int = 1_000_000,
        client_options: Mapping[str, Any] | None = None,
    ) -> ZooKeeperStore:
        """Open an existing store for reading: no node is ever created, changed or deleted.

        Other processes may write to it at the same time; their changes are visible at once. Every mutating call raises
        `StoreError`, even if it would change nothing.

        Args:
            hosts: As for the constructor, like all that follow.
            root: The path of the store's node.
            session_timeout_s: How long the servers keep the session.
            call_timeout_s: How long a call waits for a connection, and again for an answer.
            request_bytes_max: Ignored; accepted so that the same settings serve both.
            client_options: More arguments for `kazoo.client.KazooClient`.

        Raises:
            StoreError: No server answered in time, or there is no store at the root.
            CorruptStateError: The root's node holds damaged bytes.
            UnsupportedVersionError: A newer release wrote the store.
            ValueError: An argument is invalid.
        """
        session = _connect(
            hosts,
            root=root,
            session_timeout_s=session_timeout_s,
            call_timeout_s=call_timeout_s,
            request_bytes_max=request_bytes_max,
            client_options=client_options,
        )
        session.refuse_changes()
        with _closed_on_error(session):
            _check_ours(session, f"{hosts}{root}")
        store = cls.__new__(cls)
        store._use(session)
        return store

    def _use(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._ledgers = ZooKeeperLedgers(session)
        self._metadata = _ZooKeeperMetadata(session)

    @property
    def ledgers(self) -> ZooKeeperLedgers:
        """The logs."""
        return self._ledgers

    @property
    def metadata(self) -> _ZooKeeperMetadata:
        """The small values."""
        return self._metadata

    def write_all(self, writes: Sequence[Write]) -> list[int | AckStateError]:
        """See `GroupStore.write_all`; the servers share syncs among the requests that wait for one."""
        return write_concurrently(self, writes, self._ledgers.create_all)

    def close(self) -> None:
        """End the session; no-op if closed."""
        self._session.close()


def _connect(  # noqa: PLR0913 - the store's own arguments, passed on by name
    hosts: str,
    *,
    root: str,
    session_timeout_s: float,
    call_timeout_s: float,
    request_bytes_max: int,
    client_options: Mapping[str, Any] | None,
) -> ZooKeeperSession:
    """Begin a session if the arguments are valid."""
    check_path(root)
    if "/" in hosts:
        raise ValueError(f"hosts must be host:port pairs without a path, got {hosts!r}; the path goes into root")
    if not (session_timeout_s > 0 and call_timeout_s > 0):
        raise ValueError(f"timeouts must be positive, got {session_timeout_s} s and {call_timeout_s} s")
    if request_bytes_max < 2 * CHUNK_ROOM_BYTES:
        raise ValueError(f"request_bytes_max must be at least {2 * CHUNK_ROOM_BYTES}, got {request_bytes_max}")
    return ZooKeeperSession(
        hosts,
        root=root,
        session_timeout_s=session_timeout_s,
        call_timeout_s=call_timeout_s,
        request_bytes_max=request_bytes_max,
        client_options=client_options or {},
    )


@contextmanager
def _closed_on_error(session: ZooKeeperSession) -> Iterator[None]:
    try:
        yield
    except BaseException:
        session.close()
        raise


def _check_ours(session: ZooKeeperSession, name: str) -> None:
    """Refuse a root that is not a store."""
    (found,) = session.read(nodes.STORE)
    if found is None or not found.data:
        state = "missing" if found is None else "empty"
        raise StoreError(f"{name} is not an ackstate store: its node is {state}")
    nodes.decode(NodeKind.STORE, nodes.STORE, found.data)


def _prepare(session: ZooKeeperSession, root: str) -> None:
    """Create the store's nodes if there are none, and refuse a root with foreign nodes."""
    (found,) = session.read(nodes.STORE)
    if found is None:
        session.make_root()
    session.settle(lambda: _make_if_empty(session, root))


def _make_if_empty(session: ZooKeeperSession, root: str) -> None:
    found = existing(session.read(nodes.STORE)[0], nodes.STORE)
    if found.data:
        nodes.decode(NodeKind.STORE, nodes.STORE, found.data)
        return
    if found.child_count:
        raise StoreError(f"{root} is not an ackstate store: it has children and no data")
    directories = (nodes.DELETIONS, nodes.METADATA, nodes.LEDGERS, nodes.OWNERS, nodes.GARBAGE)
    session.commit([
        set_data(nodes.STORE, nodes.encode(NodeKind.STORE, nodes.STORE), found.version),
        create(nodes.LEDGER_COUNTER, nodes.encode_counter(nodes.LEDGER_COUNTER, 0)),
        *(create_directory(path) for path in directories),
    ])  # fmt: skip


@final
class _ZooKeeperMetadata:
    """The values of one store. Their versions are transaction numbers, so they rise over the whole store.

    A node's own version restarts at 0 when the node is deleted and created again, and the servers compare only that
    version. So every delete also changes one more node. Each transaction here reads that node first and names its
    version, so no delete can happen in between unseen.
    """

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session

    def get(self, path: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        check_path(path)
        node = nodes.value_path(path)
        (found,) = self._session.read(node)
        if found is None or not _holds_value(node, found):
            return None
        return Versioned(nodes.decode(NodeKind.VALUE, node, found.data), found.changed_zxid)

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """See `MetadataStore.put`.

        Raises:
            PayloadTooLargeError: Value and path do not fit into one request.
        """
        check_path(path)
        node = nodes.value_path(path)
        encoded = nodes.encode(NodeKind.VALUE, node, bytes(memoryview(data)))
        return self._session.settle(lambda: self._try_put(path, encoded, expected_version))

    def delete(self, path: str, *, expected_version: int) -> None:
        """See `MetadataStore.delete`."""
        check_path(path)
        self._session.settle(lambda: self._try_delete(path, expected_version))

    def children(self, path: str) -> list[str]:
        """See `MetadataStore.children`."""
        children_prefix(path)
        names = self._session.children(nodes.value_path(path)) or []
        return sorted(map(nodes.name_in_metadata, names))

    def _try_put(self, path: str, encoded: bytes, expected_version: int) -> int:
        node = nodes.value_path(path)
        above = nodes.directories_above(node)
        deletions, found, *found_above = self._session.read(nodes.DELETIONS, node, *above)
        _expect(path, found, expected_version)
        operations = [check(nodes.DELETIONS, existing(deletions, nodes.DELETIONS).version)]
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
        node = nodes.value_path(path)
        above = nodes.directories_above(node)
        deletions, found, *found_above = self._session.read(nodes.DELETIONS, node, *above)
        _expect(path, found, expected_version)
        if found is None or expected_version == ABSENT:
            raise VersionMismatchError(f"{path} holds no value to delete")
        version = existing(deletions, nodes.DELETIONS).version
        operations = [set_data(nodes.DELETIONS, nodes.encode(NodeKind.DIRECTORY, nodes.DELETIONS), version)]
        if found.child_count:
            operations.append(set_data(node, nodes.encode(NodeKind.DIRECTORY, node), found.version))
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
    return nodes.kind_of(path, found.data) is NodeKind.VALUE


def _expect(path: str, found: Node | None, version: int) -> None:
    holds_value = found is not None and _holds_value(nodes.value_path(path), found)
    found_version = found.changed_zxid if found is not None and holds_value else ABSENT
    if found_version != version:
        raise VersionMismatchError(f"{path} is at version {found_version}, not {version}")


if TYPE_CHECKING:
    _: type[GroupStore] = ZooKeeperStore
