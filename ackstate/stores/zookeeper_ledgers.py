"""The ledgers of a ZooKeeper store: a node with the state of each, and below it the chunks of its entries.

A transaction that appends also changes the ledger's node, if it has the version that this process saw last. So no
process can append to a ledger that another has fenced, deleted or appended to since.

An append that is too large for one request first writes its chunks beyond the end of the ledgers, where no caller
reads, and then moves the ends in one transaction. If the ends were never moved, the next append removes the staged
chunks.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.cursor.store import LedgerFencedError, LedgerNotFoundError, check_owner
from ackstate.errors import CorruptStateError
from ackstate.stores import zookeeper_nodes as nodes
from ackstate.stores.busy_ledgers import BusyLedgers
from ackstate.stores.zookeeper_index import LedgerIndex
from ackstate.stores.zookeeper_nodes import Chunk, LedgerState, LedgerStatus
from ackstate.stores.zookeeper_session import (
    LostRaceError,
    Node,
    SessionOperation,
    ZooKeeperSession,
    check,
    create,
    delete,
    existing,
    set_data,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# The part of a request with one chunk that is not its data: the paths and the ledger's node.
CHUNK_ROOM_BYTES = 16 * 1024
"""The least difference between the size of a request and the size of a chunk's data."""


class _Head(NamedTuple):
    """A ledger's state and the version of its node."""

    state: LedgerState
    version: int


