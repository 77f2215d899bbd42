"""A store whose ledgers cannot be appended to for a while, so that a cursor falls back to the metadata store."""

from __future__ import annotations

from contextlib import contextmanager

from ackstate.stores.base import StoreError


class FlakyStore:
    """Forwards every call to a store, except appends while these are refused."""

    def __init__(self, store):
        self._store = store
        self.ledgers = _FlakyLedgers(store.ledgers)
        self.metadata = store.metadata

    @contextmanager
    def refusing_appends(self):
        self.ledgers.is_broken = True
        try:
            yield
        finally:
            self.ledgers.is_broken = False

    def close(self):
        self._store.close()


class _FlakyLedgers:
    def __init__(self, ledgers):
        self._ledgers = ledgers
        self.is_broken = False

    def __getattr__(self, name):
        if self.is_broken and name in {"append", "append_many"}:
            raise StoreError("the ledgers are out of order")
        return getattr(self._ledgers, name)
