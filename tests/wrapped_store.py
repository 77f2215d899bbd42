"""Stores whose calls are looked up through a function, two kinds of them, and the copy of a disk."""

from contextlib import contextmanager

from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryDisk


class WrappedStore:
    """A store of which each call is looked up: ``look_up(name, call)`` returns what is called instead."""

    def __init__(self, store, look_up):
        self.ledgers, self.metadata = _Part(store.ledgers, look_up), _Part(store.metadata, look_up)
        self._close, self._look_up = store.close, look_up

    def close(self):
        self._look_up("close", self._close)()


class _Part:
    def __init__(self, part, look_up):
        self._part, self._look_up = part, look_up

    def __getattr__(self, name):
        return self._look_up(name, getattr(self._part, name))


def before_each_call(store, act):
    """Return a store that calls a function with the name of each of its calls, right before it."""

    def look_up(name, call):
        def called(*args, **named):
            act(name)
            return call(*args, **named)

        return called

    return WrappedStore(store, look_up)


def copied(disk):
    """Return a disk with the same contents, as the next opening of a store finds it."""
    copy = MemoryDisk()
    for ledger_id, ledger in disk.ledgers.items():
        copy.ledgers[ledger_id] = type(ledger)(ledger.owner, 0, [*ledger.entries])
    copy.values.update(disk.values)
    copy.next_ledger_id, copy.first_version = disk.next_ledger_id, disk.first_version
    return copy


class FlakyStore(WrappedStore):
    """A store whose ledgers cannot be appended to for a while, so that a cursor falls back to the metadata store."""

    def __init__(self, store):
        super().__init__(store, self._or_refuse)
        self._is_refusing = False

    @contextmanager
    def refusing_appends(self):
        self._is_refusing = True
        try:
            yield
        finally:
            self._is_refusing = False

    def _or_refuse(self, name, call):
        if self._is_refusing and name in {"append", "append_many"}:
            raise StoreError("the ledgers are out of order")
        return call
