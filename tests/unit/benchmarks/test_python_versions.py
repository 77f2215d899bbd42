"""The comparison of interpreters runs every path, and is left out without interpreters."""

from __future__ import annotations

import sys

import pytest

from benchmarks import bench_python_versions as versions
from benchmarks.measurement import BenchmarkReport


@pytest.mark.slow
def test_an_interpreter_runs_each_path_in_each_round_but_the_first():
    (only,) = versions.measured({"a": sys.executable}, size=1_000, rounds=1)
    assert len(only["a"]) == 6
    assert all(cpu > 0 for cpu in only["a"].values())


def test_each_interpreter_is_compared_with_those_before_it():
    report = BenchmarkReport("unpublished", "")
    versions.compare(report, [{"a": {"ack": a}, "b": {"ack": 2.0}, "c": {"ack": 1.0}} for a in (3.0, 5.0, 4.0)])
    assert [(row.what, row.spread.median, row.against) for row in report._figures] == [
        ("a: ack", 4, None),
        ("b beside a: ack", 2, ("a", 4, None)),
        ("c beside a: ack", 1, ("a", 4, None)),
        ("c beside b: ack", 1, ("b", 2, None)),
    ]


@pytest.mark.parametrize("arguments", [[], [sys.executable]])
def test_it_is_skipped_without_two_interpreters(arguments, capsys):
    versions.main(arguments)
    assert capsys.readouterr().out.splitlines() == [versions.SKIPPED]


def test_an_interpreter_has_the_name_that_is_given_or_its_version():
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    given = ["plain=" + sys.executable, sys.executable]
    assert versions.named(given) == {"plain": sys.executable, version: sys.executable}
    with pytest.raises(SystemExit, match="named 'plain'; pass NAME=PYTHON"):
        versions.named(given[:1] * 2)
