"""A store in an Apache BookKeeper cluster, with its metadata in ZooKeeper: ``pip install 'ackstate[bookkeeper]'``.

BookKeeper 4.14 or newer, as Pulsar has it; Java 11 or newer, and the jars of BookKeeper's client, such as Pulsar's. The
client runs in a child process: `ackstate.stores.bookkeeper_client`.

Many processes may open one root at the same time; the unit of ownership is a ledger, which is taken over by `fence`.
BookKeeper then refuses the former owner's appends, however late they arrive.

Durability. An append has happened when as many bookies as `ack_quorum` have synced it (``journalSyncData``, on by
default). It needs one round trip to the bookies and none to ZooKeeper. An append to several ledgers needs one to each;
it is all or nothing. A call about a ledger that raises `StoreError` may have happened; the next one about the same
ledger finds out first. A change of the metadata has happened when a majority of the ZooKeeper servers have synced it
(``forceSync``, on by default). One that loses its connection may have happened; once a later call of the same store has
returned, it will not happen any more.

ZooKeeper's client reconnects automatically; calls wait for the connection, up to a limit. After its session is lost,
the Java child ends, or a call gets no answer, every call is refused until the store is opened again.

Reading. A ledger that another process is appending to has at least the entries that were confirmed to that process,
and perhaps its last append, which a crash may still undo. All other entries stay.

A crash leaves a node of some 60 bytes behind for each process that has appended to several ledgers at once. Everything
else is found by the next process that uses the ledger. Names and bytes of the nodes and entries:
`ackstate.stores.zookeeper`, `ackstate.stores.bookkeeper_nodes` and `ackstate.stores.bookkeeper_entries`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from ackstate.stores.base import StoreError, check_path
from ackstate.stores.bookkeeper_client import JVM_OPTIONS, BookKeeperClient
from ackstate.stores.bookkeeper_ledger import Replication
from ackstate.stores.bookkeeper_ledgers import BookKeeperLedgers
from ackstate.stores.bookkeeper_segments import Segments
from ackstate.stores.zookeeper import ZooKeeperMetadata, check_store, closed_on_error, connect, prepare
from ackstate.stores.zookeeper_group import write_concurrently

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ackstate.errors import AckStateError
    from ackstate.stores.writes import GroupStore, Write
    from ackstate.stores.zookeeper_session import ZooKeeperSession


@dataclass(frozen=True, slots=True)
class BookKeeperOptions:
    """How a `BookKeeperStore` uses BookKeeper.

    Attributes:
        replication: The bookies, checksum and password of new ledgers; the password of all.
        ledgers_root: BookKeeper's own node in the same ZooKeeper cluster.
        class_path: Jars, and folders of jars, separated as in Java. None takes the environment's
            ``ACKSTATE_BOOKKEEPER_CLASSPATH``, or Pulsar's ``lib`` in ``PULSAR_HOME``.
        jvm_options: The options of the virtual machine, such as its largest heap.
        settings: Properties of BookKeeper's ``ClientConfiguration`` by name.
        client: A client of the same cluster that several stores share; the fields above except `replication` are then
            ignored. A store does not close it. None starts one for this store.
    """

    replication: Replication = field(default_factory=Replication)
    ledgers_root: str = "/ledgers"
    class_path: str | None = None
    jvm_options: Sequence[str] = JVM_OPTIONS
    settings: Mapping[str, str] = field(default_factory=dict)
    client: BookKeeperClient | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        check_path(self.ledgers_root)

    def connect(self, hosts: str, *, call_timeout_s: float) -> BookKeeperClient:
        """Start a client of a cluster.

        Args:
            hosts: ZooKeeper's ``host:port`` pairs separated by commas.
            call_timeout_s: How long a call waits for an answer.

        Raises:
            StoreError: JPype, Java or BookKeeper's client is missing, or the cluster does not answer.
        """
        return BookKeeperClient(
            f"zk+null://{hosts.replace(',', ';')}{self.ledgers_root}",
            class_path=self.class_path,
            jvm_options=self.jvm_options,
            settings=self.settings,
            call_timeout_s=call_timeout_s,
        )


@final
class BookKeeperStore:
    """A store in BookKeeper and below one node of ZooKeeper; thread-safe, but not usable across a fork.

    Args:
        hosts: ZooKeeper's ``host:port`` pairs separated by commas; a path belongs into `root`.
        root: The path of the store's node. A missing one is created; an empty one becomes a store.
        bookkeeper: How BookKeeper is used.
        session_timeout_s: How long ZooKeeper keeps the session without a message from it. The servers may bound it.
        call_timeout_s: How long a call waits for a connection, and again for an answer.
        request_bytes_max: The largest request to ZooKeeper.
        client_options: More arguments for `kazoo.client.KazooClient`: ``auth_data``, ``default_acl``, ``use_ssl``, ...

    Raises:
        StoreError: JPype, Java or BookKeeper's client is missing, no server answered in time, or the node is not a
            store; nothing in it was changed.
        CorruptStateError: The store holds damaged bytes.
        UnsupportedVersionError: A newer release wrote the store; nothing was changed.
        ValueError: An argument is invalid.
    """

    def __init__(  # noqa: PLR0913 - settings are named, not packed
        self,
        hosts: str,
        *,
        root: str = "/ackstate",
        bookkeeper: BookKeeperOptions | None = None,
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
        with closed_on_error(session.close):
            prepare(session, root)
            self._use(session, hosts, root, bookkeeper or BookKeeperOptions(), call_timeout_s)
        with closed_on_error(self.close):
            self._ledgers.finish_deletions()

    @classmethod
    def open_to_read(  # noqa: PLR0913 - the constructor's arguments
        cls,
        hosts: str,
        *,
        root: str = "/ackstate",
        bookkeeper: BookKeeperOptions | None = None,
        session_timeout_s: float = 10.0,
        call_timeout_s: float = 30.0,
        request_bytes_max: int = 1_000_000,
        client_options: Mapping[str, Any] | None = None,
    ) -> BookKeeperStore:
        """Open an existing store for reading: nothing is ever created, changed, deleted or fenced.

        Other processes may write to it at the same time; the module's description lists the visible entries. Every
        mutating call raises `StoreError`, even if it would change nothing.

        Args:
            hosts: As for the constructor, like all that follow.
            root: The path of the store's node.
            bookkeeper: How BookKeeper is used.
            session_timeout_s: How long ZooKeeper keeps the session.
            call_timeout_s: How long a call waits for a connection, and again for an answer.
            request_bytes_max: Ignored; accepted so that the same settings serve both.
            client_options: More arguments for `kazoo.client.KazooClient`.

        Raises:
            StoreError: JPype, Java or BookKeeper's client is missing, no server answered in time, or there is no store
                at the root.
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
        store = cls.__new__(cls)
        with closed_on_error(session.close):
            check_store(session, f"{hosts}{root}")
            store._use(session, hosts, root, bookkeeper or BookKeeperOptions(), call_timeout_s)
        return store

    def _use(
        self, session: ZooKeeperSession, hosts: str, root: str, options: BookKeeperOptions, call_timeout_s: float
    ) -> None:
        self._session = session
        self._client = options.client or options.connect(hosts, call_timeout_s=call_timeout_s)
        self._is_client_ours = options.client is None
        custom_metadata = {"application": b"ackstate", "ackstate/root": root.encode()}
        segments = Segments(session, self._client, options.replication, custom_metadata)
        self._ledgers = BookKeeperLedgers(session, self._client, segments)
        self._metadata = ZooKeeperMetadata(session)

    @property
    def ledgers(self) -> BookKeeperLedgers:
        """The logs."""
        return self._ledgers

    @property
    def metadata(self) -> ZooKeeperMetadata:
        """The small values."""
        return self._metadata

    def write_all(self, writes: Sequence[Write]) -> list[int | AckStateError]:
        """See `GroupStore.write_all`; bookies and ZooKeeper share syncs among the requests that wait for one."""
        return write_concurrently(self, writes, self._ledgers.create_all)

    def close(self) -> None:
        """End the child and the session; no-op if closed.

        As far as the cluster answers, the ledgers of this process are sealed first: their next owner then needs no
        recovery.
        """
        with suppress(StoreError):
            self._client.check_usable()
            self._session.check_connected()
            self._session.check_writable()
            self._ledgers.seal_all()
        if self._is_client_ours:
            self._client.close()
        self._session.close()


if TYPE_CHECKING:
    _: type[GroupStore] = BookKeeperStore
