"""L1: clean on our store, and each bug that a power cut shows is found and told as a story."""

import os
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import pytest

from ackstate import CursorConfig, ManagedCursor, Position
from ackstate.analysis.crash.oracle import Broken, Oracle, Promise, RunOutcome, State
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.stores.memory import MemoryStore
from crash.crash_states import run, side_by_side, sqlite
from crash.crash_states.cursors import Execution, Workload
from crash.crash_states.examination import examine, outcome
from crash.crash_states.log_trims import LogStep, LogStepKind, LogWorkload
from crash.crash_states.sqlite import Copy, RecordedStorage, Recoveries, states_between, temporary_place
from crash.observed_cursor import NUMBERING
from crash.promises import PromiseBrokenError
from crash.steps import Step, StepKind

SEEDS = (35, 7, 28)
HAPPENED = ("acks", "deltas", "kills", "native_workloads", "pulsar_workloads", "snapshots", "states_of_recoveries")


def found_by(*seeds):
    """The outcome of the first of some runs that sees a promise broken."""
    for seed in seeds:
        outcome = run(seed)
        if outcome.broken:
            return outcome
    pytest.fail("nothing was found")


@pytest.mark.slow
def test_our_store_survives_every_crash_state(monkeypatch):
    monkeypatch.setattr(sqlite, "_CRASHED_ONE_IN", 60)
    outcomes = [run(seed) for seed in SEEDS]
    assert [outcome.broken for outcome in outcomes] == [()] * len(SEEDS)
    totals = sum((Counter(outcome.counts) for outcome in outcomes), Counter())
    assert [name for name in HAPPENED if not totals[name]] == []
    assert totals["crash_states"] > 500
    assert totals["recoveries"] > 400


def test_a_kill_between_two_calls_leaves_what_was_written_and_a_recovery(monkeypatch):
    """Of the first calls of a kill, which persists, closes and opens again, each is the last one once."""
    monkeypatch.setattr(sqlite, "states_between", lambda *_: ())
    counts = Counter()
    for amount in range(8):
        ack = Step(StepKind.ACK, 0, Position(1, 3), 2)
        examined = examine(Workload(("a", "b"), CursorConfig(), (ack, Step(StepKind.KILL, 0, amount=amount))))
        assert examined.failure is None
        counts.update(examined.counts)
    assert counts["kills"] == 8
    assert counts["kills_in_the_middle"] > 4


def moved(store):
    """A recovery that moves a value, and loses it if it crashes in between."""
    for number, path in enumerate(("/a", "/b")):
        value = store.metadata.get(path)
        if value is not None:
            if number == 0:
                store.metadata.delete(path, expected_version=value.version)
                store.metadata.put("/b", value.data, expected_version=-1)
            return value.data
    return None


@pytest.mark.parametrize("crashes", [True, False])
def test_a_recovery_that_does_not_survive_a_crash_of_its_own_is_found(monkeypatch, crashes):
    monkeypatch.setattr(sqlite, "_CRASHED_ONE_IN", 1 if crashes else 2)
    with temporary_place() as place:
        storage = RecordedStorage(place / "store")
        with storage.stores:
            storage.open().metadata.put("/a", b"value", expected_version=-1)
        found = Recoveries(moved, lambda one, other: Broken(Promise.I5, f"{one}, {other}"))
        same = Recoveries(moved, lambda one, other: None if one == other else Broken(Promise.I5, "lost"))
        assert isinstance(found.open(storage.copies[-1]), Broken) == crashes
        broken = same.open(storage.copies[-1])
        if crashes:
            assert broken.found.startswith("lost, after a crash of the recovery that left: ")
        else:
            assert broken == b"value"


def test_runs_come_in_order_from_two_processes_that_end_when_closed():
    runs = side_by_side(lambda seed: RunOutcome(seed, cycles=os.getpid()), 5)
    outcomes = list(islice(runs, 5))
    runs.close()
    assert [outcome.seed for outcome in outcomes] == [5, 6, 7, 8, 9]
    workers = {outcome.cycles for outcome in outcomes}
    assert os.getpid() not in workers
    assert 1 <= len(workers) <= 2
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


@pytest.mark.slow
def test_a_receipt_before_the_write_is_found(monkeypatch):
    monkeypatch.setattr(ManagedCursor, "durable", lambda self, receipt: True)
    outcome = found_by(0, 1, 3)
    assert outcome.broken[0].promise is Promise.I2
    assert outcome.lost_durable > 0


STEPS = (
    Step(StepKind.ACK, 0, Position(1, 3), 2),
    Step(StepKind.PERSIST, 0),
    Step(StepKind.ACK, 0, Position(1, 9), 2),
    Step(StepKind.PERSIST, 0),
    Step(StepKind.REOPEN, 0),
    Step(StepKind.ACK, 0, Position(4, 9), 2),
    Step(StepKind.PERSIST, 0),
)


def test_an_opening_between_two_steps_is_not_taken_at_its_word(monkeypatch):
    open_cursor = ManagedCursor._open.__func__

    def forgets_once(cls, store, opening, *, now_ms):
        if now_ms == 50_000:  # That of the step that opens it again; a crash state is opened later.
            path = cursor_path(opening.topic, opening.subscription)
            store.metadata.delete(path, expected_version=store.metadata.get(path).version)
            for ledger_id in store.ledgers.owned_by(cursor_owner(path)):
                store.ledgers.delete(ledger_id)
        return open_cursor(cls, store, opening, now_ms=now_ms)

    monkeypatch.setattr(ManagedCursor, "_open", classmethod(forgets_once))
    store = MemoryStore()
    execution = Workload(("a",), CursorConfig(), STEPS).on(SimpleNamespace(open=lambda: store, count_calls=lambda: 0))
    with pytest.raises(PromiseBrokenError) as caught:
        execution.run()
    assert caught.value.promise is Promise.I10
    assert execution.step == 5


