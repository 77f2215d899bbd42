"""The index of a store's ledgers in ZooKeeper: their ids, owners, and unfinished deletions."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.cursor.store import check_owner
from ackstate.errors import CorruptStateError
from ackstate.stores import zookeeper_nodes as nodes
from ackstate.stores.zookeeper_session import (
    SessionOperation,
    ZooKeeperSession,
    create_directory,
    delete,
    existing,
    set_data,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class LedgerIndex:
    """Ids and owners of ledgers; the caller commits the operations together with those on the ledger's own node."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session

    def additions(self, owners: Sequence[str]) -> tuple[list[int], list[SessionOperation]]:
        """Return a new id for a ledger of each owner, above every one before, and the operations that register them."""
        directories = [*dict.fromkeys(map(nodes.owner_path, owners))]
        counter, *found = self._session.read(nodes.LEDGER_COUNTER, *directories)
        counter = existing(counter, nodes.LEDGER_COUNTER)
        first = nodes.decode_counter(nodes.LEDGER_COUNTER, counter.data) + 1
        ledger_ids = [*range(first, first + len(owners))]
        encoded = nodes.encode_counter(nodes.LEDGER_COUNTER, first + len(owners) - 1)
        operations = [set_data(nodes.LEDGER_COUNTER, encoded, counter.version)]
        missing = [directory for directory, node in zip(directories, found, strict=True) if node is None]
        operations += map(create_directory, missing)
        operations += [
            create_directory(f"{nodes.owner_path(owner)}/{ledger_id}")
            for ledger_id, owner in zip(ledger_ids, owners, strict=True)
        ]
        return ledger_ids, operations

    def removal(self, ledger_id: int, owner: str) -> list[SessionOperation]:
        """Return the operations that make a ledger garbage."""
        directory = nodes.owner_path(owner)
        (owned,) = self._session.read(directory)
        operations = [create_directory(garbage_path(ledger_id)), delete(f"{directory}/{ledger_id}")]
        if existing(owned, directory).child_count == 1:
            operations.append(delete(directory))
        return operations

    def garbage(self) -> list[int]:
        """Return the ledgers whose deletion has not finished."""
        return self._numbers(nodes.GARBAGE)

    def owned_by(self, owner: str) -> list[int]:
        """See `LedgerStore.owned_by`."""
        check_owner(owner)
        return self._numbers(nodes.owner_path(owner))

    def owners(self) -> list[str]:
        """See `LedgerStore.owners`."""
        return sorted(map(nodes.owner_in_owners, self._session.children(nodes.OWNERS) or []))

    def _numbers(self, path: str) -> list[int]:
        names: Sequence[str] = self._session.children(path) or []
        return sorted(_number(name, path) for name in names)


def garbage_path(ledger_id: int) -> str:
    """Return the node that marks an unfinished deletion."""
    return f"{nodes.GARBAGE}/{ledger_id}"


def _number(name: str, path: str) -> int:
    if not (name.isascii() and name.isdecimal()):
        raise CorruptStateError(f"node {path}", offset=0, expected="numbers of ledgers", found=name)
    return int(name)
