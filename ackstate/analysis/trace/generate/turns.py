"""Assigns entries to classes, and slots to the events of classes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ackstate.analysis.trace.generate.clock import Int64s, scattered


@dataclass(frozen=True, slots=True)
class Classes:
    """Assigns each entry of a block to a class: a seeded permutation for each block.

    Attributes:
        key: The seed.
        block: Entries of a block, a power of 2.
    """

    key: int
    block: int

    def class_of(self, blocks: Int64s, offsets: Int64s) -> Int64s:
        """Return the class of the entry at an offset of a block."""
        factor, shift, flip = self._turns(blocks)
        classes: Int64s = ((factor * offsets + shift) & (self.block - 1)) ^ flip
        return classes

    def offset_of(self, blocks: Int64s, classes: Int64s) -> Int64s:
        """Return the offset of the entry of a class: the inverse of `class_of`."""
        factor, shift, flip = self._turns(blocks)
        # An odd number is its own inverse modulo 8; Newton's step doubles the bits, here to 12.
        inverse = factor * (2 - factor * factor)
        inverse *= 2 - factor * inverse
        offsets: Int64s = (inverse * ((classes ^ flip) - shift)) & (self.block - 1)
        return offsets

    def _turns(self, blocks: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        bits = scattered(self.key, blocks)
        mask = self.block - 1
        factor, shift, flip = ((bits >> np.uint64(at)).astype(np.int64) & mask for at in (8, 24, 40))
        return factor | 1, shift, flip


@dataclass(frozen=True, slots=True)
class Turns:
    """The slots of one parity that have an event.

    Attributes:
        first_block: For each class, the first block in which it has an event.
        parity: 0 or 1.
    """

    first_block: Int64s
    parity: int

    @property
    def _at(self) -> Int64s:
        return 2 * np.arange(len(self.first_block)) + self.parity

    def before(self, slots: Int64s) -> Int64s:
        """Return the number of events before each slot."""
        blocks = -((self._at - slots[:, None]) // (2 * len(self.first_block)))
        return np.asarray(np.maximum(blocks - self.first_block, 0).sum(axis=1), np.int64)

    def between(self, first: int, end: int) -> tuple[Int64s, Int64s, Int64s]:
        """Return slot, block and class of the events from slot `first` (inclusive) to `end` (exclusive), in order."""
        block = 2 * len(self.first_block)
        blocks = np.arange(first // block, -(-end // block))
        slots = blocks[:, None] * block + self._at
        has_event = (blocks[:, None] >= self.first_block) & (slots >= first) & (slots < end)
        row, classes = np.nonzero(has_event)
        return slots[has_event], blocks[row], classes
