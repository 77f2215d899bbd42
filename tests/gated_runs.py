"""Traces and policies with a gate, and which part of them a replay takes at once."""

from __future__ import annotations

from hypothesis import strategies as st

from ackstate.analysis.replay.gated_replay import GatedReplay
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import Event, EventKind
from chunks import chunk_of


class TakenEvents:
    """Counts how events are taken, and lets nothing be taken at once, or all that may be."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.one_by_one = self.at_once = 0
        monkeypatch.setattr(GatedReplay, "_take_one_by_one", self._take_one_by_one(GatedReplay._take_one_by_one))
        monkeypatch.setattr(GatedReplay, "_take_run", self._take_run(GatedReplay._take_run))

    def set(self, run_min, steps):
        self.one_by_one = self.at_once = 0
        self.monkeypatch.setattr("ackstate.analysis.replay.gated_replay._RUN_MIN", run_min)
        self.monkeypatch.setattr("ackstate.analysis.replay.gated_replay._STEPS", steps)

    def _take_one_by_one(self, real):
        def take_one_by_one(replay, events):
            self.one_by_one += len(events.ts_ms)
            real(replay, events)
            self._check(replay)

        return take_one_by_one

    def _take_run(self, real):
        def take_run(replay, run):
            self.at_once += len(run.events.ts_ms)
            real(replay, run)
            self._check(replay)
            assert not replay._gate.is_closed

        return take_run

    def _check(self, replay):
        replay._check()
        usage = replay._gate._admission.usage()
        limit = replay._gate._limit
        # The acks that a reset undoes may take more: then nothing is sent.
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


AGES = (0, 0, 1, 3)
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
    """Deliveries in order, of which each second is acked `count` later, and the others thrice as late."""
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


LOG = {3: 60, 9: 50, 1_000: 200}


@st.composite
def anything(draw):
    """Runs and single messages, acked out of order, twice, never, undelivered or up to one; deaths and resets."""
    chance = draw(st.randoms(use_true_random=False))
    every = [(ledger_id, entry_id) for ledger_id, count in LOG.items() for entry_id in range(count)]
    ts_ms, sent, events = 1_000, 0, [Event(1_000, EventKind.PUBLISH, 3, 0, 0)]
    for _ in range(draw(st.integers(1, 120))):
        ts_ms += chance.choice((0, 0, 0, 1, 1, 2, 7, 60))
        kind = chance.choices(range(7), (45, 45, 3, 3, 2, 1, 1))[0]
        ledger_id, entry_id = every[min(sent, len(every) - 1) if kind == 0 else chance.randrange(max(sent, 1))]
        if kind == 1:
            ledger_id, entry_id = every[max(0, sent - chance.choice((0, 1, 1, 2, 3, 5, 8, 13, 21, 34)) - 1)]
        last = min(entry_id + chance.choice((0, 0, 0, 2, 9)), LOG[ledger_id] - 1)
        match kind:
            case 0 if sent < len(every):
                events.append(Event(ts_ms, EventKind.DELIVER, ledger_id, entry_id, last))
                sent += last - entry_id + 1
            case 1:
                events.append(Event(ts_ms, EventKind.ACK, ledger_id, entry_id, last))
            case 2:
                events.append(Event(ts_ms, EventKind.MARK_DELETE, ledger_id, max(0, entry_id - 5), entry_id))
            case 3:
                events.append(Event(ts_ms, EventKind.DELIVER, ledger_id, entry_id, entry_id))
            case 4:
                events += [Event(ts_ms, EventKind.CRASH), Event(ts_ms + 3, EventKind.RECOVER)]
                ts_ms += 3
                events.append(Event(ts_ms, EventKind.REDELIVER, ledger_id, entry_id, last))
            case 5:
                events.append(Event(ts_ms, EventKind.RESET, ledger_id, 0, entry_id))
            case 6:
                events.append(Event(ts_ms, EventKind.REDELIVER, ledger_id, entry_id, last))
    return events, LOG
