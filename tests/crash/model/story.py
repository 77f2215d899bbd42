"""Shortens a schedule that breaks a promise: events are removed and settings simplified while it still does."""

from __future__ import annotations

from dataclasses import fields, replace
from time import process_time
from typing import TYPE_CHECKING, Any, NamedTuple

from ackstate.analysis.crash.layer import BrokenPromise
from ackstate.analysis.crash.promises import PromiseBrokenError
from ackstate.analysis.crash.shrink import Failing, shortest
from crash.model.settings import Settings
from crash.model.simulation import BrokerSimulation

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_USUAL = Settings(count_max=1)
_COUNTS_MAX = (2, 3, 5, 10)
_ROUNDS = 2
_TEXT_MAX = 300


class ScheduleFailure(NamedTuple):
    """A schedule that breaks a promise.

    Attributes:
        settings: The settings of the broker.
        numbers: Its events.
        error: The broken promise, and the details.
        story: The events in words.
        is_at_end: Whether it was found after all events, when everything was to be acked.
    """

    settings: Settings
    numbers: tuple[int, ...]
    error: PromiseBrokenError
    story: tuple[str, ...]
    is_at_end: bool


def failure_of(simulation: BrokerSimulation, numbers: Sequence[int], *, ends: bool = True) -> ScheduleFailure | None:
    """Run a schedule, with or without its end, and return its failure, None if it broke no promise."""
    try:
        simulation.run(numbers, ends=ends)
    except PromiseBrokenError as error:
        last = simulation.event_number
        happened = tuple(numbers if last is None else numbers[: list(numbers).index(last) + 1])
        return ScheduleFailure(simulation.settings, happened, error, simulation.story(), last is None)
    return None


def told(seed: int, failure: ScheduleFailure, *, seconds_max: float) -> BrokenPromise:
    """Return a failure with the shortest story found for it within a time limit."""
    failure = _shortest(seed, failure, seconds_max=seconds_max)
    found = failure.error.found
    lines = [line if len(line) <= _TEXT_MAX else f"{line[:_TEXT_MAX]} ..." for line in failure.story]
    return BrokenPromise(
        failure.error.promise,
        found if len(found) <= _TEXT_MAX else f"{found[:_TEXT_MAX]} ...",
        (f"seed {seed}, events {', '.join(map(str, failure.numbers))}", f"with {failure.settings.text()}", *lines),
    )


def _shortest(seed: int, failure: ScheduleFailure, *, seconds_max: float) -> ScheduleFailure:
    """Remove events, and non-default settings, as long as the same promise is broken."""
    until = process_time() + seconds_max
    promise, ends = failure.error.promise, failure.is_at_end

    def again(settings: Settings, numbers: Sequence[int]) -> ScheduleFailure | None:
        found = failure_of(BrokerSimulation(seed, settings), numbers, ends=ends)
        return found if found is not None and found.error.promise is promise else None

    def with_numbers(numbers: tuple[int, ...]) -> Failing[int, ScheduleFailure] | None:
        found = again(failure.settings, numbers)
        return None if found is None else Failing(found.numbers, found)

    def with_settings(differing: tuple[_Setting, ...]) -> Failing[_Setting, ScheduleFailure] | None:
        """Return the failure with these non-default settings only, if there still is one."""
        try:
            found = again(_settings(differing), failure.numbers)
        except ValueError:  # some settings require others
            return None
        return None if found is None else Failing(differing, found)

    for _ in range(_ROUNDS):
        numbers, seconds = Failing(failure.numbers, failure), until - process_time()
        failure = shortest(numbers, with_numbers, seconds=seconds, clock=process_time).evidence
        differing, seconds = Failing(tuple(_differing(failure.settings)), failure), until - process_time()
        failure = shortest(differing, with_settings, seconds=seconds, clock=process_time).evidence
    return failure


class _Setting(NamedTuple):
    """A non-default setting of the limits or of the cursor's configuration, or none."""

    part: str
    name: str
    value: object


def _differing(settings: Settings) -> Iterator[_Setting]:
    for part in ("", "limits", "config"):
        own, usual = ((getattr(each, part) if part else each) for each in (settings, _USUAL))
        for field in fields(usual):
            value = getattr(own, field.name)
            if field.name not in {"limits", "config", "count_max"} and value != getattr(usual, field.name):
                yield _Setting(part, field.name, value)
    # The last one counts: each can be removed.
    for count_max in (*(each for each in _COUNTS_MAX if each < settings.count_max), settings.count_max):
        yield _Setting("", "count_max", count_max)


def _settings(differing: Sequence[_Setting]) -> Settings:
    values: dict[str, dict[str, Any]] = {"": {}, "limits": {}, "config": {}}
    for part, name, value in differing:
        values[part][name] = value
    limits, config = replace(_USUAL.limits, **values["limits"]), replace(_USUAL.config, **values["config"])
    return replace(_USUAL, limits=limits, config=config, **values[""])
