"""Holes and the effect of acking them: compared with the acks themselves, made on a copy of the state."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import LedgerMap, Position
from ackstate.ack_hole import AckEffect, ack_effect, hole_at, holes
from ackstate.cursor.state import CursorAckState


def acked(counts, *positions, trimmed_below=0):
    """Return a state with these acks, and the ledgers of the log."""
    ledgers = LedgerMap.from_counts(counts)
    state = CursorAckState(ledgers)
    for position in positions:
        state.ack(Position(*position))
    ledgers.trim(trimmed_below)
    return state, ledgers


def found(state, ledgers):
    return list(holes(state.deleted, ledgers, state.mark_delete))


def numbers(hole):
    return hole.freed_bytes, hole.freed_ranges, hole.mark_delete_advance


# --- By hand. A range of a small ledger takes 12 bytes and its two ends: 1 each below 128, 10 for the lower end -1.


def test_the_lowest_hole_frees_its_range_and_moves_the_mark_delete_over_it():
    state, ledgers = acked({3: 10}, (3, 2), (3, 3), (3, 5))
    lowest, upper = found(state, ledgers)
    assert lowest[:3] == (3, 0, 2)
    assert (lowest.first_position, lowest.last_position, lowest.entry_count) == (Position(3, 0), Position(3, 1), 2)
    assert numbers(lowest) == (14, 1, 4)
    assert upper[:3] == (3, 4, 5)
    assert (numbers(upper), upper.cost_bytes) == ((14, 1, 0), 14)


def test_a_filled_hole_above_entry_0_of_a_later_ledger_adds_the_ten_bytes_of_a_lower_end_of_minus_1():
    state, ledgers = acked({3: 2, 4: 5}, (3, 1), (4, 3))
    _, later = found(state, ledgers)
    assert later[:3] == (4, 0, 3)
    assert (numbers(later), later.cost_bytes) == ((-9, 0, 0), 0)


def test_a_ledger_without_acks_below_one_that_has_some_is_one_hole():
    state, ledgers = acked({3: 2, 4: 6, 5: 9}, (3, 1), (5, 4))
    assert [hole[:3] for hole in found(state, ledgers)] == [(3, 0, 1), (4, 0, 6), (5, 0, 4)]
    assert [numbers(hole) for hole in found(state, ledgers)] == [(23 - 9, 1, 2), (-23, -1, 0), (-9, 0, 0)]


def test_the_mark_delete_goes_over_the_ends_of_ledgers_and_empty_ones():
    everything = [(4, entry_id) for entry_id in range(3)]
    state, ledgers = acked({3: 3, 4: 3, 5: 0, 6: 4}, (3, 1), (3, 2), *everything, (6, 0), (6, 2))
    (lowest, upper) = found(state, ledgers)
    assert (lowest[:3], lowest.mark_delete_advance) == ((3, 0, 1), 7)
    assert (lowest.freed_ranges, lowest.freed_bytes) == (3, 14 + 23 + 23)
    assert upper[:3] == (6, 1, 2)


# --- Against the acks themselves


LEDGERS = st.dictionaries(st.integers(1, 300), st.sampled_from([0, 1, 2, 5, 9, 131]), min_size=1, max_size=4)


@st.composite
def stories(draw):
    counts = dict(sorted(draw(LEDGERS).items()))
    written = [(ledger_id, entry_id) for ledger_id in counts for entry_id in range(counts[ledger_id])]
    gaps = draw(st.sets(st.sampled_from(written), max_size=12)) if written else set()
    some = draw(st.sets(st.sampled_from(written), max_size=12)) if written else set()
    acks = set(written) - gaps if draw(st.booleans()) else some
    trimmed_below = draw(st.sampled_from([0, *counts]))
    return counts, sorted(acks), trimmed_below


def assert_true(counts, acks, trimmed_below):
    """Compare every hole, and every single ack, with the effect of acking it on a copy."""
    state, ledgers = acked(counts, *acks, trimmed_below=trimmed_below)
    arguments = state.deleted, ledgers, state.mark_delete
    unacked = [
        Position(ledger_id, entry_id)
        for ledger_id, count in ledgers.counts().items()
        for entry_id in range(count)
        if not state.is_acked(Position(ledger_id, entry_id))
    ]
    listed = list(holes(*arguments))
    assert [hole[:3] for hole in listed] == plain_holes(state, unacked)
    for hole in listed:
        effect = effect_of(state, ledgers, [p for p in unacked if hole.first_position <= p <= hole.last_position])
        assert AckEffect(-hole.freed_bytes, -hole.freed_ranges, hole.mark_delete_advance) == effect
    for position in unacked:
        assert ack_effect(position, *arguments) == effect_of(state, ledgers, [position])
        around = [hole for hole in listed if hole.first_position <= position <= hole.last_position]
        assert hole_at(position, *arguments) == (around[0] if around else None)


def plain_holes(state, unacked):
    highest = max((Position(run.ledger_id, run.end - 1) for run in state.deleted.runs()), default=Position(0, -1))
    stretches = []
    for ledger_id, entry_id in (position for position in unacked if position < highest):
        if stretches and (stretches[-1][0], stretches[-1][2]) == (ledger_id, entry_id):
            stretches[-1][2] += 1
        else:
            stretches.append([ledger_id, entry_id, entry_id + 1])
    return [tuple(stretch) for stretch in stretches]


def effect_of(state, ledgers, positions):
    """Ack entries on a copy, and recount."""
    after = CursorAckState(ledgers)
    after.mark_delete, after.persisted_mark_delete = state.mark_delete, Position(0, -1)
    after.deleted = state.deleted.copy()
    for position in positions:
        after.ack(position)
    after.deleted._check()
    return AckEffect(
        after.deleted.record_bytes - state.deleted.record_bytes,
        after.deleted.range_count - state.deleted.range_count,
        ledgers.count_between(state.mark_delete, after.mark_delete),
    )


@pytest.mark.slow
@given(stories())
def test_a_hole_frees_what_its_acks_free(story):
    assert_true(*story)
