"""Creates a good store with a known ack state from a seed, to be damaged, and reads it back as a user would."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from ackstate.analysis.crash.oracle import Oracle, State
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.formats import Format, Repair
from ackstate.wire.pulsar import Compression, RangeForm
from crash.flaky_store import FlakyStore
from crash.observed_cursor import NEVER_OPENED, SUBSCRIPTIONS, ObservedCursor, open_cursor, state_of
from crash.steps import StepKind, steps

SUBSCRIPTION, _OTHER = SUBSCRIPTIONS
_STEP_MS = 60_000
_FALL_BACK_SHARE = 0.2
_WEIGHTS = {StepKind.ACK: 3, StepKind.ACK_BATCH: 1, StepKind.MARK_DELETE: 1, StepKind.PROPERTIES: 1}


class OpenedCursor(NamedTuple):
    """A cursor that was opened."""

    state: State  # Its state
    is_reported: bool  # Whether its recovery report mentions a loss


@dataclass(slots=True)
class Story:
    """The steps of a good store, and its state after each of them."""

    oracle: Oracle = field(default_factory=lambda: Oracle(NEVER_OPENED, knows_states=True))  # Has all requested acks
    # The durable state after each step that changed it; the first is that of a cursor that was never created
    states: list[State] = field(default_factory=lambda: [NEVER_OPENED])
    steps: list[str] = field(default_factory=list)  # The steps in words
    counts: Counter[str] = field(default_factory=Counter)  # The actual events, by name

    def expected(self, state):
        return Oracle(state, knows_states=True).expected._replace(requested=self.oracle.expected.requested)

    def note(self, cursor):
        state = state_of(cursor)._replace(is_new=False)
        if state != self.states[-1]:
            self.states.append(state)


def open_story(store, *, repair=Repair.NONE):
    cursor = open_cursor(store, SUBSCRIPTION, repair=repair)
    return cursor, OpenedCursor(state_of(cursor), bool(cursor.recovery_report.discarded_reason))


def write_story(store, chance, story, *, persist_count=None):
    """Run a cursor and another one on an empty store; all steps are completed, and neither is closed."""
    config = _config(chance)
    flaky = FlakyStore(store)
    other = ObservedCursor(open_cursor(flaky, _OTHER, config=config), config, Oracle(NEVER_OPENED), lambda _: None)
    cursor = open_cursor(flaky, SUBSCRIPTION, config=config)
    observed = ObservedCursor(cursor, config, story.oracle, lambda name: story.counts.update([name]))
    story.note(cursor)
    story.steps.append(f"{config.format.name} cursor made")
    story.counts[f"{config.format.value.lower()}_stores"] += 1
    count = chance.randint(4, 11) if persist_count is None else persist_count
    kinds = chance.choices([*_WEIGHTS], [*_WEIGHTS.values()], k=count)
    for number, step in enumerate(steps(chance, kinds, cursor_count=1), start=1):
        now_ms = number * _STEP_MS
        observed.do(step, now_ms=now_ms)
        story.steps.append(str(step))
        if step.kind is StepKind.PROPERTIES:
            story.note(cursor)
        with flaky.refusing_appends() if chance.random() < _FALL_BACK_SHARE else nullcontext():
            persisted = observed.persist(now_ms=now_ms)
        story.steps.append(f"persisted: {persisted.route.value}")
        story.note(cursor)
        if chance.random() < 0.4:
            for beside in steps(chance, [StepKind.ACK, StepKind.PERSIST], cursor_count=1):
                other.do(beside, now_ms=now_ms)


def _config(chance):
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
