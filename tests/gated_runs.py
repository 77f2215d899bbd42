"""Traces and policies with a gate, and which part of them a replay takes at once."""

from __future__ import annotations

from hypothesis import strategies as st

from ackstate.analysis.redelivery.gated_replay import GatedReplay
from ackstate.analysis.redelivery.policy import Policy
from ackstate.analysis.redelivery.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.cursor.auto_age import AutoAge
from chunks import chunk_of


class Taken:
    """Counts how events are taken, and lets nothing be taken at once, or all that may be."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.steps = self.at_once = self.in_stretches = 0
        monkeypatch.setattr(GatedReplay, "_step", self._step(GatedReplay._step))
        monkeypatch.setattr(GatedReplay, "_take_run", self._take_run(GatedReplay._take_run))
        monkeypatch.setattr(GatedReplay, "_let_happen", self._let_happen(GatedReplay._let_happen))

    def set(self, run_min, steps):
        self.steps = self.at_once = self.in_stretches = 0
        self.monkeypatch.setattr("ackstate.analysis.redelivery.gated_replay._RUN_MIN", run_min)
        self.monkeypatch.setattr("ackstate.analysis.redelivery.gated_replay._STEPS", steps)

    def _step(self, real):
        def step(replay, mentions, at):
            self.steps += 1
            return real(replay, mentions, at)

        return step

    def _take_run(self, real):
        def take_run(replay, run):
            self.at_once += len(run.events.ts_ms)
            real(replay, run)
            self._check(replay)
            assert not replay._gate.is_closed

        return take_run

    def _let_happen(self, real):
        def let_happen(replay, stretch):
            was_closed = replay._gate.is_closed
            self.in_stretches += len(stretch.used_bytes)
            real(replay, stretch)
            self._check(replay)
            assert replay._gate.is_closed == was_closed

        return let_happen

    def _check(self, replay):
        replay._sent._check()
        replay._waiting._check()
        usage = replay._admission.usage()
        limit = replay._limits.max_unpersisted_ack_record_bytes
        # What a reset leaves out may take more: then nothing is sent.
        assert not usage.reserved_bytes or usage.unpersisted_record_bytes + usage.reserved_bytes <= limit


def curve_of(events, policy, log, sizes):
    replay, begin, last = SubscriptionReplay([policy], log), 0, {}
    parts = []
    for size in [*sizes, len(events)]:
        if events[begin : begin + size]:
            parts += replay.take(chunk_of(events[begin : begin + size]))
        begin += size
    end_ms = events[-1].ts_ms + 450
    for points in [*parts, *replay.end(end_ms)]:
        last.update(zip(points.ts_ms.tolist(), points.value.tolist(), strict=True))
    value = 0
    at_end = {now_ms: (value := last.get(now_ms, value)) for now_ms in range(events[0].ts_ms, end_ms + 1)}
    costs = replay.curves[0].costs
    return at_end, (costs.write_count, costs.blocked_ms, replay.curves[0].sum.peak)


AGES = (0, 0, 1, AutoAge(late_share_max=0.5, seconds_min=1, seconds_max=4))
POLICIES = st.fixed_dictionaries(
    {
        "max_unpersisted_ack_record_bytes": st.sampled_from((60, 150, 400, 5_000)),
        "flush_interval_ms": st.sampled_from((0, 5, 30, 400)),
        "become_old_ack_record_seconds": st.sampled_from(AGES),
    },
    optional={
        "tick_ms": st.sampled_from((1, 7, 50)),
        "mark_delete_rate_limit": st.sampled_from((3, 20)),
        "range_count_max": st.sampled_from((0, 2, 5)),
        "format": st.sampled_from(("NATIVE", "PULSAR")),
        "ledger_writable": st.sampled_from(("true", "false")),
    },
)  # as settings: they are no policies before the limits may be so small


def traffic(count, *, lag=20, per_ms=3):
    """Deliveries in order, of which each second is acked so many later, and the others thrice as late."""
    events = []
    for number in range(count):
        ts_ms = 1_000 + number // per_ms
        events.append(Event(ts_ms, EventKind.DELIVER, 3, number, number))
        acked = number - lag if (number - lag) % 2 == 0 else number - 3 * lag
        if acked >= 0:
            events.append(Event(ts_ms, EventKind.ACK, 3, acked, acked))
    return events, {3: count}


def policy_of(limit, **found):
    return Policy.from_mapping({"max_unpersisted_ack_record_bytes": limit, "flush_interval_ms": 50, **found})