@final
class ZooKeeperLedgers:
    """The logs of one store."""

    def __init__(self, session: ZooKeeperSession) -> None:
        self._session = session
        self._index = LedgerIndex(session)
        self._chunk_bytes_max = session.request_bytes_max - CHUNK_ROOM_BYTES
        # The last seen heads, so that an append need not read first; the servers refuse a transaction for an old head.
        self._heads: dict[int, _Head] = {}
        self._creating = threading.Lock()
        # Two appends at once to one ledger would only make each other retry.
        self._busy = BusyLedgers()

    def finish_deletions(self) -> None:
        """Remove the chunks left by interrupted deletions."""
        for ledger_id in self._index.garbage():
            self._clear(ledger_id)

    def create(self, owner: str) -> int:
        """See `LedgerStore.create`."""
        return self.create_all([owner])[0]

    def create_all(self, owners: Sequence[str]) -> list[int]:
        """Create a ledger for each owner in one transaction, and return their ids in order.

        Raises:
            PayloadTooLargeError: The nodes do not fit into one request; at least 100 do if the owners are short.
        """
        for owner in owners:
            check_owner(owner)
        with self._creating:
            return self._session.settle(lambda: self._try_create(owners))

    def append(self, ledger_id: int, entry: bytes) -> int:
        """See `LedgerStore.append`."""
        return self.append_all([(ledger_id, entry)])[0]

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        """See `LedgerStore.append_all`.

        Raises:
            PayloadTooLargeError: The nodes of the ledgers do not fit into one request (about 5,000 do).
        """
        # Through a memoryview, because bytes(5) is five zeros.
        batch = [(ledger_id, bytes(memoryview(entry))) for ledger_id, entry in entries]
        self._session.check_writable()
        if not batch:
            return []
        with self._busy.holding({ledger_id for ledger_id, _ in batch}):
            return self._session.settle(lambda: self._try_append(batch))

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """See `LedgerStore.read`."""
        if not 0 <= first <= end:
            raise ValueError(f"first and end must be 0 <= first <= end, got {first} and {end}")
        state = self._state(ledger_id)
        if first == end:
            return []
        if end > state.entry_count:
            raise LedgerNotFoundError(f"ledger {ledger_id} ends before entry {end - 1}")
        firsts = self._chunks(ledger_id, [nodes.chunk_path(ledger_id, entry_id, 0) for entry_id in range(first, end)])
        return [
            chunk.data if chunk.chunk_count == 1 else self._joined(ledger_id, entry_id, chunk)
            for entry_id, chunk in enumerate(firsts, first)
        ]

    def last(self, ledger_id: int) -> int:
        """See `LedgerStore.last`."""
        return self._state(ledger_id).entry_count - 1

    def delete(self, ledger_id: int) -> None:
        """See `LedgerStore.delete`. One transaction removes the ledger; then its chunks go, at most 1,000 at a time.

        An interrupted call leaves chunks that no caller sees. The next opening of the store for writing removes them.
        """
        self._session.settle(lambda: self._take_away(ledger_id))
        self._heads.pop(ledger_id, None)
        self._clear(ledger_id)

    def fence(self, ledger_id: int) -> int:
        """See `LedgerStore.fence`."""
        self._heads.pop(ledger_id, None)
        return self._session.settle(lambda: self._try_fence(ledger_id))

    def owned_by(self, owner: str) -> list[int]:
        """See `LedgerStore.owned_by`."""
        return self._index.owned_by(owner)

    def owners(self) -> list[str]:
        """See `LedgerStore.owners`."""
        return self._index.owners()

    def _try_create(self, owners: Sequence[str]) -> list[int]:
        ledger_ids, operations = self._index.additions(owners)
        states = {
            ledger_id: LedgerState(0, LedgerStatus.OPEN, owner)
            for ledger_id, owner in zip(ledger_ids, owners, strict=True)
        }
        operations += [
            create(nodes.ledger_path(each), nodes.encode_ledger(each, state)) for each, state in states.items()
        ]
        self._session.commit(operations)
        self._heads |= {ledger_id: _Head(state, 0) for ledger_id, state in states.items()}
        return ledger_ids

    def _try_append(self, batch: list[tuple[int, bytes]]) -> list[int]:
        heads = self._open_heads(list(dict.fromkeys(ledger_id for ledger_id, _ in batch)))
        ends = {ledger_id: head.state.entry_count for ledger_id, head in heads.items()}
        entry_ids: list[int] = []
        chunks: list[tuple[int, SessionOperation]] = []
        for ledger_id, entry in batch:
            entry_ids.append(ends[ledger_id])
            chunks += self._creations(ledger_id, ends[ledger_id], entry)
            ends[ledger_id] += 1
        try:
            self._commit(heads, ends, chunks)
        except LostRaceError as error:
            for ledger_id in heads:
                self._heads.pop(ledger_id, None)
            if error.name_taken:
                self._remove_staged(sorted(heads))
            raise
        return entry_ids

    def _open_heads(self, ledger_ids: list[int]) -> dict[int, _Head]:
        """Return the last seen heads of ledgers if all accept appends; raise for the first ledger that does not."""
        seen = {ledger_id: head for ledger_id in ledger_ids if (head := self._heads.get(ledger_id))}
        unseen = [ledger_id for ledger_id in ledger_ids if ledger_id not in seen]
        paths = [nodes.ledger_path(ledger_id) for ledger_id in unseen]
        for ledger_id, found in zip(unseen, self._session.read(*paths) if paths else [], strict=True):
            state = _state_of(ledger_id, found)
            if state.status is LedgerStatus.FENCED:
                raise LedgerFencedError(f"ledger {ledger_id} was fenced")
            assert found is not None
            seen[ledger_id] = _Head(state, found.version)
        return seen

    def _creations(self, ledger_id: int, entry_id: int, entry: bytes) -> Iterator[tuple[int, SessionOperation]]:
        """Yield the operations that create the chunks of an entry, each with its ledger."""
        size = self._chunk_bytes_max
        parts = [entry[begin : begin + size] for begin in range(0, len(entry), size)] or [b""]
        for number, part in enumerate(parts):
            path = nodes.chunk_path(ledger_id, entry_id, number)
            yield ledger_id, create(path, nodes.encode_chunk(path, Chunk(len(parts), part)))

    def _commit(
        self, heads: dict[int, _Head], ends: dict[int, int], chunks: list[tuple[int, SessionOperation]]
    ) -> None:
        """Add chunks to ledgers and move their ends, all or nothing."""
        moved = {ledger_id: head.state._replace(entry_count=ends[ledger_id]) for ledger_id, head in heads.items()}
        moves = [
            set_data(nodes.ledger_path(ledger_id), nodes.encode_ledger(ledger_id, state), heads[ledger_id].version)
            for ledger_id, state in moved.items()
        ]
        together = moves + [creation for _, creation in chunks]
        if self._session.request_bytes(together) > self._session.request_bytes_max:
            self._session.check_size(moves)
            self._stage(heads, chunks)
            together = moves
        results = self._session.commit(together)
        for (ledger_id, state), result in zip(moved.items(), results, strict=False):
            self._heads[ledger_id] = _Head(state, result.version)

    def _stage(self, heads: dict[int, _Head], chunks: list[tuple[int, SessionOperation]]) -> None:
        """Write chunks beyond the ends of their ledgers, provided the ledgers have not changed."""
        checks = {ledger_id: check(nodes.ledger_path(ledger_id), head.version) for ledger_id, head in heads.items()}
        for pack in self._session.packs([checks[ledger_id], creation] for ledger_id, creation in chunks):
            self._session.commit(pack)

    def _remove_staged(self, ledger_ids: list[int]) -> None:
        """Remove the chunks that interrupted appends left beyond the ends of ledgers."""
        for ledger_id in ledger_ids:
            path = nodes.ledger_path(ledger_id)
            (found,) = self._session.read(path)
            state = _state_of(ledger_id, found)
            names = self._session.children(path) or []
            staged = [f"{path}/{name}" for name in names if nodes.entry_id_of(name) >= state.entry_count]
            if staged and found:
                # A new version, so that a process still staging there cannot move the end over the removed chunks.
                (changed,) = self._session.commit([set_data(path, found.data, found.version)])
                unchanged = check(path, changed.version)
                for pack in self._session.packs([unchanged, delete(chunk)] for chunk in staged):
                    self._session.commit(pack)

    def _state(self, ledger_id: int) -> LedgerState:
        return _state_of(ledger_id, self._session.read(nodes.ledger_path(ledger_id))[0])

    def _chunks(self, ledger_id: int, paths: Sequence[str]) -> list[Chunk]:
        found = self._session.read(*paths)
        if None in found:
            # The ledger was deleted after its state was read, or the chunk was lost.
            self._state(ledger_id)
        return [nodes.decode_chunk(path, existing(node, path).data) for path, node in zip(paths, found, strict=True)]

    def _joined(self, ledger_id: int, entry_id: int, first: Chunk) -> bytes:
        """Return an entry of several chunks."""
        paths = [nodes.chunk_path(ledger_id, entry_id, number) for number in range(1, first.chunk_count)]
        chunks = [first, *self._chunks(ledger_id, paths)]
        for path, chunk in zip(paths, chunks[1:], strict=True):
            if chunk.chunk_count != first.chunk_count:
                expected = f"{first.chunk_count} chunks"
                raise CorruptStateError(f"node {path}", offset=0, expected=expected, found=chunk.chunk_count)
        return b"".join(chunk.data for chunk in chunks)

    def _try_fence(self, ledger_id: int) -> int:
        path = nodes.ledger_path(ledger_id)
        (found,) = self._session.read(path)
        state = _state_of(ledger_id, found)
        if state.status is LedgerStatus.OPEN:
            assert found is not None
            fenced = nodes.encode_ledger(ledger_id, state._replace(status=LedgerStatus.FENCED))
            self._session.commit([set_data(path, fenced, found.version)])
        return state.entry_count - 1

    def _take_away(self, ledger_id: int) -> None:
        """Make a ledger invisible to every caller, and record that its chunks are to be removed."""
        path = nodes.ledger_path(ledger_id)
        (found,) = self._session.read(path)
        if found is None:
            return
        state = nodes.decode_ledger(ledger_id, found.data)
        if state.status is LedgerStatus.DELETED:
            return
        gone = nodes.encode_ledger(ledger_id, state._replace(status=LedgerStatus.DELETED))
        self._session.commit([set_data(path, gone, found.version), *self._index.removal(ledger_id, state.owner)])

    def _clear(self, ledger_id: int) -> None:
        """Remove the nodes of an invisible ledger; another process may be removing them too."""
        self._session.settle(lambda: self._try_clear(ledger_id))

    def _try_clear(self, ledger_id: int) -> None:
        path = nodes.ledger_path(ledger_id)
        names = self._session.children(path)
        if names is not None:
            for pack in self._session.packs([delete(f"{path}/{name}")] for name in names):
                self._session.commit(pack)
            self._session.commit([delete(path), delete(f"{nodes.GARBAGE}/{ledger_id}")])


def _state_of(ledger_id: int, found: Node | None) -> LedgerState:
    """Return the state in a ledger's node; `LedgerNotFoundError` if there is none or it was deleted."""
    state = found and nodes.decode_ledger(ledger_id, found.data)
    if state is None or state.status is LedgerStatus.DELETED:
        raise LedgerNotFoundError(f"there is no ledger {ledger_id}")
    return state
