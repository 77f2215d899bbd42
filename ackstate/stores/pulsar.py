"""A store with Apache Pulsar's own layout: `ManagedCursor` opens a broker's cursor in place, and a broker opens ours.

`open_cluster` opens it: the metadata is in ZooKeeper, the ledgers are in BookKeeper. Open a cursor with
``CursorConfig(format=Format.PULSAR)``, and only while no broker owns the topic (`hold_topic`). Every change of a
cursor's record is a compare-and-set on the node that the broker also compares, and a cursor ledger is taken over by
BookKeeper's recovery, as brokers do. So a former owner can write no longer once the new one has opened the cursor
ledger, or has written the record.

A ledger has the digest CRC32C, the empty password, and custom metadata that names the topic's message log and the
cursor. Its last entry counts, whether or not BookKeeper has confirmed it to readers. Each entry is the caller's bytes
without a mark of the end of an append: so a crash in an append of several entries may leave some of them. In Pulsar's
format each entry is a cursor's whole state, and so any part of them is a valid outcome.

This library has ``/managed-ledgers/TOPIC/SUBSCRIPTION``, with percent-encoded names; Pulsar has
``/managed-ledgers/TENANT/NAMESPACE/DOMAIN/TOPIC/SUBSCRIPTION``, with the last two names as in a URL's query. A scalable
topic of Pulsar 5.0, ``topic://``, has its cursors in its segments: ``segment://TENANT/NAMESPACE/TOPIC/SEGMENT`` is
``TENANT/NAMESPACE/segment/TOPIC/SEGMENT`` there.

Source: ``TopicName.getPersistenceNamingEncoding``, ``MetaStoreImpl.PREFIX``, ``LedgerMetadataUtils``,
``ManagedCursorImpl``, ``OwnershipCache``, ``NamespaceBundleFactory``, ``NamespaceEphemeralData`` of Apache Pulsar.
"""

from __future__ import annotations

import json
import re
import zlib
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final
from urllib.parse import quote, unquote, unquote_plus

from ackstate.errors import AckStateError, CorruptStateError
from ackstate.ledger_map import LedgerMap
from ackstate.message import Message
from ackstate.stores.base import (
    LedgerNotFoundError,
    MetadataStore,
    Store,
    StoreError,
    check_path,
    no_ledger,
)
from ackstate.stores.bookkeeper_client import BookKeeperOptions
from ackstate.topic_name import ROOT, TopicName, parse_topic, persistence_name
from ackstate.wire.pulsar import decode_cursor_info
from ackstate.wire.pulsar.codec import decode_ledger_info
from ackstate.wire.pulsar.message_entry import decode_message_times

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ackstate.position import Position
    from ackstate.stores.base import LedgerStore, Versioned
    from ackstate.stores.bookkeeper import BookKeeperLedgers
    from ackstate.stores.bookkeeper_client import BookKeeperClient, OpenLedger, Replication
    from ackstate.stores.zookeeper import ZooKeeperNodes

DOMAIN, _SEGMENTS = "persistent", "segment"  # the domains of topics with cursors
_SEGMENT = re.compile(r"(.+)/([0-9a-f]{4}-[0-9a-f]{4}-[0-9]+)", re.DOTALL)  # the local name of a segment
_SCHEMES = ("pulsar+zk://", "zk:")
_OPTIONS = ("chroot", "ledgers", "digest", "password_file")
_OTHERS = {"rocksdb:": "RocksDB", "etcd:": "etcd", "oxia:": "Oxia", "memory:": "the memory of a broker"}
_OF_PULSAR_1 = "a namespace of Pulsar 1, with a cluster in its name, is not read"
_NO_SEGMENT = "not the name of a segment, such as 0000-ffff-0"
_OWNER_PREFIX = "cursor "
_BROKERS = "/loadbalance/brokers"
_EXTENSIBLE = "Extensible"
_HASH_END = 2**32
_UNLOADING = {
    "nativeUrl": "pulsar://ackstate-holds-this-bundle.invalid:6650",
    "httpUrl": "http://ackstate-holds-this-bundle.invalid:8080",
    "disabled": True,
    "advertisedListeners": {},
}


