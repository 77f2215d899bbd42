"""Errors outside a process: permissions, full disks, Java, damage that Spark reads; one clear line each."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ackstate.analysis.demo.broker import MARKER
from ackstate.analysis.spark.session import SparkUnavailableError, start_java
from command_line import ENTRY, assert_one_line, run, run_apart, run_each_apart, tree
from trace_files import read_rows, write_rows


def flipped(good_trace, share):
    """Return the trace with one bit of its data pages changed; its footer is sound."""
    damaged = bytearray(good_trace.read_bytes())
    footer_bytes = int.from_bytes(damaged[-8:-4], "little") + 8
    damaged[4 + int(share * (len(damaged) - footer_bytes - 8))] ^= 0x10
    return bytes(damaged)


# How many flipped bits are tried: Spark reads the pages by the same code.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "count"), [("local", 30), pytest.param("spark", 3, marks=[pytest.mark.spark, pytest.mark.soak])]
)
def test_damage_that_only_a_replay_can_see_is_one_line_or_harmless(good_trace, tmp_path, capsys, engine, count):
    sound = run(capsys, "redelivery", good_trace, "--engine", engine, "--json")
    assert sound.status == 0
    path = tmp_path / "damaged.parquet"
    refused = 0
    for number in range(count):
        path.write_bytes(flipped(good_trace, number / count))
        outcome = run(capsys, "redelivery", path, "--engine", engine, "--json")
        if outcome.status:
            assert_one_line(outcome, path)
            refused += 1
        else:
            assert json.loads(outcome.out) == json.loads(sound.out) | {"trace": str(path)}
    assert refused > count // 3


def first_row(**changes):
    return lambda rows: [
        {**rows[0], **{name: change(rows[0].get(name)) for name, change in changes.items()}}, *rows[1:]
    ]  # fmt: skip


CONTRADICTIONS = {
    "kind": first_row(kind=lambda values: [99, *values[1:]]),
    "too short": first_row(ts_ms=lambda values: values[:-1]),
    "ledgers": first_row(ledgers=lambda _: []),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_rows_that_contradict_themselves_are_refused(good_trace, tmp_path, capsys, name):
    path, is_trusted_by_replays = tmp_path / "trace.parquet", name == "ledgers"
    write_rows(CONTRADICTIONS[name](sorted_by_use(read_rows(good_trace))), path)
    words = ("trace", "check", path) if is_trusted_by_replays else ("redelivery", path, "--engine", "local")
    assert_one_line(run(capsys, *words), f"ackstate: {path}: not a trace, damaged chunk 0")


def sorted_by_use(rows):
    """Rows of subscriptions first: those of the topic alone are not computed with."""
    return sorted(rows, key=lambda row: row["subscription"] == "")


@pytest.mark.parametrize(
    "engine", ["local", pytest.param("spark", marks=[pytest.mark.spark, pytest.mark.slow])]
)  # fmt: skip
def test_a_path_is_a_name_and_no_pattern(good_trace, tmp_path, capsys, engine):
    name = "a trace [1] {b} c*? 50%20#x&y ärger:b.d"
    shutil.copytree(good_trace.parent, tmp_path / name)
    (tmp_path / "a trace 1 b c").mkdir()
    outcome = run(capsys, "redelivery", tmp_path / name, "--engine", engine, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    assert len(json.loads(outcome.out)["subscriptions"]) == 3


def run_without_privilege(*commands):
    """Run commands to which permissions apply, also if root runs the tests."""
    prefix = []
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root passes all permissions, and there is no setpriv to drop them")
        prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    return run_each_apart(*commands, prefix=prefix)


@pytest.mark.slow
def test_a_directory_that_may_not_be_written_is_named(broker, tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for outcome in run_without_privilege(
        ["demo", "--out", closed / "out"],
        ["broker", closed / "broker"],
        ["trace", broker / "recording", closed / "trace"],
    ):
        assert_one_line(outcome, closed, "Permission denied")
    assert not list(closed.iterdir())


@pytest.mark.slow
def test_what_may_not_be_read_is_named(broker, good_trace, tmp_path):
    trace = shutil.copytree(good_trace.parent, tmp_path / "trace")
    closed = [trace, broker / "recording", broker / "store"]
    for each in closed:
        each.chmod(0)
    outcomes = run_without_privilege(
        ["redelivery", trace], ["trace", broker / "recording", tmp_path / "new"], ["recover", broker]
    )
    for each, outcome in zip(closed, outcomes, strict=True):
        each.chmod(0o755)
        assert_one_line(outcome, each)


@pytest.fixture
def small_disk(tmp_path):
    """Make small file systems; a real one each, because only that is full in the places where it hurts."""
    mounted = []

    def mount(size):
        if os.geteuid() != 0:
            pytest.skip("only root mounts file systems")
        point = tmp_path / f"disk-{len(mounted)}"
        point.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs: {done.stderr.decode().strip()}")
        mounted.append(point)
        return point

    yield mount
    for point in mounted:
        # Spark's virtual machine ends a moment after the command.
        subprocess.run(["umount", "--lazy", str(point)], check=True)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.parametrize("size", ["256k", "512k", "1m"])
def test_a_broker_that_fills_the_disk_stops_and_loses_nothing(small_disk, tmp_path, capsys, size):
    disk = small_disk(size)
    outcome = run(capsys, "broker", disk / "broker", "--seconds=30", "--messages-per-second=20000")
    assert_one_line(outcome._replace(out=outcome.out.removeprefix("ready\n")), disk / "broker", "full")
    roomy = shutil.copytree(disk / "broker", tmp_path / "roomy")
    assert run(capsys, "recover", roomy).status == 0


@pytest.mark.root
def test_a_recovery_on_a_full_disk_is_one_line_and_can_be_had_later(small_disk, killed, capsys):
    disk = small_disk("4m")
    shutil.copytree(killed, disk / "broker")
    fill(disk)
    assert_one_line(run(capsys, "recover", disk / "broker"), disk / "broker", "full")
    (disk / "filler").unlink()
    assert run(capsys, "recover", disk / "broker").status == 0


@pytest.mark.root
@pytest.mark.parametrize("earlier", [True, False])
def test_a_trace_on_a_full_disk_is_whole_or_not_there(small_disk, good_trace, killed, capsys, earlier):
    disk = small_disk("1m")
    trace = disk / "trace"
    if earlier:
        shutil.copytree(good_trace.parent, trace)
    fill(disk)
    before = tree(disk)
    assert_one_line(run(capsys, "trace", killed / "recording", trace), trace, "full")
    assert tree(disk) == before


def fill(disk):
    """Leave no room at all."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        for size in (65_536, 4_096, 1):
            try:
                while filler.write(bytes(size)):
                    pass
            except OSError:
                continue


