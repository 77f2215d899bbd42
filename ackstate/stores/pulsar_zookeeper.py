"""Apache Pulsar's own nodes in ZooKeeper: plain values at Pulsar's paths, changed by compare-and-set.

A value here is a node's data, as Pulsar writes it. The versions that this module returns are the numbers of the
transactions that wrote the values, which never repeat; the servers compare the nodes' own versions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.stores.base import ABSENT, StoreError, Versioned, VersionMismatchError
from ackstate.stores.zookeeper_session import LostRaceError, ZooKeeperSession, create, delete, set_data

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

REQUEST_BYTES_MAX = 1_000_000


@final
class PulsarZooKeeper:
    """The metadata of a Pulsar cluster in ZooKeeper, at Pulsar's paths; thread-safe.

    Errors are those of `MetadataStore`.

    Args:
        hosts: ``HOST:PORT`` pairs separated by commas.
        chroot: The prefix of every path; empty for none.
        call_timeout_s: How long a call waits for a connection, and again for an answer.
        client_options: More arguments for `kazoo.client.KazooClient`.
        only_reads: Refuse every change.

    Raises:
        StoreError: No server answered in time.
    """

    def __init__(
        self,
        hosts: str,
        *,
        chroot: str = "",
        call_timeout_s: float = 30.0,
        client_options: Mapping[str, Any] | None = None,
        only_reads: bool = False,
    ) -> None:
        self.name = f"zk:{hosts}{chroot}"
        self.session = ZooKeeperSession(
            hosts,
            root=chroot,
            session_timeout_s=30.0,
            call_timeout_s=call_timeout_s,
            request_bytes_max=REQUEST_BYTES_MAX,
            client_options=client_options or {},
        )
        if only_reads:
            self.session.refuse_changes()

    def get(self, path: str) -> Versioned | None:
        """Return the value of a path and its version; None if the path does not exist."""
        (found,) = self.session.read(path)
        return None if found is None else Versioned(found.data, found.changed_zxid)

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """Replace or create a value by compare-and-set, and return its new version."""
        self.session.check_writable()
        if expected_version == ABSENT:
            # Created empty and then set, because only setting returns the number of the transaction.
            operations = [create(path, b""), set_data(path, data, 0)]
        else:
            operations = [set_data(path, data, self._node_version(path, expected_version))]
        try:
            version: int = self.session.commit(operations)[-1].mzxid
        except LostRaceError as error:
            if expected_version == ABSENT and not error.name_taken:
                raise StoreError(f"{self.name}: there is nothing above {path}; nothing was written") from error
            raise VersionMismatchError(f"{path} was changed by another") from error
        return version

    def delete(self, path: str, *, expected_version: int) -> None:
        """Delete a value by compare-and-set."""
        self.session.check_writable()
        try:
            self.session.commit([delete(path, self._node_version(path, expected_version))])
        except LostRaceError as error:
            raise VersionMismatchError(f"{path} was changed by another") from error

    def children(self, path: str) -> list[str]:
        """Return the names one level below a path, sorted."""
        return sorted(self.session.children(path) or [])

    def create_ephemeral(self, path: str, data: bytes) -> bool:
        """Create a value that lasts as long as this session; return False if there is one already."""
        return self.session.create_ephemeral(path, data)

    def delete_ephemeral(self, path: str) -> None:
        """Delete a value of `create_ephemeral`; no-op if it is gone."""
        self.session.delete_ephemeral(path)

    def close(self) -> None:
        """End the session; no-op if closed."""
        self.session.close()

    def _node_version(self, path: str, expected_version: int) -> int:
        """Return the version that the servers compare, if the value is at the expected one."""
        (found,) = self.session.read(path)
        if found is None or found.changed_zxid != expected_version:
            at = ABSENT if found is None else found.changed_zxid
            raise VersionMismatchError(f"{path} is at version {at}, not {expected_version}")
        return found.version
