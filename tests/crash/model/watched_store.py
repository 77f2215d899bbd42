"""The store of one broker: shared by all its cursors, each with a separate session that can fail and is watched."""

from ackstate.errors import AckStateError
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore
from crash.model.settings import Encoded


class WatchedStore:
    """Calls a schedule before and after each write, and records attempted writes, until the broker is left as dead.

    Cursors that are persisted together share a store, but faults are scripted for each cursor. So this is one store for
    all of them, and every call goes to the session of the cursor that owns the ledger or record.
    """

    def __init__(self, disk):
        self._disk = disk
        self._joined = {}
        self.ledgers, self.metadata = _WatchedLedgers(self), _Metadata(self)
        self.is_left = False

    def join(self, side, session):
        self._joined.pop(side.cursor_path, None)
        self._joined[side.cursor_path] = side, session

    def close(self):
        """Do nothing: sessions end by themselves."""

    def of_path(self, path):
        """Return the subscription and session of a path, or of an owner's name that ends with a path.

        A path of no cursor belongs to the one that joined last.
        """
        found = next((joined for known, joined in self._joined.items() if known in path), None)
        return list(self._joined.values())[-1] if found is None else found

    def of_ledger(self, ledger_id):
        """Return the subscription and session of a ledger; any one if the ledger does not exist."""
        ledger = self._disk.ledgers.get(ledger_id)
        return next(iter(self._joined.values())) if ledger is None else self.of_path(ledger.owner)

    def children(self, path):
        return MemoryStore(self._disk).metadata.children(path)

    def write(self, sides, write):
        """Write, and run other threads' work before and after."""
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
            side.simulation.while_writing(side)
        return result

    def attempt(self, side, encoded, data):
        if not self.is_left:
            side.attempt(encoded, data)

    def take_over(self, side):
        if not self.is_left and side.rival is not None:
            side.rival.race(side)


class _WatchedLedgers:
    def __init__(self, store):
        self._store = store

    def create(self, owner):
        side, session = self._store.of_path(owner)
        return int(self._store.write([side], lambda: session.ledgers.create(owner)))

    def append(self, ledger_id, entries):
        side, session = self._store.of_ledger(ledger_id)
        for entry in entries:
            self._store.attempt(side, Encoded.ENTRY, entry)
        return self._store.write([side], lambda: session.ledgers.append(ledger_id, entries))

    def append_many(self, appends):
        for ledger_id, entries in appends:
            for entry in entries:
                self._store.attempt(self._store.of_ledger(ledger_id)[0], Encoded.ENTRY, entry)
        outcomes = []
        for ledger_id, entries in appends:
            side, session = self._store.of_ledger(ledger_id)
            try:
                outcomes.append(
                    self._store.write(
                        [side], lambda session=session, one=(ledger_id, entries): session.ledgers.append(*one)
                    )
                )
            except AckStateError as error:
                outcomes.append(error)
        return outcomes

    def fence(self, ledger_id):
        side, session = self._store.of_ledger(ledger_id)
        self._store.take_over(side)
        return session.ledgers.fence(ledger_id)

    def __getattr__(self, name):
        """Return `read`, `last` or `delete` of a ledger."""
        return lambda ledger_id, *args: getattr(self._store.of_ledger(ledger_id)[1].ledgers, name)(ledger_id, *args)

    def owned_by(self, owner):
        return self._store.of_path(owner)[1].ledgers.owned_by(owner)


class _Metadata:
    def __init__(self, store):
        self._store = store

    def get(self, path):
        return self._store.of_path(path)[1].metadata.get(path)

    def put(self, path, data, *, expected_version):
        side, session = self._store.of_path(path)
        if path != side.cursor_path:
            return session.metadata.put(path, data, expected_version=expected_version)
        self._store.take_over(side)
        self._store.attempt(side, Encoded.RECORD, data)
        return self._store.write([side], lambda: session.metadata.put(path, data, expected_version=expected_version))

    def delete(self, path, *, expected_version):
        self._store.of_path(path)[1].metadata.delete(path, expected_version=expected_version)

    def children(self, path):
        return self._store.children(path)
