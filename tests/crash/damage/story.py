"""Creates a good store with a known ack state, reads it back as a user would, and judges what a repair gives up."""

from __future__ import annotations

from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

from ackstate.analysis.crash.oracle import Oracle, State
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.formats import Format, Repair
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.recovery import decode_record
from ackstate.position import Position
from ackstate.wire.pulsar import Compression, RangeForm
from crash.observed_cursor import NEVER_OPENED, NUMBERING, SUBSCRIPTIONS, TOPIC, ObservedCursor, open_cursor, state_of
from crash.steps import LEDGERS, StepKind, steps
from wrapped_store import FlakyStore

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


_PATH = cursor_path(TOPIC, SUBSCRIPTION)


def repaired(medium, files, repair):
    """Open a damaged copy with a repair, and return the cursor's state, and the acks that it must have."""
    with closing(medium.open(files)) as store:
        least = _least(store, repair)
        return open_story(store, repair=repair)[1].state, least


def what_fails_after(medium, state):
    """Open a just repaired cursor again, and return an error text; empty if it works.

    Its state must be unchanged, and one ack written there must survive another opening.
    """
    with closing(medium.reopen()) as store:
        cursor, opened = open_story(store)
        if opened.state != state._replace(is_new=False):
            return f"{opened.state} when it is opened again, but it was {state}"
        position = _first_unacked(cursor)
        receipt = cursor.ack(position, now_ms=600_000)
        cursor.persist(now_ms=600_000)
        if not cursor.durable(receipt):
            return f"the ack of {position} cannot be made durable"
    with closing(medium.reopen()) as store:
        cursor, opened = open_story(store)
        is_there = not opened.state.is_new and not opened.is_reported and cursor.is_acked(position)
        return (
            ""
            if is_there and state.acked <= opened.state.acked
            else f"{opened.state} after {position} was acked on top of {state}"
        )


def what_it_gave_up(repair, state, least, story):
    """Check that a repaired state gives up exactly the announced acks; return an error text, empty if it does."""
    if lost := least - state.acked:
        return f"{lost} below the mark-delete of the record are lost"
    if repair is Repair.START_ANEW:
        return f"it starts with {state}" if state.acked else ""
    is_older = repair in {Repair.DISCARD_DAMAGED_RECORDS, Repair.USE_ORPHAN_JOURNAL}
    was_durable = any(state.acked == earlier.acked for earlier in story.states)
    return f"{state}, which never was durable" if is_older and not was_durable else ""


def _least(store, repair):
    value = store.metadata.get(_PATH) if repair is Repair.USE_METADATA_SNAPSHOT else None
    mark_delete = None if value is None else decode_record(value.data).record.mark_delete
    return NUMBERING.nothing if mark_delete is None else NUMBERING.up_to(*mark_delete)


def _first_unacked(cursor):
    positions = (Position(ledger_id, entry_id) for ledger_id, count in LEDGERS.items() for entry_id in range(count))
    return next(position for position in positions if not cursor.is_acked(position))
