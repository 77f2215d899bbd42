"""The oracle of L1 to L5 and BK finds each broken promise, and excuses states that an alternative allows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.crash.oracle import Numbering, Oracle, Promise, State, counts, differing, judge

LOG = Numbering({1: 10, 2: 0, 4: 5}, batch_size=4)
NAMES = {"k": "v"}


def acked(*numbers, ledger_id=1):
    return LOG.runs([(ledger_id, number, number + 1) for number in numbers])


def state(*numbers, marked=-1, names=NAMES, **fields):
    covered = LOG.up_to(1, marked)
    return State(covered | acked(*numbers), covered, names=names, **fields)


def program(**options):
    """A cursor that was opened at 1:1, acked 5 and 6 and the first message of 1:7, and has a receipt for 5 and that."""
    oracle = Oracle(state(marked=1), **options)
    some = acked(5, 6) | LOG.messages(1, 7, 0b0001)
    oracle.requested(some)
    oracle.accepted(some)
    oracle.gauged(2)
    oracle.durable(acked(5) | LOG.messages(1, 7, 0b0001))
    oracle.gauged(1)
    return oracle


FOUND = state(5, marked=1)._replace(acked=acked(0, 1, 5) | LOG.messages(1, 7, 0b0001))


@pytest.mark.parametrize(
    ("found", "promises"),
    [
        (FOUND, []),
        (FOUND._replace(acked=FOUND.acked | acked(6)), [Promise.I3]),  # milder than the worst, and it was to be that
        (FOUND._replace(acked=FOUND.acked - acked(5)), [Promise.I2, Promise.I3]),
        (FOUND._replace(acked=FOUND.acked - LOG.messages(1, 7, 0b0001)), [Promise.I2]),
        (FOUND._replace(acked=FOUND.acked | acked(2)), [Promise.I1]),
        (FOUND._replace(acked=FOUND.acked | LOG.messages(1, 7, 0b0010)), [Promise.I1]),
        (FOUND._replace(acked=FOUND.acked | acked(12)), [Promise.I1]),
        (FOUND._replace(marked=LOG.up_to(1, 0)), [Promise.I7]),
        (FOUND._replace(names={}), [Promise.I9]),
        (FOUND._replace(is_new=True), [Promise.I10]),
        (state(names={}, is_new=True), [Promise.I10]),
    ],
)
def test_each_promise_is_judged(found, promises):
    assert [each.promise for each in judge(found, [program().expected], is_worst=True)] == promises


def test_a_milder_crash_may_redeliver_less_than_the_gauge_says_and_none_more():
    oracle = program()
    assert oracle.judge(FOUND._replace(acked=FOUND.acked | acked(6))) == ()
    oracle.gauged(0)
    assert [each.promise for each in oracle.judge(FOUND)] == [Promise.I3]


def test_any_alternative_excuses_and_the_first_is_told():
    before, after = Oracle(state(1)).expected, Oracle(state(1, 2)).expected
    assert judge(state(1), [before, after]) == judge(state(1, 2), [before, after]) == ()
    assert judge(state(1, 3), [before, after]) == ((Promise.I1, "acked without a request: 1:[3, 4)", 1),)


def test_a_persist_is_found_whole_or_in_part_where_it_excludes_acks():
    for excludes, promises in ((False, [Promise.I9]), (True, [])):
        oracle = Oracle(state(marked=1), knows_states=True)
        oracle.requested(acked(2, 5, 6))
        oracle.writing(state(5, 6, marked=2), excludes=excludes)
        oracle.written()
        assert oracle.judge(state(5, 6, marked=2)) == ()
        assert [each.promise for each in oracle.judge(state(5, marked=2))] == promises
        for wrong in (state(5, 6, marked=1), state(5, 6, marked=2, rest={"n": 2})):
            assert (wrong.rest and excludes) or Promise.I9 in [each.promise for each in oracle.judge(wrong)]


def test_what_may_be_displaced_need_not_survive():
    oracle = Oracle(state(5, marked=1))
    oracle.writing(state(3, 5, marked=1), excludes=True, displaces=True)
    oracle.requested(acked(3))
    assert oracle.judge(state(3, marked=1)) == ()


def test_a_reset_that_failed_may_have_happened_until_the_next_persist():
    oracle = Oracle(state(5, marked=3))
    oracle.resetting(state(marked=1))
    oracle.gauged(5)
    assert oracle.judge(state(marked=1)) == oracle.judge(state(5, marked=3)) == ()
    assert oracle.judge(state(5, marked=1)) != ()
    oracle.written()
    assert Promise.I2 in [each.promise for each in oracle.judge(state(marked=1))]


def test_nothing_from_before_a_reset_counts_after_it():
    oracle = Oracle(state(5, marked=3))
    oracle.resetting(state(marked=1))
    oracle.reset()
    assert oracle.judge(state(marked=1)) == ()
    assert [each.promise for each in oracle.judge(state(5, marked=1))] == [Promise.I1]


def test_properties_are_the_last_ones_or_those_before_while_they_are_set():
    oracle = Oracle(state(names={}))
    oracle.naming(NAMES)
    assert oracle.judge(state(names={})) == oracle.judge(state()) == ()
    oracle.named(NAMES)
    assert [each.promise for each in oracle.judge(state(names={}))] == [Promise.I9]


def test_two_recoveries_that_differ_are_told_by_entries_or_by_state():
    assert differing(state(1, is_new=True), state(1)) == ()
    assert "lacking now: 1:[1, 2); new: 1:[2, 3)" in differing(state(1), state(2))[0].found
    assert "first 1:[1, 2), then 1:[1, 2)" in differing(state(1), state(1, names={}))[0].found


def test_counts_are_of_entries_or_of_messages():
    broken = judge(FOUND._replace(acked=acked(0, 2, 3)), [program().expected])
    assert counts(broken) == {"lost_durable": 2, "invented": 2, "gauge_mismatch": 1}
    broken = judge(FOUND._replace(acked=FOUND.acked - LOG.messages(1, 7, 1)), [program().expected])
    assert counts(broken) == {"lost_durable": 1, "invented": 0, "gauge_mismatch": 0}


RUNS = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(0, 14), st.integers(0, 14)), max_size=4)


def plain(runs):
    return {(ledger_id, entry_id) for ledger_id, first, end in runs for entry_id in range(first, end)}


@given(RUNS, RUNS)
def test_sets_are_those_of_plain_entries(some, others):
    for ours, theirs in (
        (LOG.runs(some) | LOG.runs(others), plain(some) | plain(others)),
        (LOG.runs(some), plain(some)),
    ):
        assert plain(ours.runs()) == theirs
        assert bool(ours) == bool(theirs)
    inside = {entry for entry in plain(some) - plain(others) if entry[1] < LOG.ledgers.get(entry[0], 0)}
    left = LOG.runs(some) - LOG.runs(others)
    assert {entry for entry in plain(left.runs()) if entry[1] < LOG.ledgers.get(entry[0], 0)} == inside


def test_an_entry_is_complete_with_the_last_of_its_messages():
    parts = LOG.messages(4, 1, 0b1010) | LOG.messages(4, 1, 0b0100)
    assert parts.completed() == parts
    assert str(parts) == "3 messages of batches"
    assert (parts | LOG.messages(4, 1, 0b0001)).completed() == LOG.run(4, 1, 2)
