"""Computes the size of ranges as Pulsar writes them.

A range ``(lower, upper]`` is one element of a protobuf ``repeated MessageRange``: two nested positions, each a
ledger id and an entry id as varints. With ``v(n)`` the length of a varint, one framed element takes ::

    tag, length            2
    2 x (tag, length)      4      lower and upper endpoint
    2 x (tag, ledger id)   2 + 2 v(ledger)
    tag, entry id          1 + v(first - 1)     the lower end is open; -1 takes ten bytes
    tag, entry id          1 + v(last)

and every length prefix is one byte, since no element reaches 128. So the size splits into a part that each range of a
ledger pays, a part that only its first entry decides, and a part that only its last entry decides.

Source: ``MLDataFormats.proto`` of Apache Pulsar, messages ``MessageRange`` and ``NestedPositionInfo``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyroaring import BitMap

MINUS_ONE_BYTES = 10
# The length of a varint by the number's count of binary digits, 0 to 64: each ack looks up two of them.
VARINT_BYTES = tuple(max(1, (digits + 6) // 7) for digits in range(65))
_ENTRY_ID_END = 2**32
# At each of these numbers a varint becomes one byte longer.
_LONGER_FROM = tuple(2**digits for digits in (7, 14, 21, 28))


def varint_bytes(number: int) -> int:
    """Return the length of a non-negative number as a protobuf varint, in bytes."""
    return VARINT_BYTES[number.bit_length()]


def range_fixed_bytes(ledger_id: int) -> int:
    """Return the size of any range of this ledger, without its two entry ids."""
    return 10 + 2 * varint_bytes(ledger_id)


def range_first_bytes(first: int) -> int:
    """Return the size of a range's lower end, given its first acked entry."""
    return VARINT_BYTES[(first - 1).bit_length()] if first else MINUS_ONE_BYTES


def range_last_bytes(last: int) -> int:
    """Return the size of a range's upper end, given its last acked entry."""
    return VARINT_BYTES[last.bit_length()]


def range_bytes(ledger_id: int, first: int, last: int) -> int:
    """Return the size of one range, from its first to its last acked entry, both inclusive."""
    return range_fixed_bytes(ledger_id) + range_first_bytes(first) + range_last_bytes(last)


def isolated_range_bytes(ledger_id: int, entry_id: int) -> int:
    """Return the most that acking one entry can add to the ranges' size: a separate range.

    Joining an existing range costs less: it changes one end of it, by at most nine bytes.
    """
    return range_bytes(ledger_id, entry_id, entry_id)


def isolated_ranges_bytes(positions: Sequence[tuple[int, int]]) -> list[int]:
    """Return `isolated_range_bytes` of each of some valid positions, at least one, in rising order.

    Complexity: O(1) calls if the first and the last are of one ledger and take the same, as all between them do then.
    """
    first, last = positions[0], positions[-1]
    lowest = isolated_range_bytes(*first)
    if first is last or (first[0] == last[0] and lowest == isolated_range_bytes(*last)):
        return [lowest] * len(positions)
    sizes: list[int] = []
    recent_id, fixed = -1, 0
    for ledger_id, entry_id in positions:
        if ledger_id != recent_id:
            recent_id, fixed = ledger_id, range_fixed_bytes(ledger_id)
        lower = VARINT_BYTES[(entry_id - 1).bit_length()] if entry_id else MINUS_ONE_BYTES
        sizes.append(fixed + lower + VARINT_BYTES[entry_id.bit_length()])
    return sizes


def firsts_bytes(firsts: BitMap) -> int:
    """Sum `range_first_bytes` over a bitmap of first entries.

    Complexity: one rank query for each change of a varint's length between the lowest and the highest.
    """
    return _varints_bytes(firsts, 1) + (MINUS_ONE_BYTES - 1) * (0 in firsts)


def lasts_bytes(lasts: BitMap) -> int:
    """Sum `range_last_bytes` over a bitmap of last entries. Complexity: as `firsts_bytes`."""
    return _varints_bytes(lasts, 0)


def _varints_bytes(entry_ids: BitMap, less: int) -> int:
    """Return the size of the varints of all entry ids minus a number; -1 counts as one byte."""
    total = count = len(entry_ids)
    if not count:
        return 0
    lowest, highest = entry_ids.min(), entry_ids.max()
    for longer in _LONGER_FROM:
        begin = longer + less
        if begin > highest:
            break
        total += count if begin <= lowest else entry_ids.range_cardinality(begin, _ENTRY_ID_END)
    return total


def ranges_bytes(ledger_id: int, bitmap: BitMap, firsts: BitMap) -> int:
    """Return the size of all ranges of a ledger, given its acked entries and the first entry of each run.

    Complexity: O(1) queries if all entries have varints of one length, else as `firsts_bytes`.
    """
    if not firsts:
        return 0
    lowest, entry_bytes = bitmap.min(), VARINT_BYTES[bitmap.max().bit_length()]
    if lowest and VARINT_BYTES[(lowest - 1).bit_length()] == entry_bytes:
        return len(firsts) * (range_fixed_bytes(ledger_id) + 2 * entry_bytes)
    # At or above any entry, the runs that end are as many as those that begin, plus one if a run spans it.
    passing = sum(longer - 1 in bitmap and longer in bitmap for longer in _LONGER_FROM)
    return len(firsts) * range_fixed_bytes(ledger_id) + firsts_bytes(firsts) + lasts_bytes(firsts) + passing
