"""What a program does whose system calls fail: steps that a seed decides, on one cursor or two of one store."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum

from ackstate.analysis.workloads.cursor_steps import steps
from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal.format import Format

STEP_MS = 1_000
"""How much later each step of a script comes than the one before."""
# Compacted all the time, in ledgers that are short: each of these is met by a fault.
_NATIVE = CursorConfig(compaction_bytes_min=150, ledger_entry_count_max=12, ledger_retry_ms=0)


class Setting(Enum):
    """How the cursors are opened."""

    NATIVE = "native"
    YOUNG = "young"
    """Native, and what was delivered within two steps is not persisted before the cursor is closed."""
    PULSAR = "pulsar"
    """In Pulsar's format, with fewer ranges than are acked: what is durable gives way to lower ranges."""

    @property
    def config(self) -> CursorConfig:
        """As a cursor takes it."""
        return _CONFIGS[self]


_CONFIGS = {
    Setting.NATIVE: _NATIVE,
    Setting.YOUNG: replace(_NATIVE, become_old_ack_record_seconds=2 * STEP_MS // 1_000),
    Setting.PULSAR: replace(_NATIVE, format=Format.PULSAR, range_count_max=3, metadata_range_count_max=2),
}


@dataclass(frozen=True, slots=True)
class Script:
    """What a program does.

    Attributes:
        steps: One after another.
        setting: How the cursors are opened at first.
        cursor_count: How many cursors it has.
        endures: Whether it tries again with what it has open before it opens everything anew.
    """

    steps: tuple[Step, ...]
    setting: Setting = Setting.NATIVE
    cursor_count: int = 1
    endures: bool = False


_WEIGHTS = {
    StepKind.ACK: 40,
    StepKind.ACK_BATCH: 8,
    StepKind.MARK_DELETE: 10,
    StepKind.PERSIST: 24,
    StepKind.PERSIST_ALL: 16,
    StepKind.RESET: 4,
    StepKind.PROPERTIES: 6,
    StepKind.REOPEN: 6,
}


def script(seed: int) -> Script:
    """Return a script of 7 to 43 steps that a seed decides, with a reopening in its midst."""
    chance = random.Random(f"script {seed}")  # noqa: S311 - a workload, not a secret
    cursor_count = chance.choice((1, 2, 2))
    setting = chance.choice((Setting.NATIVE, *Setting))
    kinds = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()], k=chance.randint(6, 14))
    kinds.insert(len(kinds) // 2, StepKind.REOPEN)
    played = tuple(
        step._replace(setting=chance.choice(tuple(Setting))) if step.kind is StepKind.REOPEN else step
        for step in steps(chance, kinds, cursor_count=cursor_count)
    )
    return Script(played, setting, cursor_count, endures=chance.random() < 0.5)
