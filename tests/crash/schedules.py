"""L0: random schedules of a whole broker on the faulty memory store, compared after each event with plain sets.

`crash.model` defines the events and the comparisons. A run is the schedule of one seed: 70 to 150
events, of which about one in twelve is a crash. If it breaks a promise, the shortest story found within a few seconds
is reported.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import count
from time import process_time
from typing import NamedTuple

from ackstate.analysis.crash.layer import shortest
from ackstate.analysis.crash.oracle import BrokenPromise, Promise, RunOutcome
from crash.model.settings import Settings
from crash.model.simulation import BrokerSimulation
from crash.promises import PromiseBrokenError
from crash.quiet import quiet

_USUAL = Settings(count_max=1)
_COUNTS_MAX = (2, 3, 5, 10)
_ROUNDS = 2
_TEXT_MAX = 300


class ScheduleFailure(NamedTuple):
    """A schedule that breaks a promise."""

    settings: Settings  # The settings of the broker
    numbers: tuple[int, ...]  # Its events
    error: PromiseBrokenError  # The broken promise, and the details
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


def told(seed, failure, *, seconds_max):
    failure = _shortest(seed, failure, seconds_max=seconds_max)
    found = failure.error.found
    lines = [line if len(line) <= _TEXT_MAX else f"{line[:_TEXT_MAX]} ..." for line in failure.story]
    return BrokenPromise(
        failure.error.promise,
        found if len(found) <= _TEXT_MAX else f"{found[:_TEXT_MAX]} ...",
        (f"seed {seed}, events {', '.join(map(str, failure.numbers))}", f"with {failure.settings.text()}", *lines),
    )


def _shortest(seed, failure, *, seconds_max):
    """Remove events, and non-default settings, as long as the same promise is broken."""
    until = process_time() + seconds_max
    promise, ends = failure.error.promise, failure.is_at_end

    def again(settings, numbers):
        found = failure_of(BrokerSimulation(seed, settings), numbers, ends=ends)
        return found if found is not None and found.error.promise is promise else None

    def with_numbers(numbers):
        found = again(failure.settings, numbers)
        return None if found is None else (found.numbers, found)

    def with_settings(differing):
        """Return the failure with these non-default settings only, if there still is one."""
        try:
            found = again(_settings(differing), failure.numbers)
        except ValueError:  # some settings require others
            return None
        return None if found is None else (differing, found)

    for _ in range(_ROUNDS):
        seconds = until - process_time()
        _, failure = shortest(failure.numbers, failure, with_numbers, seconds=seconds, clock=process_time)
        differing, seconds = tuple(_differing(failure.settings)), until - process_time()
        _, failure = shortest(differing, failure, with_settings, seconds=seconds, clock=process_time)
    return failure


class _Setting(NamedTuple):
    """A non-default setting of the limits or of the cursor's configuration, or none."""

    part: str
    name: str
    value: object


def _differing(settings):
    for part in ("", "limits", "config"):
        own, usual = ((getattr(each, part) if part else each) for each in (settings, _USUAL))
        for field in fields(usual):
            value = getattr(own, field.name)
            if field.name not in {"limits", "config", "count_max"} and value != getattr(usual, field.name):
                yield _Setting(part, field.name, value)
    # The last one counts: each can be removed.
    for count_max in (*(each for each in _COUNTS_MAX if each < settings.count_max), settings.count_max):
        yield _Setting("", "count_max", count_max)


def _settings(differing):
    values = {"": {}, "limits": {}, "config": {}}
    for part, name, value in differing:
        values[part][name] = value
    limits, config = replace(_USUAL.limits, **values["limits"]), replace(_USUAL.config, **values["config"])
    return replace(_USUAL, limits=limits, config=config, **values[""])


_SHRINK_SECONDS = 5.0
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


def run(seed, settings=None, *, shrink_seconds=_SHRINK_SECONDS):
    simulation = BrokerSimulation(seed, settings)
    failure = failure_of(simulation, range(simulation.event_count()))
    counts = (
        dict.fromkeys(FEATURES, 0)
        | simulation.counts
        | {"steps": simulation.step_count, "faults": simulation.fault_count}
    )
    if failure is None:
        return RunOutcome(seed, simulation.crash_count, counts=counts)
    error = failure.error
    return RunOutcome(
        seed,
        simulation.crash_count,
        lost_durable=error.entry_count if error.promise is Promise.I2 else 0,
        invented=error.entry_count if error.promise is Promise.I1 else 0,
        gauge_mismatch=int(error.promise is Promise.I3),
        broken=(told(seed, failure, seconds_max=shrink_seconds),),
        counts=counts,
    )
