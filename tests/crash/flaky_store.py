"""A store whose ledgers cannot be appended to for a while, so that a cursor falls back to the metadata store."""

from __future__ import annotations

from contextlib import contextmanager

from ackstate.stores.base import StoreError
from ackstate.stores.writes import write_all, write_each


class FlakyStore:
    """Forwards every call to a store, except appends while these are refused."""

    def __init__(self, store):
        self._store = store
        self.ledgers = _FlakyLedgers(store.ledgers)
        self.metadata = store.metadata

    @contextmanager
    def refusing_appends(self):
        """Refuse every append meanwhile, with `StoreError`."""
        self.ledgers.is_broken = True
        try:
            yield
        finally:
            self.ledgers.is_broken = False

    def write_all(self, writes):
        """Execute writes together, or one by one while appends are refused."""
        return write_each(self, writes) if self.ledgers.is_broken else write_all(self._store, writes)

    def close(self):
        """Close the store."""
        self._store.close()


class _FlakyLedgers:
    def __init__(self, ledgers):
        self._ledgers = ledgers
        self.is_broken = False

    def append(self, ledger_id, entry):
        self._check()
        return self._ledgers.append(ledger_id, entry)

    def append_all(self, entries):
        self._check()
        return self._ledgers.append_all(entries)

    def _check(self):
        if self.is_broken:
            raise StoreError("the ledgers are out of order")

    def __getattr__(self, name):
        return getattr(self._ledgers, name)