class PulsarUrl(NamedTuple):
    """Where the metadata of a Pulsar cluster is, and which of its topics are meant."""

    hosts: str  # the ZooKeeper servers
    within: str = ""  # a tenant, a namespace or a topic, as TENANT/NAMESPACE/TOPIC; empty for the whole cluster
    chroot: str = ""  # the node in ZooKeeper below which the cluster is; empty for the top
    ledgers: str = "/ledgers"  # BookKeeper's node, below `chroot`
    digest: str = ""  # the brokers' ``managedLedgerDigestType``; empty for the default
    password_file: str = ""  # a file with the brokers' ``managedLedgerPassword``; empty for none


def parse_pulsar_url(url: str) -> PulsarUrl:
    """Parse ``pulsar+zk://HOST:PORT[,HOST:PORT][/TENANT[/NAMESPACE[/TOPIC]]]``; `ValueError` for any other URL."""
    # ``zk:HOST:PORT[,HOST:PORT][/CHROOT]``, as in a broker's ``metadataStoreUrl``, is accepted, too.
    # ``?NAME=VALUE[&NAME=VALUE]`` sets other fields of `PulsarUrl`, such as ``?chroot=/pulsar&password_file=secret``.
    scheme = next((scheme for scheme in _SCHEMES if url.startswith(scheme)), None)
    if scheme is None:
        other = next((name for start, name in _OTHERS.items() if url.removeprefix("pulsar+").startswith(start)), None)
        if other is not None:
            raise ValueError(f"metadata in {other} is not supported: only in ZooKeeper (zk:)")
        raise ValueError(f"expected pulsar+zk://HOST:PORT[/TENANT/NAMESPACE/TOPIC], got {url!r}")
    rest, options = _options(url.removeprefix(scheme))
    hosts, slash, path = rest.removeprefix("//").partition("/")
    path = path.rstrip("/")
    if scheme == "zk:" and path:
        options.setdefault("chroot", slash + path)
        path = ""
    if not hosts.strip() or (path and not all(path.split("/")[:2])):
        raise ValueError(f"expected pulsar+zk://HOST:PORT[/TENANT/NAMESPACE/TOPIC], got {url!r}")
    for name in {"chroot", "ledgers"} & options.keys():
        check_path(options[name])
    return PulsarUrl(hosts, path, **options)


def _options(rest: str) -> tuple[str, dict[str, str]]:
    """Return the part of a URL before its options, and the options. A topic may contain question marks."""
    before, _, text = rest.rpartition("?")
    if not re.match(r"\w+=", text) or not before:
        return rest, {}
    options = dict(each.partition("=")[::2] for each in text.split("&"))
    for name in options.keys() - set(_OPTIONS):
        raise ValueError(f"unknown option {name!r} of the URL; there are {', '.join(_OPTIONS)}")
    return before, options


def is_pulsar_url(url: str) -> bool:
    """Return whether a store that a user named is the metadata store of a Pulsar cluster, supported or not."""
    return url.startswith(("pulsar+", *_SCHEMES, *_OTHERS))


def check_topic(topic: str) -> str:
    """Return a topic's full name, also for ``TENANT/NAMESPACE/TOPIC`` and a bare ``TOPIC`` of ``public/default``."""
    if "://" not in topic:
        topic = f"persistent://{topic if topic.count('/') > 1 else f'public/default/{topic}'}"
    _parts(topic)
    return topic


def _parts(topic: str) -> TopicName:
    parts = parse_topic(topic)
    is_segment = parts is not None and parts.domain == _SEGMENTS and _SEGMENT.fullmatch(parts.local)
    if parts is None or not (parts.domain == DOMAIN or is_segment):
        raise ValueError(
            f"topic must be {DOMAIN}://TENANT/NAMESPACE/TOPIC, or a segment of a scalable topic,"
            f" {_SEGMENTS}://TENANT/NAMESPACE/TOPIC/0000-ffff-0, got {topic!r}"
        )
    return parts


