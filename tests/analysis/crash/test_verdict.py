from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report
from ackstate.analysis.crash.verdict import Life, entries, listed

LOG = {3: 10, 5: 0, 6: 10}


def lived(*entry_ids, known=()):
    """A life that was asked to ack some entries of ledger 3, in this order."""
    life = Life(LOG, entries([EntryRun(3, entry_id, entry_id + 1) for entry_id in known]))
    for number, entry_id in enumerate(entry_ids):
        life.asked(Operation(number, OperationKind.ACK, 3, entry_id))
    return life


def holds(*entry_ids):
    return Report([EntryRun(3, entry_id, entry_id + 1) for entry_id in entry_ids])


def test_everything_kept_is_clean():
    life = lived(1, 2)
    life.accepted(0)
    life.durable([0])
    assert life.judge(holds(1, 2)).is_clean
    assert life.judge(holds(1)).broken() == ()


def test_a_receipt_that_lied_is_lost():
    life = lived(1, 2)
    life.durable([1])
    verdict = life.judge(holds(1))
    assert list(verdict.lost_durable.runs()) == [(3, 2, 3)]
    assert [(each.promise, each.found) for each in verdict.broken()] == [(Promise.I2, "lost: 3:[2, 3)")]


def test_what_was_known_at_the_start_must_survive():
    verdict = lived(1, known=[7]).judge(holds())
    assert list(verdict.lost_durable.runs()) == [(3, 7, 8)]


def test_what_nobody_asked_to_ack_is_invented():
    verdict = lived(1).judge(holds(1, 4))
    assert list(verdict.invented.runs()) == [(3, 4, 5)]
    assert [each.promise for each in verdict.broken(("a story",))] == [Promise.I1]
    assert verdict.broken(("a story",))[0].story == ("a story",)


def test_what_was_asked_and_never_accepted_may_be_known_or_not():
    assert lived(1).judge(holds(1)).is_clean
    assert lived(1).judge(holds()).is_clean


def test_a_gauge_that_was_too_low_is_found():
    life = lived(1, 2)
    for number in (0, 1):
        life.accepted(number)
    life.gauged(1)
    verdict = life.judge(holds())
    assert (verdict.redelivery_max, verdict.is_gauge_passed) == (1, True)
    assert [each.promise for each in verdict.broken()] == [Promise.I3]
    assert not life.judge(holds(2)).is_gauge_passed


def test_what_was_accepted_after_the_gauge_comes_on_top_of_it_once():
    life = lived(1, 2, 2, 1)
    life.accepted(0)
    life.gauged(1)
    for number in (1, 2, 3):
        life.accepted(number)
    assert life.judge(holds()).redelivery_max == 2


def test_a_gauge_that_counts_more_than_can_come_again_is_found():
    life = lived(1, 2, 3, known=[1, 7])
    for number in range(3):
        life.accepted(number)
    life.durable([1])
    life.gauged(1)
    assert life.judge(holds(1, 2, 3, 7)).is_clean
    life.gauged(2)
    life.gauged(0)
    verdict = life.judge(holds(1, 2, 3, 7))
    assert (verdict.overstated, verdict.is_gauge_passed, verdict.is_gauge_wrong) == ((2, 1), False, True)
    found = "2 by the gauge, and at most 1 without a receipt"
    assert [(each.promise, each.found) for each in verdict.broken()] == [(Promise.I3, found)]


def test_a_receipt_counts_against_a_gauge_only_if_it_came_before_the_operation():
    """Another thread may have read the gauge before the persist that the receipt is of."""
    life = lived(1)
    life.durable([0])
    life.gauged(1, number=0)
    assert life.judge(holds(1)).is_clean
    life.asked(Operation(1, OperationKind.ACK, 3, 2))
    life.gauged(1, number=1)
    assert life.judge(holds(1)).is_clean
    life.gauged(2, number=1)
    assert life.judge(holds(1)).overstated == (2, 1)


def test_what_is_asked_later_may_be_in_a_gauge_that_is_heard_later():
    life = lived(1, 2)
    life.gauged(2, number=0)
    assert life.judge(holds()).is_clean


def persist(life):
    number = len(life.operations)
    life.asked(Operation(number, OperationKind.PERSIST))
    return number


def test_receipts_are_due_for_new_entries_before_an_accepted_persist():
    life = lived(1, 2, 2, 7, 3, known=[7])
    assert life.receipts_due() == (0, 0)
    number = persist(life)
    life.asked(Operation(6, OperationKind.ACK, 3, 9))
    assert life.receipts_due() == (0, 0), "the persist was not accepted"
    life.accepted(number)
    assert life.receipts_due() == (3, 0)
    life.durable([2, 6])
    assert life.receipts_due() == (3, 1)
    life.durable([0, 4])
    assert life.receipts_due() == (3, 3)


def test_an_ack_is_durable_where_a_later_receipt_covers_it():
    life = lived(1)
    life.asked(Operation(1, OperationKind.MARK_DELETE, 3, 4))
    life.accepted(persist(life))
    life.durable([1])
    assert life.receipts_due() == (2, 2)


def test_without_a_gauge_none_can_be_wrong():
    life = lived(1)
    life.accepted(0)
    assert life.judge(holds()).is_clean


def test_a_mark_delete_covers_lower_ledgers():
    life = Life(LOG)
    life.asked(Operation(0, OperationKind.MARK_DELETE, 6, 1))
    life.durable([0])
    assert list(life.judge(Report([])).lost_durable.runs()) == [(3, 0, 10), (6, 0, 2)]
    assert life.judge(Report([EntryRun(3, 0, 10), EntryRun(6, 0, 2)])).is_clean


@pytest.mark.parametrize("number", [-1, 1])
def test_a_number_that_was_never_asked_is_refused(number):
    life = lived(1)
    for claim in (life.accepted, lambda number: life.durable([number])):
        with pytest.raises(IndexError, match=f"no operation {number}"):
            claim(number)


def test_many_runs_are_listed_in_part():
    assert listed(entries([])) == "nothing"
    assert listed(entries([EntryRun(3, first, first + 1) for first in range(0, 40, 2)])).endswith("3:[14, 15) ...")


@given(st.data())
def test_the_verdict_is_that_of_plain_sets(data):
    entry = st.integers(0, 9)
    asked = data.draw(st.lists(entry, max_size=8))
    known = data.draw(st.sets(entry, max_size=3))
    life = lived(*asked, known=known)
    numbers = st.sampled_from(range(len(asked))) if asked else st.nothing()
    accepted, durable = data.draw(st.sets(numbers)), data.draw(st.sets(numbers))
    for number in sorted(accepted):
        life.accepted(number)
    life.durable(durable)
    recovered = data.draw(st.sets(entry))
    verdict = life.judge(holds(*recovered))
    plain = {
        "lost_durable": (known | {asked[number] for number in durable}) - recovered,
        "invented": recovered - known - set(asked),
        "redelivered": (known | {asked[number] for number in accepted}) - recovered,
    }
    for name, expected in plain.items():
        found = {entry for _, first, end in getattr(verdict, name).runs() for entry in range(first, end)}
        assert found == expected
