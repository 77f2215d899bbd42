"""The overshoot of a limit on the ack state, exact and as an estimate, and the cost of keeping the limit."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate.cursor import CursorConfig, ManagedCursor, MemoryStore
from ackstate.cursor.subscription import Subscription, SubscriptionType
from ackstate.delay import TopicDelayIndex
from ackstate.limits import DispatchGate, GateLimits
from ackstate.limits.rules import Accounting
from ackstate.topic.message_log import NO_DELAY, Message, MessageLog
from benchmarks.acked_entries import SEED
from benchmarks.measurement import RESULTS, Against, BenchmarkReport
from benchmarks.overshoot_plot import LimitPanel, UsageCurve, drawn

if TYPE_CHECKING:
    from ackstate import Position

ABOUT = (
    "Messages at a fixed rate of simulated time from a backlog that never ends: every figure is a count, none a time. "
    "An ack comes 2 s after its message was sent, so that about as many are on their way as a receiver queue of "
    "Pulsar's holds. Every other message (alternating), or all that one of four consumers gets, is not acked until "
    "that consumer is closed; or every other message is delayed, so that no consumer has it and nothing is reserved "
    "for it. At most 10,000 ranges are persisted, Pulsar's default; the rest stays un-persisted. No limit is on but "
    "the one named. The highest use is that in memory, in ranges or in bytes of ack records that are not durable, "
    "without reservations. Pulsar's own was measured at 11,097 ranges for a limit of 10,000."
)
STEP_MS = 100
ACK_AFTER_MS = 2_000
RANGES_PERSISTED_MAX = 10_000
DAY_MS = 86_400_000
STUCK = "stuck"
KEYS = 1_000
KIB, MIB = 2**10, 2**20


@dataclass(frozen=True, slots=True)
class ConsumerWorkload:
    """The number and kinds of consumers.

    Attributes:
        name: In the table.
        working: How many consumers ack everything, beside the one that is stuck.
        stuck_acks_one_in: The stuck consumer acks one of this many messages, the last one; 0 for none.
        delays_even: Whether the entries of even id are delayed beyond the end of the run.
        batch: How many messages a consumer gets before the next has its turn.
        kind: How messages are shared out.
    """

    name: str
    working: int
    stuck_acks_one_in: int = 0
    delays_even: bool = False
    batch: int = 1
    kind: SubscriptionType = SubscriptionType.SHARED


@dataclass(frozen=True, slots=True)
class LimitSetting:
    """A limit, and the rate at which it is run into."""

    name: str
    unit: str
    limits: GateLimits
    limit: int
    messages_per_s: int
    seconds: int
    stuck_until_s: int


class LimitRunResult(NamedTuple):
    """The result of a run.

    Attributes:
        highest: The highest use, after any ack.
        curve: The highest use in each second.
        sent_until_blocked: How many messages were sent when the gate first closed.
        acked: How many messages were acked in all.
        blocked_share: In which part of the time it kept new messages back, while the consumer was stuck.
    """

    highest: int
    curve: list[int]
    sent_until_blocked: int
    acked: int
    blocked_share: float


def _only(**limit: int) -> GateLimits:
    off = {"max_unpersisted_ack_record_bytes": 0, "max_unacked_messages": 0, "max_unacked_messages_per_consumer": 0}
    return GateLimits(**{**off, **limit})


def _bytes(name: str, limit: int, messages_per_s: int, seconds: int, stuck_until_s: int) -> LimitSetting:
    limits = _only(max_unpersisted_ack_record_bytes=limit)
    return LimitSetting(name, "bytes", limits, limit, messages_per_s, seconds, stuck_until_s)


ALTERNATING = ConsumerWorkload("alternating", 0, stuck_acks_one_in=2, batch=1_000)
DELAYED = ConsumerWorkload("every other delayed", 0, stuck_acks_one_in=1, delays_even=True, batch=1_000)
ONE_STUCK = ConsumerWorkload("one stuck of four", 3)
KEY_SHARED = ConsumerWorkload("key_shared, one stuck", 3, batch=1_000, kind=SubscriptionType.KEY_SHARED)
KIB_64 = _bytes("64 KiB", 64 * KIB, 1_000, 90, 65)
MIB_1 = _bytes("1 MiB", MIB, 5_000, 65, 65)
MIB_5 = _bytes("5 MiB", 5 * MIB, 10_000, 65, 65)
RANGES = LimitSetting("10,000 ranges", "ranges", _only(max_unacked_ranges=10_000), 10_000, 1_000, 75, 65)
# The largest limit takes a million messages to reach, so it is reached once. The rule for ranges counts those in
# memory, with either accounting, so persists make no difference to it.
RUNS = [
    *((KIB_64, ALTERNATING, interval_s) for interval_s in (1, 10, 60)),
    *((MIB_1, ALTERNATING, interval_s) for interval_s in (1, 10, 60)),
    (MIB_5, ALTERNATING, 60),
    *((KIB_64, workload, 10) for workload in (DELAYED, ONE_STUCK, KEY_SHARED)),
    *((RANGES, workload, 10) for workload in (ALTERNATING, DELAYED, ONE_STUCK, KEY_SHARED)),
]


class Backlog:
    """One log for all runs of like messages, each of which reads as far as it gets."""

    def __init__(self, *, delays_even: bool = False) -> None:
        self._deliver_at_ms = (DAY_MS if delays_even else NO_DELAY, NO_DELAY)
        self.store = MemoryStore()
        self.log = MessageLog.open(self.store, topic="t", entries_per_ledger_max=50_000)
        self._keys = [b"key %d" % number for number in range(KEYS)]
        self._random = np.random.default_rng(SEED)
        self._published = 0
        self._names = count()

    def keep_ahead(self, sent: int) -> None:
        """Publish more messages than a step can send."""
        while self._published < sent + 50_000:
            keys = self._random.integers(0, KEYS, 10_000).tolist()
            self.log.publish(
                [
                    Message(b"", key=self._keys[key], deliver_at_ms=self._deliver_at_ms[at % 2])
                    for at, key in enumerate(keys)
                ]
            )
            self._published += len(keys)

    def cursor(self, *, interval_s: int) -> ManagedCursor:
        """Open a cursor of its own for a run."""
        config = CursorConfig(flush_interval_ms=interval_s * 1_000, range_count_max=RANGES_PERSISTED_MAX)
        return ManagedCursor.open(
            self.store,
            topic="t",
            subscription=f"s{next(self._names)}",
            ledgers=self.log.ledgers,
            config=config,
            now_ms=0,
        )


class LimitRun:
    """One run of a workload against a limit."""

    def __init__(self, backlog: Backlog, setting: LimitSetting, workload: ConsumerWorkload, *, interval_s: int) -> None:
        self._backlog = backlog
        self._setting = setting
        self._workload = workload
        self._cursor = backlog.cursor(interval_s=interval_s)
        self._consumers = [STUCK, *(f"working {number}" for number in range(workload.working))]
        self._to_ack: deque[tuple[int, str, Position]] = deque()
        self._highest = self._sent = self._acked = 0
        self._curve: list[int] = []

    def outcome(self, accounting: Accounting) -> LimitRunResult:
        """Run it."""
        setting = self._setting
        gate = DispatchGate(replace(setting.limits, accounting=accounting))
        is_delayed = self._workload.delays_even
        delays = TopicDelayIndex(tick_time_ms=1_000).open_view(self._cursor.is_acked) if is_delayed else None
        subscription = Subscription(
            self._backlog.log, self._cursor, gate=gate, delays=delays, kind=self._workload.kind
        )  # fmt: skip
        for consumer in self._consumers:
            subscription.consumer_opened(consumer)
        blocked = sent_until_blocked = 0
        for now_ms in range(0, setting.seconds * 1_000, STEP_MS):
            if now_ms == setting.stuck_until_s * 1_000:
                self._close_stuck(subscription)
            self._backlog.keep_ahead(self._sent * (1 + self._workload.delays_even))
            self._dispatch(subscription, now_ms)
            if gate.is_closed and STUCK in self._consumers:
                sent_until_blocked = sent_until_blocked or self._sent
                blocked += 1
            self._ack(subscription, now_ms)
            self._cursor.tick(now_ms=now_ms)
        share = 100 * blocked / (setting.stuck_until_s * 1_000 / STEP_MS)
        return LimitRunResult(self._highest, self._curve, sent_until_blocked, self._acked, share)

    def _close_stuck(self, subscription: Subscription) -> None:
        subscription.consumer_closed(STUCK)
        self._to_ack = deque(each for each in self._to_ack if each[1] != STUCK)
        self._consumers = self._consumers[1:] or ["working"]

    def _dispatch(self, subscription: Subscription, now_ms: int) -> None:
        wanted = self._setting.messages_per_s * STEP_MS // 1_000
        shares = dict(zip(self._consumers, np.bincount(np.arange(wanted) % len(self._consumers)).tolist(), strict=True))
        while any(shares.values()):
            for consumer, share in shares.items():
                asked = min(share, self._workload.batch)
                positions = [each.position for each in subscription.dispatch(consumer, asked, now_ms=now_ms)]
                shares[consumer] = share - asked if len(positions) == asked else 0
                self._sent += len(positions)
                self._to_ack.extend(
                    (now_ms + ACK_AFTER_MS, consumer, position)
                    for position in positions
                    if consumer != STUCK or self._is_acked_by_stuck(position)
                )

    def _is_acked_by_stuck(self, position: Position) -> bool:
        one_in = self._workload.stuck_acks_one_in
        return one_in > 0 and position.entry_id % one_in == one_in - 1

    def _ack(self, subscription: Subscription, now_ms: int) -> None:
        if now_ms % 1_000 == 0:
            self._curve.append(self._used)
        while self._to_ack and self._to_ack[0][0] <= now_ms:
            subscription.ack(self._to_ack.popleft()[2], now_ms=now_ms)
            self._acked += 1
            self._curve[-1] = max(self._curve[-1], self._used)
        self._highest = max(self._highest, self._curve[-1])

    @property
    def _used(self) -> int:
        if self._setting.unit == "ranges":
            return self._cursor.deleted.range_count
        return self._cursor.view.unpersisted_record_bytes


def measure_overshoot(report: BenchmarkReport) -> list[LimitPanel]:
    """Run everything with both kinds of accounting; return the curves of the picture."""
    backlogs = {delays_even: Backlog(delays_even=delays_even) for delays_even in (False, True)}
    panels = []
    for setting, workload, interval_s in RUNS:
        exact, estimate = (
            LimitRun(backlogs[workload.delays_even], setting, workload, interval_s=interval_s).outcome(accounting)
            for accounting in Accounting
        )
        persists = f", persists {interval_s} s apart" if setting.unit == "bytes" else ""
        what = f"{setting.name}, {workload.name}{persists}"
        _report_costs(report, what, setting, exact, estimate)
        curves = (UsageCurve("estimate", estimate.curve), UsageCurve("exact", exact.curve))
        panels.append(LimitPanel(what, f"{setting.messages_per_s:,} messages/s", setting.limit, curves))
    return panels


def _report_costs(
    report: BenchmarkReport, what: str, setting: LimitSetting, exact: LimitRunResult, estimate: LimitRunResult
) -> None:
    report.count(f"{what}: exact", setting.unit, exact.highest, Against("limit", setting.limit))
    report.count(f"{what}: estimate", setting.unit, estimate.highest, Against("the limit", setting.limit))
    for name, unit, ours, theirs in (
        ("sent before exact first blocks", "messages", exact.sent_until_blocked, estimate.sent_until_blocked),
        ("exact blocks", "% of the time", exact.blocked_share, estimate.blocked_share),
        ("acked with exact", "messages", exact.acked, estimate.acked),
    ):
        # One that never blocked in the time has nothing to compare with.
        report.count(f"{what}: {name}", unit, ours, Against("estimate", theirs) if theirs else None)


if __name__ == "__main__":
    logging.disable(logging.WARNING)  # Each persist logs that ranges were left out.
    report = BenchmarkReport("overshoot", ABOUT)
    panels = measure_overshoot(report)
    (RESULTS / "overshoot.svg").write_text(drawn(panels))
    report.publish()
