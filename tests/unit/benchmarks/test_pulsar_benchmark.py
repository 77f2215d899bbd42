"""The comparison with Pulsar's own classes: equal workloads, equal results, and a page that shows them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from base64 import b64decode

import numpy as np
import pytest

from ackstate import DeletedRanges, LedgerMap, Position
from ackstate.wire.pulsar import decode_position_info
from benchmarks.delayed_messages import TICK_MS
from benchmarks.measurement import RESULTS
from benchmarks.pulsar import tasks, workloads
from benchmarks.pulsar.bench_pulsar import (
    CHECKED_ACKS,
    CHECKED_HOLES,
    FORMS,
    ComparisonRows,
    DisagreementError,
    measured,
)
from benchmarks.pulsar.ours import Ours
from benchmarks.pulsar.page import PAGE, PICTURE, page, verdict
from benchmarks.pulsar.picture import drawn
from benchmarks.pulsar.release import VERSIONS, running
from benchmarks.pulsar.results import NAME, OURS, Comparison, Results
from benchmarks.pulsar.side import SideError
from benchmarks.pulsar.tasks import FULL, PULSAR, SMALL, Row, Task

SVG = "{http://www.w3.org/2000/svg}"
RELEASES = [f"Pulsar {version}" for version in VERSIONS]


class LosesAnAck:
    """Our side, but the state has an ack less."""

    name = RELEASES[0]

    def __init__(self):
        self._ours = Ours()

    def run(self, command, **options):
        answer = self._ours.run(command, **options)
        return answer | {name: answer[name] - 1 for name in ("acked", "drained", "found", "held") if name in answer}


class KeptFigures:
    """Keeps the figures."""

    def __init__(self):
        self.medians, self.against = {}, {}

    def time(self, what, unit, spread, against=None):
        self.medians[what] = spread.median
        self.against[what] = against


# Workloads.


def test_every_other_entry_is_acked_once_out_of_order():
    rows = workloads.every_other(3_000)
    entries = (rows[:, 0] - workloads.FIRST_LEDGER) * workloads.LEDGER_SIZE + rows[:, 1]
    assert sorted(entries.tolist()) == list(range(1, 6_000, 2))
    assert (np.diff(entries) < 0).sum() > 1_000
    assert max(abs(entries - np.arange(1, 6_000, 2))) < 2 * 1_000
    assert (workloads.every_other(3_000) == rows).all()


def test_wide_runs_are_apart_and_within_their_ledgers():
    runs = workloads.wide_runs(20_000)
    assert (runs[:, 1] < runs[:, 2]).all()
    assert runs[:, 2].max() < workloads.LEDGER_SIZE
    ranges = DeletedRanges()
    for ledger_id, first, end in runs.tolist():
        assert ranges.add_run(ledger_id, first, end) == end - first
    assert ranges.range_count == len(runs) > 19_900


def test_no_message_is_due_while_messages_are_added():
    rows = workloads.delayed(1_000)
    assert len(np.unique(rows[:, :2], axis=0)) == 1_000
    assert rows[:, 2].min() > 2 * TICK_MS


def test_a_file_has_what_was_written(tmp_path):
    rows = workloads.delayed(10)
    assert (workloads.read(workloads.written(rows, tmp_path / "rows"), 3) == rows).all()
    assert (tmp_path / "rows").read_bytes()[:8] == int(rows[0, 0]).to_bytes(8, "little")


# Results of the work.


@pytest.mark.slow
def test_our_results_are_the_expected_ones(tmp_path):
    report, sides = KeptFigures(), [Ours()]
    rows = ComparisonRows(report)
    for task in tasks.all_tasks(tmp_path, SMALL):
        if task.command != "weigh_delays" and task.only != PULSAR:
            rows.put(task, measured(task, sides, is_quick=True))
    assert len(report.medians) > 15
    assert all(median > 0 for median in report.medians.values())


@pytest.mark.slow
def test_a_different_result_is_not_timed(tmp_path):
    refused = 0
    for task in tasks.all_tasks(tmp_path, SMALL):
        if task.only != OURS and {"acked", "drained", "found"} & set(task.expected):
            with pytest.raises(DisagreementError, match=r"Pulsar 4\.2\.4, .*: (acked|drained|found) must be \d+, got "):
                measured(task, [LosesAnAck()], is_quick=True)
            refused += 1
    assert refused > 10


@pytest.mark.slow
@pytest.mark.parametrize("holes", FULL.holes)
def test_our_persists_include_compactions(tmp_path, holes):
    file = workloads.written(workloads.every_other(holes + FULL.persisted), tmp_path / "acks")
    answer = Ours().run("ack", file=file, holes=holes, acks=FULL.persisted, list=1, persist=1)
    # The first is of the holes, before the acks.
    assert answer["snapshots"] >= 2
    assert answer["bytes"] > 90 * FULL.persisted


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", RELEASES)
def test_pulsars_record_has_the_state_of_our_cursor(tmp_path, side, form):
    rows = workloads.every_other(CHECKED_HOLES + CHECKED_ACKS)
    log = LedgerMap.from_counts({workloads.FIRST_LEDGER: workloads.LEDGER_SIZE, workloads.FIRST_LEDGER + 1: 1})
    info = decode_position_info(b64decode(Results.read().records[side][form]), log)
    file = workloads.written(rows, tmp_path / "acks")
    ours = Ours().run("ack", file=file, holes=CHECKED_HOLES, acks=CHECKED_ACKS, list=1, persist=1)
    assert info.position == Position(ours["mark_delete_ledger"], ours["mark_delete_entry"])
    assert (info.deleted.range_count, len(info.deleted)) == (ours["ranges"], ours["acked"])
    assert [run.first for run in info.deleted.runs()] == sorted(rows[:, 1].tolist())


# Rows.


def test_a_side_that_is_not_measured_has_the_figure_of_the_row_beside():
    report = KeptFigures()
    rows = ComparisonRows(report)
    first = Row("both", "us", each=1e3, grows=True)
    rows.put(Task((first,), "ack", {}, {}), {OURS: [{"nanos": 1_000}, {"nanos": 3_000}], PULSAR: [{"nanos": 8_000}]})
    second = Row("one", "us", each=1e3, beside="both")
    rows.put(Task((second,), "ack", {}, {}), {PULSAR: [{"nanos": 6_000}]})
    assert report.medians == {"both; ours": 2, "both; Pulsar": 8, "one; ours": 2, "one; Pulsar": 6}
    assert report.against["one; Pulsar"] == (OURS, 2, None)
    assert rows.growing == ["both"]


def compared(ours, *others):
    spreads = dict(zip([OURS, *RELEASES], ours_and(ours, *others), strict=True))
    return Comparison("row", "us", grows=True, spreads=spreads)


def ours_and(*figures):
    return [{"median": figure, "low": figure, "high": figure} for figure in figures]


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ((2, 30, 25), "ours, 12.5 times"),
        ((2, 1, 0.5), "Pulsar 5.0.0-M1, 4 times"),
        ((2, 2.05, 90), "equal"),
        ((2, 4_000, 5_000), "ours, 2,000 times"),
    ],
)
def test_the_better_release_is_compared_with_ours(figures, said):
    assert verdict(compared(*figures)) == said


# The page.


def test_the_page_and_the_picture_are_those_of_the_results():
    results = Results.read()
    assert PAGE.read_text(encoding="utf-8") == page(results), "python -m benchmarks.pulsar.page writes it"
    assert PICTURE.read_text(encoding="utf-8") == drawn(results.rows)


def test_every_row_has_a_figure_for_each_side():
    results = Results.read()
    written = json.loads((RESULTS / f"{NAME}.json").read_text())
    assert [list(row.spreads) for row in results.rows] == [[OURS, *RELEASES]] * len(results.rows)
    assert [row.what for row in results.rows if row.grows] == written["growing"]
    text = page(results)
    assert all(f"| {row.what} | {row.unit} |" in text for row in results.rows)


def test_the_picture_has_a_dot_for_each_release_and_row():
    rows = [compared(2, 30, 25), compared(2, 1, 0.5)]
    root = ET.fromstring(drawn(rows))
    # And one for each release in the legend.
    assert len(root.findall(f"{SVG}circle")) == 2 * 2 + 2


# Missing programs.


def test_a_missing_maven_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SideError, match=r"^Maven is missing: .*apt-get install maven$"), running(VERSIONS[0]):
        pass


def test_a_missing_jdk_is_one_line(monkeypatch, tmp_path):
    maven = tmp_path / "mvn"
    maven.write_text("#!/bin/sh\nexit 1\n")
    maven.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SideError, match=r"^javac is missing: .*or set JAVA_HOME$"), running(VERSIONS[0]):
        pass


def test_a_failed_build_shows_its_first_error(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    for program, text in (
        ("mvn", "echo '[INFO] x'; echo '[ERROR] no network'; echo '[ERROR] more'; exit 1"),
        ("bin/javac", ""),
    ):
        (tmp_path / program).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with (
        pytest.raises(SideError, match=re.escape("Pulsar 4.2.4 cannot be built: [ERROR] no network") + "$"),
        running("4.2.4"),
    ):
        pass


def test_the_versions_of_pulsar_are_those_of_the_results():
    assert set(Results.read().records) == set(RELEASES)
