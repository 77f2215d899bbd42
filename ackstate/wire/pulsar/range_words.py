"""One ledger's acked entries as words of a Java ``BitSet``: entry 64 i + j is bit j of word i.

A bit differs from the one below it only at the start of a run or just after its end. If there are many entries, such
edges are few, and words are their running parity: so the cost depends on the ranges and the words, not on the entries.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np
from pyroaring import BitMap

from ackstate.entry_bitmap import bitmap_of_runs
from ackstate.position import ENTRY_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

WORD_COUNT_MAX = (ENTRY_ID_MAX + 1) // 64
# An unpacked bit takes a byte: a piece takes 256 KiB and stays in the cache.
_PIECE_WORDS = 4_096
# From this share of acked entries on, a bitmap is built from runs rather than from entries.
_DENSE = 5 / 8


def words_of(bitmap: BitMap) -> list[int]:
    """Return a bitmap's words, signed, up to the last that is not zero; the bitmap must not be empty.

    A single word is followed by a zero word, as in Pulsar; readers accept it.

    Complexity: O(words + ranges).
    """
    count = bitmap.max() // 64 + 1
    edges = np.frombuffer((bitmap ^ bitmap.shift(1)).to_array(), np.uint32).astype(np.int64)
    toggles = np.zeros(count, np.uint64)
    begins = np.arange(0, count, _PIECE_WORDS)
    cuts = [*np.searchsorted(edges, begins * 64).tolist(), int(np.searchsorted(edges, count * 64))]
    for begin, low, high in zip(begins.tolist(), cuts[:-1], cuts[1:], strict=True):
        if low < high:
            piece = toggles[begin : begin + _PIECE_WORDS]
            piece[:] = _packed(edges[low:high] - begin * 64, len(piece))
    words: list[int] = _running_parity(toggles).view(np.int64).tolist()
    return words if count > 1 else [*words, 0]


def bitmap_of_words(words: Sequence[int]) -> BitMap:
    """Return the entries whose bits are set in signed words; there may be at most `WORD_COUNT_MAX` of them.

    Complexity: O(words + entries), or O(words + ranges) if most entries are acked.
    """
    bitmap = BitMap()
    for begin in range(0, len(words), _PIECE_WORDS):
        piece = np.array(words[begin : begin + _PIECE_WORDS], np.int64).view(np.uint64)
        if piece.any():
            bitmap |= _bitmap_of_piece(piece, begin * 64)
    return bitmap


def _bitmap_of_piece(words: npt.NDArray[np.uint64], offset: int) -> BitMap:
    entry_count = int.from_bytes(words.tobytes(), "little").bit_count()
    if entry_count < _DENSE * len(words) * 64:
        entries = _bits(words) + offset
        return BitMap(array("I", entries.astype(np.uint32).tobytes()))
    edges = _edges(words)
    if len(edges) % 2:
        edges = np.append(edges, len(words) * 64)
    return bitmap_of_runs(edges[0::2] + offset, edges[1::2] + (offset - 1))


def _edges(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return each bit that differs from the one below it, in order."""
    below = words << np.uint64(1)
    below[1:] |= words[:-1] >> np.uint64(63)
    return _bits(words ^ below)


def _running_parity(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return words in which a bit is set if an odd number of input bits up to and including it are set."""
    parity = words
    for step in (1, 2, 4, 8, 16, 32):
        parity = parity ^ (parity << np.uint64(step))
    carried = np.zeros(len(words), np.uint64)
    carried[1:] = np.bitwise_xor.accumulate(parity >> np.uint64(63))[:-1]
    return parity ^ (np.uint64(0) - carried)


def _packed(bits: npt.NDArray[np.int64], word_count: int) -> npt.NDArray[np.uint64]:
    one_a_byte = np.zeros(word_count * 64, np.uint8)
    one_a_byte[bits] = 1
    return np.packbits(one_a_byte, bitorder="little").view(np.uint64)


def _bits(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
