"""When a cursor persists, asked in pieces as at the ends of chunks and of days."""

from __future__ import annotations

import numpy as np

from analysis.redelivery.policy import Policy
from analysis.redelivery.schedule import Schedule


def test_two_acks_that_wait_out_the_first_interval_are_one_persist():
    """Asked in between, when the tick of the first ack was over and that of the second was not."""
    schedule = Schedule(Policy.from_mapping({"flush_interval_ms": 5, "tick_ms": 7}), opened_ms=1_000)
    schedule.acked(np.array([1_000, 1_002]))
    assert schedule.persist_until(1_003).tolist() == []
    assert schedule.persist_until(1_009).tolist() == [1_008]
