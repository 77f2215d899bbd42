"""What happens before the power goes: seeded steps of some cursors on one store, and what each moment promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate import LedgerMap, Position
from ackstate.analysis.crash.acked_set import Numbering
from ackstate.analysis.crash.oracle import State
from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.cursor import CursorConfig
from ackstate.cursor.journal_format import Format
from ackstate.cursor.outcome import Source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from random import Random

    from ackstate.cursor import ManagedCursor

TOPIC = "t"
BATCH_SIZE = 4
"""Messages of an entry, where it is acked as a batch."""

_LEDGERS = {1: 24, 2: 0, 4: 30, 7: 20}
NUMBERING = Numbering(_LEDGERS, batch_size=BATCH_SIZE)
"""Of the log that the cursors stand in."""


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


@dataclass(frozen=True, slots=True)
class Workload:
    """What one run does.

    Attributes:
        subscriptions: Each has a cursor; all share a store.
        config: Of the cursors.
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
    """Return a workload decided by a source of randomness.

    Args:
        random: Is drawn from.
        step_count: How many steps.
    """
    subscriptions = ("a", "b") if random.random() < 0.3 else ("a",)
    format_ = Format.NATIVE if random.random() < 0.7 else Format.PULSAR
    config = CursorConfig(
        format=format_,
        compaction_bytes_min=random.choice((40, 90, 200)),
        ledger_entry_count_max=random.choice((3, 5, 50)),
        ledger_rollover_ms=0,
        range_count_max=random.choice((4, 8)) if format_ is Format.NATIVE and random.random() < 0.15 else None,
    )
    kinds, weights = list(_WEIGHTS), list(_WEIGHTS.values())
    steps = [_draw_step(random, kind, len(subscriptions)) for kind in random.choices(kinds, weights, k=step_count)]
    return Workload(subscriptions, config, tuple(steps))


def _draw_step(random: Random, kind: StepKind, cursor_count: int) -> Step:
    cursor = random.randrange(cursor_count)
    ledger_id = random.choice([ledger_id for ledger_id, count in _LEDGERS.items() if count])
    position, amount, stride = Position(ledger_id, random.randrange(_LEDGERS[ledger_id])), 0, 1
    match kind:
        case StepKind.ACK:
            amount, stride = random.randint(1, 9), random.randint(1, 3)
        case StepKind.ACK_BATCH:
            # Few entries, so that a batch is sometimes completed.
            position, amount = Position(ledger_id, random.randrange(4)), random.randrange(1, 16)
        case StepKind.MARK_DELETE:
            # Early positions, so that what follows has something to do.
            position = Position(1, position.entry_id % _LEDGERS[1])
        case StepKind.PROPERTIES:
            amount = random.randrange(1000)
        case StepKind.KILL:
            amount = random.randrange(24)
    return Step(kind, cursor, position, amount, stride)


def message_log() -> LedgerMap:
    """Return the log that the cursors stand in; it does not change."""
    return LedgerMap.from_counts(_LEDGERS)


def view_of(cursor: ManagedCursor) -> State:
    """Return what a cursor says that was just opened."""
    marked = NUMBERING.up_to(*cursor.mark_delete_position)
    acked = marked | NUMBERING.runs(cursor.deleted.runs())
    for position, words in cursor.batch.items():
        acked |= NUMBERING.messages(*position, ~words[0] & (1 << BATCH_SIZE) - 1)
    is_new = cursor.recovery_report.source is Source.NEW
    return State(acked, marked, names=dict(cursor.cursor_properties), is_new=is_new)
