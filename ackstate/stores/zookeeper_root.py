"""The root node of a store in ZooKeeper: opens a session below it, checks it, creates it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ackstate.cursor.store import StoreError, check_path
from ackstate.stores import zookeeper_nodes as nodes
from ackstate.stores.bookkeeper_nodes import WRITERS
from ackstate.stores.zookeeper_nodes import NodeKind
from ackstate.stores.zookeeper_session import ZooKeeperSession, create, create_directory, existing, set_data

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class _Closable(Protocol):
    def close(self) -> None: ...


_REQUEST_BYTES_MIN = 32 * 1024


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
def closed_on_error(opened: _Closable) -> Iterator[None]:
    """Close a session or a store if the block fails."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


def check_store(session: ZooKeeperSession, name: str) -> None:
    """Refuse a root that is not a store.

    Raises:
        StoreError: It is missing or empty.
        CorruptStateError: Its bytes are damaged.
        UnsupportedVersionError: A newer release wrote it.
    """
    (found,) = session.read(nodes.STORE)
    if found is None or not found.data:
        state = "missing" if found is None else "empty"
        raise StoreError(f"{name} is not an ackstate store: its node is {state}")
    nodes.decode(NodeKind.BOOKKEEPER_STORE, nodes.STORE, found.data)


def prepare(session: ZooKeeperSession, root: str) -> None:
    """Create the nodes of a store at an empty root, and refuse a root with foreign nodes.

    Args:
        session: The session.
        root: The name of the root in errors.

    Raises:
        StoreError: The root has children and no data.
        CorruptStateError: The root's bytes are damaged.
        UnsupportedVersionError: A newer release wrote it.
    """
    (found,) = session.read(nodes.STORE)
    if found is None:
        session.make_root()
    session.settle(lambda: _make_if_empty(session, root))


def _make_if_empty(session: ZooKeeperSession, root: str) -> None:
    found = existing(session.read(nodes.STORE)[0], nodes.STORE)
    if found.data:
        nodes.decode(NodeKind.BOOKKEEPER_STORE, nodes.STORE, found.data)
        return
    if found.child_count:
        raise StoreError(f"{root} is not an ackstate store: it has children and no data")
    directories = (nodes.DELETIONS, nodes.METADATA, nodes.LEDGERS, nodes.OWNERS, nodes.GARBAGE, WRITERS)
    session.commit([
        set_data(nodes.STORE, nodes.encode(NodeKind.BOOKKEEPER_STORE, nodes.STORE), found.version),
        create(nodes.LEDGER_COUNTER, nodes.encode_counter(nodes.LEDGER_COUNTER, 0)),
        *(create_directory(path) for path in directories),
    ])  # fmt: skip
