"""Counts the bytes of each ledger of a message log, since a store has no sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.errors import CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ackstate.ledger_map import LedgerMap
    from ackstate.stores.base import Store

_ENTRIES_AT_ONCE = 1_000


@final
class LedgerSizes:
    """Bytes of the entries of each ledger of one log. Not safe for concurrent use.

    They are counted as they are appended, and the log's record has those of ledgers that were closed. A ledger whose
    owner crashed has no size there, nor has one of a release without sizes: it is read, once.

    Args:
        store: Where the ledgers live.
        ledgers: How many entries each has.
        known: The sizes in the log's record, by ledger id.
    """

    def __init__(self, store: Store, ledgers: LedgerMap, known: Iterable[tuple[int, int]]) -> None:
        self._store = store
        self._ledgers = ledgers
        self._known = {ledger_id: size for ledger_id, size in known if ledgers.has_ledger(ledger_id)}
        self._whole: int | None = None  # bytes of the log; None while the size of a ledger may be unknown
        self._below = (-1, 0)  # a ledger, and the bytes of those before it

    @property
    def known(self) -> Mapping[int, int]:
        """The sizes that are known, by ledger id, rising: to be read, not changed."""
        return self._known

    def begin(self, ledger_id: int) -> None:
        """Count a new ledger, which is empty."""
        self._known[ledger_id] = 0

    def appended(self, ledger_id: int, byte_count: int) -> None:
        """Count entries that were appended to a ledger."""
        if ledger_id in self._known:
            self._known[ledger_id] += byte_count
            if self._whole is not None:
                self._whole += byte_count

    def forget(self, ledger_id: int) -> None:
        """Note that a ledger has entries that were not counted."""
        self._known.pop(ledger_id, None)
        self._whole = None

    def trim(self) -> None:
        """Forget ledgers that the log no longer has."""
        self._known = {
            ledger_id: size for ledger_id, size in self._known.items() if self._ledgers.has_ledger(ledger_id)
        }
        self._whole, self._below = None, (-1, 0)

    def of(self, ledger_id: int) -> int:
        """Return the bytes of a ledger; 0 if it is damaged, so that it does not count as space that is used.

        Raises:
            StoreError: The storage failed.

        Complexity: O(1), but the first time O(entries) of a ledger whose size is not known.
        """
        if ledger_id not in self._known:
            self._known[ledger_id] = self._read(ledger_id)
            self._known = dict(sorted(self._known.items()))
        return self._known[ledger_id]

    @property
    def whole(self) -> int:
        """The bytes of the log, errors as for `of`. Complexity: O(1), but the first time after a trim."""
        if self._whole is None:
            self._whole = sum(map(self.of, self._ledgers))
        return self._whole

    def from_ledger(self, ledger_id: int) -> int:
        """Return the bytes of a ledger of the log and of all later ones, errors as for `of`.

        Complexity: O(ledgers between it and that of the last call), or O(ledgers) if it comes before that.
        """
        known_id, size = self._below
        if ledger_id != known_id:
            known_id, size = (known_id, size) if ledger_id > known_id else (-1, 0)
            size += sum(map(self.of, self._ledgers.ledgers_between(known_id - 1, ledger_id)))
            self._below = ledger_id, size
        return self.whole - size

    def _read(self, ledger_id: int) -> int:
        read, count = self._store.ledgers.read, self._ledgers.entry_count(ledger_id)
        try:
            return sum(
                len(entry)
                for first in range(0, count, _ENTRIES_AT_ONCE)
                for entry in read(ledger_id, first, min(first + _ENTRIES_AT_ONCE, count))
            )
        except CorruptStateError:
            return 0
