"""A store in a ZooKeeper cluster, for ZooKeeper 3.5 or newer through kazoo: ``pip install 'ackstate[zookeeper]'``.

Many processes may open one root at the same time; the unit of ownership is a ledger, which is taken over by `fence`.
Each append is a transaction that names the version of the ledger's node, and a fence changes that node. So the servers
refuse a former owner's append, however late it arrives.

Durability. ZooKeeper syncs its log on a majority of the servers before it answers (``forceSync``, on by default). A
call that loses its connection raises `StoreError`: it is unknown whether it has happened. Once a later call of the same
store has returned, it will not happen any more. The client reconnects automatically; calls wait for the connection, up
to a limit. After the session is lost, or a call gets no answer, every call is refused until the store is opened again.

Entries of any size are stored in chunks. An `append_all` that fits into one request is one transaction. A larger one
first writes its chunks beyond the end of the ledgers, where no caller reads, and one transaction then moves the ends:
again all or nothing. A value of the metadata must fit into one request.

Names and bytes of the nodes: `ackstate.stores.zookeeper_nodes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ackstate.stores.zookeeper_group import write_concurrently
from ackstate.stores.zookeeper_ledgers import ZooKeeperLedgers
from ackstate.stores.zookeeper_metadata import ZooKeeperMetadata
from ackstate.stores.zookeeper_nodes import NodeKind
from ackstate.stores.zookeeper_root import check_store, closed_on_error, connect, prepare

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.cursor.writes import GroupStore, Write
    from ackstate.errors import AckStateError
    from ackstate.stores.zookeeper_session import ZooKeeperSession


@final
class ZooKeeperStore:
    """A store below one node of a ZooKeeper cluster; thread-safe, but not usable across a fork.

    Appending costs one round trip and one sync of the servers, reading two round trips. Changes by other processes are
    visible at once.

    Args:
        hosts: ``host:port`` pairs separated by commas; a path belongs into `root`.
        root: The path of the store's node. A missing one is created; an empty one becomes a store.
        session_timeout_s: How long the servers keep the session without a message from it. The servers may bound it.
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
        session = connect(
            hosts,
            root=root,
            session_timeout_s=session_timeout_s,
            call_timeout_s=call_timeout_s,
            request_bytes_max=request_bytes_max,
            client_options=client_options,
        )
        self._use(session)
        with closed_on_error(session):
            prepare(session, root, NodeKind.STORE)
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
        session = connect(
            hosts,
            root=root,
            session_timeout_s=session_timeout_s,
            call_timeout_s=call_timeout_s,
            request_bytes_max=request_bytes_max,
            client_options=client_options,
        )
        session.refuse_changes()
        with closed_on_error(session):
            check_store(session, f"{hosts}{root}", NodeKind.STORE)
        store = cls.__new__(cls)
        store._use(session)
        return store

    def _use(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._ledgers = ZooKeeperLedgers(session)
        self._metadata = ZooKeeperMetadata(session)

    @property
    def ledgers(self) -> ZooKeeperLedgers:
        """The logs."""
        return self._ledgers

    @property
    def metadata(self) -> ZooKeeperMetadata:
        """The small values."""
        return self._metadata

    def write_all(self, writes: Sequence[Write]) -> list[int | AckStateError]:
        """See `GroupStore.write_all`; the servers share syncs among the requests that wait for one."""
        return write_concurrently(self, writes, self._ledgers.create_all)

    def close(self) -> None:
        """End the session; no-op if closed."""
        self._session.close()


if TYPE_CHECKING:
    _: type[GroupStore] = ZooKeeperStore
