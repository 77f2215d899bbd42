"""The golden states of a replay, and the story that leads to them and goes on after them; no Spark.

``PYTHONPATH=.:tests python tests/golden_states.py`` writes the files of this version.
"""

from __future__ import annotations

from pathlib import Path

from ackstate.analysis.estimate.daily_state import BrokerState, decoded, encoded_broker
from ackstate.analysis.estimate.slices import Slices
from ackstate.analysis.estimate.subscription_parts import RequestedParts
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.state_fields import VERSION
from ackstate.analysis.trace.events import Event, EventKind
from daily_runs import replayed, rows_of

GOLDEN = Path(__file__).parent / "golden"
CUT_MS = 9_000
GATE = {"max_unpersisted_ack_record_bytes": 1_024}
GRID = {
    "counted": {"flush_interval_ms": 400, "mark_delete_rate_limit": 1},
    "ranges": {"flush_interval_ms": 900, "range_count_max": 2, "keep": "WIDEST"},
    "pulsar": {"flush_interval_ms": 700, "format": "PULSAR", "range_form": "LIST", "range_count_max": 3},
    "young": {"flush_interval_ms": 800, "become_old_ack_record_seconds": 2},
    "metadata": {"flush_interval_ms": 600, "ledger_writable": False, "metadata_range_count_max": 1},
    "gated": {"flush_interval_ms": 3_000, "become_old_ack_record_seconds": 1, **GATE},
    "shut": {"flush_interval_ms": 8_500, **GATE},
}
"""Policies by the name of their file; with each goes the recording."""


def policies_of(name):
    return [None, Policy.from_mapping(GRID[name] | {"compaction_bytes_min": 100})]


def story(name):
    """Deliveries, acks in and out of order, persists, a crash and its redeliveries; more of it after `CUT_MS`.

    Where the gate shuts, twice as many messages and holes, and no crash.
    """
    step_ms, unacked = (45, 2) if name == "shut" else (90, 11)
    sent = [Event(1_000 + step_ms * entry, EventKind.DELIVER, 1 + entry // 60, entry % 60, entry % 60)
            for entry in range(180)]  # fmt: skip
    acked = [Event(1_700 + step_ms * entry + 1_300 * (entry % 7 == 0), EventKind.ACK, *event[2:5])
             for entry, event in enumerate(sent) if entry % unacked]  # fmt: skip
    persists = [Event(1_000 + 977 * number, kind) for number in range(17)
                for kind in (EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED)]  # fmt: skip
    crash = [
        Event(5_000, EventKind.CRASH),
        Event(5_003, EventKind.RECOVER),
        Event(5_003, EventKind.REDELIVER, 1, 20, 30),
    ]
    crash = [] if name == "shut" else crash
    return sorted([*sent, *acked, *persists, *crash], key=lambda event: event.ts_ms)


KEY = ("persistent://p/n/t", "s")
LOG = {1: 60, 2: 60, 3: 60}


def run(name, events, *, state=None, first_ms):
    """Read some events, and return the results: parts of estimates, and the state."""
    slices = Slices.of(1_000, events[-1].ts_ms, 2, from_ms=first_ms)
    wanted = RequestedParts(
        policies_of(name), range(2), 1_000, slices, is_plotted=True, keeps_states=True, states="states"
    )
    found = replayed(rows_of(KEY, events=events, state=state, log=LOG, is_published=True), wanted)
    state = found["state"].drop_null()[0].as_py()
    return state, [row for row in found.to_pylist() if row["state"] is None]


def parts(name):
    events = story(name)
    early = [event for event in events if event.ts_ms <= CUT_MS]
    return early, events[len(early) :]


def golden(name):
    return (GOLDEN / f"redelivery-state-v{VERSION}-{name}.json").read_text().rstrip("\n")


def broker():
    """Return the broker's state, of the curves of a subscription."""
    text, _ = run("young", parts("young")[0], first_ms=1_000)
    return BrokerState(decoded(text, policies_of("young")).curves, [5_000], 1, "0f" * 32)


if __name__ == "__main__":
    written = {each: run(each, parts(each)[0], first_ms=1_000)[0] for each in GRID}
    for each, text in {**written, "broker": encoded_broker(broker())}.items():
        (GOLDEN / f"redelivery-state-v{VERSION}-{each}.json").write_text(text + "\n")
