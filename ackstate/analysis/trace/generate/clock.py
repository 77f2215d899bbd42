"""Times in a generated trace: seeded numbers and times, each a pure function of its index."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
UInt64s = npt.NDArray[np.uint64]

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
# Rates hold for about this long.
_SPELL_MS = 250


def key_of(*parts: object) -> int:
    """Return a 64-bit hash of these parts, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def scattered(key: int, indexes: Int64s) -> UInt64s:
    """Return 64 bits for each index that look random; SplitMix64 started at `key`.

    Source: the output function of SplitMix64, from S. Vigna's description of it.
    """
    bits = indexes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key)
    bits ^= bits >> np.uint64(30)
    bits *= np.uint64(0xBF58476D1CE4E5B9)
    bits ^= bits >> np.uint64(27)
    bits *= np.uint64(0x94D049BB133111EB)
    bits ^= bits >> np.uint64(31)
    return bits


@dataclass(frozen=True, slots=True)
class Arrivals:
    """A rate that rises and falls, in spells of a quarter of a second, between two thirds and twice its mean.

    Time is in ns from 0, and a slot is half the time of a message: one slot for its arrival, one for an ack. Every
    spell has the same number of slots and begins in the first half of its own time, so the time of any slot is a
    formula.

    Attributes:
        key: The seed.
        spell_slots: Slots of a spell.
        spell_ns: Mean duration of a spell.
    """

    key: int
    spell_slots: int
    spell_ns: int

    @classmethod
    def at_rate(cls, key: int, messages_per_second: float) -> Arrivals:
        """Return arrivals of this mean rate."""
        slots = max(2, round(2 * messages_per_second * _SPELL_MS / 1_000))
        return cls(key, slots, round(slots * NS_PER_S / (2 * messages_per_second)))

    def at_ns(self, slots: Int64s) -> Int64s:
        """Return the times of slots, strictly rising below 10^8 messages a second."""
        if not len(slots):
            return slots
        spells = slots // self.spell_slots
        first = int(spells.min())
        begins = self._begin_ns(np.arange(first, int(spells.max()) + 2))
        lasts = np.diff(begins)
        passed = slots - spells * self.spell_slots
        spells -= first
        at_ns: Int64s = begins[spells] + lasts[spells] * passed // self.spell_slots
        return at_ns

    def first_slot(self, at_ns: int) -> int:
        """Return the first slot that is at `at_ns`, at least 0, or later."""
        spell = at_ns // self.spell_ns
        # The spell of that number may begin later.
        if at_ns < self._begin_ns(np.array([spell]))[0]:
            spell -= 1
        begin, end = map(int, self._begin_ns(np.array([spell, spell + 1])))
        return spell * self.spell_slots - (-(at_ns - begin) * self.spell_slots // (end - begin))

    def _begin_ns(self, spells: Int64s) -> Int64s:
        late = (scattered(self.key, spells) % np.uint64(self.spell_ns // 2)).astype(np.int64)
        return np.where(spells > 0, spells * self.spell_ns + late, 0)
