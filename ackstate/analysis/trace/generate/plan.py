"""The plan of a generated trace: the events of each subscription, and the pieces in which they are generated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ackstate.analysis.trace.events import CHUNK_EVENTS
from ackstate.analysis.trace.generate.clock import NS_PER_S, Arrivals, key_of
from ackstate.analysis.trace.generate.outages import Flushes, Outage, outages
from ackstate.analysis.trace.generate.series import SubscriptionSeries, TopicSeries
from ackstate.analysis.trace.generate.turns import Classes
from ackstate.analysis.workloads.traffic import MESSAGES_PER_SECOND, Traffic, workload_named

EVENTS_MAX = 10**13
SUBSCRIPTIONS_MAX = 10**7
FLUSH_INTERVAL_MS_MAX = 86_400_000
CRASHES_MAX = 10_000
PIECE_CHUNKS = 64
PIECE_EVENTS = PIECE_CHUNKS * CHUNK_EVENTS
_RATE_MIN, _RATE_MAX = 0.001, 10_000_000.0
_SPAN_YEARS_MAX = 100
_YEAR_S = 365 * 86_400
# Subscriptions with the same number of events end at most this far apart.
_UNEQUAL_NS = NS_PER_S // 2


class RowGroupPlan(NamedTuple):
    """Consecutive chunks of one subscription, which fill a row group; the last piece may be shorter.

    Attributes:
        subscription: Its number, from 0.
        number: Number of the piece, from 0.
    """

    subscription: int
    number: int


@dataclass(frozen=True, slots=True)
class TracePlan:
    """The parameters of a generated trace.

    Attributes:
        workload: A name of `WORKLOADS`.
        events: Events of all subscriptions together, not counting those of the topics.
        seed: Decides everything else: the same plan gives the same trace.
        subscriptions: Number of subscriptions.
        topics: Number of topics over which the subscriptions are spread.
        hot_share: The first subscription has this share of the events, and a topic to itself; None: all are alike.
        messages_per_second: Mean rate of a topic whose subscriptions have the mean number of events; other topics have
            proportional rates, so that all take the same time.
        flush_interval_ms: Interval at which every cursor persists.
        crashes: Number of times that the broker dies, all subscriptions at once.

    Raises:
        ValueError: A value is out of its bounds, or they do not fit together.
    """

    workload: str
    events: int
    seed: int = 1
    subscriptions: int = 8
    topics: int = 4
    hot_share: float | None = None
    messages_per_second: float = MESSAGES_PER_SECOND
    flush_interval_ms: int = 1_000
    crashes: int = 0

    def __post_init__(self) -> None:
        workload_named(self.workload)
        _check("events", self.events, 1, EVENTS_MAX)
        _check("subscriptions", self.subscriptions, 1, SUBSCRIPTIONS_MAX)
        _check("topics", self.topics, 1, self.subscriptions, "as many as subscriptions at most")
        _check("messages per second", self.messages_per_second, _RATE_MIN, _RATE_MAX)
        _check("flush interval in ms", self.flush_interval_ms, 1, FLUSH_INTERVAL_MS_MAX)
        _check("crashes", self.crashes, 0, CRASHES_MAX)
        if self.hot_share is not None:
            self._check_hot(self.hot_share)
        if self.events_of(self.subscriptions - 1) < 1:
            raise ValueError(f"{self.events} events are fewer than one for each of {self.subscriptions} subscriptions")
        _check("messages per second of the first topic", self.rate_of(0), _RATE_MIN, _RATE_MAX)
        # An entry has at least one event, its delivery or its ack.
        if self.events_of(0) / self.rate_of(0) > _SPAN_YEARS_MAX * _YEAR_S:
            raise ValueError(f"{self.events} events take more than {_SPAN_YEARS_MAX} years: raise the rate")

    def _check_hot(self, share: float) -> None:
        if not 0 < share < 1:
            raise ValueError(f"hot share must be between 0 and 1, got {share}")
        if self.topics < 2:
            raise ValueError("a hot subscription has a topic to itself: at least 2 topics are needed")
        if not 1 <= round(self.events * share) < self.events:
            raise ValueError(f"hot share {share} of {self.events} events leaves no event for one side")

    @property
    def shape(self) -> Traffic:
        """The workload."""
        return workload_named(self.workload)

    @property
    def _hot_count(self) -> int:
        return 0 if self.hot_share is None else 1

    @property
    def _hot_events(self) -> int:
        return 0 if self.hot_share is None else round(self.events * self.hot_share)

    def events_of(self, subscription: int) -> int:
        """Return the number of a subscription's events; except for a hot one, it never rises with the index."""
        if subscription < self._hot_count:
            return self._hot_events
        share, rest = divmod(self.events - self._hot_events, self.subscriptions - self._hot_count)
        return share + (subscription - self._hot_count < rest)

    def topic_of(self, subscription: int) -> int:
        """Return the number of a subscription's topic; subscription k is the first of topic k."""
        hot = self._hot_count
        return subscription if subscription < hot else hot + (subscription - hot) % (self.topics - hot)

    def rate_of(self, topic: int) -> float:
        """Return a topic's mean rate, in messages a second."""
        mean = self.events / self.subscriptions
        if self.hot_share is None:
            return self.messages_per_second
        cold = (self.events - self._hot_events) / (self.subscriptions - 1)
        return self.messages_per_second * (cold if topic else self._hot_events) / mean

    @property
    def piece_count(self) -> int:
        """The number of pieces."""
        return self._pieces_before(self.subscriptions)

    def piece(self, index: int) -> RowGroupPlan:
        """Return a piece by its index; pieces of one subscription are consecutive."""
        low, high = 0, self.subscriptions
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._pieces_before(middle) <= index else (low, middle)
        return RowGroupPlan(low, index - self._pieces_before(low))

    def pieces_of(self, subscription: int) -> int:
        """Return the number of a subscription's pieces."""
        return math.ceil(self.events_of(subscription) / PIECE_EVENTS)

    def _pieces_before(self, subscription: int) -> int:
        hot = self._hot_count
        rest = (self.events - self._hot_events) % (self.subscriptions - hot)
        others = max(subscription - hot, 0)
        count = self.pieces_of(0) if hot and subscription else 0
        count += min(others, rest) * self.pieces_of(hot)
        return count + max(others - rest, 0) * self.pieces_of(self.subscriptions - 1)

    def outages(self) -> list[Outage]:
        """Return the outages, timed by the first subscription, whose events an outage brings forward.

        Raises:
            ValueError: The trace is too short for this number of crashes.
        """
        last, end_ns = np.array([self.events_of(0) - 1]), None
        while True:
            found: list[Outage] = [] if end_ns is None else self._outages_until(end_ns)
            series = self.series_of(0, found)
            ended_ns = int(series.arrivals.at_ns(series.slots_of(last))[0]) - _UNEQUAL_NS
            if len(found) == self.crashes and (not found or found[-1].at_ns < ended_ns):
                return found
            end_ns = ended_ns if end_ns is None else min(ended_ns, end_ns * 19 // 20)

    def _outages_until(self, end_ns: int) -> list[Outage]:
        return outages(Flushes(self.flush_interval_ms), self.crashes, end_ns=end_ns, key=key_of(self.seed, "outages"))

    def series_of(self, subscription: int, outages: list[Outage]) -> SubscriptionSeries:
        """Return a subscription's events."""
        topic = self.topic_of(subscription)
        rate = self.rate_of(topic)
        # Delays are set at publish time, the same for all subscriptions of the topic.
        told_by = ("topic", topic) if self.shape.delay_ms else ("subscription", subscription)
        classes = Classes(key_of(self.seed, *told_by), self.shape.block)
        arrivals = Arrivals.at_rate(key_of(self.seed, "arrivals", topic), rate)
        return SubscriptionSeries(self.shape, arrivals, classes, rate, Flushes(self.flush_interval_ms), outages)

    def topic_events(self, topic: int, series: SubscriptionSeries) -> int:
        """Return the number of PUBLISH events of a topic, up to the last entry sent to its longest subscription."""
        last_slot = int(series.slots_of(np.array([self.events_of(topic) - 1]))[0])
        return TopicSeries(series).count(last_slot + 1)


def _check(what: str, value: float, lowest: float, highest: float, why: str = "") -> None:
    # Written so that nan fails as well.
    if not lowest <= value <= highest:
        raise ValueError(f"{what} must be from {lowest:,} to {highest:,}, got {value:,}" + (f", {why}" if why else ""))
