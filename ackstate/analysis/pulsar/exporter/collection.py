"""Looks at all topics of a cluster again and again, and judges each look with the help of the earlier ones."""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.pulsar.snapshot.bounds import ComesBack
from ackstate.analysis.pulsar.snapshot.judgement import Judgement, Looks, judge
from ackstate.analysis.pulsar.snapshot.requests import request_all
from ackstate.errors import AckStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ackstate.analysis.pulsar.snapshot.broker_settings import BrokerSettings
    from ackstate.analysis.pulsar.snapshot.sources import Source, TopicAnswers

SETTINGS_S = 3_600.0
"""Settings of topics, which cost four requests each, are read again after this time."""
_EARLIER_MAX = 3  # looks that are kept of each topic, besides the judged one


class Collection(NamedTuple):
    """The result of one look at all topics.

    Attributes:
        judgements: The subscriptions of the topics that were read.
        topic_count: The topics that were listed; 0 if they could not be listed.
        unread: For each broker, how many of its topics were not read; "" has those of an unknown owner, and tenants,
            namespaces and partitioned topics that were not listed.
        unlisted: Why each of these was not.
        failure: The reason why no topic was listed; empty if they were.
        ended_s: When it ended, in seconds since 1970.
        duration_s: How long it took.
    """

    judgements: Sequence[Judgement] = ()
    topic_count: int = 0
    unread: Mapping[str, int] = {}
    unlisted: Sequence[str] = ()
    failure: str = ""
    ended_s: float = 0.0
    duration_s: float = 0.0


@final
class Collector:
    """Collects from one cluster; calls of `collect` must not overlap.

    Args:
        make_source: Returns a source without any settings in its memory.
    """

    def __init__(self, make_source: Callable[[], Source]) -> None:
        self._make_source = make_source
        self._source = make_source()
        self._source_s = time.monotonic()
        self._looks: dict[str, deque[TopicAnswers]] = {}
        self._owners: dict[str, str] = {}

    def collect(self) -> Collection:
        """Look at every topic once. A failure is part of the result, and does not raise."""
        begun_s = time.monotonic()
        if begun_s - self._source_s >= SETTINGS_S:
            self._source, self._source_s = self._make_source(), begun_s
        try:
            topics, unlisted = self._source.listing()
        except AckStateError as error:
            return Collection(failure=str(error), ended_s=time.time(), duration_s=time.monotonic() - begun_s)
        judgements: list[Judgement] = []
        unread: Counter[str] = Counter({"": len(unlisted)} if unlisted else {})
        for topic, found in request_all(topics, self._judged).items():
            if isinstance(found, AckStateError):
                unread[self._owners.get(topic, "")] += 1
            else:
                judgements += found
        self._forget_others(topics)
        return Collection(
            judgements, len(topics), dict(unread), [*map(str, unlisted)],
            ended_s=time.time(), duration_s=time.monotonic() - begun_s,
        )  # fmt: skip

    def _judged(self, topic: str) -> list[Judgement]:
        settings, answers = self._source.settings(topic), self._source.read(topic)
        if answers.stats is not None and answers.stats.owner_broker:
            self._owners[topic] = answers.stats.owner_broker
        looks = self._looks.setdefault(topic, deque(maxlen=_EARLIER_MAX))
        earlier = list(looks)
        found = narrowed(topic, answers, earlier, settings)
        # The oldest kept look is as old as a quiet cursor needs; the others are the latest ones.
        if len(looks) == looks.maxlen and answers.asked_s - looks[1].answered_s < settings.quiet_seconds:
            looks.pop()
        looks.append(answers)
        return found

    def _forget_others(self, topics: Iterable[str]) -> None:
        for topic in self._looks.keys() - set(topics):
            del self._looks[topic]
            self._owners.pop(topic, None)


def narrowed(
    topic: str, now: TopicAnswers, earlier: Sequence[TopicAnswers], settings: BrokerSettings
) -> list[Judgement]:
    """Return the judgements of a look, each with the narrowest bounds that any earlier look gives.

    Raises:
        SnapshotError: An answer is malformed.
    """
    found = judge(topic, Looks(now), settings)
    for look in earlier:
        again = judge(topic, Looks(now, look), settings)
        found = [_narrower(first, second) for first, second in zip(found, again, strict=True)]
    return found


def _narrower(first: Judgement, second: Judgement) -> Judgement:
    """Return a judgement with the narrower of two bounds at each end; with the first if they contradict each other."""
    if first.comes_back is None or second.comes_back is None:
        return first
    low = max(first.comes_back.low, second.comes_back.low, key=lambda bound: bound.entries)
    high = min(first.comes_back.high, second.comes_back.high, key=lambda bound: bound.entries)
    return first if low.entries > high.entries else replace(first, comes_back=ComesBack(low, high))
