"""Which broker owns a topic, and a lock that keeps every broker from loading it.

Brokers own bundles: ranges of the hashes of a namespace's topics. The owner of a bundle has an ephemeral node in
ZooKeeper. `hold_topic` creates that node itself, marked as a bundle that is being unloaded. So it fails if a broker
owns the topic, and until it is released, brokers make clients try again later.

Source: ``OwnershipCache``, ``NamespaceBundleFactory``, ``NamespaceEphemeralData`` of Apache Pulsar.
"""

from __future__ import annotations

import json
import zlib
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from ackstate.errors import CorruptStateError
from ackstate.stores.base import StoreError
from ackstate.topic_name import parse_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.stores.pulsar_zookeeper import PulsarZooKeeper

_BROKERS = "/loadbalance/brokers"
_EXTENSIBLE = "Extensible"
_HASH_END = 2**32
_UNLOADING = {
    "nativeUrl": "pulsar://ackstate-holds-this-bundle.invalid:6650",
    "httpUrl": "http://ackstate-holds-this-bundle.invalid:8080",
    "disabled": True,
    "advertisedListeners": {},
}


class TopicOwnedError(StoreError):
    """A broker owns the topic; nothing was changed."""


def find_owner(nodes: PulsarZooKeeper, topic: str) -> str | None:
    """Return the broker that owns a topic, None if no broker does.

    Raises:
        StoreError: The storage failed, or the brokers keep their ownership outside the metadata store.
        CorruptStateError: A node cannot be decoded.
    """
    _check_load_manager(nodes)
    namespace = _namespace(topic)
    for bundle in nodes.children(f"/namespace/{namespace}"):
        first, end = _bounds(bundle, namespace)
        if first <= topic_hash(topic) < end:
            path = f"/namespace/{namespace}/{bundle}"
            if (found := nodes.get(path)) is not None:
                return str(_json(found.data, path).get("nativeUrl") or "a broker that does not name its URL")
    return None


@contextmanager
def hold_topic(nodes: PulsarZooKeeper, topic: str) -> Iterator[None]:
    """Keep every broker from loading a topic, and the other topics of its bundle.

    Raises:
        TopicOwnedError: A broker owns it.
        StoreError: The storage failed, or the brokers keep their ownership outside the metadata store.
        CorruptStateError: A node cannot be decoded.
    """
    owner = find_owner(nodes, topic)
    namespace = _namespace(topic)
    path = f"/namespace/{namespace}/{_bundle(nodes, namespace, topic)}"
    if owner is None and not nodes.create_ephemeral(path, json.dumps(_UNLOADING).encode()):
        owner = find_owner(nodes, topic) or "a broker that has just come"
    if owner is not None:
        raise TopicOwnedError(
            f"{topic} is owned by {owner}: unload its namespace first (pulsar-admin namespaces unload {namespace}) with"
            " its clients stopped, or stop the brokers; nothing was changed"
        )
    try:
        yield
    finally:
        nodes.delete_ephemeral(path)


def topic_hash(topic: str) -> int:
    """Return the hash by which a topic belongs to a bundle."""
    return zlib.crc32(topic.encode())


def _namespace(topic: str) -> str:
    parts = parse_topic(topic)
    if parts is None:
        raise ValueError(f"topic must be persistent://TENANT/NAMESPACE/TOPIC, got {topic!r}")
    return parts.namespace


def _bundle(nodes: PulsarZooKeeper, namespace: str, topic: str) -> str:
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


def _check_load_manager(nodes: PulsarZooKeeper) -> None:
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
