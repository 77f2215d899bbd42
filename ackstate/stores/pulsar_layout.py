"""A store with Apache Pulsar's own layout: `ManagedCursor` opens a broker's cursor in place, and a broker opens ours.

Open a cursor with ``CursorConfig(format=Format.PULSAR)``, and only while no broker owns the topic
(`ackstate.stores.pulsar_ownership`). Every change of a cursor's record is a compare-and-set on the node that the
broker also compares, and a cursor ledger is taken over by BookKeeper's recovery, as brokers do. So a former owner can
write no longer once the new one has opened the cursor ledger, or has written the record.

The metadata is in ZooKeeper, the ledgers are in BookKeeper.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, final

from ackstate.cursor.journal.journal import ROOT
from ackstate.errors import CorruptStateError
from ackstate.stores.base import Store, StoreError, check_path
from ackstate.stores.pulsar_message_log import PulsarMessageLog, read_message_log
from ackstate.stores.pulsar_names import DOMAIN, decoded, managed_ledger_name, pulsar_path, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ackstate.stores.base import LedgerStore, Versioned
    from ackstate.stores.pulsar_zookeeper import PulsarZooKeeper

_OF_PULSAR_1 = "a namespace of Pulsar 1, with a cluster in its name, is not read"


@final
class PulsarMetadata:
    """The cursors' records of a Pulsar cluster, under this library's paths; see `ackstate.stores.base.MetadataStore`.

    Args:
        nodes: The cluster's metadata.
        within: A tenant, a namespace or a topic, as ``TENANT/NAMESPACE/TOPIC``: others are not listed.

    Attributes:
        unread: Why nodes are left out of what `children` and `topics` have listed so far, by path.
    """

    def __init__(self, nodes: PulsarZooKeeper, within: str = "") -> None:
        self.unread: dict[str, str] = {}
        self._nodes = nodes
        self._within = within.split("/", 2) if within else []

    def get(self, path: str) -> Versioned | None:
        stored = self._stored_path(path)
        return None if stored is None else self._nodes.get(stored)

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        return self._nodes.put(self._written_path(path), data, expected_version=expected_version)

    def delete(self, path: str, *, expected_version: int) -> None:
        self._nodes.delete(self._written_path(path), expected_version=expected_version)

    def children(self, path: str) -> list[str]:
        if path == ROOT:
            return sorted(map(quoted, self.topics()))
        check_path(path)
        stored = pulsar_path(path)
        if stored is None or path.count("/") > 2:
            return []
        return sorted(map(quoted, self._decoded(stored)))

    def topics(self) -> Iterator[str]:
        """Yield the topics, by tenant, namespace and name."""
        tenants = self._within[:1] or self._nodes.children(ROOT)
        for tenant in tenants:
            for namespace in self._within[1:2] or self._nodes.children(f"{ROOT}/{tenant}"):
                within = f"{tenant}/{namespace}"
                for other in {*self._nodes.children(f"{ROOT}/{within}")} - {DOMAIN}:
                    self.unread[f"{ROOT}/{within}/{other}"] = _OF_PULSAR_1
                names = self._decoded(f"{ROOT}/{within}/{DOMAIN}")
                yield from (f"{DOMAIN}://{within}/{name}" for name in names if self._within[2:] in ([], [name]))

    def _decoded(self, path: str) -> Iterator[str]:
        for name in self._nodes.children(path):
            try:
                yield decoded(name)
            except CorruptStateError as error:
                self.unread[f"{path}/{name}"] = str(error)

    def _stored_path(self, path: str) -> str | None:
        check_path(path)
        return pulsar_path(path) if path.count("/") == 3 else None

    def _written_path(self, path: str) -> str:
        stored = self._stored_path(path)
        if stored is None:
            raise StoreError(f"{self._nodes.name}: {path} has no place in Pulsar's layout; nothing was written")
        return stored


@final
class PulsarLayout:
    """The cursors of a Pulsar cluster, as a `Store`. Opened by `ackstate.stores.pulsar_cluster.open_cluster`.

    Args:
        nodes: The cluster's metadata; closed with this.
        ledgers: The cluster's ledgers.
        within: A tenant, a namespace or a topic, as ``TENANT/NAMESPACE/TOPIC``: other cursors are not listed.
        on_close: Called by `close` before the metadata is closed.

    Attributes:
        nodes: The cluster's metadata, at Pulsar's paths.
        journal_records_max: How many of a journal's last records an inspection reads: each has the whole state.
    """

    journal_records_max = 20

    def __init__(
        self,
        nodes: PulsarZooKeeper,
        ledgers: LedgerStore,
        *,
        within: str = "",
        on_close: Callable[[], object] | None = None,
    ) -> None:
        self.nodes = nodes
        self._ledgers = ledgers
        self._metadata = PulsarMetadata(nodes, within)
        self._closing = ExitStack()
        self._closing.callback(nodes.close)
        if on_close is not None:
            self._closing.callback(on_close)

    @property
    def ledgers(self) -> LedgerStore:
        """The cursor ledgers."""
        return self._ledgers

    @property
    def metadata(self) -> PulsarMetadata:
        """The cursors' records."""
        return self._metadata

    def find_message_log(self, topic: str) -> PulsarMessageLog | None:
        """Return the message log of a topic as it is now; None if there is no such topic.

        Raises:
            ValueError: The topic is not ``persistent://TENANT/NAMESPACE/TOPIC``.
            CorruptStateError: Its record cannot be decoded.
            StoreError: The storage failed.
        """
        found = self.nodes.get(f"{ROOT}/{managed_ledger_name(topic)}")
        return None if found is None else read_message_log(found.data, self._ledgers, topic=topic)

    def close(self) -> None:
        self._closing.close()


if TYPE_CHECKING:
    _: type[Store] = PulsarLayout
