import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.crash.oracle import Numbering, Promise, counts, with_story
from ackstate.analysis.crash.runs import ProcessRun
from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report

LOG = {3: 10, 5: 0, 6: 10}


def lived(*entry_ids, known=()):
    """A life that was asked to ack some entries of ledger 3, in this order."""
    life = ProcessRun(LOG, Numbering(LOG).runs([(3, entry_id, entry_id + 1) for entry_id in known]))
    for number, entry_id in enumerate(entry_ids):
        life.requested(Operation(number, OperationKind.ACK, 3, entry_id))
    return life


def holds(*entry_ids):
    return Report([EntryRun(3, entry_id, entry_id + 1) for entry_id in entry_ids])


def lost(*runs, count):
    return (Promise.I2, "lost: " + " ".join(runs), count)


# Known at the start, asked; accepted and durable operations; readings of the gauge then; what a recovery holds.
@pytest.mark.parametrize(
    ("life", "held", "broken"),
    [
        (((), (1, 2), (0,), (0,), ()), (1, 2), ()),
        (((), (1, 2), (0,), (0,), ()), (1,), ()),
        (((), (1, 2), (), (1,), ()), (1,), lost("3:[2, 3)", count=1)),
        (((7,), (1,), (), (), ()), (), lost("3:[7, 8)", count=1)),
        (((), (1,), (), (), ()), (1, 4), (Promise.I1, "acked without a request: 3:[4, 5)", 1)),
        (((), (1,), (), (), ()), (1,), ()),
        (((), (1,), (), (), ()), (), ()),
        # Without a gauge none can be wrong.
        (((), (1,), (0,), (), ()), (), ()),
        (((), (1, 2), (0, 1), (), (1,)), (), (Promise.I3, "at most 1 by the gauge, 2 redelivered: 3:[1, 3)", 0)),
        (((), (1, 2), (0, 1), (), (1,)), (2,), ()),
        # Of 1, 2 and 3, the first was acked before, and the second has a receipt.
        (((1, 7), (1, 2, 3), (0, 1, 2), (1,), (1,)), (1, 2, 3, 7), ()),
        (
            ((1, 7), (1, 2, 3), (0, 1, 2), (1,), (1, 2, 0)),
            (1, 2, 3, 7),
            (Promise.I3, "2 by the gauge, and at most 1 without a receipt", 0),
        ),
    ],
)
def test_what_a_recovery_holds_is_judged_by_all_that_was_said(life, held, broken):
    known, asked, accepted, durable, gauges = life
    life = lived(*asked, known=known)
    for number in accepted:
        life.accepted(number)
    life.durable(durable)
    for reading in gauges:
        life.gauged(reading)
    assert life.judge(holds(*held)) == ((broken,) if broken else ())


def test_what_the_log_does_not_have_is_invented():
    (broken,) = lived(1).judge(Report([EntryRun(3, 9, 12), EntryRun(4, 0, 2**32)]))
    assert broken == (Promise.I1, "acked without a request: 3:[9, 10) 3:[10, 12) 4:[0, 4294967296)", 2**32 + 3)
    assert with_story([broken], ("a story",))[0].story == ("a story",)


def test_what_was_accepted_after_the_gauge_comes_on_top_of_it_once():
    life = lived(1, 2, 2, 1)
    life.accepted(0)
    life.gauged(1)
    for number in (1, 2, 3):
        life.accepted(number)
    assert life.expected.gauge_max == 2


def test_a_receipt_counts_against_a_gauge_only_if_it_came_before_the_operation():
    """Another thread may have read the gauge before the persist that the receipt is of."""
    life = lived(1)
    life.durable([0])
    life.gauged(1, number=0)
    assert life.judge(holds(1)) == ()
    life.requested(Operation(1, OperationKind.ACK, 3, 2))
    life.gauged(1, number=1)
    assert life.judge(holds(1)) == ()
    life.gauged(2, number=1)
    assert life.expected.overstated == (2, 1)


def test_what_is_asked_later_may_be_in_a_gauge_that_is_heard_later():
    life = lived(1, 2)
    life.gauged(2, number=0)
    assert life.judge(holds()) == ()


def persist(life):
    number = len(life.operations)
    life.requested(Operation(number, OperationKind.PERSIST))
    return number


def test_receipts_are_due_for_new_entries_before_an_accepted_persist():
    life = lived(1, 2, 2, 7, 3, known=[7])
    assert life.receipts_due() == (0, 0)
    number = persist(life)
    life.requested(Operation(6, OperationKind.ACK, 3, 9))
    assert life.receipts_due() == (0, 0), "the persist was not accepted"
    life.accepted(number)
    assert life.receipts_due() == (3, 0)
    life.durable([2, 6])
    assert life.receipts_due() == (3, 1)
    life.durable([0, 4])
    assert life.receipts_due() == (3, 3)


def test_an_ack_is_durable_where_a_later_receipt_covers_it():
    life = lived(1)
    life.requested(Operation(1, OperationKind.MARK_DELETE, 3, 4))
    life.accepted(persist(life))
    life.durable([1])
    assert life.receipts_due() == (2, 2)


def test_a_mark_delete_covers_lower_ledgers():
    life = ProcessRun(LOG)
    life.requested(Operation(0, OperationKind.MARK_DELETE, 6, 1))
    life.durable([0])
    assert life.judge(Report([])) == ((Promise.I2, "lost: 3:[0, 10) 6:[0, 2)", 12),)
    assert life.judge(Report([EntryRun(3, 0, 10), EntryRun(6, 0, 2)])) == ()


def test_many_runs_are_listed_in_part():
    numbering = Numbering({3: 40})
    assert str(numbering.nothing) == "nothing"
    assert str(numbering.runs([(3, first, first + 1) for first in range(0, 40, 2)])).endswith("3:[14, 15) ...")


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
    life.gauged(gauge := data.draw(st.integers(0, len(set(asked) - known))), number=0 if asked else None)
    lost = (known | {asked[number] for number in durable}) - recovered
    invented = recovered - known - set(asked)
    redelivered = (known | {asked[number] for number in accepted}) - recovered
    assert counts(life.judge(holds(*recovered))) == {
        "lost_durable": len(lost),
        "invented": len(invented),
        "gauge_mismatch": len(redelivered) > gauge,
    }
