"""The programs of L2, and the judgement of them; on a store in memory, without a system call."""

import logging
import pickle
from collections import Counter

import pytest

from ackstate.analysis.crash.oracle import Oracle, State
from ackstate.position import Position
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore
from crash.observed_cursor import NEVER_OPENED, NUMBERING
from crash.steps import Step, StepKind
from crash.system_calls.program import FaultedProgram, ProgramLog, SaidAccount, Script, Setting, script

SEEDS = 32
OCCURS = (
    *("acks", "batches", "mark_deletes", "properties", "resets"),
    *("deltas", "whole_states", "snapshots", "metadata_states", "journal_compactions", "fallbacks"),
    *("group_persists", "group_fallbacks", "reopenings_after_a_fault"),
)


def played(a_script, *, failing=()):
    """Run a program whose first store fails in some mutations, and return the log of it."""
    disk, log, faults = MemoryDisk(), ProgramLog(a_script.cursor_count), [Fault(at, FaultKind.FULL) for at in failing]

    def open_store(_directory):
        store = MemoryStore(disk, faults=faults)
        faults.clear()
        return store

    FaultedProgram(a_script, None, open_store, log.record).run()
    return log


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.CRITICAL, logger="ackstate")


@pytest.mark.slow
def test_the_scripts_of_a_slice_do_all_that_a_cursor_can_and_their_programs_are_clean():
    counts = Counter()
    for seed in range(SEEDS):
        # One fault, then a long one: that is, a fallback, then an error.
        for failing in ((), (seed,), range(seed, seed + 12)):
            log = played(script(seed), failing=failing)
            assert log.broken == [], (seed, failing, log.history)
            assert log.is_done
            counts += log.counts
    assert [name for name in OCCURS if not counts[name]] == []


def test_each_setting_is_begun_with_and_changed_to():
    steps = [(script(seed).setting, step) for seed in range(SEEDS) for step in script(seed).steps]
    changes = {(begun, step.setting) for begun, step in steps if step.kind is StepKind.REOPEN}
    assert changes == {(before, after) for before in Setting for after in Setting}
    left_out = {StepKind.FALL_BACK, StepKind.REOPEN_STORE, StepKind.KILL, StepKind.DELETE}
    assert {step.kind for _, step in steps} == set(StepKind) - left_out
    assert script(5) == script(5) != script(6)


ACKED = NUMBERING.runs([(1, 0, 3), (4, 5, 6)]) | NUMBERING.messages(7, 2, 0b0101) | NUMBERING.run(2, 0, 4)
STATE = State(ACKED, NUMBERING.up_to(1, 2), (("n", 5),), (("number", "7"),))


def tell_all(account):
    """Call every method of an account."""
    account.requested(ACKED)
    account.accepted(ACKED)
    account.naming(STATE.names)
    account.named(STATE.names)
    account.writing(STATE, excludes=False, displaces=False)
    account.written()
    account.durable(ACKED)
    account.gauged(3)
    account.marked(STATE.marked)
    account.resetting(STATE._replace(rest=()))
    account.reset()
    account.writing(STATE, excludes=True, displaces=True)


def test_what_a_program_says_is_what_the_oracle_of_its_cursor_and_no_other_is_told():
    oracle, log, said = Oracle(NEVER_OPENED, knows_states=True), ProgramLog(2), []
    tell_all(oracle)
    tell_all(SaidAccount(lambda *each: said.append(pickle.dumps(each)), 1))
    for each in map(pickle.loads, said):
        log.record(*each)
    assert log._oracles[1].expected == oracle.expected
    assert log._oracles[0].expected == Oracle(NEVER_OPENED, knows_states=True).expected
    log.judge(1, STATE)
    assert log.broken == []
    for number in (0, 1):
        log.judge(number, NEVER_OPENED._replace(is_new=False))
    assert {broken.found[:8] for broken in log.broken} == {"cursor 1"}
    assert played(Script((Step(StepKind.ACK, 1, Position(1, 5)),), cursor_count=2)).broken == []
