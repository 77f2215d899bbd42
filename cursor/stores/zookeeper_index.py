"""The index of a store's ledgers in ZooKeeper: their ids, owners, and unfinished deletions."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.cursor.store import check_owner
from ackstate.cursor.stores import zookeeper_nodes as nodes
from ackstate.cursor.stores.zookeeper_session import (
    SessionOperation,
    ZooKeeperSession,
    create_directory,
    delete,
    existing,
    set_data,
)
from ackstate.errors import CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Sequence


@final
class LedgerIndex:
    """Ids and owners of ledgers; the caller commits the operations together with those on the ledger's own node."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session

    def addition(self, owner: str) -> tuple[int, list[SessionOperation]]:
        """Return a new ledger's id, above every one before, and the operations that register it."""
        directory = nodes.owner_path(owner)
        counter, found_directory = self._session.read(nodes.LEDGER_COUNTER, directory)
        counter = existing(counter, nodes.LEDGER_COUNTER)
        ledger_id = nodes.decode_counter(nodes.LEDGER_COUNTER, counter.data) + 1
        encoded = nodes.encode_counter(nodes.LEDGER_COUNTER, ledger_id)
        operations = [set_data(nodes.LEDGER_COUNTER, encoded, counter.version)]
        if found_directory is None:
            operations.append(create_directory(directory))
        operations.append(create_directory(f"{directory}/{ledger_id}"))
        return ledger_id, operations

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
