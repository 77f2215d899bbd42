"""L2: the n-th call fails as it should, and the product survives it; museum.matrix finds out one that does not."""

import subprocess
import sys
from pathlib import Path

import pytest

from ackstate.analysis.crash.runs import LayerSkippedError
from crash import PATHS
from crash import shim as fault_shim
from crash.shim import compiled, environment
from crash.system_calls import system_calls

PROCESS = Path(__file__).with_name("process_with_shim.py")


def run_with_shim(directory, what):
    """Run a part of the process that has the shim; it raises what it finds wrong."""
    try:
        library = compiled(directory)
    except LayerSkippedError as reason:
        pytest.skip(str(reason))
    command, started = [sys.executable, "-P", str(PROCESS), what], {**environment(library), **PATHS}
    ended = subprocess.run(command, env=started, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_calls_are_counted_fail_and_kill_as_told_and_a_power_cut_takes_back_what_was_not_synced(tmp_path):
    run_with_shim(tmp_path, "calls")


@pytest.mark.slow
def test_the_product_survives_a_fault_of_each_kind_in_short_programs(tmp_path):
    run_with_shim(tmp_path, "clean")


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