def managed_ledger_name(topic: str) -> str:
    """Return Pulsar's name of a topic's message log, as in the custom metadata of its ledgers."""
    parts = _parts(topic)
    local, *segment = parts.local.rsplit("/", maxsplit=1) if parts.domain == _SEGMENTS else [parts.local]
    return "/".join([parts.namespace, parts.domain, persistence_name(local), *segment])


def decoded(name: str) -> str:
    """Return a topic's local or a subscription's name from its stored form; else raise `CorruptStateError`."""
    try:
        text = unquote_plus(name, errors="strict")
    except UnicodeDecodeError:
        text = ""
    if not text or persistence_name(text) != name:
        raise CorruptStateError(
            "name in the metadata store", offset=0, expected="a name as Pulsar encodes it", found=repr(name)
        )
    return text


def pulsar_path(path: str) -> str | None:
    """Return Pulsar's path of a topic's or a cursor's record; None for a path that Pulsar does not have."""
    prefix, names = f"{ROOT}/", path.removeprefix(f"{ROOT}/").split("/")
    if not path.startswith(prefix) or len(names) > 2:
        return None
    topic, *subscription = map(unquote, names)
    return "/".join([ROOT, managed_ledger_name(topic), *map(persistence_name, subscription)])


def quoted(name: str) -> str:
    """Return a topic or a subscription as a path of this library spells it."""
    return quote(name, safe="")


@final
class CursorLedgers:
    """The names and owners of cursor ledgers, as a broker creates them: a `LedgerRegistry`."""

    # The owner of a ledger is that whose record names it, or for which this object has created it. A ledger that a
    # broker's crash left over is not found: BookKeeper has no index of them.
    has_batch_marks = False

    def __init__(self, client: BookKeeperClient, nodes: ZooKeeperNodes, replication: Replication) -> None:
        self._client, self._nodes, self._replication = client, nodes, replication
        self._created: dict[int, str] = {}  # ledgers created here, with their owners
        self.check_usable, self.check_writable = nodes.session.check_usable, nodes.session.check_writable

    def create(self, owner: str) -> OpenLedger:
        """Create a ledger of a cursor; no one else has ledgers here."""
        metadata = cursor_metadata(owner)
        if metadata is None:
            raise StoreError(f"{self._nodes.name}: only cursors have ledgers here, got {owner!r}; nothing was created")
        opened = self._client.create(self._replication, ledger_id=None, custom_metadata=metadata).wait()
        self._created[opened.ledger_id] = owner
        return opened

    def check(self, ledger_id: int) -> None:
        """Raise `LedgerNotFoundError` if there is no such ledger, of a cursor or a message log."""
        self._client.metadata(ledger_id).wait()

    def missing(self, ledger_id: int) -> AckStateError:
        return no_ledger(ledger_id)

    def delete(self, ledger_id: int) -> None:
        self._client.destroy(ledger_id, self._replication)
        self._created.pop(ledger_id, None)

    def owned_by(self, owner: str) -> Iterable[int]:
        found = {ledger_id for ledger_id, name in list(self._created.items()) if name == owner}
        path, metadata = pulsar_path(owner.removeprefix(_OWNER_PREFIX)), cursor_metadata(owner)
        record = None if metadata is None or path is None else self._nodes.get(path)
        named = -1
        if record is not None:
            with suppress(AckStateError):
                named = decode_cursor_info(record.data).cursors_ledger_id
        if named >= 0 and metadata is not None and self._has_metadata(named, metadata):
            found.add(named)
        return found

    def owners(self) -> Iterable[str]:
        """Return the owners of ledgers created here."""
        return list(self._created.values())

    def _has_metadata(self, ledger_id: int, expected: Mapping[str, bytes]) -> bool:
        try:
            found = self._client.metadata(ledger_id).wait().custom_metadata
        except LedgerNotFoundError:
            return False
        return all(found.get(name) == value for name, value in expected.items())


def cursor_metadata(owner: str) -> dict[str, bytes] | None:
    """Return the custom metadata of the ledgers of a cursor; None if the owner is not a cursor."""
    path = _record_path(owner.removeprefix(_OWNER_PREFIX)) if owner.startswith(_OWNER_PREFIX) else None
    if path is None:
        return None
    ledger, _, cursor = path.removeprefix(f"{ROOT}/").rpartition("/")
    return {
        "application": b"pulsar",
        "component": b"managed-ledger",
        "pulsar/managed-ledger": ledger.encode(),
        "pulsar/cursor": cursor.encode(),
    }


