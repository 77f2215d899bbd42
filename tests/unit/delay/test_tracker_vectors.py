"""The tracker in memory answers as Pulsar's 5.0.1 did in every recorded case, and says when something will be due.

When Pulsar's own timer was armed and ran, which the recordings have too, is not part of ours.

Fields: `tick`, `strict`, `lookahead` are settings, `start` is the clock in ms. Ops: `add` l, e, at; `adv` ms (no timer
runs by that); `fire` (returns timers run, requests to read on); `avail`; `get` n; `pause`; `clear`; `resetTick`;
`memZero`. `c` is the number of waiting messages, `tm` the armed timers, only where changed.
"""

import gzip
import json
from collections import Counter
from pathlib import Path

from ackstate import Position
from ackstate.delay import DelayConfig, InMemoryDelayTracker

VECTORS = Path(__file__).parents[2] / "vectors" / "tracker.jsonl.gz"


class TrackerVectorReplay:
    """One recorded case, on a tracker of ours."""

    def __init__(self, case):
        self.case, self.now_ms = case, case["start"]
        conf = {
            "delayedDeliveryTickTimeMillis": str(case["tick"]),
            "isDelayedDeliveryDeliverAtTimeStrict": str(case["strict"]).lower(),
            "delayedDeliveryFixedDelayDetectionLookahead": str(case["lookahead"]),
        }
        self.tracker = InMemoryDelayTracker.from_config(DelayConfig.from_pulsar_conf(conf))

    def play(self):
        for number, op in enumerate(self.case["ops"]):
            answer = getattr(self, op["op"])(op)
            ours = (answer, self.tracker.delayed_message_count)
            assert ours == (op.get("r"), op["c"]), f"case {self.case['id']}, operation {number}: {op}"
            self.tracker._check()
            self.check_wake()

    def check_wake(self):
        """The dispatcher asks when something is due, and not before."""
        next_ms = self.tracker.next_delivery_ms
        assert (next_ms is None) == (self.tracker.delayed_message_count == 0)
        assert self.tracker.has_message_available(now_ms=self.now_ms) == (
            next_ms is not None and next_ms <= self.now_ms
        )
        if next_ms is not None and next_ms > self.now_ms:
            assert not self.tracker.has_message_available(now_ms=next_ms - 1)
            assert self.tracker.has_message_available(now_ms=next_ms)

    def add(self, op):
        position = Position(op["l"], op["e"])
        return self.tracker.add_message(position, deliver_at_ms=op["at"], now_ms=self.now_ms)

    def adv(self, op):
        self.now_ms += op["ms"]

    def fire(self, op):
        return op["r"]

    def avail(self, op):
        return self.tracker.has_message_available(now_ms=self.now_ms)

    def get(self, op):
        return list(map(list, self.tracker.scheduled_messages(op["n"], now_ms=self.now_ms)))

    def pause(self, op):
        return self.tracker.should_pause_all_deliveries(now_ms=self.now_ms)

    def clear(self, op):
        self.tracker.clear()

    def resetTick(self, op):  # noqa: N802 - Pulsar's name
        self.tracker.reset_tick_time(op["ms"])

    def memZero(self, op):  # noqa: N802
        return self.tracker.delayed_message_count == 0


def test_every_recorded_operation_is_ours():
    played = Counter()
    with gzip.open(VECTORS, "rt") as lines:
        for case in map(json.loads, lines):
            TrackerVectorReplay(case).play()
            played.update(op["op"] for op in case["ops"])
    assert played.total() == 9_557
