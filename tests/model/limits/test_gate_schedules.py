"""Random schedules over two gates of one broker, as many as `GATE_SCHEDULES` says: no limit is passed by one byte.

Each is short, and the counts beside the gate are plain sums. An ack adds all of its reservation, or nothing.
"""

from __future__ import annotations

import os
import random

import pytest

from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Rule, Usage

SCHEDULES = int(os.environ.get("GATE_SCHEDULES", "500"))
STEPS = 15
CONSUMERS = ("a", "b")
_SOME = random.Random(1)
COSTS = [[_SOME.randrange(3, 63) for _ in range(count)] for count in (1, 1, 1, 2, 5, 5, 16, 20) for _ in range(8)]


class ScheduledDispatcher:
    """Sums of the sent messages, and of the bytes that their acks have left."""

    def __init__(self, rng, limits, broker):
        self.rng, self.limits = rng, limits
        self.gate = DispatchGate(limits, broker=broker)
        self.sent: list[tuple[int, str]] = []
        self.record_bytes = self.reserved = self.ranges = 0
        self.unacked = dict.fromkeys(CONSUMERS, 0)
        self.waiting = self.woken = 0

    def usage(self, consumer=""):
        consumers = self.unacked.get(consumer, 0)
        return Usage(self.record_bytes, self.reserved, len(self.sent), self.ranges, len(self.sent), consumers)

    def used(self):
        return (
            self.record_bytes + self.reserved,
            self.ranges + len(self.sent),
            len(self.sent),
            max(self.unacked.values()),
        )

    def maxima(self):
        limits = self.limits
        return (
            limits.max_unpersisted_ack_record_bytes,
            limits.max_unacked_ranges,
            limits.max_unacked_messages,
            limits.max_unacked_messages_per_consumer,
        )

    def send(self):
        consumer, costs = self.rng.choice(CONSUMERS), self.rng.choice(COSTS)
        is_new = self.rng.random() < 0.8
        ask = self.gate.request if is_new else self.gate.request_redelivery
        granted = ask(costs, usage=self.usage(consumer), consumer=consumer).granted
        self.sent += [(cost, consumer) for cost in costs[:granted]]
        self.reserved += sum(costs[:granted])
        self.unacked[consumer] += granted
        self.gate.count_unacked(granted)
        if is_new and not granted:
            assert self.gate.why_blocked(self.usage(consumer), consumer), "refused and no rule named"
            self.waiting += 1
            self.gate.when_open(self.wake, consumer)

    def wake(self):
        self.woken += 1

    def take_off(self):
        """Take back some in any order, for an ack or a return, and say so at once or later."""
        count = min(len(self.sent), self.rng.choice((1, 4, 60)))
        for _ in range(count):
            picked = self.rng.random()
            cost, consumer = self.sent.pop(int(picked * len(self.sent)))
            self.reserved -= cost
            self.unacked[consumer] -= 1
            # Acked, mostly at its worst: a range of its own, or it fills a hole.
            if picked < 0.7:
                self.record_bytes += cost if picked < 0.5 else 0
                self.ranges = max(0, self.ranges + (1 if picked < 0.5 else -1))
        self.gate.count_unacked(-count)
        if self.rng.random() < 0.8:
            self.refresh()

    def persist(self):
        """It may leave some un-persisted, and the mark-delete may take ranges away."""
        self.record_bytes = self.rng.choice((0, self.record_bytes // 2))
        self.ranges = self.rng.choice((0, self.ranges))
        self.refresh()

    def refresh(self):
        self.gate.refresh(self.usage(), self.unacked)

    def finish(self):
        while self.sent:
            self.take_off()
        self.record_bytes = self.ranges = 0
        self.refresh()


def run(seed: int) -> None:
    """Run one schedule and check the changed numbers after each step, and at the end that nothing sticks."""
    rng = random.Random(seed)
    limits = GateLimits(
        rng.choice((0, 1024, 1100)),
        rng.choice((0, 5, 40)),
        max_unacked_ranges=rng.choice((0, 7, 30)),
        max_unacked_messages_per_consumer=rng.choice((0, 4, 20)),
    )
    broker = BrokerLimit(rng.choice((0, 10, 50)), 0.2)
    dispatchers = [ScheduledDispatcher(rng, limits, broker) for _ in range(2)]
    for _ in range(STEPS):
        it = rng.choice(dispatchers)
        rng.choice((it.send, it.send, it.take_off, it.persist))()
        check(it, dispatchers, broker)
    for it in dispatchers:
        it.finish()
    for it in dispatchers:
        assert (it.gate.is_closed, it.woken) == (False, it.waiting), f"sticks: seed {seed}"
        assert it.gate.request([62], usage=it.usage()).granted == 1, f"blocks needlessly: seed {seed}"


def run_all(count):
    for seed in range(count):
        run(seed)


def check(it, dispatchers, broker):
    for rule, used, limit in zip(Rule, it.used(), it.maxima(), strict=False):
        assert not limit or used <= limit, f"{rule} is passed: {used} of {limit}"
    total = sum(len(each.sent) for each in dispatchers)
    assert broker.unacked_messages == total
    share = max(1, int(broker.max_unacked_messages * broker.blocked_share))
    over = [each for each in dispatchers if len(each.sent) > share]
    if broker.max_unacked_messages and over:
        below = sum(len(each.sent) for each in dispatchers if each not in over)
        assert total - below <= broker.max_unacked_messages, "the broker's limit is passed"


@pytest.mark.slow
def test_gate_schedules_pass_no_limit_and_stick_nowhere():
    run_all(SCHEDULES)