@final
class PulsarMessageLog:
    """The message log of one topic, as it was when it was found."""

    def __init__(self, ledgers: LedgerMap, store: LedgerStore, offloaded: frozenset[int]) -> None:
        self.ledgers = ledgers  # how many entries each ledger holds
        self._store = store
        self._offloaded = offloaded

    def can_read(self, ledger_id: int) -> bool:
        """Return whether the messages of a ledger are in BookKeeper, so that one that cannot be read is lost."""
        return ledger_id not in self._offloaded

    def read(self, positions: Iterable[Position]) -> Iterator[Message]:
        """Yield messages, without their payloads."""
        for ledger_id, entry_id in positions:
            times = decode_message_times(self._store.read(ledger_id, entry_id, entry_id + 1)[0])
            yield Message(
                b"",
                publish_time_ms=times.publish_time_ms,
                deliver_at_ms=times.deliver_at_ms,
                message_count=times.message_count,
            )


@final
class PulsarMetadata(MetadataStore):
    """The cursors' records of a Pulsar cluster, under this library's paths."""

    def __init__(self, nodes: ZooKeeperNodes, within: str = "") -> None:
        super().__init__()
        # Why nodes are left out of what `children` and `topics` have listed so far, by path.
        self.unread: dict[str, str] = {}
        self._nodes = nodes
        # A tenant, a namespace or a topic, as ``TENANT/NAMESPACE/TOPIC``: others are not listed.
        self._within = within.split("/", 2) if within else []

    def _get(self, path: str) -> Versioned | None:
        stored = _record_path(path)
        return None if stored is None else self._nodes.get(stored)

    def _put(self, path: str, data: bytes, expected_version: int) -> int:
        return self._nodes.put(self._written_path(path), data, expected_version=expected_version)

    def _delete(self, path: str, expected_version: int) -> None:
        self._nodes.delete(self._written_path(path), expected_version=expected_version)

    def _children(self, path: str) -> Iterable[str]:
        if path == ROOT:
            return map(quoted, self.topics())
        stored = pulsar_path(path)
        return [] if stored is None or path.count("/") > 2 else map(quoted, self._decoded(stored))

    def topics(self) -> Iterator[str]:
        """Yield the topics, by tenant, namespace and name."""
        tenants = self._within[:1] or self._nodes.children(ROOT)
        for tenant in tenants:
            for namespace in self._within[1:2] or self._nodes.children(f"{ROOT}/{tenant}"):
                within = f"{tenant}/{namespace}"
                for other in {*self._nodes.children(f"{ROOT}/{within}")} - {DOMAIN, _SEGMENTS}:
                    self.unread[f"{ROOT}/{within}/{other}"] = _OF_PULSAR_1
                names = self._decoded(f"{ROOT}/{within}/{DOMAIN}")
                yield from (f"{DOMAIN}://{within}/{name}" for name in names if self._within[2:] in ([], [name]))
                path = f"{ROOT}/{within}/{_SEGMENTS}"
                for name in self._decoded(path):
                    segments = self._nodes.children(f"{path}/{persistence_name(name)}")
                    for each in segments if self._within[2:] in ([], [name]) else ():
                        if _SEGMENT.fullmatch(f"{name}/{each}"):
                            yield f"{_SEGMENTS}://{within}/{name}/{each}"
                        else:
                            self.unread[f"{path}/{persistence_name(name)}/{each}"] = _NO_SEGMENT

    def _decoded(self, path: str) -> Iterator[str]:
        for name in self._nodes.children(path):
            try:
                yield decoded(name)
            except CorruptStateError as error:
                self.unread[f"{path}/{name}"] = str(error)

    def _written_path(self, path: str) -> str:
        stored = _record_path(path)
        if stored is None:
            raise StoreError(f"{self._nodes.name}: {path} has no place in Pulsar's layout; nothing was written")
        return stored


