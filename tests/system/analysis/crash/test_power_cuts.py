"""L4: our own cursor survives power cuts; a subject that does not sync is caught, and so is a lying one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path

import pytest

from ackstate.analysis.crash import loop_disk, shim
from ackstate.analysis.crash.conversation import SubjectError
from ackstate.analysis.crash.layer import LayerSkippedError, RunSize, fast_parent
from ackstate.analysis.crash.oracle import Promise
from ackstate.analysis.crash.power_cuts import PowerCut, power_cuts, power_cuts_of
from ackstate.analysis.crash.process import SubjectProcess, subject_launch
from ackstate.analysis.crash.shim import compiled, environment
from ackstate.analysis.crash.subject import EntryRun, OperationKind, Report
from ackstate.stores import sqlite_database
from crash import PATHS

SMALL = RunSize(lives=3, operations=40)
HOSTILE = "noauto_da_alloc,data=writeback"


@pytest.fixture(autouse=True)
def root_with_a_disk(request):
    if request.node.get_closest_marker("root"):
        request.getfixturevalue("power_can_be_cut")


def runs(layer, count, *, first_seed=1):
    """The first runs of a layer."""
    with closing(layer(first_seed)) as outcomes:
        return list(islice(outcomes, count))


def runs_of_cuts(layer, cuts):
    """As many runs as have this many cuts."""
    found = []
    with closing(layer(1)) as outcomes:
        while sum(outcome.cycles for outcome in found) < cuts:
            found.append(next(outcomes))
    return found


@pytest.mark.root
@pytest.mark.slow
def test_our_cursor_survives():
    outcomes = runs_of_cuts(power_cuts_of(subject_launch("ours")), 24)
    assert [outcome.broken for outcome in outcomes] == [()] * len(outcomes)
    assert [outcome.seed for outcome in outcomes] == list(range(1, len(outcomes) + 1))
    assert sum(outcome.counts["durable_receipts"] for outcome in outcomes) > 100
    assert sum(outcome.counts["crashed_early"] for outcome in outcomes) > 0
    assert sum(outcome.counts["crashed_recoveries"] for outcome in outcomes) > 0


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("options", ["", HOSTILE])
def test_the_naive_one_is_caught_at_once(options):
    outcomes = runs(power_cuts_of(subject_launch("naive"), mount_options=[options], size=SMALL), 2)
    broken = [outcome.broken[0] for outcome in outcomes if outcome.broken]
    assert broken
    assert {each.promise for each in broken} <= {Promise.I2, Promise.I5}
    for outcome in outcomes:
        assert outcome.cycles <= 10


@pytest.mark.root
@pytest.mark.slow
def test_a_story_says_what_was_promised_and_where_the_power_went():
    (outcome,) = runs(power_cuts_of(subject_launch("naive"), mount_options=[HOSTILE]), 1, first_seed=3)
    (broken,) = outcome.broken
    story = list(broken.story)
    assert story[0].startswith("life ")
    durable = next(index for index, line in enumerate(story) if line.startswith("durable: "))
    cut = next(index for index, line in enumerate(story) if "the power is cut" in line and HOSTILE in line)
    assert durable < cut
    assert len(story) < 30, "it is shrunk"


@pytest.mark.root
@pytest.mark.slow
def test_our_cursor_is_caught_when_its_store_does_not_sync(monkeypatch):
    """Patched in this process: it must be so in those that are crashed, too."""
    pragmas = [each for each in sqlite_database._PRAGMAS if "synchronous" not in each]
    monkeypatch.setattr(sqlite_database, "_PRAGMAS", [*pragmas, "synchronous = OFF"])
    with closing(power_cuts_of(subject_launch("ours"), mount_options=[""], size=SMALL)(1)) as outcomes:
        assert any(outcome.broken for outcome in islice(outcomes, 3))


@pytest.mark.root
@pytest.mark.soak
def test_our_cursor_is_caught_when_its_store_does_not_sync_names(tmp_path):
    """ext4 would keep them with the next sync of a file; the layer takes them back."""
    process = Path(__file__).with_name("process_with_shim.py")
    command, started = [sys.executable, "-P", str(process), "cuts"], {**environment(compiled(tmp_path)), **PATHS}
    ended = subprocess.run(command, env=started, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["none"]["broken"] == []
    for name in ("never_sync_directory", "never_sync_above"):
        # A store that has lost a name has lost receipts, or cannot be opened.
        assert {Promise.I2, Promise.I5} & {each["promise"] for each in found[name]["broken"]}, name


@pytest.mark.root
@pytest.mark.slow
def test_a_worker_with_the_shim_cuts_the_power_under_subjects_by_name(monkeypatch):
    with closing(power_cuts(3, subject="naive")) as outcomes:
        outcome = next(outcomes)
    assert (outcome.seed, bool(outcome.broken)) == (3, True)
    assert not list(fast_parent().glob(f"ackstate-power-shim-{os.getpid()}-*"))
    # Where there is no compiler, the layer runs here.
    monkeypatch.setattr(shim.shutil, "which", lambda _name: None)
    monkeypatch.setattr(loop_disk, "_mkfs", lambda: None)
    with pytest.raises(LayerSkippedError, match=r"mkfs\.ext4"):
        next(power_cuts(3, subject="naive"))


class Log:
    """A line for each ack, synced by persist; says that it is durable when the sync has failed, too."""

    persists_in_background = False

    def start(self, directory, ledgers):
        self.log = (directory / "log").open("a+")
        self.log.seek(0)
        lines = [line.split() for line in self.log if line.endswith("end\n")]
        self.acked = [EntryRun(*map(int, line[:3])) for line in lines if len(line) == 4]
        self.ledgers, self.waiting, self.said = ledgers, [], []
        self.sync()
        descriptor = os.open(directory, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    def apply(self, operation):
        if operation.kind is OperationKind.PERSIST:
            self.sync()
            self.said, self.waiting = self.waiting, []
            return
        self.waiting.append(operation.number)
        ledger_id, end = operation.ledger_id, operation.entry_id + 1
        runs = [EntryRun(ledger_id, end - 1, end)]
        if operation.kind is OperationKind.MARK_DELETE:
            lower = [
                EntryRun(lower_id, 0, count)
                for lower_id, count in self.ledgers.items()
                if lower_id < ledger_id and count
            ]
            runs = [*lower, EntryRun(ledger_id, 0, end)]
        for run in runs:
            self.log.write("{} {} {} end\n".format(*run))
        self.acked += runs

    def sync(self):
        with suppress(OSError):
            self.log.flush()
            os.fsync(self.log.fileno())

    def receipts(self):
        said, self.said = self.said, []
        return said

    def recover(self, directory, ledgers):
        self.start(directory, ledgers)
        return self.report()

    def report(self):
        return Report(self.acked)


class HugeGauge(Log):
    """Keeps all its promises, and counts far too many entries."""

    redelivery_if_crashed = 10**9


@pytest.mark.root
@pytest.mark.slow
def test_a_gauge_that_is_far_too_high_is_caught():
    layer = power_cuts_of(lambda: SubjectProcess.fork(HugeGauge), mount_options=["noauto_da_alloc"], size=SMALL)
    with closing(layer(1)) as outcomes:
        outcome = next(each for each in islice(outcomes, 5) if each.broken)
    assert Promise.I3 in {each.promise for each in outcome.broken}
    assert outcome.gauge_mismatch > 0


def log_cuts():
    return power_cuts_of(lambda: SubjectProcess.fork(Log), mount_options=["noauto_da_alloc"], size=SMALL)


@pytest.mark.root
@pytest.mark.slow
def test_what_is_said_on_a_dead_disk_does_not_count():
    outcomes = runs_of_cuts(log_cuts(), 20)
    assert [outcome.broken for outcome in outcomes] == [()] * len(outcomes)


@pytest.mark.soak
@pytest.mark.root
@pytest.mark.slow
def test_counted_it_would_be_unjust(monkeypatch):
    """The planted bug: read its answers after the cut, and it is blamed for the losses of the dead disk."""

    def cut_then_read(self, process):
        self._disk.cut_power()
        time.sleep(0.05)
        said, _ = process.last_words()
        self._disk.power_on()
        return said

    monkeypatch.setattr(PowerCut, "__call__", cut_then_read)
    with closing(log_cuts()(1)) as outcomes:
        assert any(outcome.lost_durable for outcome in islice(outcomes, 40))


@pytest.mark.root
def test_a_subject_that_cannot_begin_is_an_error_and_no_broken_promise():
    with pytest.raises(SubjectError, match="no room here"):
        runs(power_cuts_of(subject_launch("sh -c 'echo no room here >&2'")), 1)


@pytest.mark.root
@pytest.mark.slow
def test_nothing_is_left_behind(tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (outcome,) = runs(power_cuts_of(subject_launch("ours"), size=SMALL), 1)
    assert not outcome.broken
    assert "ackstate-disk" not in Path("/proc/self/mounts").read_text()
    assert list(temporary.iterdir()) == []


def test_it_says_why_it_cannot_run_here(monkeypatch):
    monkeypatch.setattr(loop_disk, "_leave_mounts", lambda: None)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(LayerSkippedError, match="power cuts need root"):
        runs(power_cuts_of(subject_launch("ours")), 1)
