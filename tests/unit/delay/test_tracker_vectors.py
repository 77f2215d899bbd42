"""The tracker in memory answers as Pulsar's 5.0.1 did in every recorded case, and its dispatcher is woken in time.

Pulsar's timer is no part of ours: it is modelled here, on the public answers of a tracker, and must have been armed and
have run as recorded. `Wake` compares its effect with that of another poll at `next_delivery_ms`.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from enum import Enum
from pathlib import Path

from ackstate import Position
from ackstate.delay import DelayConfig, InMemoryDelayTracker

VECTORS = Path(__file__).parents[2] / "vectors" / "tracker.jsonl.gz"
TIME_MS_MAX = 2**63 - 1


class Wake(Enum):
    """After an operation: when would Pulsar's dispatcher be woken, and when would ours?

    EARLY and STALL are Pulsar's defect with a tick reset below the precision, which is not copied.
    """

    NOTHING = "nothing waits"
    READY = "something is due: neither timer is needed"
    EQUAL = "Pulsar's timer runs when the first bucket falls due"
    LATER = "Pulsar's timer runs at the bucket's own time, or a tick after it last ran; the bucket falls due before"
    EARLY = "Pulsar's timer runs at the bucket's own time, before the bucket falls due, and will not be armed again"
    STALL = "Pulsar's timer is not armed, though the bucket falls due later: on an idle topic no poll would follow"


class PulsarTimer:
    """``AbstractDelayedDeliveryTracker``: when a tracker asks its dispatcher to read on."""

    def __init__(self, case):
        self.tick_ms, self.is_strict = case["tick"], case["strict"]
        self.last_run_ms, self.target_ms, self.deadline_ms = 0, -1, None

    def bucket_ms(self, tracker):
        """The time of the first bucket, of which a tracker tells when it falls due."""
        assert tracker.next_delivery_ms > 0
        lead_ms = 0 if self.is_strict else self.tick_ms - tracker.precision_ms + 1
        return tracker.next_delivery_ms + lead_ms

    def update(self, tracker, now_ms):
        if tracker.delayed_message_count == 0:
            self.target_ms, self.deadline_ms = -1, None
            return
        bucket_ms = self.bucket_ms(tracker)
        if bucket_ms == self.target_ms:
            return
        self.target_ms, self.deadline_ms = -1, None
        if bucket_ms > now_ms:
            self.target_ms = bucket_ms
            self.deadline_ms = min(max(bucket_ms, self.last_run_ms + self.tick_ms), TIME_MS_MAX)

    def run(self, now_ms):
        if self.deadline_ms is None or self.deadline_ms > now_ms:
            return [0, 0]
        self.last_run_ms, self.target_ms, self.deadline_ms = now_ms, -1, None
        return [1, 1]


class TrackerVectorReplay:
    """One recorded case, on a tracker of ours."""

    def __init__(self, case):
        self.case, self.now_ms, self.wakes = case, case["start"], Counter()
        self.tracker = InMemoryDelayTracker.from_config(
            DelayConfig.from_pulsar_conf(
                {
                    "delayedDeliveryTickTimeMillis": case["tick"],
                    "isDelayedDeliveryDeliverAtTimeStrict": case["strict"],
                    "delayedDeliveryFixedDelayDetectionLookahead": case["lookahead"],
                }
            )
        )
        self.timer = PulsarTimer(case)

    def play(self):
        armed = []
        for number, op in enumerate(self.case["ops"]):
            armed = op.get("tm", armed)
            answer = getattr(self, op["op"])(op)
            timer = [] if self.timer.deadline_ms is None else [self.timer.deadline_ms]
            ours = (answer, self.tracker.delayed_message_count, timer)
            assert ours == (op.get("r"), op["c"], armed), f"case {self.case['id']}, operation {number}: {op}"
            self.tracker._check()
            self.wakes[self.wake()] += 1
        return self.wakes

    def add(self, op):
        position = Position(op["l"], op["e"])
        is_held = self.tracker.add_message(position, deliver_at_ms=op["at"], now_ms=self.now_ms)
        if is_held:
            self.timer.update(self.tracker, self.now_ms)
        return is_held

    def adv(self, op):
        self.now_ms += op["ms"]

    def fire(self, op):
        return self.timer.run(self.now_ms)

    def avail(self, op):
        is_available = self.tracker.has_message_available(now_ms=self.now_ms)
        if not is_available:
            self.timer.update(self.tracker, self.now_ms)
        return is_available

    def get(self, op):
        positions = self.tracker.scheduled_messages(op["n"], now_ms=self.now_ms)
        self.timer.update(self.tracker, self.now_ms)
        return list(map(list, positions))

    def pause(self, op):
        is_paused = self.tracker.should_pause_all_deliveries(now_ms=self.now_ms)
        if is_paused:
            # It asked whether a message was available, and none was.
            self.timer.update(self.tracker, self.now_ms)
        return is_paused

    def clear(self, op):
        self.tracker.clear()

    def resetTick(self, op):  # noqa: N802
        self.tracker.reset_tick_time(op["ms"])
        self.timer.tick_ms = op["ms"]

    def memZero(self, op):  # noqa: N802
        return self.tracker.memory_bytes == 0

    def wake(self):
        """Where Pulsar's dispatcher stands; ours asks when something is due, and not before."""
        next_ms, armed_ms = self.tracker.next_delivery_ms, self.timer.deadline_ms
        assert (next_ms is None) == (self.tracker.delayed_message_count == 0)
        if next_ms is None:
            return Wake.NOTHING
        assert self.tracker.has_message_available(now_ms=self.now_ms) == (next_ms <= self.now_ms)
        if next_ms <= self.now_ms:
            return Wake.READY
        if armed_ms is None or armed_ms < next_ms:
            assert not self.timer.is_strict
            assert self.timer.tick_ms < self.tracker.precision_ms - 1
            return Wake.STALL if armed_ms is None else Wake.EARLY
        assert not self.tracker.has_message_available(now_ms=next_ms - 1)
        assert self.tracker.has_message_available(now_ms=next_ms)
        return Wake.EQUAL if armed_ms == next_ms else Wake.LATER


def replay_all():
    wakes = Counter()
    with gzip.open(VECTORS, "rt") as lines:
        for line in lines:
            wakes += TrackerVectorReplay(json.loads(line)).play()
    return wakes


def test_every_recorded_operation_is_ours():
    assert replay_all() == {
        Wake.READY: 5539,
        Wake.LATER: 1895,
        Wake.EQUAL: 1597,
        Wake.NOTHING: 466,
        Wake.EARLY: 38,
        Wake.STALL: 22,
    }