def _record_path(path: str) -> str | None:
    """Return Pulsar's path of a cursor's record."""
    return pulsar_path(path) if path.count("/") == 3 else None


@final
class PulsarLayout:
    """The cursors of a Pulsar cluster, as a `Store`. Opened by `open_cluster`."""

    journal_records_max = 20  # how many of a journal's last records an inspection reads: each has the whole state

    def __init__(
        self,
        nodes: ZooKeeperNodes,
        ledgers: BookKeeperLedgers,
        *,
        within: str = "",
        closing: ExitStack | None = None,
    ) -> None:
        self.nodes = nodes  # the cluster's metadata, at Pulsar's paths
        self.ledgers = ledgers  # the cursor ledgers
        self.metadata = PulsarMetadata(nodes, within)  # the cursors' records
        self._closing = closing or ExitStack()

    def __repr__(self) -> str:
        return f"PulsarLayout({self.nodes.name!r})"

    def find_message_log(self, topic: str) -> PulsarMessageLog | None:
        """Return the message log of a topic as it is now; None if there is no such topic."""
        record = self.nodes.get(f"{ROOT}/{managed_ledger_name(topic)}")
        if record is None:
            return None
        found = decode_ledger_info(record.data)
        if not found:
            raise CorruptStateError(f"message log of {topic}", offset=0, expected="a ledger", found="none")
        counts = {each.ledger_id: each.entry_count for each in found}
        last_id = found[-1].ledger_id
        if not counts[last_id]:
            # The record does not have the size of the ledger that is written to, nor that of one whose broker died: the
            # last entry that can be read is its last one. The broker names a ledger that it is about to create.
            with suppress(LedgerNotFoundError):
                counts[last_id] = self.ledgers.last(last_id) + 1
        offloaded = frozenset(each.ledger_id for each in found if each.is_offloaded)
        return PulsarMessageLog(LedgerMap.from_counts(counts), self.ledgers, offloaded)

    def close(self) -> None:
        self._closing.close()


def open_cluster(
    url: str,
    *,
    bookkeeper: BookKeeperOptions | None = None,
    only_reads: bool = False,
    call_timeout_s: float = 30.0,
    client_options: Mapping[str, Any] | None = None,
) -> PulsarLayout:
    """Open the cluster of a URL, see `parse_pulsar_url`; needs ``pip install 'ackstate[bookkeeper]'`` and Java.

    Args:
        url: Where the metadata is, such as ``pulsar+zk://127.0.0.1:2181``.
        bookkeeper: How BookKeeper is used; the URL says where it is. The digest and the password must be those of the
            brokers; those of the URL take precedence.
        only_reads: Refuse every change with `StoreError`.
        call_timeout_s: How long a call waits for an answer.
        client_options: More arguments for `kazoo.client.KazooClient`.

    Raises:
        ValueError: The URL is malformed, or names a metadata store other than ZooKeeper.
        StoreError: A server does not answer, or a package, Java or its classes are missing.
        OSError: The file with the password cannot be read.
    """
    from ackstate.stores.bookkeeper import BookKeeperLedgers  # noqa: PLC0415 - their libraries may not be installed
    from ackstate.stores.zookeeper import ZooKeeperNodes, ZooKeeperSession  # noqa: PLC0415

    parts = parse_pulsar_url(url)
    options = bookkeeper or BookKeeperOptions()
    chosen = options.replication
    if parts.digest:
        chosen = replace(chosen, digest_type=parts.digest)
    if parts.password_file:
        chosen = replace(chosen, password=Path(parts.password_file).read_bytes().rstrip(b"\r\n"))
    with ExitStack() as opened:
        session = ZooKeeperSession(
            parts.hosts,
            root=parts.chroot,
            call_timeout_s=call_timeout_s,
            client_options=client_options,
            only_reads=only_reads,
        )
        opened.callback(session.close)
        placed = replace(options, ledgers_root=parts.chroot + parts.ledgers)
        client = options.client or placed.connect(parts.hosts, call_timeout_s=call_timeout_s)
        if options.client is None:
            opened.callback(client.close)
        nodes = ZooKeeperNodes(session)
        ledgers = BookKeeperLedgers(client, chosen, CursorLedgers(client, nodes, chosen))
        return PulsarLayout(nodes, ledgers, within=parts.within, closing=opened.pop_all())


