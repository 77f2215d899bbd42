"""A store in memory that holds only the last record of each ledger: in Pulsar's format it is the whole state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError
from ackstate.stores.memory import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.stores.base import LedgerStore, MetadataStore


@dataclass(slots=True)
class _Last:
    owner: str
    count: int = 0
    record: bytes = b""
    is_fenced: bool = False


@final
class LatestEntryStore:
    """A store for cursors that write Pulsar's format, and read only the last record of a ledger.

    Memory: one record per ledger. Otherwise it behaves like `MemoryStore`, without faults.
    """

    def __init__(self) -> None:
        self._others = MemoryStore()
        self._ledgers: dict[int, _Last] = {}
        self._next_id = 1

    @property
    def ledgers(self) -> LedgerStore:
        return self

    @property
    def metadata(self) -> MetadataStore:
        return self._others.metadata

    def close(self) -> None:
        self._others.close()

    def create(self, owner: str) -> int:
        ledger_id = self._next_id
        self._next_id += 1
        self._ledgers[ledger_id] = _Last(owner)
        return ledger_id

    def append(self, ledger_id: int, entry: bytes) -> int:
        return self.append_all([(ledger_id, entry)])[0]

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int]:
        targets = [(self._ledger(ledger_id), entry) for ledger_id, entry in entries]
        for ledger, _ in targets:
            if ledger.is_fenced:
                raise LedgerFencedError(f"a ledger of {ledger.owner} was fenced")
        found = []
        for ledger, entry in targets:
            ledger.record = entry
            ledger.count += 1
            found.append(ledger.count - 1)
        return found

    def read(self, ledger_id: int, first: int, end: int) -> list[bytes]:
        """Return the last record, or an empty list for an empty range.

        Raises:
            LedgerNotFoundError: Another record is requested.
        """
        ledger = self._ledger(ledger_id)
        if first == end:
            return []
        if (first, end) != (ledger.count - 1, ledger.count):
            raise LedgerNotFoundError(f"ledger {ledger_id} has entry {ledger.count - 1} alone, not {first} to {end}")
        return [ledger.record]

    def last(self, ledger_id: int) -> int:
        return self._ledger(ledger_id).count - 1

    def delete(self, ledger_id: int) -> None:
        self._ledgers.pop(ledger_id, None)

    def fence(self, ledger_id: int) -> int:
        ledger = self._ledger(ledger_id)
        ledger.is_fenced = True
        return ledger.count - 1

    def owned_by(self, owner: str) -> list[int]:
        return sorted(ledger_id for ledger_id, ledger in self._ledgers.items() if ledger.owner == owner)

    def owners(self) -> list[str]:
        return sorted({ledger.owner for ledger in self._ledgers.values()})

    def _ledger(self, ledger_id: int) -> _Last:
        if ledger_id not in self._ledgers:
            raise LedgerNotFoundError(f"ledger {ledger_id} does not exist")
        return self._ledgers[ledger_id]
