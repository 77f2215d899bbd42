"""A good store with a known ack state, for media to be damaged: made by one seed, and read back as a user would."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.acked_set import Numbering
from ackstate.analysis.crash.flaky_store import FlakyStore
from ackstate.analysis.crash.oracle import Oracle, State
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal_format import Format, Repair
from ackstate.cursor.managed import ManagedCursor
from ackstate.cursor.outcome import Route, Source
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.wire.pulsar import Compression, RangeForm

if TYPE_CHECKING:
    from random import Random

    from ackstate.analysis.crash.acked_set import AckedSet
    from ackstate.analysis.crash.oracle import Expected
    from ackstate.cursor.store import Store

LEDGERS = {3: 30, 5: 40, 8: 24}
"""The message log: the number of entries of each ledger, by id."""
TOPIC = "orders"
SUBSCRIPTION = "billing"
_COUNTED = {
    Route.NOTHING: "nothing",
    Route.DELTA: "deltas",
    Route.WHOLE: "whole_states",
    Route.SNAPSHOT: "snapshots",
    Route.METADATA: "fallbacks",
}
_COUNTED_STEPS = {"ack": "acks", "batch": "batches", "mark_delete": "mark_deletes"}
_BATCH_MESSAGES = 8  # Of each entry.
_ALL_UNACKED = (1 << _BATCH_MESSAGES) - 1
NUMBERING = Numbering(LEDGERS, batch_size=_BATCH_MESSAGES)


def keep_quiet(*names: str) -> None:
    """Let what some loggers say of planned faults go nowhere, unless the application has somewhere for it."""
    for name in names:
        logger = logging.getLogger(name)
        if not logger.handlers:
            logger.addHandler(logging.NullHandler())


class Opened(NamedTuple):
    """A cursor that was opened.

    Attributes:
        state: What it knows.
        is_reported: Whether its recovery report says that something was left out.
    """

    state: State
    is_reported: bool


@final
@dataclass(slots=True)
class Story:
    """What was done, and what the store knew after each step.

    Attributes:
        asked: What anybody asked to ack.
        states: All that was durable, after each step that changed it; the first is of a cursor that was never made.
        steps: What was done, in words.
        counts: What really happened, by name.
    """

    asked: AckedSet = NUMBERING.nothing
    states: list[State] = field(default_factory=lambda: [State(NUMBERING.nothing, NUMBERING.nothing, is_new=True)])
    steps: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def expected(self, state: State) -> Expected:
        """Return what a recovery may find that ends at a state."""
        return Oracle(state, knows_states=True).expected._replace(asked=NUMBERING.completed(self.asked))

    def note(self, state: State) -> None:
        """Note what is durable now."""
        if state != self.states[-1]:
            self.states.append(state)


def open_cursor(
    store: Store, *, repair: Repair = Repair.NONE, config: CursorConfig | None = None
) -> tuple[ManagedCursor, Opened]:
    """Open the story's cursor as a user would."""
    ledgers = LedgerMap.from_counts(LEDGERS)
    cursor = ManagedCursor.open(
        store, topic=TOPIC, subscription=SUBSCRIPTION, ledgers=ledgers, config=config, repair=repair, now_ms=0
    )
    report = cursor.recovery_report
    return cursor, Opened(state_of(cursor, is_new=report.source is Source.NEW), bool(report.discarded_reason))


def state_of(cursor: ManagedCursor, *, is_new: bool = False) -> State:
    """Return what a cursor knows, durable or not: the messages, and the properties of its mark-delete and its own."""
    acked = NUMBERING.up_to(*cursor.mark_delete_position) | NUMBERING.runs(cursor.deleted.runs())
    for position in cursor.batch:
        unacked = cursor.batch[position][0] if cursor.batch[position] else 0
        acked |= NUMBERING.messages(*position, _ALL_UNACKED & ~unacked)
    properties = (*sorted(cursor.properties.items()), *sorted(cursor.cursor_properties.items()))
    return State(acked, NUMBERING.nothing, properties, is_new=is_new)


def write_story(store: Store, chance: Random, story: Story, *, persist_count: int | None = None) -> None:
    """Let a cursor work on an empty store, and another one beside it; nothing is left undone, or closed.

    Args:
        store: Empty.
        chance: Decides what they do.
        story: Gets what they did.
        persist_count: How often the cursor persists; 4 to 11 times by chance if it is not given.
    """
    config = _config(chance)
    flaky = FlakyStore(store)
    other = ManagedCursor.open(
        flaky, topic=TOPIC, subscription="audit", ledgers=LedgerMap.from_counts(LEDGERS), config=config, now_ms=0
    )
    cursor, opened = open_cursor(flaky, config=config)
    story.note(opened.state._replace(is_new=False))
    story.steps.append(f"{config.format.name} cursor made")
    story.counts[f"{config.format.value.lower()}_stores"] += 1
    minutes = chance.randint(5, 12) if persist_count is None else 1 + persist_count
    for now_ms in range(60_000, 60_000 * minutes, 60_000):
        _step(cursor, chance, story)
        with flaky.refusing_appends() if chance.random() < 0.1 else nullcontext():
            persisted = cursor.persist(now_ms=now_ms)
        story.counts[_COUNTED[persisted.route]] += persisted.route is not Route.NOTHING
        story.steps.append(f"persisted: {persisted.route.value}")
        story.note(state_of(cursor))
        if chance.random() < 0.4:
            other.ack(Position(5, chance.randrange(LEDGERS[5])), now_ms=now_ms)
            other.persist(now_ms=now_ms)


def _config(chance: Random) -> CursorConfig:
    return CursorConfig(
        format=chance.choice(list(Format)),
        compaction_bytes_min=chance.choice([100, 300, 64 * 1024]),
        ledger_entry_count_max=chance.choice([3, 50_000]),
        range_form=chance.choice(list(RangeForm)),
        compression=chance.choice([Compression.NONE, Compression.ZLIB]),
        compression_bytes_min=1,
        flush_interval_ms=0,
        ledger_retry_ms=1,
    )


def _step(cursor: ManagedCursor, chance: Random, story: Story) -> None:
    """Ack something, and note it."""
    ledger_id = chance.choice(list(LEDGERS))
    kind = chance.choice(["ack", "ack", "ack", "batch", "mark_delete", "properties"])
    if kind == "ack":
        entry_ids = chance.sample(range(LEDGERS[ledger_id]), chance.randint(1, 8))
        story.asked |= NUMBERING.runs((ledger_id, entry_id, entry_id + 1) for entry_id in entry_ids)
        cursor.ack_entries(ledger_id, entry_ids, now_ms=0)
    elif kind == "batch":
        position = Position(ledger_id, chance.randrange(LEDGERS[ledger_id]))
        unacked = chance.randint(1, _ALL_UNACKED - 1)
        story.asked |= NUMBERING.messages(*position, _ALL_UNACKED & ~unacked)
        cursor.ack_batch(position, [unacked], now_ms=0)
    elif kind == "mark_delete":
        passed = chance.randint(1, 4)
        first, entry_id = cursor.mark_delete_position
        target = Position(first, entry_id + passed) if entry_id + passed < LEDGERS.get(first, 0) else None
        if target is not None:
            story.asked |= NUMBERING.run(first, 0, target.entry_id + 1)
            cursor.mark_delete(target, now_ms=0, properties={"seen": chance.randrange(1 << 40)})
    else:
        cursor.set_cursor_properties({"team": "billing", "note": "x" * chance.randrange(60)})
        story.note(state_of(cursor))
    story.steps.append(kind)
    story.counts[_COUNTED_STEPS.get(kind, kind)] += 1
