"""Limits by a rule of Pulsar's, where durable ranges must stay."""

from __future__ import annotations

from ackstate import DeletedRanges
from ackstate.cursor.config import PersistLimits
from ackstate.wire.pulsar import LimitRule

LIMITS = PersistLimits(range_count_max=3, rule=LimitRule.PULSAR_5_0)


def acked(*entry_ids, ledger_id=1):
    ranges = DeletedRanges()
    for entry_id in entry_ids:
        ranges.add_run(ledger_id, entry_id, entry_id + 1)
    return ranges


def test_ranges_that_stay_are_not_joined_by_others_beyond_the_limit():
    durable = acked(20, 22, 24)
    wanted = acked(0, 2, 4, 20, 22, 24)
    assert LIMITS.select(wanted, always=None) == acked(0, 2, 4)
    assert LIMITS.select(wanted, always=durable) == durable


def test_ranges_that_stay_are_joined_by_others_that_fit():
    durable = acked(2)
    wanted = acked(1, 2)
    wanted.update(acked(*range(0, 20, 2), ledger_id=2))
    kept = LIMITS.select(wanted, always=durable)
    assert kept == acked(1, 2)


def test_ranges_beyond_a_lowered_limit_stay():
    durable = acked(0, 2, 4, 6, 8)
    assert LIMITS.select(acked(*range(0, 20, 2)), always=durable) == durable
