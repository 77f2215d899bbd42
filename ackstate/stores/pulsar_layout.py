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
from ackstate.ledger_map import LedgerMap
from ackstate.message import Message
from ackstate.stores.base import LedgerNotFoundError, Store, StoreError, check_path
from ackstate.stores.pulsar_names import DOMAIN, decoded, managed_ledger_name, pulsar_path, quoted
from ackstate.wire.pulsar.codec import decode_ledger_info
from ackstate.wire.pulsar.message_entry import decode_message_times

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ackstate.position import Position
    from ackstate.stores.base import LedgerStore, Versioned
    from ackstate.stores.pulsar_zookeeper import PulsarZooKeeper
    from ackstate.wire.pulsar.codec import MessageLedger


@final
class PulsarMessageLog:
    """The message log of one topic, as it was when it was found.

    Attributes:
        ledgers: How many entries each ledger holds.
    """

    def __init__(self, ledgers: LedgerMap, store: LedgerStore, offloaded: frozenset[int]) -> None:
        self.ledgers = ledgers
        self._store = store
        self._offloaded = offloaded

    def can_read(self, ledger_id: int) -> bool:
        """Return whether the messages of a ledger are in BookKeeper, so that one that cannot be read is lost."""
        return ledger_id not in self._offloaded

    def read(self, positions: Iterable[Position]) -> Iterator[Message]:
        """Yield messages, without their payloads.

        Raises:
            LedgerNotFoundError: A message does not exist.
            CorruptStateError: A message cannot be decoded.
            StoreError: The storage failed.
        """
        for ledger_id, entry_id in positions:
            times = decode_message_times(self._store.read(ledger_id, entry_id, entry_id + 1)[0])
            yield Message(
                b"",
                publish_time_ms=times.publish_time_ms,
                deliver_at_ms=times.deliver_at_ms,
                message_count=times.message_count,
            )


def read_message_log(data: bytes, store: LedgerStore, *, topic: str) -> PulsarMessageLog:
    """Return the message log of a topic.

    The record does not have the size of the ledger that is written to, nor that of one whose broker died: the last
    entry that can be read is its last one.

    Raises:
        CorruptStateError: The record cannot be decoded, or names no ledger.
        StoreError: The storage failed.
    """
    found = decode_ledger_info(data)
    if not found:
        raise CorruptStateError(f"message log of {topic}", offset=0, expected="a ledger", found="none")
    counts = {each.ledger_id: _entry_count(each, store, is_last=each is found[-1]) for each in found}
    offloaded = frozenset(each.ledger_id for each in found if each.is_offloaded)
    return PulsarMessageLog(LedgerMap.from_counts(counts), store, offloaded)


def _entry_count(ledger: MessageLedger, store: LedgerStore, *, is_last: bool) -> int:
    if ledger.entry_count or not is_last:
        return ledger.entry_count
    try:
        return store.last(ledger.ledger_id) + 1
    except LedgerNotFoundError:
        # The broker has named the ledger that it is about to create.
        return 0


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
