"""Reads ledgers that another process may be writing to; nothing is written or fenced.

BookKeeper confirms an entry to readers with the next one. So reading goes beyond the last confirmed entry, to the last
one that can be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.stores.base import LedgerNotFoundError
from ackstate.stores.bookkeeper_errors import BOOKIE_UNREACHABLE, BookKeeperError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.stores.bookkeeper_client import BookKeeperClient, Reply
    from ackstate.stores.bookkeeper_ledger import LedgerMetadata

_FIRST_READ_ENTRIES = 8
_READ_BYTES = 4 << 20
"""A read of more entries at once than have this many bytes is followed by a smaller one."""
_READ_ENTRIES_MAX = 4_096
_PROBES_AT_ONCE = 16
_UNCONFIRMED_MAX = 10_000
"""More entries than a writer has under way: a reader that is slower than the writer must come to an end."""


def read_entries(client: BookKeeperClient, handle: int, first: int, end: int) -> Iterator[bytes]:
    """Yield the entries from `first` (included) to `end` (excluded), confirmed or not.

    Raises:
        LedgerNotFoundError: One of them does not exist.
        StoreError: BookKeeper failed.
    """
    count = _FIRST_READ_ENTRIES
    while first < end:
        entries = client.read_unconfirmed(handle, first, min(first + count, end)).wait()
        yield from entries
        first += len(entries)
        fits = sum(map(len, entries)) <= _READ_BYTES
        count = min(2 * count, _READ_ENTRIES_MAX) if fits else max(1, count // 4)


def last_readable(client: BookKeeperClient, ledger_id: int, handle: int) -> int:
    """Return the last entry of a ledger that can be read, confirmed or not; -1 if there is none.

    At least every entry that was acknowledged to the writer before the call can be read.

    Raises:
        LedgerNotFoundError: There is no such ledger.
        StoreError: Bookies that do not answer may have a further entry.
    """
    ledger = client.metadata(ledger_id).wait()
    if ledger.last_entry_id is not None:
        return ledger.last_entry_id
    end = client.last_confirmed(handle).wait() + 1
    limit = end + _UNCONFIRMED_MAX
    while end < limit:
        entry_ids = range(end, end + _PROBES_AT_ONCE)
        probes = [client.read_unconfirmed(handle, entry_id, entry_id + 1) for entry_id in entry_ids]
        found = _readable_count(client, probes, ledger)
        end += found
        if found < _PROBES_AT_ONCE:
            break
    return end - 1


def _readable_count(client: BookKeeperClient, probes: Sequence[Reply[list[bytes]]], ledger: LedgerMetadata) -> int:
    """Return the number of entries before the first one that does not exist."""
    for count, probe in enumerate(probes):
        try:
            probe.wait()
        except LedgerNotFoundError:
            return count
        except BookKeeperError as error:
            # All bookies of the entry that can be reached do not have it.
            if error.code != BOOKIE_UNREACHABLE or not _would_be_found(client, ledger):
                raise
            return count
    return len(probes)


def _would_be_found(client: BookKeeperClient, ledger: LedgerMetadata) -> bool:
    """Return whether an acknowledged entry is on a bookie that answers, although others do not."""
    ensemble = ledger.ensembles[max(ledger.ensembles)]
    missing = set(client.missing_bookies().wait()) & set(ensemble)
    # None is missing if a bookie has returned meanwhile: it may have the entry.
    return 0 < len(missing) < ledger.ack_quorum
