"""The store of one broker: one for all its cursors, each with a session of its own that can fail, and be watched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash.model.settings import Encoded
from ackstate.cursor.store import StoreError
from ackstate.cursor.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ackstate.analysis.crash.model.simulated_subscription import SimulatedSubscription
    from ackstate.cursor.stores.memory import MemoryDisk


@final
class WatchedStore:
    """Lets a schedule look before and after each write, and keeps what was to be written.

    Cursors that are persisted together share a store; faults are scripted for each alone. So this is one store for
    them all, and every call goes to the session of the cursor whose ledger or record it is about.

    Attributes:
        ledgers: As of any store, with the next.
        metadata: The small values.
        is_left: Whether the broker is dead by all that is known: nobody watches what it still does.
    """

    def __init__(self, disk: MemoryDisk) -> None:
        self._disk = disk
        self._joined: dict[str, tuple[SimulatedSubscription, MemoryStore]] = {}
        self.ledgers, self.metadata = _Ledgers(self), _Metadata(self)
        self.is_left = False

    def join(self, side: SimulatedSubscription, session: MemoryStore) -> None:
        """Let all that concerns the cursor of a subscription go to a session from now on."""
        self._joined[side.cursor_path] = side, session

    def close(self) -> None:
        """Do nothing: sessions end by themselves."""

    def of_path(self, path: str) -> tuple[SimulatedSubscription, MemoryStore]:
        """Return whose a path or an owner's name is that ends with one."""
        return next(joined for known, joined in self._joined.items() if known in path)

    def of_ledger(self, ledger_id: int) -> tuple[SimulatedSubscription, MemoryStore]:
        """Return whose a ledger is; anybody's if there is none."""
        ledger = self._disk.ledgers.get(ledger_id)
        return next(iter(self._joined.values())) if ledger is None else self.of_path(ledger.owner)

    def children(self, path: str) -> list[str]:
        """Return what is below a path that is nobody's."""
        return MemoryStore(self._disk).metadata.children(path)

    def write(self, sides: Sequence[SimulatedSubscription], write: Callable[[], Any]) -> Any:
        """Write, and let others work before and after."""
        if self.is_left:
            return write()
        for side in sides:
            side.begins_write()
        try:
            result = write()
        except StoreError:
            for side in sides:
                side.has_failed = True
            raise
        for side in sides:
            side.schedule.while_writing(side)
        return result

    def attempt(self, side: SimulatedSubscription, encoded: Encoded, data: bytes) -> None:
        """Note what is about to be written."""
        if not self.is_left:
            side.attempt(encoded, data)

    def take_over(self, side: SimulatedSubscription) -> None:
        """Let the owner before do something, if a cursor is being opened and this is to fence that one."""
        if not self.is_left and side.rival is not None:
            side.rival.race(side)


@final
class _Ledgers:
    def __init__(self, store: WatchedStore) -> None:
        self._store = store

    def create(self, owner: str) -> int:
        side, session = self._store.of_path(owner)
        return int(self._store.write([side], lambda: session.ledgers.create(owner)))

    def append(self, ledger_id: int, entry: bytes) -> Any:
        side, session = self._store.of_ledger(ledger_id)
        self._store.attempt(side, Encoded.ENTRY, entry)
        return self._store.write([side], lambda: session.ledgers.append(ledger_id, entry))

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> Any:
        """See `LedgerStore.append_all`; watched by every side that has an entry in it."""
        joined = [self._store.of_ledger(ledger_id) for ledger_id, _ in entries]
        for (side, _), (_, entry) in zip(joined, entries, strict=True):
            self._store.attempt(side, Encoded.ENTRY, entry)
        sessions = {side.name: session for side, session in joined}
        session = sessions.get(joined[0][0].schedule.at_work.name, joined[0][1])
        # One write: what keeps one of them from its ledger keeps all.
        session = next((each for each in sessions.values() if each.has_broken_ledgers), session)
        return self._store.write([side for side, _ in joined], lambda: session.ledgers.append_all(entries))

    def fence(self, ledger_id: int) -> int:
        side, session = self._store.of_ledger(ledger_id)
        self._store.take_over(side)
        return session.ledgers.fence(ledger_id)

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        return self._store.of_ledger(ledger_id)[1].ledgers.read(ledger_id, first, end)

    def last(self, ledger_id: int) -> int:
        return self._store.of_ledger(ledger_id)[1].ledgers.last(ledger_id)

    def delete(self, ledger_id: int) -> None:
        self._store.of_ledger(ledger_id)[1].ledgers.delete(ledger_id)

    def owned_by(self, owner: str) -> list[int]:
        return self._store.of_path(owner)[1].ledgers.owned_by(owner)


@final
class _Metadata:
    def __init__(self, store: WatchedStore) -> None:
        self._store = store

    def get(self, path: str) -> Any:
        return self._store.of_path(path)[1].metadata.get(path)

    def put(self, path: str, data: bytes, *, expected_version: int) -> Any:
        """See `MetadataStore.put`; watched."""
        side, session = self._store.of_path(path)
        self._store.take_over(side)
        self._store.attempt(side, Encoded.RECORD, data)
        return self._store.write([side], lambda: session.metadata.put(path, data, expected_version=expected_version))

    def delete(self, path: str, *, expected_version: int) -> None:
        self._store.of_path(path)[1].metadata.delete(path, expected_version=expected_version)

    def children(self, path: str) -> list[str]:
        return self._store.children(path)
