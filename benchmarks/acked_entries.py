"""Seeded shapes of acknowledgment, named after the situations that cause them.

Each returns entry ids of one ledger, in the order in which they are acked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

EntryIds = npt.NDArray[np.uint32]

SEED = 20_240_611


def in_order(count: int) -> EntryIds:
    """One consumer that acks as it reads."""
    return np.arange(count, dtype=np.uint32)


def alternating(count: int) -> EntryIds:
    """Two consumers served in turn, of which one acks: every entry with an even id; each hole is one entry."""
    return np.arange(0, 2 * count, 2, dtype=np.uint32)


def random_half(span: int, *, seed: int = SEED) -> EntryIds:
    """Each of `span` entries is acked with probability one half, in order."""
    return _where(np.random.default_rng(seed).random(span) < 0.5)


def ninety_nine_percent(span: int, *, seed: int = SEED) -> EntryIds:
    """One message in a hundred fails and waits for its redelivery; the others are acked, in order."""
    return _where(np.random.default_rng(seed).random(span) < 0.99)


def clustered(run_count: int, *, width_mean: int = 100, seed: int = SEED) -> EntryIds:
    """Key-shared consumers of unequal speed: runs of acked entries and equally long holes, in order."""
    random = np.random.default_rng(seed)
    return of_runs(random.geometric(1 / width_mean, run_count), random.geometric(1 / width_mean, run_count))


def random_widths(run_count: int, *, seed: int = SEED) -> EntryIds:
    """Runs of 1 to 100 entries, all widths equally likely, with holes of 1 to 10 between."""
    random = np.random.default_rng(seed)
    return of_runs(random.integers(1, 101, run_count), random.integers(1, 11, run_count))


def heavy_tailed_widths(run_count: int, *, seed: int = SEED) -> EntryIds:
    """Runs, mostly of a few entries, rarely of up to a million, with holes of 1 to 10 between."""
    random = np.random.default_rng(seed)
    widths = np.minimum(1 + random.pareto(1.1, run_count) * 3, 1_000_000).astype(np.int64)
    return of_runs(widths, random.integers(1, 11, run_count))


def shuffled(entry_ids: EntryIds, *, seed: int = SEED) -> EntryIds:
    """The same entries, acked in random order."""
    return np.random.default_rng(seed).permutation(entry_ids)


def of_runs(widths: npt.NDArray[np.int64], gaps: npt.NDArray[np.int64]) -> EntryIds:
    """Return the entries of runs of these widths, each after its gap."""
    passed_gaps = np.repeat(np.cumsum(gaps), widths)
    return (passed_gaps + np.arange(len(passed_gaps))).astype(np.uint32)


def _where(acked: npt.NDArray[np.bool_]) -> EntryIds:
    return np.flatnonzero(acked).astype(np.uint32)
