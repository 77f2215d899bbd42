"""Add up the curves of many subscriptions: each is cut into slices of time, which are added up one by one."""

from __future__ import annotations

import re
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple, Self, final

import numpy as np

from ackstate.analysis.redelivery.curve_sum import CAUSES, combined

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate.analysis.redelivery.acked import Int64s
    from ackstate.analysis.redelivery.curve_sum import Points
    from ackstate.analysis.redelivery.parts import Part

_NAMESPACE = re.compile(r"(?:persistent|non-persistent)://([^/]+/[^/]+)/.")
_NOTHING = np.empty(0, np.int64)


def namespace_of(topic: str) -> str:
    """Return a topic's namespace, empty if its name has none.

    >>> namespace_of("persistent://public/default/orders"), namespace_of("orders")
    ('public/default', '')
    """
    found = _NAMESPACE.match(topic)
    return found[1] if found else ""


class Slices(NamedTuple):
    """A trace's time in equal slices, the last of which holds its last millisecond.

    Attributes:
        begin_ms: Of the trace.
        end_ms: Its last event.
        width_ms: Of a slice.
        slice_count: How many; 0 if none are wanted.
    """

    begin_ms: int
    end_ms: int
    width_ms: int
    slice_count: int

    @classmethod
    def of(cls, begin_ms: int, end_ms: int, count: int) -> Self:
        """Cut a trace into at most so many slices."""
        width_ms = -(-(end_ms - begin_ms + 1) // max(count, 1))
        return cls(begin_ms, end_ms, width_ms, -(-(end_ms - begin_ms + 1) // width_ms) if count else 0)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return where a slice begins and ends; the last one ends with the trace."""
        begin_ms = self.begin_ms + number * self.width_ms
        return begin_ms, min(begin_ms + self.width_ms, self.end_ms)


class Change(NamedTuple):
    """How a curve changes within a slice.

    Attributes:
        number: Of the slice.
        begin: The number that it begins with; 0 also if another `Change` of the slice says it.
        ts_ms: When it changes; rising.
        delta: By how much.
    """

    number: int
    begin: int
    ts_ms: Int64s
    delta: Int64s


@final
class SliceWriter:
    """Cuts one curve into slices."""

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        self._value = 0
        self._number = -1  # of the slice that was begun last

    def go_on(self, value: int) -> None:
        """Begin with a number that stands already."""
        self._value = value

    def changes(self, points: Points) -> Iterator[Change]:
        """Yield what the next points change."""
        if not self._slices.slice_count or not len(points.ts_ms):
            return
        lasts = np.flatnonzero(np.append(points.ts_ms[1:] != points.ts_ms[:-1], True))
        value = np.where(points.is_alive, points.value, 0)[lasts]
        delta = np.diff(value, prepend=self._value)
        at = np.flatnonzero(delta)
        ts_ms, delta = points.ts_ms[lasts][at], delta[at]
        numbers = (ts_ms - self._slices.begin_ms) // self._slices.width_ms
        bounds = [*np.flatnonzero(np.diff(numbers, prepend=-1)).tolist(), len(numbers)]
        for low, high in pairwise(bounds):
            number = int(numbers[low])
            yield from self._standing(number)
            begin = self._value if number > self._number else 0
            yield Change(number, begin, ts_ms[low:high], delta[low:high])
            self._number = number
            self._value += int(delta[low:high].sum())

    def end(self) -> Iterator[Change]:
        """Yield what the last value comes to until the trace ends."""
        yield from self._standing(self._slices.slice_count)

    def _standing(self, until_number: int) -> Iterator[Change]:
        """Yield the slices in which the curve stands still."""
        if self._value:
            for number in range(self._number + 1, until_number):
                yield Change(number, self._value, _NOTHING, _NOTHING)
        self._number = max(self._number, until_number - 1)


def sum_slices(parts: Iterable[Part], slices: Slices) -> Iterator[Part]:
    """Add up curves of topics, namespaces and all, slice by slice.

    Args:
        parts: Sorted by policy, slice, namespace and topic. Of results, those of subscriptions.
        slices: What they are cut into.

    Yields:
        For each slice and scope a part of the result; what is a result already, and its costs for each other scope.
    """
    for (_, number), of_slice in groupby(parts, key=lambda part: (part.policy, part.slice)):
        if number < 0:
            for part in of_slice:
                yield from _for_all_scopes(part)
            continue
        everything = _Sum()
        for namespace, of_namespace in groupby(of_slice, key=lambda part: part.namespace):
            in_namespace = _Sum()
            for topic, of_topic in groupby(of_namespace, key=lambda part: part.topic):
                in_topic, last = _Sum(), None
                for part in of_topic:
                    in_topic.add(Change(number, part.begin, part.first, part.second))
                    last = part
                assert last is not None
                in_namespace.add(in_topic.total(number))
                yield in_topic.result(last, ("topic", namespace, topic), slices.bounds(number))
            everything.add(in_namespace.total(number))
            yield in_namespace.result(last, ("namespace", namespace, ""), slices.bounds(number))
        yield everything.result(last, ("total", "", ""), slices.bounds(number))


def _for_all_scopes(part: Part) -> Iterator[Part]:
    yield part
    if part.sums is None:
        return
    costs = part._replace(sums=[0, None, *part.sums[2:]], first=_NOTHING, second=_NOTHING, subscription="")
    yield costs._replace(scope="topic")
    yield costs._replace(scope="namespace", topic="")
    yield costs._replace(scope="total", topic="", namespace="")


@final
class _Sum:
    """Changes of several curves in one slice."""

    def __init__(self) -> None:
        self._begin = 0
        self._changes: list[tuple[Int64s, Int64s]] = []

    def add(self, change: Change) -> None:
        self._begin += change.begin
        self._changes.append((change.ts_ms, change.delta))

    def total(self, number: int) -> Change:
        """Return them as one, with at most one change a millisecond."""
        if len(self._changes) > 1:
            ts_ms, delta = (np.concatenate(columns) for columns in zip(*self._changes, strict=True))
            times, at = np.unique(ts_ms, return_inverse=True)
            sums = np.zeros(len(times), np.int64)
            np.add.at(sums, at, delta)
            self._changes = [(times, sums)]
        return Change(number, self._begin, *self._changes[0])

    def result(self, of: Part | None, names: tuple[str, str, str], bounds: tuple[int, int]) -> Part:
        """Return for how long each value held, and the most."""
        assert of is not None
        _, begin, ts_ms, delta = self.total(of.slice)
        times = np.concatenate(([bounds[0]], ts_ms))
        values = begin + np.concatenate(([0], np.cumsum(delta)))
        # A slice's first value stands only until something changes in its first millisecond.
        held = np.append(times[1:] != times[:-1], True)
        times, values = times[held], values[held]
        durations = np.diff(np.append(times, max(bounds[1], int(times[-1]))))
        at = int(np.argmax(values))
        first, second = combined(values, durations)
        scope, namespace, topic = names
        sums = [int(values[at]), int(times[at]), *[0] * (len(CAUSES) + 5)]
        return of._replace(
            slice=-1, scope=scope, namespace=namespace, topic=topic, subscription="", begin=0,
            first=first, second=second, sums=sums,
        )  # fmt: skip
