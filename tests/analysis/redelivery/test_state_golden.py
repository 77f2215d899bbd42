"""A state that an earlier run has kept is gone on with: whoever changes what is in one begins another version.

``PYTHONPATH=.:tests python tests/analysis/redelivery/test_state_golden.py`` writes the states of this release anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from daily_runs import batches_of, row_of

from ackstate.analysis.redelivery import daily_subscription, incremental
from ackstate.analysis.redelivery.checkpoint import VERSION
from ackstate.analysis.redelivery.daily_subscription import Days
from ackstate.analysis.redelivery.policy import Policy
from ackstate.analysis.redelivery.slices import Slices
from ackstate.analysis.trace.events import Event, EventKind

STATES = Path(__file__).parents[2] / "vectors" / "redelivery-state"
CUT_MS = 9_000
GRID = {
    "plain": {"flush_interval_ms": 400, "mark_delete_rate_limit": 1},
    "ranges": {"flush_interval_ms": 900, "range_count_max": 2, "keep": "WIDEST"},
    "pulsar": {"flush_interval_ms": 700, "format": "PULSAR", "range_form": "LIST", "range_count_max": 3},
    "young": {"flush_interval_ms": 800, "become_old_ack_record_seconds": 2},
    "auto": {"flush_interval_ms": 500, "become_old_ack_record_seconds": "AUTO"},
    "metadata": {"flush_interval_ms": 600, "ledger_writable": False, "metadata_range_count_max": 1},
    "gate": {"flush_interval_ms": 3_000, "max_unpersisted_ack_record_bytes": 1_024, "become_old_ack_record_seconds": 1},
}


def policies_of(name):
    return [None, Policy.from_mapping(GRID[name] | {"compaction_bytes_min": 100})]


def story():
    """Deliveries, acks in and out of order, persists, a crash and what it brings back; more of it after `CUT_MS`."""
    sent = [
        Event(1_000 + 90 * entry, EventKind.DELIVER, 1 + entry // 60, entry % 60, entry % 60) for entry in range(180)
    ]
    acked = [Event(1_700 + 90 * entry + 1_300 * (entry % 7 == 0), EventKind.ACK, *event[2:5])
             for entry, event in enumerate(sent) if entry % 11]  # fmt: skip
    persists = [Event(1_000 + 977 * number, kind) for number in range(17)
                for kind in (EventKind.PERSIST_BEGUN, EventKind.PERSIST_ENDED)]  # fmt: skip
    crash = [
        Event(5_000, EventKind.CRASH),
        Event(5_003, EventKind.RECOVER),
        Event(5_003, EventKind.REDELIVER, 1, 20, 30),
    ]
    return sorted([*sent, *acked, *persists, *crash], key=lambda event: event.ts_ms)


KEY = ("persistent://p/n/t", "s")
LOG = {1: 60, 2: 60, 3: 60}


def run(name, events, *, state=None, first_ms):
    """Read some events, and return what comes out: parts of estimates, and the state."""
    slices = Slices.of(first_ms, events[-1].ts_ms, 2)
    rows = [row_of(KEY, 0, events=events, log=LOG, is_published=True)]
    if state is not None:
        rows.append(row_of(KEY, -1, state=state, log=LOG, is_published=True))
    read = Days(1_000, slices, Slices.of(1_000, events[-1].ts_ms, 3))
    found = pa.Table.from_batches(
        list(incremental._replay(batches_of(rows), policies=policies_of(name), days=read)), daily_subscription.RUN
    )
    state = found["state"].drop_null()[0].as_py()
    return state, [row for row in found.to_pylist() if row["state"] is None]


def parts():
    events = story()
    early = [event for event in events if event.ts_ms <= CUT_MS]
    return early, events[len(early) :]


def kept(name):
    return (STATES / f"v{VERSION}-{name}.json").read_text().rstrip("\n")


@pytest.mark.parametrize("name", GRID)
def test_a_state_that_was_kept_is_gone_on_with(name):
    early, late = parts()
    of_this_release, _ = run(name, early, first_ms=1_000)
    assert shape(json.loads(kept(name))) == shape(json.loads(of_this_release))
    _, from_this = run(name, late, state=of_this_release, first_ms=CUT_MS)
    _, from_kept = run(name, late, state=kept(name), first_ms=CUT_MS)
    assert str(from_kept) == str(from_this)


def test_a_field_that_has_another_name_is_noticed():
    other = kept("ranges").replace('"_left_out"', '"_left_outside"')
    assert shape(json.loads(kept("ranges"))) != shape(json.loads(other))


def test_a_named_tuple_that_has_another_field_is_noticed():
    def shortened(value):
        return value | {"values": value["values"][:-1]} if value.get("tuple") == "PersistLimits" else value

    state = kept("ranges")
    assert shape(json.loads(state)) != shape(json.loads(state, object_hook=shortened))


def shape(value):
    """Return the fields of each class and the number of values of each named tuple, without the values."""
    found = set()

    def look(each):
        if isinstance(each, dict):
            if "object" in each:
                found.add((each["object"], *sorted(each["fields"])))
            if each.get("tuple"):
                found.add((each["tuple"], str(len(each["values"]))))
            for inner in each.values():
                look(inner)
        elif isinstance(each, list):
            for inner in each:
                look(inner)

    look(value)
    return sorted(found)


if __name__ == "__main__":
    STATES.mkdir(exist_ok=True)
    for each in GRID:
        (STATES / f"v{VERSION}-{each}.json").write_text(run(each, parts()[0], first_ms=1_000)[0] + "\n")
