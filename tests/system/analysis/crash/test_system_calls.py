"""L2: the n-th call fails as it should, the product survives it, and a product that does not is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from signal import SIGKILL

import pytest

from ackstate.analysis.crash import shim as fault_shim
from ackstate.analysis.crash.layer import LayerSkippedError
from ackstate.analysis.crash.oracle import Promise
from ackstate.analysis.crash.shim import Action, compiled, environment
from crash import PATHS
from crash.system_calls import system_calls

PROCESS = Path(__file__).with_name("process_with_shim.py")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    try:
        return compiled(tmp_path_factory.mktemp("shim"))
    except LayerSkippedError as reason:
        pytest.skip(str(reason))


def run_with_shim(library, what):
    """Run the process that has the shim and return its output."""
    command = [sys.executable, "-P", str(PROCESS), what]
    ended = subprocess.run(
        command, env={**environment(library), **PATHS}, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.fixture(scope="module")
def calls(library):
    return run_with_shim(library, "calls")


@pytest.fixture(scope="module")
def planted(library):
    return run_with_shim(library, "planted")


@pytest.mark.slow  # It compiles the shim.
def test_calls_that_store_below_the_directory_are_counted_and_no_others(calls):
    stores = ["mkdir", "open", "write", "write", "write", "fsync", "fdatasync", "ftruncate", "rename", "unlink"]
    assert calls["counted"] == [*([name, True, 1] for name in stores), *[[None, False, 0]] * 3]


def test_a_short_write_stores_half_and_the_next_write_fails(calls):
    assert calls["torn"] == [5, "ENOSPC", 10, "012340123456789"]


def test_a_failure_lasts_as_long_as_it_was_told(calls):
    assert calls["lasting"] == [None, "ENOSPC", "ENOSPC", "ENOSPC", None, None]


def test_a_read_can_fail_and_writes_do_not_count_then(calls):
    assert calls["reading"] == ["EIO", "there"]


def test_a_process_is_killed_before_in_the_midst_of_or_after_a_call(calls):
    assert calls["KILL_BEFORE"] == [SIGKILL, "0123456789", 2, "write"]
    assert calls["TORN_KILL"] == [SIGKILL, "0123456789abcde", 2, "write"]
    assert calls["KILL_AFTER"] == [SIGKILL, "0123456789abcdefghij", 2, "write"]


def test_what_a_failed_sync_was_for_is_readable_and_lost_although_a_later_sync_succeeds(calls):
    # Sector a was synced, then overwritten; B came after it. C was synced after the failed sync, D never.
    assert calls["gate"] == ["EIO", "ABCD", "a.C", 3]


def test_what_a_failed_sync_was_for_is_not_read_any_more_once_the_cache_was_dropped(calls):
    # D was not synced when that happened, nor later.
    assert calls["gate_forgotten"] == ["EIO", "a.CD", "a.C", 1]


def test_a_sector_that_is_written_again_and_synced_is_not_lost(calls):
    assert calls["gate_rewritten"] == ["EIO", "ABCD", "aBC", 2]


def test_a_power_cut_takes_back_the_names_in_directories_that_were_not_synced(calls):
    # "a" has its old name again, "h" was never there, and "lost" is gone with the files synced in it.
    assert calls["unsynced_names"] == [["kept", "kept/a", "kept/d"], 4]


@pytest.mark.slow
def test_the_product_survives_a_fault_of_each_kind_in_short_programs(library):
    outcomes = run_with_shim(library, "clean")
    assert [outcome["broken"] for outcome in outcomes] == [[]] * len(outcomes)
    counts = sum((Counter(outcome["counts"]) for outcome in outcomes), Counter())
    # One for each call of a program, and one that is not faulted.
    assert counts["completed_programs"] == len(Action)
    assert sum(outcome["cycles"] for outcome in outcomes) == counts["calls"] + counts["completed_programs"] > 100
    assert sum(outcome["is_last"] for outcome in outcomes) == counts["completed_programs"]
    assert max(outcome["cycles"] for outcome in outcomes) <= 13


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "promise", "met"),
    [
        ("swallow_failed_sync", Promise.I10, "fails with EIO"),
        ("never_sync", Promise.I10, "the power is cut"),
        ("never_sync_above", Promise.I10, "the power is cut"),
        ("raise_what_comes", Promise.ERRORS, "fails with ENOSPC: call"),
        ("pass_a_group_by", Promise.I2, "of store/ackstate.sqlite3"),
    ],
)
def test_a_planted_bug_is_caught_with_its_story(planted, plant, promise, met):
    outcome = planted[plant]
    assert promise in [found["promise"] for found in outcome["broken"]]
    story = outcome["broken"][0]["story"]
    assert any(met in line for line in story), story
    assert 2 < len(story) < 40


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(fault_shim.shutil, "which", lambda _name: None)
    with pytest.raises(LayerSkippedError, match="C compiler"):
        compiled(tmp_path)
    with pytest.raises(LayerSkippedError, match="C compiler"):
        next(system_calls(0))


@pytest.mark.slow
def test_a_shim_that_does_not_compile_is_a_reason_to_skip(monkeypatch, tmp_path):
    wrong = tmp_path / "wrong.c"
    wrong.write_text("#error no such luck\n")
    monkeypatch.setattr(fault_shim, "_SOURCE", wrong)
    with pytest.raises(LayerSkippedError, match="no such luck"):
        compiled(tmp_path)
