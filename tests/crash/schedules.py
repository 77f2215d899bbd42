"""L0: random schedules of a whole broker on the faulty memory store, compared after each event with plain sets.

`crash.model` defines the events and the comparisons. A run is the schedule of one seed: 70 to 150
events, of which about one in twelve is a crash. If it breaks a promise, the shortest story found within a few seconds
is reported.
"""

from __future__ import annotations

from itertools import count
from time import process_time
from typing import NamedTuple

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.oracle import Broken, BrokenPromise, RunOutcome
from crash.model.simulation import BrokerSimulation
from crash.promises import PromiseBrokenError
from crash.quiet import quiet
from crash.shrink import shortest

_SHRINK_SECONDS = 5.0
_TEXT_MAX = 300


class ScheduleFailure(NamedTuple):
    """A schedule that breaks a promise."""

    settings: object
    numbers: tuple[int, ...]  # Its events
    error: PromiseBrokenError
    story: tuple[str, ...]  # The events in words
    is_at_end: bool  # Whether it was found after all events, when everything was to be acked


def failure_of(simulation, numbers, *, ends=True):
    """Run a schedule, with or without its end, and return its failure, None if it broke no promise."""
    try:
        simulation.run(numbers, ends=ends)
    except PromiseBrokenError as error:
        last = simulation.event_number
        happened = tuple(numbers if last is None else numbers[: list(numbers).index(last) + 1])
        return ScheduleFailure(simulation.settings, happened, error, simulation.story(), last is None)
    return None


def _told(seed, failure):
    """Return a failure with the shortest story found for it within a time limit."""

    def attempt(numbers):
        found = failure_of(BrokerSimulation(seed, failure.settings), numbers, ends=failure.is_at_end)
        is_same = found is not None and found.error.promise is failure.error.promise
        return (found.numbers, found) if is_same else None

    _, told = shortest(failure.numbers, failure, attempt, seconds=_SHRINK_SECONDS, clock=process_time)
    found, *lines = [
        text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]} ..." for text in (told.error.found, *told.story)
    ]
    begun = f"seed {seed}, events {', '.join(map(str, told.numbers))}", f"with {told.settings.text()}"
    return BrokenPromise(told.error.promise, found, (*begun, *lines))


FEATURES = (
    "delta", "whole", "snapshot", "metadata", "cut", "held_back", "batches", "resets", "failed_resets",
    "failed_persists", "fenced", "raced", "fenced_publishes", "published_in_a_race", "group_persists", "derived",
    "deletions", "trimmed_ledgers", "failed_trims", "lost_ledgers",
)  # fmt: skip
"""Further counts of a run: a feature that is never used is not tested."""


def schedules(first_seed):
    with quiet("ackstate"):
        for seed in count(first_seed):
            yield run(seed)


def run(seed):
    simulation = BrokerSimulation(seed)
    failure = failure_of(simulation, range(simulation.event_count()))
    counts = dict.fromkeys(FEATURES, 0) | simulation.counts
    counts |= {"steps": simulation.step_count, "faults": simulation.fault_count}
    if failure is None:
        return RunOutcome(seed, simulation.crash_count, counts=counts)
    found = oracle.counts([Broken(failure.error.promise, failure.error.found, failure.error.entry_count)])
    return RunOutcome(seed, simulation.crash_count, **found, broken=(_told(seed, failure),), counts=counts)
