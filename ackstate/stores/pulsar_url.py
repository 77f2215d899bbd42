"""The URL of a Pulsar cluster's metadata store, and the names of its topics."""

from __future__ import annotations

import re
from typing import NamedTuple

from ackstate.stores.base import check_path
from ackstate.topic_name import parse_topic

_SCHEMES = ("pulsar+zk://", "zk:")
_OPTIONS = ("chroot", "ledgers", "digest", "password_file")
_OTHERS = {"rocksdb:": "RocksDB", "etcd:": "etcd", "oxia:": "Oxia", "memory:": "the memory of a broker"}


class PulsarUrl(NamedTuple):
    """Where the metadata of a Pulsar cluster is, and which of its topics are meant.

    Attributes:
        hosts: The ZooKeeper servers.
        within: A tenant, a namespace or a topic, as ``TENANT/NAMESPACE/TOPIC``; empty for the whole cluster.
        chroot: The node in ZooKeeper below which the cluster is; empty for the top.
        ledgers: BookKeeper's node, below `chroot`.
        digest: The brokers' ``managedLedgerDigestType``; empty for the default.
        password_file: A file with the brokers' ``managedLedgerPassword``; empty for none.
    """

    hosts: str
    within: str = ""
    chroot: str = ""
    ledgers: str = "/ledgers"
    digest: str = ""
    password_file: str = ""

    @property
    def topic(self) -> str | None:
        """The topic, if the URL names one."""
        return f"persistent://{self.within}" if self.within.count("/") > 1 else None


def parse_pulsar_url(url: str) -> PulsarUrl:
    """Parse ``pulsar+zk://HOST:PORT[,HOST:PORT][/TENANT[/NAMESPACE[/TOPIC]]]``.

    ``zk:HOST:PORT[,HOST:PORT][/CHROOT]``, as in a broker's ``metadataStoreUrl``, is accepted, too.
    ``?NAME=VALUE[&NAME=VALUE]`` sets other fields of `PulsarUrl`, such as ``?chroot=/pulsar&password_file=secret``.

    Raises:
        ValueError: The URL is not one of these; another metadata store of Pulsar is named.
    """
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
    """Return a topic's full name; ``TENANT/NAMESPACE/TOPIC`` and a bare ``TOPIC`` of ``public/default`` are accepted.

    Raises:
        ValueError: It is the name of a topic that is not persistent.
    """
    if "://" not in topic:
        topic = f"persistent://{topic if topic.count('/') > 1 else f'public/default/{topic}'}"
    parts = parse_topic(topic)
    if parts is None or parts.domain != "persistent":
        raise ValueError(f"topic must be persistent://TENANT/NAMESPACE/TOPIC, got {topic!r}")
    return topic