@pytest.mark.slow
def test_an_answer_that_cannot_be_written_is_said_to_be_so_unless_nobody_reads_it(broker, tmp_path):
    reading, left = os.pipe()
    os.close(reading)
    with Path("/dev/full").open("w") as full, os.fdopen(left, "w") as pipe:
        for words, out, status, said in (
            (["recover", broker], full, 2, "ackstate: standard output: the disk is full\n"),
            (
                ["trace", broker / "recording", tmp_path / "trace"],
                full,
                2,
                "ackstate: standard output: the disk is full\n",
            ),
            (["recover", broker, "--json"], pipe, 141, ""),  # as a program that `| head` ends
        ):
            command = [*ENTRY, *map(str, words)]
            done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
            assert (done.returncode, done.stderr) == (status, said)


OLD = "echo 'openjdk version \"{}\"' >&2"
NO_JAVA = {
    "old": (OLD.format("11.0.22"), 0o755, "/bin/java is Java 11: Spark needs Java 17 or newer"),
    "very old": (OLD.format("1.8.0_292"), 0o755, "/bin/java is Java 8:"),
    "silent": ("", 0o755, ""),
    "no program": ("", 0o644, ""),
    "nowhere": (None, 0, ""),
}


@pytest.mark.parametrize(("script", "mode", "said"), NO_JAVA.values(), ids=NO_JAVA)
def test_a_java_that_is_too_old_or_none_is_named(tmp_path, monkeypatch, script, mode, said):
    if script is not None:
        java = tmp_path / "bin" / "java"
        java.parent.mkdir()
        java.write_text(f"#!/bin/sh\n{script}\n")
        java.chmod(mode)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(SparkUnavailableError) as caught:
        start_java({})
    assert f"{tmp_path}{said}" in str(caught.value)


def test_a_missing_java_is_said_before_anything_is_run(good_trace, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "JAVA_HOME"} | {"PATH": str(tmp_path)}
    for words in (["redelivery", good_trace], ["demo", "--out", tmp_path / "out"]):
        assert_one_line(run_apart(*words, env=environment), "no Java on the PATH", "Java 17")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [MARKER]


BARE = """
import sys
for name in ("pyspark", "py4j", "pyarrow", "pandas"):
    sys.modules[name] = None
"""


@pytest.mark.slow
def test_what_needs_no_spark_runs_without_the_extra_and_what_does_names_it(broker, tmp_path):
    new, out = tmp_path / "new", tmp_path / "out"
    *helped, made, recovered, again, demo, redelivery, trace = run_each_apart(
        ["--help"], [], ["broker", "--help"], ["broker", new, "--seconds=0.1"], ["recover", broker, "--json"],
        ["recover", new], ["demo", "--out", out], ["redelivery", tmp_path / "trace"],
        ["trace", broker / "recording", tmp_path / "trace"], before=BARE,
    )  # fmt: skip
    assert [outcome.status for outcome in (*helped, again)] == [0, 0, 0, 0]
    assert made == (0, "ready\n", "")
    assert (recovered.status, recovered.err, len(json.loads(recovered.out)["subscriptions"])) == (0, "", 3)
    for outcome in (demo, redelivery, trace):
        assert_one_line(outcome, "is missing: install ackstate[spark]")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broker", "new"]
