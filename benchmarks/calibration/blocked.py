"""A workload that is blocked by a limit on bytes: the sent and acked messages depend on the persisted state."""

from __future__ import annotations

import heapq
from random import Random
from typing import TYPE_CHECKING

from ackstate.analysis.trace.events import Event, EventKind
from ackstate.stores.memory import MemoryStore
from benchmarks.calibration.player import OverSubscription
from benchmarks.calibration.workload import CalibrationWorkload

if TYPE_CHECKING:
    from ackstate.analysis.replay.policy import Policy
    from ackstate.position import Position

_BEGIN_MS = 1_700_000_000_000
_LASTS_MS = 4_000
_CONSUMERS = 4
_RETRY_MS = 10
_PUBLISHED = (0, 0, 1, 1, 2)
_SLOW_SHARE = 1 / 8
_SLOW_MS = 1_500


def blocked(policy: Policy, seed: int) -> CalibrationWorkload:
    """Return the events under a policy that blocks, determined by executing it once on a store in memory.

    Four consumers request a message every millisecond, or every ten after they were refused one, and ack it after some
    milliseconds; one message in eight takes a second and a half.
    """
    topic = f"persistent://public/default/blocked-{policy.max_unpersisted_ack_record_bytes}-{seed}"
    chance = Random(f"{policy.label} {seed}")
    broker = OverSubscription(topic, policy, MemoryStore())
    events: list[Event] = []
    waiting: list[tuple[int, Position, int]] = []
    asks_ms = [_BEGIN_MS] * _CONSUMERS
    broker.open(_BEGIN_MS)
    for now_ms in range(_BEGIN_MS, _BEGIN_MS + _LASTS_MS):
        count = 1 if now_ms == _BEGIN_MS else chance.choice(_PUBLISHED)
        events += [_event(EventKind.PUBLISH, now_ms, broker.append(now_ms)) for _ in range(count)]
        while waiting and waiting[0][0] <= now_ms:
            _, position, consumer = heapq.heappop(waiting)
            broker.subscription.ack(position, now_ms=now_ms)
            events.append(_event(EventKind.ACK, now_ms, position, consumer))
        for consumer in range(_CONSUMERS):
            if asks_ms[consumer] <= now_ms:
                sent = broker.send_one(consumer, now_ms)
                events.append(_event(EventKind.DELIVER, now_ms, sent, consumer))
                asks_ms[consumer] = now_ms + (1 if sent else _RETRY_MS)
                if sent:
                    takes_ms = _SLOW_MS if chance.random() < _SLOW_SHARE else chance.randrange(1, 40)
                    heapq.heappush(waiting, (now_ms + takes_ms, sent, consumer))
        if now_ms % policy.tick_ms == 0:
            broker.cursor.tick(now_ms=now_ms)
    while events[-1].ledger_id < 0 or events[-1].kind is EventKind.PUBLISH:
        events.pop()
    return CalibrationWorkload(topic, events)


def _event(kind: EventKind, now_ms: int, position: Position | None, consumer: int = -1) -> Event:
    if position is None:
        return Event(now_ms, kind, number=consumer)
    return Event(now_ms, kind, position.ledger_id, position.entry_id, position.entry_id, consumer)
