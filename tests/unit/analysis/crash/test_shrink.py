"""The shrinker of all layers, against failures whose shortest steps are known."""

from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.crash.oracle import BrokenPromise, Promise
from ackstate.analysis.crash.runs import RunSize, shorter_run
from crash.shrink import shortest

STEPS = tuple(range(40))


def failing_with(*needed):
    """Return an attempt that fails where all these steps are done, at the last of them, and its requests."""
    asked = []

    def attempt(steps):
        asked.append(steps)
        if not set(needed) <= set(steps):
            return None
        happened = steps[: 1 + max(map(steps.index, needed), default=-1)]
        return happened, f"broken by {len(happened)} steps"

    return attempt, asked


@given(st.sets(st.sampled_from(STEPS), max_size=6))
def test_only_the_steps_remain_that_it_takes(needed):
    attempt, _ = failing_with(*needed)
    steps, evidence = shortest(STEPS, "broken", attempt)
    assert set(steps) == needed
    assert evidence == f"broken by {len(needed)} steps"


def test_nothing_is_tried_after_the_time_is_over():
    attempt, asked = failing_with(3)
    times = iter(range(100))
    shortest(STEPS, "broken", attempt, seconds=4, clock=lambda: next(times))
    assert len(asked) == 4


def test_a_run_becomes_as_small_as_breaks_a_promise():
    def repeat(size):
        is_lost = size.lives >= 3 and size.operations >= 11
        return (BrokenPromise(Promise.I2 if is_lost else Promise.I3, "found", size),)

    size = RunSize(lives=10, operations=120)
    broken = (BrokenPromise(Promise.I3, "found"), *repeat(size))
    assert shorter_run(broken, size, repeat, tries=60, seconds=60)[-1].story == RunSize(3, 11)
