import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate import LedgerMap, Position

P = Position
EVERY_POSITION = [P(ledger, entry) for ledger in range(10) for entry in range(-1, 4)]
counts_of_ledgers = st.dictionaries(st.integers(1, 8), st.integers(0, 3), min_size=1, max_size=6).map(
    lambda counts: dict(sorted(counts.items()))
)


def test_a_log_of_empty_ledgers_ends_before_the_first_entry_of_the_last():
    log = LedgerMap.from_counts({1: 0, 2: 0})
    assert (log.last_confirmed, log.next_valid(P(1, -1))) == (P(2, -1), P(2, 0))
    assert log.append() == P(2, 0)
    log.roll(3)
    assert log.last_confirmed == P(2, 0)


def written(counts):
    return [P(ledger, entry) for ledger, count in counts.items() for entry in range(count)]


def naive_previous(counts, position):
    ledger, entry = position
    if entry > 0:
        return P(ledger, entry - 1)
    earlier = [other for other in counts if other < ledger]
    filled = [other for other in earlier if counts[other]]
    if filled:
        return P(filled[-1], counts[filled[-1]] - 1)
    return P(earlier[0], -1) if earlier else P(ledger, -1)


@given(counts_of_ledgers, st.integers(0, 9))
def test_arithmetic_agrees_with_a_list_of_all_entries(counts, trim_before):
    log = LedgerMap.from_counts(counts)
    log.trim(trim_before)
    last_ledger = max(counts)
    counts = {ledger: count for ledger, count in counts.items() if ledger >= trim_before or ledger == last_ledger}
    entries = written(counts)
    assert log.counts() == counts
    assert list(log) == list(counts)
    for position in EVERY_POSITION:
        assert (position in log) == (position in entries)
        assert log.previous(position) == naive_previous(counts, position)
        following = [entry for entry in entries if entry > position]
        to_come = P(last_ledger, counts[last_ledger])
        assert log.next_valid(position) == (following[0] if following else to_come)
        assert log.is_valid(position) == (position in entries or position == to_come)
        assert log.find_next_ledger(position.ledger_id) == min(
            (i for i in counts if i > position.ledger_id), default=None
        )
        for count in range(1, 5):
            assert log.position_after(position, count) == (
                following[count - 1] if count <= len(following) else log.last_confirmed
            )
        for upper in EVERY_POSITION[::3]:
            assert log.count_between(position, upper) == sum(position < entry <= upper for entry in entries)


def test_no_entries_on_is_just_before_the_next_valid_position():
    log = LedgerMap.from_counts({3: 2, 4: 0, 5: 1})
    assert log.position_after(P(3, 0), 0) == P(3, 0)
    assert log.position_after(P(3, 1), 0) == P(3, 1)
    assert log.position_after(P(1, 7), 0) == P(3, -1)
    assert log.position_after(P(9, 9), 0) == log.last_confirmed
    assert log.first_position == P(3, -1)
    with pytest.raises(ValueError, match="entries after 3:0 must be at least 0, got -1"):
        log.position_after(P(3, 0), -1)


def test_a_refused_call_changes_nothing():
    log = LedgerMap.from_counts({3: 2})
    for refused in (
        lambda: log.append(-1),
        lambda: log.append(2**32),
        lambda: log.roll(3),
        lambda: log.roll(2**63),
        lambda: log.append(1.5),
        lambda: log.check_written(P(3, 1.0)),
    ):
        with pytest.raises((ValueError, TypeError)):
            refused()
    assert log.counts() == {3: 2}


LOOKUPS = {
    "counts": LedgerMap.counts,
    "entry_count": lambda log: [log.entry_count(ledger_id) for ledger_id in range(10)],
    "count_between": lambda log: log.count_between(Position(0, -1), Position(99, 0)),
    "next_valid": lambda log: log.next_valid(Position(5, 3)),
    "previous": lambda log: log.previous(Position(99, 0)),
    "position_after": lambda log: log.position_after(Position(2, 0), 3),
    "ledgers": list,
}


CHANGES = {"append": lambda log: log.append(2), "roll": lambda log: log.roll(8), "trim": lambda log: log.trim(5)}


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_lookup_during_a_change_sees_the_log_before_or_after_it(change, lookup):
    """The look-up happens before each line of the change, as another thread's may."""
    log, seen = LedgerMap.from_counts({2: 3, 5: 4}), []

    def trace(*_):
        sys.settrace(None)
        seen.append(lookup(log))
        sys.settrace(trace)
        return trace

    before = lookup(log)
    sys.settrace(trace)
    try:
        change(log)
    finally:
        sys.settrace(None)
    assert len(seen) > 2
    assert all(each in (before, lookup(log)) for each in seen)
