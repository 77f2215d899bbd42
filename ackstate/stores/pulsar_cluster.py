"""Opens the cursors of a Pulsar cluster by its URL; needs ``pip install 'ackstate[bookkeeper]'`` and Java."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ackstate.stores.bookkeeper_client import BookKeeperClient
from ackstate.stores.bookkeeper_ledger import Replication
from ackstate.stores.pulsar_layout import PulsarLayout
from ackstate.stores.pulsar_ledgers import PulsarLedgers
from ackstate.stores.pulsar_url import parse_pulsar_url
from ackstate.stores.pulsar_zookeeper import PulsarZooKeeper

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ackstate.stores.pulsar_url import PulsarUrl


def open_cluster(  # noqa: PLR0913 - settings are named, not packed
    url: str,
    *,
    only_reads: bool = False,
    replication: Replication | None = None,
    class_path: str | None = None,
    call_timeout_s: float = 30.0,
    client_options: Mapping[str, Any] | None = None,
    client: BookKeeperClient | None = None,
) -> PulsarLayout:
    """Open the cluster of a URL; see `ackstate.stores.pulsar_url.parse_pulsar_url`.

    Args:
        url: Where the metadata is, such as ``pulsar+zk://127.0.0.1:2181``.
        only_reads: Refuse every change with `StoreError`.
        replication: How new cursor ledgers are replicated; None for Pulsar's default, 2 bookies. The digest and the
            password must be those of the brokers; those of the URL take precedence.
        class_path: Where BookKeeper's Java client is; None for the environment's.
        call_timeout_s: How long a call waits for an answer.
        client_options: More arguments for `kazoo.client.KazooClient`.
        client: A client of the cluster's BookKeeper to share, which stays open; None starts one for this store.

    Raises:
        ValueError: The URL is malformed, or names a metadata store other than ZooKeeper.
        StoreError: A server does not answer, or a package, Java or its classes are missing.
        OSError: The file with the password cannot be read.
    """
    parts = parse_pulsar_url(url)
    chosen = _with_secrets(replication or Replication(), parts)
    with ExitStack() as opened:
        nodes = PulsarZooKeeper(
            parts.hosts,
            chroot=parts.chroot,
            call_timeout_s=call_timeout_s,
            client_options=client_options,
            only_reads=only_reads,
        )
        opened.callback(nodes.close)
        on_close = None
        if client is None:
            uri = f"zk+null://{parts.hosts.replace(',', ';')}{parts.chroot}{parts.ledgers}"
            client = BookKeeperClient(uri, class_path=class_path, call_timeout_s=call_timeout_s)
            on_close = client.close
        opened.pop_all()
    ledgers = PulsarLedgers(client, nodes, chosen, only_reads=only_reads)
    return PulsarLayout(nodes, ledgers, within=parts.within, on_close=on_close)


def _with_secrets(replication: Replication, parts: PulsarUrl) -> Replication:
    """Return a replication with the digest and the password of a URL, if it has them."""
    if parts.digest:
        replication = replace(replication, digest_type=parts.digest)
    if parts.password_file:
        replication = replace(replication, password=Path(parts.password_file).read_bytes().rstrip(b"\r\n"))
    return replication
