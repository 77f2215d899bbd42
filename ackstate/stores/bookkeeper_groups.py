"""Makes appends to several ledgers of a `BookKeeperStore` all or nothing.

A process that appends to several ledgers at once has a node in ZooKeeper, its writer. It numbers its groups 1, 2, 3 and
writes one at a time: first all entries, each ledger's last one with the name of the group, then the number into the
writer's node. That write commits the group. Until then no later entry is appended to these ledgers, so only the end of
a ledger can be in doubt. A recovery that finds an uncommitted group there first closes the writer, so that the group
can never be committed afterwards.
"""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING, final

from ackstate.stores import bookkeeper_nodes as nodes
from ackstate.stores.base import StoreError
from ackstate.stores.bookkeeper_entries import Group
from ackstate.stores.bookkeeper_nodes import WriterState
from ackstate.stores.zookeeper_session import LostRaceError, ZooKeeperSession, create, delete, set_data

if TYPE_CHECKING:
    from ackstate.stores.zookeeper_session import Node


@final
class GroupWriter:
    """The writer of this process. Its methods are called with `lock` held.

    Attributes:
        lock: Held from `begin` to the end of a group.
    """

    def __init__(self, session: ZooKeeperSession) -> None:
        self.lock = threading.Lock()
        self._session = session
        self._writer_id: int | None = None
        self._committed = 0
        self._version = 0

    def begin(self) -> Group:
        """Return the next group.

        Raises:
            StoreError: The writer's node was not created; there is no group.
        """
        if self._writer_id is None:
            self._writer_id = self._session.settle(self._try_create)
            self._committed, self._version = 0, 0
        return Group(self._writer_id, self._committed + 1)

    def commit(self, group: Group) -> bool:
        """Commit a group whose entries are all durable; False if a recovery has closed the writer before.

        Raises:
            StoreError: It is unknown whether the group is committed.
        """
        path = nodes.writer_path(group.writer_id)
        data = nodes.encode_writer(group.writer_id, WriterState(group.number, is_closed=False))
        self._session.check_writable()
        try:
            (changed,) = self._session.commit([set_data(path, data, self._version)])
        except LostRaceError:
            return False
        self._committed, self._version = group.number, changed.version
        return True

    def abandon(self) -> None:
        """Begin the next group with a new writer."""
        self._writer_id = None

    def remove(self) -> None:
        """Delete the writer's node: no unsealed segment ends with one of its groups."""
        if self._writer_id is not None:
            self._session.commit([delete(nodes.writer_path(self._writer_id), self._version)])
            self._writer_id = None

    def _try_create(self) -> int:
        writer_id = secrets.randbits(64)
        data = nodes.encode_writer(writer_id, WriterState(0, is_closed=False))
        self._session.commit([create(nodes.writer_path(writer_id), data)])
        return writer_id


class WriterMissingError(StoreError):
    """There is no such writer: its process has sealed all of its segments meanwhile, or the node was lost."""


def is_committed(session: ZooKeeperSession, group: Group) -> bool:
    """Return whether a group is committed; it may still become so.

    Raises:
        WriterMissingError: There is no such writer.
        CorruptStateError: Its node is damaged.
    """
    state, _ = _read(session, group)
    return state.committed >= group.number


def decide(session: ZooKeeperSession, group: Group) -> bool:
    """Return whether a group is committed, and if it is not, make sure that it never will be; errors as above."""
    return session.settle(lambda: _try_decide(session, group))


def _try_decide(session: ZooKeeperSession, group: Group) -> bool:
    state, node = _read(session, group)
    if state.committed >= group.number:
        return True
    if not state.is_closed:
        closed = nodes.encode_writer(group.writer_id, state._replace(is_closed=True))
        session.commit([set_data(nodes.writer_path(group.writer_id), closed, node.version)])
    return False


def _read(session: ZooKeeperSession, group: Group) -> tuple[WriterState, Node]:
    (found,) = session.read(nodes.writer_path(group.writer_id))
    if found is None:
        raise WriterMissingError
    return nodes.decode_writer(group.writer_id, found.data), found
