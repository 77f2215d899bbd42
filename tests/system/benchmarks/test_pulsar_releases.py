"""Pulsar's own classes have the results that our side has, on the tasks of the benchmark."""

from __future__ import annotations

import pytest

from benchmarks.pulsar import release, tasks
from benchmarks.pulsar.bench_pulsar import checked_records, measured
from benchmarks.pulsar.ours import Ours
from benchmarks.pulsar.results import Results


def is_built(version):
    return (release.BUILT / version / "classpath").exists()


@pytest.mark.slow
@pytest.mark.parametrize("version", release.VERSIONS)
def test_all_sides_have_the_same_results(monkeypatch, tmp_path, version):
    if not is_built(version):
        pytest.skip("make bench-pulsar has not built this release of Pulsar")
    monkeypatch.setattr(release, "HEAP", "512m")
    with release.running(version) as pulsar:
        records = checked_records(tmp_path, [Ours(), pulsar])
        count = 0
        for task in tasks.all_tasks(tmp_path, tasks.SMALL):
            if task.command != "weigh_delays":
                measured(task, [Ours(), pulsar], is_quick=True)
                count += 1
    assert records == {pulsar.name: Results.read().records[pulsar.name]}
    assert count > 15
