"""What the programs of L2 do, and how they are judged; on a store in memory, without a system call."""

from __future__ import annotations

import json
import logging
from collections import Counter

import pytest

from ackstate.analysis.crash.layers.system_calls.program import FaultedProgram
from ackstate.analysis.crash.layers.system_calls.script import Script, Setting, script
from ackstate.analysis.crash.layers.system_calls.witness import Witness
from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.workloads.step import Step, StepKind
from ackstate.cursor.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore
from ackstate.position import Position

SEEDS = 32
OCCURS = {
    "deltas",
    "whole states",
    "snapshots",
    "states in metadata",
    "fallbacks",
    "resets",
    "batch acks",
    "cursor properties set",
    "group persists",
    "group fallbacks",
    "reopenings after a fault",
}


def played(a_script, *, failing=()):
    """Run a program whose first store fails in some mutations, and return the witness of it."""
    disk, witness, faults = MemoryDisk(), Witness(a_script.cursor_count), [Fault(at, FaultKind.FULL) for at in failing]

    def open_store(_directory):
        store = MemoryStore(disk, faults=faults)
        faults.clear()
        return store

    FaultedProgram(a_script, None, open_store, witness.hear).run()
    return witness


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="ackstate.cursor")


@pytest.mark.slow
def test_the_scripts_of_a_slice_do_all_that_a_cursor_can_and_their_programs_are_clean():
    counts = Counter()
    for seed in range(SEEDS):
        # One fault, then a long one: that is, a fallback, then an error.
        for failing in ((), (seed,), range(seed, seed + 12)):
            witness = played(script(seed), failing=failing)
            assert witness.broken == [], (seed, failing, witness.history)
            assert witness.is_done
            counts += witness.counts
    assert {name for name in OCCURS if not counts[name]} == set()


def test_each_setting_is_begun_with_and_changed_to():
    steps = [(script(seed).setting, step) for seed in range(SEEDS) for step in script(seed).steps]
    changes = {(begun, step.setting) for begun, step in steps if step.kind is StepKind.REOPEN}
    assert changes == {(before, after) for before in Setting for after in Setting}
    assert {step.kind for _, step in steps} == set(StepKind) - {
        StepKind.FALL_BACK,
        StepKind.REOPEN_STORE,
        StepKind.KILL,
    }


def test_a_seed_decides_a_script():
    assert script(5) == script(5) != script(6)


def held(*runs, batch=(), properties=None, names=None):
    """What a cursor holds; the first run is what its mark-delete position covers, if it begins at 1:0."""
    runs = [list(run) for run in runs]
    marked = runs[:1] if runs and runs[0][:2] == [1, 0] else []
    return {
        "acked": runs,
        "marked": marked,
        "batch": [list(each) for each in batch],
        "properties": properties or {},
        "names": names or {},
    }


def opened(found):
    return {"opened": found, "setting": "native"}


def writing(state, *, leaves_out=False, displaces=False):
    return {"writing": state, "leaves_out": leaves_out, "displaces": displaces}


def acked(*run):
    return [{"asked": "ack", "entries": [run]}, {"accepted": [run], "gauge": 1}]


WRITTEN = {"written": "somehow"}
RESETTING = {"resetting": held((1, 0, 2)), "to": "reset"}
STATE = held((1, 0, 2), (1, 5, 6))
JUDGED = {
    "an ack that is durable": ([*acked(1, 5, 6), {"durable": [[1, 5, 6]]}], held(), Promise.I2),
    "one that nobody asked for": ([], held((1, 5, 6)), Promise.I1),
    "more than the gauge said": ([*acked(1, 5, 6), *acked(1, 7, 8)], held(), Promise.I3),
    "half of what was written": (
        [*acked(1, 5, 6), *acked(1, 7, 8), writing(held((1, 5, 6), (1, 7, 8)))],
        held((1, 5, 6)),
        Promise.I9,
    ),
    "a batch before the last write": (
        [opened(held(batch=[[4, 1, 5]])), writing(held(batch=[[4, 1, 1]])), WRITTEN],
        held(batch=[[4, 1, 5]]),
        Promise.I9,
    ),
    "properties before the last write": (
        [opened(held(properties={"n": 1})), writing(held(properties={"n": 2})), WRITTEN],
        held(properties={"n": 1}),
        Promise.I9,
    ),
    "cursor properties before the last ones": (
        [{"naming": {"n": "1"}}, {"named": {"n": "1"}}],
        held(names={}),
        Promise.I9,
    ),
    "what was acked before a reset": (
        [*acked(1, 5, 6), RESETTING, {"reset": True}],
        held((1, 0, 2), (1, 5, 6)),
        Promise.I1,
    ),
    "a reset that failed, after the next persist": (
        [opened(STATE), RESETTING, {"failed": "full"}, writing(STATE), WRITTEN],
        held((1, 0, 2)),
        Promise.I2,
    ),
    "less than the mark-delete position, though young": (
        [opened(held()), {"asked": "", "entries": [[1, 0, 6]]}, writing(STATE, leaves_out=True), WRITTEN],
        held((1, 5, 6)),
        Promise.I9,
    ),
}


def heard(said):
    witness = Witness(2)
    for fields in said:
        witness.hear(json.dumps({"cursor": 1, **fields}).encode())
        if "opened" in fields:
            witness.broken.clear()  # What a story begins with was not written in it.
    return witness


@pytest.mark.parametrize("story", JUDGED)
def test_a_recovery_is_refused_that_found(story):
    said, found, promise = JUDGED[story]
    witness = heard(said)
    witness.judge(1, found)
    assert any(broken.promise is promise for broken in witness.broken), witness.broken


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ([opened(STATE), RESETTING, {"failed": "full"}], held((1, 0, 2))),
        ([opened(STATE), RESETTING, {"failed": "full"}], STATE),
        ([opened(STATE), RESETTING, {"reset": True}], held((1, 0, 2))),
        ([{"naming": {"n": "1"}}, {"failed": "full"}], held(names={"n": "1"})),
        ([{"naming": {"n": "1"}}, {"failed": "full"}], held()),
        ([{"asked": "", "entries": [[1, 0, 6]]}, writing(STATE, leaves_out=True), WRITTEN], held((1, 0, 2))),
        ([opened(STATE), writing(STATE, leaves_out=True, displaces=True)], held((1, 0, 2))),
    ],
)
def test_a_recovery_is_believed_that_found_what_may_be_there(said, found):
    witness = heard(said)
    witness.judge(1, found)
    assert witness.broken == []


def test_what_one_cursor_lost_is_not_held_against_the_other():
    witness = heard([*acked(1, 5, 6), {"durable": [[1, 5, 6]]}])
    witness.judge(0, held())
    assert witness.broken == []
    assert played(Script((Step(StepKind.ACK, 1, Position(1, 5)),), cursor_count=2)).broken == []