class TopicOwnedError(StoreError):
    """A broker owns the topic; nothing was changed."""


def find_owner(nodes: ZooKeeperNodes, topic: str) -> str | None:
    """Return the broker that owns a topic, None without one; `StoreError` if ownership is kept elsewhere."""
    _check_load_manager(nodes)
    namespace = _parts(topic).namespace
    for bundle in nodes.children(f"/namespace/{namespace}"):
        first, end = _bounds(bundle, namespace)
        if first <= topic_hash(topic) < end:
            path = f"/namespace/{namespace}/{bundle}"
            if (found := nodes.get(path)) is not None:
                return str(_json(found.data, path).get("nativeUrl") or "a broker that does not name its URL")
    return None


@contextmanager
def hold_topic(nodes: ZooKeeperNodes, topic: str) -> Iterator[None]:
    """Keep every broker from loading a topic, and the other topics of its bundle.

    Raises:
        TopicOwnedError: A broker owns it.
        StoreError: The storage failed, or the brokers keep their ownership outside the metadata store.
        CorruptStateError: A node cannot be decoded.
    """
    owner = find_owner(nodes, topic)
    namespace = _parts(topic).namespace
    path = f"/namespace/{namespace}/{_bundle(nodes, namespace, topic)}"
    if owner is None and not nodes.session.create_ephemeral(path, json.dumps(_UNLOADING).encode()):
        owner = find_owner(nodes, topic) or "a broker that has just come"
    if owner is not None:
        raise TopicOwnedError(
            f"{topic} is owned by {owner}: unload its namespace first (pulsar-admin namespaces unload {namespace}) with"
            " its clients stopped, or stop the brokers; nothing was changed"
        )
    try:
        yield
    finally:
        nodes.session.delete_ephemeral(path)


def topic_hash(topic: str) -> int:
    """Return the hash by which a topic belongs to a bundle."""
    return zlib.crc32(topic.encode())


def _bundle(nodes: ZooKeeperNodes, namespace: str, topic: str) -> str:
    """Return the name of the bundle of a topic, by the namespace's policies."""
    for path in (f"/admin/local-policies/{namespace}", f"/admin/policies/{namespace}"):
        found = nodes.get(path)
        bundles = None if found is None or not found.data else _json(found.data, path).get("bundles")
        if isinstance(bundles, dict):
            names = [f"{low}_{high}" for low, high in pairwise(map(str, bundles.get("boundaries") or []))]
            for name in names:
                first, end = _bounds(name, namespace)
                if first <= topic_hash(topic) < end:
                    return name
    raise StoreError(f"{nodes.name}: namespace {namespace} has no bundle for {topic}")


def _bounds(bundle: str, namespace: str) -> tuple[int, int]:
    """Return the first hash of a bundle, and the end (exclusive); the last bundle includes its upper bound."""
    low, _, high = bundle.partition("_")
    try:
        first, end = int(low, 16), int(high, 16)
    except ValueError:
        what = f"bundle of namespace {namespace}"
        raise CorruptStateError(
            what, offset=0, expected="a name such as 0x00000000_0x40000000", found=repr(bundle)
        ) from None
    return first, _HASH_END if end == _HASH_END - 1 else end


def _check_load_manager(nodes: ZooKeeperNodes) -> None:
    """Refuse brokers whose load manager keeps the ownership of bundles in a topic."""
    for broker in nodes.children(_BROKERS):
        path = f"{_BROKERS}/{broker}"
        found = nodes.get(path)
        if found is not None and _EXTENSIBLE in str(_json(found.data, path).get("loadManagerClassName")):
            raise StoreError(
                f"{nodes.name}: broker {broker} keeps the ownership of topics in a topic (its load manager is"
                " extensible), where it cannot be checked: stop the brokers first, or import through a live broker"
            )


def _json(data: bytes, path: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise CorruptStateError(f"node {path}", offset=0, expected="a JSON object", found=repr(data[:60]))
    return found


if TYPE_CHECKING:
    _: type[Store] = PulsarLayout
