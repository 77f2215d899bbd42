"""A schedule that breaks a promise, made short: events are left out and settings made plain while it still does."""

from __future__ import annotations

from dataclasses import fields, replace
from time import process_time
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.layer import BrokenPromise
from ackstate.analysis.crash.model.schedule import Schedule
from ackstate.analysis.crash.model.settings import Settings
from ackstate.analysis.crash.promises import PromiseBrokenError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_COUNTS_MAX = (1, 2, 3, 5, 10)
_TEXT_MAX = 300


class Failure(NamedTuple):
    """A schedule that breaks a promise.

    Attributes:
        settings: Of the broker.
        numbers: Its events.
        error: Which promise, and what was found.
        story: What happened.
        is_at_end: Whether it was found after all events, when everything was to be acked.
    """

    settings: Settings
    numbers: tuple[int, ...]
    error: PromiseBrokenError
    story: tuple[str, ...]
    is_at_end: bool


def failure_of(schedule: Schedule, numbers: Sequence[int], *, ends: bool = True) -> Failure | None:
    """Run a schedule, with its end or without, and return how it broke a promise; None if it broke none."""
    try:
        schedule.run(numbers, ends=ends)
    except PromiseBrokenError as error:
        last = schedule.event_number
        happened = tuple(numbers if last is None else numbers[: list(numbers).index(last) + 1])
        return Failure(schedule.settings, happened, error, schedule.story(), last is None)
    return None


def told(seed: int, failure: Failure, *, seconds_max: float) -> BrokenPromise:
    """Return a failure with the shortest story that is found for it in so many seconds of computing."""
    shortest = _Search(seed, failure, seconds_max=seconds_max).shortest()
    found = shortest.error.found
    lines = [line if len(line) <= _TEXT_MAX else f"{line[:_TEXT_MAX]} ..." for line in shortest.story]
    return BrokenPromise(
        shortest.error.promise,
        found if len(found) <= _TEXT_MAX else f"{found[:_TEXT_MAX]} ...",
        (f"seed {seed}, events {', '.join(map(str, shortest.numbers))}", f"with {shortest.settings.text()}", *lines),
    )


@final
class _Search:
    """Leaves out what is not needed; whatever is tried has to break the same promise."""

    def __init__(self, seed: int, failure: Failure, *, seconds_max: float) -> None:
        self._seed = seed
        self._best = failure
        self._is_at_end = failure.is_at_end
        self._end = process_time() + seconds_max

    def shortest(self) -> Failure:
        """Return the shortest that was found."""
        self._leave_out()
        self._make_plain()
        for count_max in _COUNTS_MAX:
            if count_max < self._best.settings.count_max:
                self._try(replace(self._best.settings, count_max=count_max), self._best.numbers)
        self._leave_out()
        self._make_plain()
        return self._best

    def _try(self, settings: Settings, numbers: Sequence[int]) -> bool:
        if process_time() > self._end:
            return False
        failure = failure_of(Schedule(self._seed, settings), numbers, ends=self._is_at_end)
        if failure is None or failure.error.promise is not self._best.error.promise:
            return False
        self._best = failure
        return True

    def _make_plain(self) -> None:
        for settings in _plainer():
            self._try(settings(self._best.settings), self._best.numbers)

    def _leave_out(self) -> None:
        """Leave out events, first many neighbours at once, then one by one."""
        size = max(len(self._best.numbers) // 2, 1)
        while True:
            end = len(self._best.numbers)
            while end > 0:
                numbers = self._best.numbers
                first = max(end - size, 0)
                self._try(self._best.settings, numbers[:first] + numbers[end:])
                end = min(first, len(self._best.numbers))
            if size == 1:
                return
            size //= 2


def _plainer() -> Iterator[_Plainer]:
    """Yield ways to make settings plainer, one field at a time."""
    plain = Settings()
    for part in ("", "limits", "config"):
        for each in fields(getattr(plain, part) if part else plain):
            if part or each.name not in {"limits", "config", "count_max"}:
                yield _Plainer(part, each.name)


class _Plainer(NamedTuple):
    part: str
    name: str

    def __call__(self, settings: Settings) -> Settings:
        plain = Settings()
        if not self.part:
            return replace(settings, **{self.name: getattr(plain, self.name)})
        usual = getattr(getattr(plain, self.part), self.name)
        return replace(settings, **{self.part: replace(getattr(settings, self.part), **{self.name: usual})})
