"""The workload before a power cut: seeded steps of some cursors on one store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.workloads.cursor_steps import steps
from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.cursor import CursorConfig
from ackstate.cursor.journal.format import Format
from crash.observed_cursor import SUBSCRIPTIONS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

_WEIGHTS = {
    StepKind.ACK: 10,
    StepKind.ACK_BATCH: 2,
    StepKind.MARK_DELETE: 1.5,
    StepKind.PERSIST: 8,
    StepKind.PERSIST_ALL: 1.5,
    StepKind.FALL_BACK: 0.5,
    StepKind.RESET: 0.7,
    StepKind.PROPERTIES: 0.7,
    StepKind.REOPEN: 0.6,
    StepKind.REOPEN_STORE: 0.6,
    StepKind.KILL: 1.2,
}
_DELETE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of one run.

    Attributes:
        subscriptions: Each has a cursor; all share a store.
        config: Configuration of the cursors.
        steps: In order.
    """

    subscriptions: tuple[str, ...]
    config: CursorConfig
    steps: tuple[Step, ...]

    def story(self) -> Iterator[str]:
        """Yield the workload as lines."""
        config = self.config
        yield (
            f"cursors {', '.join(self.subscriptions)} in the {config.format.value} format, compacted from"
            f" {config.compaction_bytes_min} bytes on, {config.ledger_entry_count_max} entries a ledger"
        )
        for number, step in enumerate(self.steps, start=1):
            yield f"{number}. {step}"


def draw_workload(random: Random, *, step_count: int) -> Workload:
    """Return a random workload.

    Args:
        random: The source of randomness.
        step_count: Number of steps; each joint persist of all cursors is preceded by an ack of each.
    """
    subscriptions = SUBSCRIPTIONS if random.random() < 0.3 else SUBSCRIPTIONS[:1]
    format_ = Format.NATIVE if random.random() < 0.7 else Format.PULSAR
    config = CursorConfig(
        format=format_,
        compaction_bytes_min=random.choice((40, 90, 200)),
        ledger_entry_count_max=random.choice((3, 5, 50)),
        ledger_rollover_ms=0,
        range_count_max=random.choice((4, 8)) if format_ is Format.NATIVE and random.random() < 0.15 else None,
    )
    kinds = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=step_count)
    drawn = steps(random, kinds, cursor_count=len(subscriptions))
    if random.random() < _DELETE_SHARE:
        deletion = Step(StepKind.DELETE, random.randrange(len(subscriptions)))
        drawn.insert(random.randrange(len(drawn) // 2, len(drawn) + 1), deletion)
    return Workload(subscriptions, config, tuple(drawn))
