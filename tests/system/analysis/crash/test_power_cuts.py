"""L4: our own cursor survives power cuts; a subject that does not sync is caught, and so is a lying one."""

import json
from contextlib import closing, suppress
from itertools import islice

import pytest

from ackstate.analysis.crash.oracle import Promise
from ackstate.analysis.crash.power_cuts import power_cuts
from ackstate.analysis.crash.runs import RunSize
from ackstate.analysis.crash.subjects import NaiveSubject
from ackstate.stores import sqlite_database
from museum.exhibits import EXHIBITS

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("power_can_be_cut")]

SMALL = RunSize(lives=3, operations=40)
HOSTILE = "noauto_da_alloc,data=writeback"


def runs(count, first_seed=1, **options):
    """The first runs."""
    with closing(power_cuts(first_seed, **options)) as outcomes:
        return list(islice(outcomes, count))


def runs_of_cuts(cuts, **options):
    """As many runs as have this many cuts."""
    found = []
    with closing(power_cuts(1, **options)) as outcomes:
        while sum(outcome.cycles for outcome in found) < cuts:
            found.append(next(outcomes))
    return found


def test_our_cursor_survives():
    outcomes = runs_of_cuts(24)
    assert [outcome.broken for outcome in outcomes] == [()] * len(outcomes)
    assert [outcome.seed for outcome in outcomes] == list(range(1, len(outcomes) + 1))
    assert sum(outcome.counts["durable_receipts"] for outcome in outcomes) > 100
    assert sum(outcome.counts["crashed_early"] for outcome in outcomes) > 0
    assert sum(outcome.counts["crashed_recoveries"] for outcome in outcomes) > 0


@pytest.mark.parametrize("options", ["", HOSTILE])
def test_the_naive_one_is_caught_at_once(options):
    outcomes = runs(2, subject="naive", mount_options=[options], size=SMALL)
    broken = [outcome.broken[0] for outcome in outcomes if outcome.broken]
    assert broken
    assert {each.promise for each in broken} <= {Promise.I2, Promise.I5}
    for outcome in outcomes:
        assert outcome.cycles <= 10


def test_a_story_says_what_was_promised_and_where_the_power_went():
    (outcome,) = runs(1, first_seed=3, subject="naive", mount_options=[HOSTILE])
    (broken,) = outcome.broken
    story = list(broken.story)
    assert story[0].startswith("life ")
    durable = next(index for index, line in enumerate(story) if line.startswith("durable: "))
    cut = next(index for index, line in enumerate(story) if "the power is cut" in line and HOSTILE in line)
    assert durable < cut
    assert len(story) < 30, "it is shrunk"


def test_our_cursor_is_caught_when_its_store_does_not_sync():
    """Patched in this process: it must be so in those that are crashed, too."""
    (never_sync,) = [each for each in EXHIBITS if each.name == "M1-sqlite"]
    with never_sync.plant(), closing(power_cuts(1, mount_options=[""], size=SMALL)) as outcomes:
        assert any(outcome.broken for outcome in islice(outcomes, 3))


class Synced(NaiveSubject):
    """Syncs all that it saves; says that it is durable when that has failed, too."""

    def start(self, directory, ledgers):
        super().start(directory, ledgers)
        self._save()

    def _save(self):
        with suppress(OSError):
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text(json.dumps({ledger_id: sorted(acked) for ledger_id, acked in self._acked.items()}))
            sqlite_database.sync_path(temporary)
            temporary.rename(self._path)
            sqlite_database.sync_path(self._path.parent)
        self._saved, self._unsaved = self._saved + self._unsaved, []


def test_what_is_said_on_a_dead_disk_does_not_count():
    outcomes = runs_of_cuts(20, subject=Synced, mount_options=["noauto_da_alloc"], size=SMALL)
    assert [outcome.broken for outcome in outcomes] == [()] * len(outcomes)
