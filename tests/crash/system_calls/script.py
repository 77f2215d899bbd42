"""The script of a program whose system calls fail: seeded steps on one or two cursors of one store."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum

from ackstate.analysis.workloads.cursor_steps import steps
from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal.format import Format

STEP_MS = 1_000
"""The time between two steps of a script."""
# Frequent compactions and short ledgers, so that faults hit each of them.
_NATIVE = CursorConfig(compaction_bytes_min=150, ledger_entry_count_max=12, ledger_retry_ms=0)


class Setting(Enum):
    """The configuration of the cursors."""

    NATIVE = "native"
    YOUNG = "young"
    """Native; acks of deliveries within two steps are not persisted before the cursor is closed."""
    PULSAR = "pulsar"
    """Pulsar's format, with a limit below the number of acked ranges: lower ranges displace durable ones."""

    @property
    def config(self) -> CursorConfig:
        """Return the configuration of a cursor."""
        return _CONFIGS[self]


_CONFIGS = {
    Setting.NATIVE: _NATIVE,
    Setting.YOUNG: replace(_NATIVE, become_old_ack_record_seconds=2 * STEP_MS // 1_000),
    Setting.PULSAR: replace(_NATIVE, format=Format.PULSAR, range_count_max=3, metadata_range_count_max=2),
}


@dataclass(frozen=True, slots=True)
class Script:
    """The script of a program.

    Attributes:
        steps: The steps in order.
        setting: The initial configuration of the cursors.
        cursor_count: Number of cursors.
        endures: Whether it retries with its open objects before it reopens everything.
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
    """Return a seeded script of 7 to 43 steps, with a reopening in the middle."""
    chance = random.Random(f"script {seed}")
    cursor_count = chance.choice((1, 2, 2))
    setting = chance.choice((Setting.NATIVE, *Setting))
    kinds = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()], k=chance.randint(6, 14))
    kinds.insert(len(kinds) // 2, StepKind.REOPEN)
    played = tuple(
        step._replace(setting=chance.choice(tuple(Setting))) if step.kind is StepKind.REOPEN else step
        for step in steps(chance, kinds, cursor_count=cursor_count)
    )
    return Script(played, setting, cursor_count, endures=chance.random() < 0.5)
