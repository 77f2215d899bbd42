"""Writes the workloads that both sides read: files of rows of 64-bit little-endian integers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.workloads import LEDGER_SIZE, SEED, TICK_MS, mixed_delays

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Rows = NDArray[np.int64]

FIRST_LEDGER = 3
_WINDOW = 1_000


def every_other(count: int, *, seed: int = SEED) -> Rows:
    """Return positions to ack: every other entry, from the second on; out of order within windows of 1,000 acks.

    Each is a range of its own, and the first entry stays unacked, so the mark-delete position stays where it is.
    """
    random = np.random.default_rng(seed)
    windows = [random.permutation(np.arange(at, min(at + _WINDOW, count))) for at in range(0, count, _WINDOW)]
    return _positions(2 * np.concatenate(windows) + 1)


def lookups(count: int, span: int, *, seed: int = SEED) -> Rows:
    """Return random positions among the first `span` entries."""
    return _positions(np.random.default_rng(seed).integers(0, span, count))


def single_entries(count: int) -> Rows:
    """Return runs of one entry each, every other entry: rows of ledger, first entry and end."""
    positions = _positions(2 * np.arange(count) + 1)
    return np.column_stack([positions, positions[:, 1] + 1])


def wide_runs(count: int, *, width_mean: int = 100, seed: int = SEED) -> Rows:
    """Return runs as wide as their gaps, on the average, none of which goes over the end of a ledger."""
    random = np.random.default_rng(seed)
    gaps, widths = random.geometric(1 / width_mean, (2, count))
    ends = np.cumsum(gaps + widths)
    first = _positions(ends - widths)
    end = np.minimum(first[:, 1] + widths, LEDGER_SIZE - 1)
    # A run of which nothing is left would be none.
    first[:, 1] = np.minimum(first[:, 1], LEDGER_SIZE - 2)
    runs = np.column_stack([first, end])
    return runs[_is_apart(runs)]


def delayed(count: int) -> Rows:
    """Return messages due within an hour, any time as likely as another: rows of ledger, entry and time in ms.

    None is due within two ticks, because Pulsar delivers such a message at once.
    """
    parts = [(each.ledger_id, each.deliver_at_ms) for each in mixed_delays(count, now_ms=2 * TICK_MS)]
    return np.concatenate([
        np.column_stack([np.full(len(times), ledger_id), np.arange(len(times)), times]) for ledger_id, times in parts
    ])  # fmt: skip


def written(rows: Rows, path: Path) -> Path:
    """Write rows to a file."""
    rows.astype("<i8").tofile(path)
    return path


def read(path: str, columns: int) -> Rows:
    """Read a file of rows."""
    return np.fromfile(path, "<i8").reshape(-1, columns)


def _positions(entries: NDArray[np.int64]) -> Rows:
    """Return the positions of entries counted from the beginning of the log."""
    ledgers, entry_ids = np.divmod(entries, LEDGER_SIZE)
    return np.column_stack([FIRST_LEDGER + ledgers, entry_ids])


def _is_apart(runs: Rows) -> NDArray[np.bool_]:
    """Return which runs neither touch nor overlap the one before."""
    apart = np.ones(len(runs), bool)
    same_ledger = runs[1:, 0] == runs[:-1, 0]
    apart[1:] = ~same_ledger | (runs[1:, 1] > runs[:-1, 2])
    return apart
