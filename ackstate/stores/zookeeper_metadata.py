"""The metadata of a store in ZooKeeper: a node for each value."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.cursor.store import ABSENT, MetadataStore, Versioned, VersionMismatchError, check_path, children_prefix
from ackstate.stores import zookeeper_nodes as nodes
from ackstate.stores.zookeeper_nodes import NodeKind
from ackstate.stores.zookeeper_session import (
    Node,
    SessionOperation,
    ZooKeeperSession,
    check,
    create,
    create_directory,
    delete,
    existing,
    set_data,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


@final
class ZooKeeperMetadata:
    """The values of one store. Their versions are transaction numbers, so they rise over the whole store.

    A node's own version restarts at 0 when the node is deleted and created again, and the servers compare only that
    version. So every delete also changes another node. Each transaction here reads that node first and names its
    version, so no delete can happen in between unseen.
    """

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session

    def get(self, path: str) -> Versioned | None:
        """See `MetadataStore.get`."""
        check_path(path)
        node = nodes.value_path(path)
        (found,) = self._session.read(node)
        if found is None or not _holds_value(node, found):
            return None
        return Versioned(nodes.decode(NodeKind.VALUE, node, found.data), found.changed_zxid)

    def put(self, path: str, data: bytes, *, expected_version: int) -> int:
        """See `MetadataStore.put`.

        Raises:
            PayloadTooLargeError: Value and path do not fit into one request.
        """
        check_path(path)
        node = nodes.value_path(path)
        encoded = nodes.encode(NodeKind.VALUE, node, bytes(memoryview(data)))
        return self._session.settle(lambda: self._try_put(path, encoded, expected_version))

    def delete(self, path: str, *, expected_version: int) -> None:
        """See `MetadataStore.delete`."""
        check_path(path)
        self._session.settle(lambda: self._try_delete(path, expected_version))

    def children(self, path: str) -> list[str]:
        """See `MetadataStore.children`."""
        children_prefix(path)
        names = self._session.children(nodes.value_path(path)) or []
        return sorted(map(nodes.name_in_metadata, names))

    def _try_put(self, path: str, encoded: bytes, expected_version: int) -> int:
        node = nodes.value_path(path)
        above = nodes.directories_above(node)
        deletions, found, *found_above = self._session.read(nodes.DELETIONS, node, *above)
        _expect(path, found, expected_version)
        operations = [check(nodes.DELETIONS, existing(deletions, nodes.DELETIONS).version)]
        if found is None:
            missing = [directory for directory, there in zip(above, found_above, strict=True) if there is None]
            operations += [create_directory(directory) for directory in reversed(missing)]
            # Created empty and then set, because only setting returns the transaction's number.
            operations += [create(node, b""), set_data(node, encoded, 0)]
        else:
            operations.append(set_data(node, encoded, found.version))
        version: int = self._session.commit(operations)[-1].mzxid
        return version

    def _try_delete(self, path: str, expected_version: int) -> None:
        node = nodes.value_path(path)
        above = nodes.directories_above(node)
        deletions, found, *found_above = self._session.read(nodes.DELETIONS, node, *above)
        _expect(path, found, expected_version)
        if found is None or expected_version == ABSENT:
            raise VersionMismatchError(f"{path} holds no value to delete")
        version = existing(deletions, nodes.DELETIONS).version
        operations = [set_data(nodes.DELETIONS, nodes.encode(NodeKind.DIRECTORY, nodes.DELETIONS), version)]
        if found.child_count:
            operations.append(set_data(node, nodes.encode(NodeKind.DIRECTORY, node), found.version))
        else:
            operations.append(delete(node, found.version))
            operations += _deletions_of_the_empty(above, found_above)
        self._session.commit(operations)


def _deletions_of_the_empty(paths: list[str], found: list[Node | None]) -> Iterator[SessionOperation]:
    """Yield the deletions of directories that lead only to a value that is being deleted, nearest first."""
    for path, node in zip(paths, found, strict=True):
        if node is None or node.child_count > 1 or _holds_value(path, node):
            return
        yield delete(path, node.version)


def _holds_value(path: str, found: Node) -> bool:
    return nodes.kind_of(path, found.data) is NodeKind.VALUE


def _expect(path: str, found: Node | None, version: int) -> None:
    holds_value = found is not None and _holds_value(nodes.value_path(path), found)
    found_version = found.changed_zxid if found is not None and holds_value else ABSENT
    if found_version != version:
        raise VersionMismatchError(f"{path} is at version {found_version}, not {version}")


if TYPE_CHECKING:
    _: type[MetadataStore] = ZooKeeperMetadata