def views(first):
    """The result of a recovery of a cursor that has acked the first entries of ledger 1."""
    acked = NUMBERING.runs([(1, 0, first)])
    return State(acked, acked)


def test_in_the_middle_of_a_step_either_side_of_it_is_right():
    before, after = (Oracle(views(count)).expected._replace(gauge_max=0) for count in (1, 3))
    promised = {"a": before}, {"a": after}
    assert Execution.judge({"a": views(1)}, promised, is_worst=True) is None
    assert Execution.judge({"a": views(3)}, promised, is_worst=True) is None
    broken = Execution.judge({"a": views(2)}, promised, is_worst=True)
    assert broken == (Promise.I1, "a: acked without a request: 1:[1, 2)", 1)


FRAME = 24 + 4096


def test_the_log_of_sqlite_is_cut_at_the_borders_of_frames_and_pages_and_inside():
    before, after = Copy(b"db", b"h" * 32 + b"1" * FRAME), Copy(b"db", b"h" * 32 + b"1" * FRAME + b"2" * 2 * FRAME)
    states = {state.copy for state in states_between(before, after)}
    synced, middle = 32 + FRAME, 32 + 2 * FRAME
    sizes = {len(log) for database, log in states if log.rstrip(b"\0") == log}
    assert {synced, synced + 8, synced + 24, synced + 24 + 512, synced + FRAME - 1, middle, middle + 24} <= sizes
    assert all(log.startswith(before.log) for _, log in states)
    assert Copy(b"db", after.log[:synced] + bytes(FRAME) + after.log[middle:]) in states


def test_pages_of_sqlite_are_copied_in_any_part_while_the_log_is_whole():
    old, new = [letter * 4096 for letter in (b"a", b"b", b"c")], [letter * 4096 for letter in (b"A", b"b", b"C")]
    before, after = Copy(b"".join(old), b"log"), Copy(b"".join(new), b"")
    states = [state.copy for state in states_between(before, after)]
    with_log = {database for database, log in states if log == b"log"}
    assert with_log >= {before.database, new[0] + old[1] + old[2], old[0] + old[1] + new[2], after.database}
    assert (b"A" * 512 + b"a" * 3584) + old[1] + old[2] in with_log
    assert {database for database, log in states if not log} == {after.database}
    page = 4096
    before, after = Copy(b"a" * page, b"log"), Copy(b"A" * page + b"B" * page + b"C" * page, b"")
    with_log = {database for database, log in (state.copy for state in states_between(before, after)) if log == b"log"}
    assert with_log >= {before.database, *(after.database[:border] for border in (page, 2 * page, 3 * page))}, (
        "it grows"
    )


@pytest.mark.soak
def test_each_write_of_sqlite_is_told_by_what_a_call_leaves(monkeypatch):
    steps = []

    def remembered(before, after):
        steps.append((before, after))
        yield from states_between(before, after)

    monkeypatch.setattr(sqlite, "states_between", remembered)
    reopened = Step(StepKind.REOPEN_STORE, 0)
    killed = Step(StepKind.KILL, 0, amount=3)
    examined = examine(Workload(("a",), CursorConfig(), (*STEPS[:4], reopened, *STEPS[5:], killed)))
    assert examined.failure is None
    changed = [(before, after) for before, after in steps if before != after]
    appended = [(before.log, after.log) for before, after in changed if before.database == after.database and after.log]
    copied = [after.log for before, after in changed if before.database != after.database]
    assert len(appended) > 8
    assert len(copied) > 1
    assert set(copied) == {b""}
    assert len(appended) + len(copied) == len(changed)
    for old, new in appended:
        assert new.startswith(old)
        frames = range(max(len(old), 32), len(new), FRAME)
        commits = [frame for frame in frames if int.from_bytes(new[frame + 4 : frame + 8], "big")]
        assert commits == [frames[-1]] == [len(new) - FRAME]


@pytest.mark.soak
def test_every_commit_of_sqlite_is_cut_at_every_border_and_judged(monkeypatch):
    asked = []
    judge_copy = Recoveries.open

    def noted(judging, copy):
        asked.append(copy)
        return judge_copy(judging, copy)

    monkeypatch.setattr(Recoveries, "open", noted)
    examined = examine(Workload(("a",), CursorConfig(), STEPS[:2]))
    assert examined.failure is None
    assert examined.cycles == len(asked)
    log = max((copy.log for copy in reversed(asked)), key=len)  # the last of them is whole
    sizes = {len(copy.log) for copy in asked if log.startswith(copy.log)}
    borders = range(32, len(log) + 1, FRAME)
    assert len(borders) > 6
    assert sizes >= {*borders, *(border + 24 for border in borders[:-1])}


TRIMS = LogWorkload(
    2,
    tuple(
        LogStep(kind, number)
        for kind, number in (
            (LogStepKind.PUBLISH, 2), (LogStepKind.PUBLISH, 2), (LogStepKind.ACK, 3), (LogStepKind.TRIM, 0),
            (LogStepKind.PERSIST, 0), (LogStepKind.TRIM, 0), (LogStepKind.PUBLISH, 1),
        )
    ),
)  # fmt: skip


@pytest.mark.slow
def test_a_log_that_is_trimmed_survives_every_crash_state(monkeypatch):
    monkeypatch.setattr(sqlite, "_CRASHED_ONE_IN", 40)
    examined = outcome(10, TRIMS)
    assert not examined.broken
    assert examined.counts["trimmed_ledgers"] == 1
    assert examined.counts["crash_states"] > 100
    assert examined.counts["states_of_recoveries"] > 50
