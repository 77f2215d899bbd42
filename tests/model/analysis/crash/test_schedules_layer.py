"""L0: random schedules find nothing in the product, and a seed decides what happens."""

import pytest

from crash import schedules
from crash.model.settings import Settings
from crash.model.simulation import BrokerSimulation

# Together they use every feature. The layer itself runs thousands: `python -m crash --layer L0`.
SEEDS = (131, 132, 133, 136, 139, 143, 167, 171)


@pytest.mark.slow
def test_schedules_break_no_promise():
    outcomes = [next(schedules.schedules(seed)) for seed in SEEDS]
    assert [broken for outcome in outcomes for broken in outcome.broken] == []
    assert sum(outcome.cycles for outcome in outcomes) > 8 * len(outcomes)
    assert sum(outcome.counts["steps"] for outcome in outcomes) > 70 * len(outcomes)
    assert sum(outcome.counts["faults"] for outcome in outcomes) > len(outcomes)
    unused = [name for name in schedules.FEATURES if not sum(outcome.counts[name] for outcome in outcomes)]
    assert unused == []


@pytest.mark.slow
def test_a_seed_says_what_happens():
    first, again = (BrokerSimulation(7) for _ in range(2))
    first.run()
    again.run()
    assert first.story() == again.story()
    other = BrokerSimulation(8)
    other.run()
    assert other.story() != first.story()


def test_an_event_that_is_left_out_changes_no_other_event():
    """Time passes by the draws of the events, each from its own seed."""
    waits = {}
    for number in range(150):
        schedule = BrokerSimulation(3, Settings())
        schedule.run([number], ends=False)
        waits[number] = schedule.now_ms
    passing = [number for number, passed_ms in waits.items() if passed_ms]
    assert len(passing) > 3
    schedule = BrokerSimulation(3, Settings())
    schedule.run(passing, ends=False)
    assert schedule.now_ms == sum(waits.values())
