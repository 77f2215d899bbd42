"""Numbers for the pages that positions are on: a page is 65,536 entries of one ledger.

A page and the lower half of an entry make the *place* of a position, which takes 40 bits where the position takes 95.
"""

from __future__ import annotations

from array import array
from sys import getsizeof
from typing import TYPE_CHECKING, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from collections.abc import Set as AbstractSet

    from numpy.typing import NDArray

ENTRY_BITS, PAGE_BITS = 16, 24
ENTRY_MASK = (1 << ENTRY_BITS) - 1
# The memory of a page beside its slots (two integers): measured.
_PAGE_BYTES = 64


@final
class EntryPages:
    """A number for each page in use, from 0, below 2**24; a number that is free is used again.

    Not safe for concurrent use.
    """

    __slots__ = ("_free", "_highs", "_ledger_ids", "_numbers")

    def __init__(self) -> None:
        # Invariant: page number n is that of the key _ledger_ids[n] << 16 | _highs[n], unless it is free.
        self._numbers: dict[int, int] = {}
        self._ledger_ids = array("q")
        self._highs = array("H")
        self._free: list[int] = []

    def __len__(self) -> int:
        """Return how many pages are in use."""
        return len(self._numbers)

    @property
    def memory_bytes(self) -> int:
        """About how much memory the pages take. Complexity: O(1)."""
        return sum(map(getsizeof, (self._numbers, self._ledger_ids, self._highs))) + _PAGE_BYTES * len(self._numbers)

    def number(self, ledger_id: int, high: int) -> int:
        """Return the number of the page of a ledger's entries with this upper half, a new one if it has none.

        Raises:
            OverflowError: All numbers are in use.
        """
        key = ledger_id << ENTRY_BITS | high
        page = self._numbers.get(key)
        if page is not None:
            return page
        if self._free:
            page = self._free.pop()
            self._ledger_ids[page], self._highs[page] = ledger_id, high
        else:
            page = len(self._highs)
            if page >> PAGE_BITS:
                raise OverflowError(f"messages on {page} pages of {1 << ENTRY_BITS} entries wait; no more can")
            self._ledger_ids.append(ledger_id)
            self._highs.append(high)
        self._numbers[key] = page
        return page

    def places(self, ledger_ids: NDArray[np.int64], entry_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places of positions; errors as for `number`."""
        highs = entry_ids >> ENTRY_BITS
        first, last = int(highs.min()), int(highs.max())
        numbers: NDArray[np.int64]
        if last - first < len(highs) and ledger_ids.min() == ledger_ids.max():
            # Of one ledger and close together, as a reader meets them: no need to sort.
            numbers, ledger_id = highs - first, int(ledger_ids[0])
            counts = np.bincount(numbers).tolist()
            found = [self.number(ledger_id, first + at) if count else 0 for at, count in enumerate(counts)]
        else:
            ledgers, ledger_numbers = np.unique(ledger_ids, return_inverse=True)
            keys, numbers = np.unique(ledger_numbers << ENTRY_BITS | highs, return_inverse=True)
            used = zip(ledgers[keys >> ENTRY_BITS].tolist(), (keys & ENTRY_MASK).tolist(), strict=True)
            found = [self.number(ledger_id, high) for ledger_id, high in used]
        return np.array(found, dtype=np.int64)[numbers] << ENTRY_BITS | entry_ids & ENTRY_MASK

    def position(self, place: int) -> tuple[int, int]:
        """Return the ledger and the entry at a place."""
        page = place >> ENTRY_BITS
        return self._ledger_ids[page], self._highs[page] << ENTRY_BITS | place & ENTRY_MASK

    def positions(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ledgers and the entries at places."""
        pages = places >> ENTRY_BITS
        ledger_ids = np.frombuffer(self._ledger_ids, dtype=np.int64)[pages]
        highs = np.frombuffer(self._highs, dtype=np.uint16)[pages].astype(np.int64)
        return ledger_ids, highs << ENTRY_BITS | places & ENTRY_MASK

    def by_page(self, places: NDArray[np.int64]) -> Iterator[tuple[int, array[int]]]:
        """Sort places, at least one, and yield for each page of a ledger that ledger and the entries.

        Complexity: O(n log n) for n places, and O(1) for each page.
        """
        places.sort()
        pages = places >> ENTRY_BITS
        highs = np.frombuffer(self._highs, dtype=np.uint16)[pages].astype(np.uint32)
        entry_ids = array("I", (highs << np.uint32(ENTRY_BITS) | places.astype(np.uint16)).tobytes())
        lasts = (pages[1:] != pages[:-1]).nonzero()[0]  # the last on each page but the last page
        start = 0
        for page, last in zip(pages[lasts].tolist(), lasts.tolist(), strict=True):
            yield self._ledger_ids[page], entry_ids[start : last + 1]
            start = last + 1
        yield self._ledger_ids[int(pages[-1])], entry_ids[start:]

    def few_by_page(self, places: Iterable[int]) -> Iterable[tuple[int, list[int]]]:
        """Do as `by_page`; faster for few places."""
        found: dict[int, tuple[int, list[int]]] = {}
        for place in places:
            page = place >> ENTRY_BITS
            if page not in found:
                found[page] = self._ledger_ids[page], []
            found[page][1].append(self._highs[page] << ENTRY_BITS | place & ENTRY_MASK)
        return found.values()

    def keep_only(self, used: AbstractSet[int]) -> None:
        """Free the numbers of all pages but some. Complexity: O(pages)."""
        unused = [key for key, page in self._numbers.items() if page not in used]
        self._free += [self._numbers.pop(key) for key in unused]

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(pages)."""
        for key, page in self._numbers.items():
            assert key == self._ledger_ids[page] << ENTRY_BITS | self._highs[page]
        assert sorted([*self._numbers.values(), *self._free]) == list(range(len(self._highs)))
