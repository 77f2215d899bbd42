"""The command line when all is well: its output, its files, and its remains after an interrupt."""

import contextlib
import io
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import pytest

from ackstate.analysis import cli
from ackstate.analysis.cli import console, demo
from ackstate.analysis.demo.broker import BrokerDirectory
from command_line import ENTRY, killed_broker, run, run_apart, tree
from demo_runs import demo_run, killed_inside_persist, outcome

COMMANDS = ("demo", "redelivery", "trace", "broker", "recover", "fsck", "inspect", "explain", "serve")
NAMES = ("eight-consumers", "in-order", "one-percent-stuck")


class Terminal(io.StringIO):
    """The output on a terminal of 80 columns."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    for name, setting in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
        monkeypatch.setenv(name, setting)
    return Terminal()


def shown(terminal, monkeypatch, show, *arguments):
    """Return the lines that a call shows at the terminal, without the marks for bold."""
    with monkeypatch.context() as patch, contextlib.suppress(SystemExit):
        patch.setattr(sys, "stdout", terminal)
        show(*arguments)
    return re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()


def cells(lines):
    """Return the columns of tables, with cells that continue in the next line joined."""
    rows, after_head = [], False
    for line in lines:
        columns = [cell.strip() for cell in line.split("│")]
        if "╇" in line:
            after_head = True
        elif after_head and len(columns) > 1:
            # A row begins where its numbers do: the first of them is never too wide.
            if columns[1]:
                rows.append(columns)
            else:
                rows[-1] = [" ".join(filter(None, pair)) for pair in zip(rows[-1], columns, strict=True)]
    return rows


def show_outcome(found):
    """Show the demo's table, as the demo does in the end."""
    console.show(demo.outcome_table(found))


# --- help


@pytest.mark.parametrize("arguments", [[], ["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_teaches_within_80_columns(monkeypatch, capsys, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "..." not in out.replace("[ARGS]...", "")
    assert out.startswith("Usage: ackstate")


@pytest.mark.slow
def test_bash_completes_a_command_with_the_script(tmp_path):
    command = Path(sys.executable).parent / "ackstate"
    script = f"""
        PATH={command.parent}:$PATH
        eval "$(_ACKSTATE_COMPLETE=source_bash ackstate)"
        COMP_WORDS=(ackstate exp) COMP_CWORD=1
        function=$(complete -p ackstate | sed 's/.* -F \\(\\S*\\) .*/\\1/')
        "$function" ackstate
        echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("explain\n", "")


def test_the_version_is_that_of_the_distribution(capsys):
    assert run(capsys, "--version") == (0, f"ackstate {version('ackstate')}\n", "")


# --- tables


@pytest.mark.parametrize("inside_persist", [True, False])
def test_the_demo_table_has_every_cell_in_full(terminal, monkeypatch, inside_persist):
    run_ = demo_run()
    if inside_persist:
        found = outcome("one-percent-stuck", redelivered=1_234_567)
        found = killed_inside_persist(found, not_written=1_234_567, written=98_765, observed=98_765)
        run_ = replace(run_, subscriptions=[*run_.subscriptions[:2], found])
    lines = shown(terminal, monkeypatch, show_outcome, run_)
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    expected = [
        [o.name, str(o.acked), str(o.durable), str(o.predicted_at_kill), str(o.observed), "0", "0"]
        for o in run_.subscriptions
    ]
    if inside_persist:
        expected[2][3] = "1234567 or, if written, 98765"
    assert cells(lines) == expected


def test_a_pipe_gets_every_row_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    name = "billing-of-the-northern-provinces-and-all-islands-" * 3
    show_outcome(demo_run([name, "short"]))
    assert [row[0] for row in cells(capsys.readouterr().out.splitlines())] == [name, "short"]


# --- by hand


@pytest.mark.slow
def test_a_lost_ack_is_bad_news(tmp_path, capsys):
    place = killed_broker(tmp_path / "broker")
    killed_broker(tmp_path / "shorter", steps=40)
    shutil.rmtree(place.store)
    shutil.copytree(tmp_path / "shorter" / "store", place.store)
    status, out, err = run(capsys, "recover", place.path, "--json")
    assert (status, err) == (1, "")
    assert all(found["lost"] > 0 for found in json.loads(out)["subscriptions"])


def recovered(capsys, place):
    """Recover a killed broker; return what came back of each subscription."""
    status, out, err = run(capsys, "recover", place.path, "--json")
    found = json.loads(out)["subscriptions"]
    assert (status, err, [each["subscription"] for each in found]) == (0, "", list(NAMES))
    assert all(each["lost"] == each["invented"] == 0 for each in found)
    return {each["subscription"]: each["observed"] for each in found}


@pytest.mark.spark
@pytest.mark.slow
def test_by_hand_the_crash_is_predicted_as_it_is_observed_and_the_broker_goes_on(
    tmp_path, terminal, monkeypatch, capsys
):
    place = killed_broker(tmp_path / "broker")
    observed = recovered(capsys, place)
    assert min(observed.values()) > 0
    status, out, err = run(capsys, "trace", place.recording, tmp_path / "trace", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out) == {"trace": str(tmp_path / "trace"), "events": json.loads(out)["events"]}
    assert run(capsys, "redelivery", tmp_path / "trace", "--report", tmp_path / "report.html").status == 0
    assert "Java" in (tmp_path / "report.html").read_text().split("<h2>")[-1]
    status, out, err = run(capsys, "redelivery", tmp_path / "trace", "--json")
    assert (status, err) == (0, "")
    predicted = {
        row["subscription"]: [c["at_crash"] for c in row["crashes"]] for row in json.loads(out)["subscriptions"]
    }
    assert predicted == {name: [count] for name, count in observed.items()}
    lines = shown(terminal, monkeypatch, cli.main, ["redelivery", str(tmp_path / "trace")])
    assert max(map(len, lines)) <= 80
    assert {row[0]: row[-1] for row in cells(lines)} == {name: str(count) for name, count in observed.items()}
    for _ in range(2):
        assert set(recovered(capsys, place).values()) == {0}, "recovering again finds nothing more"
    assert run(capsys, "broker", place.path, "--seconds=0.05") == (0, "ready\n", "")
    recovered(capsys, place)


# --- interrupted, killed


@pytest.mark.slow
def test_an_interrupted_broker_says_so_and_leaves_what_a_dead_one_does(tmp_path):
    command = [*ENTRY, "broker", str(tmp_path / "broker"), "--seconds=60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as live:
        assert live.stdout.readline() == "ready\n"
        live.send_signal(signal.SIGINT)
        out, err = live.communicate(timeout=60)
    assert (live.returncode, out, err) == (130, "", "ackstate: interrupted\n")
    assert run_apart("recover", tmp_path / "broker").status == 0


WATCHED_JAVA = """#!/bin/sh
case "$*" in
*launcher.Main*) ;;
*SparkSubmit*) echo $$ >"{pipe}" ;;
esac
exec "{java}" "$@"
"""


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells when a process ends that is not a child")
def test_a_demo_interrupted_while_spark_starts_leaves_no_virtual_machine(tmp_path):
    home = os.environ.get("JAVA_HOME")
    watched = tmp_path / "home" / "bin" / "java"
    watched.parent.mkdir(parents=True)
    real = f"{home}/bin/java" if home else shutil.which("java")
    watched.write_text(WATCHED_JAVA.format(pipe=tmp_path / "pipe", java=real))
    watched.chmod(0o755)
    os.mkfifo(tmp_path / "pipe")
    command = [*ENTRY, "demo", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "JAVA_HOME": str(tmp_path / "home")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as live:
        machine = os.pidfd_open(int((tmp_path / "pipe").read_text()))
        live.send_signal(signal.SIGINT)
        out, err = live.communicate(timeout=120)
        ended, _, _ = select.select([machine], [], [], 60)
        os.close(machine)
    assert (live.returncode, out, err) == (130, "", "ackstate: interrupted\n")
    assert ended


PARENT = """
import sys
from pathlib import Path
from ackstate.analysis.demo.broker import DemoSettings
from ackstate.analysis.demo.broker import BrokerDirectory
from ackstate.analysis.demo.run import run_and_kill

told = []

def waiting(_share):
    if not told:
        told.append(print("waiting", flush=True))

run_and_kill(BrokerDirectory(Path(sys.argv[1])), DemoSettings(), lives_ms=(60_000, 60_000), waiting=waiting)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process when its parent ends")
def test_a_broker_dies_with_the_demo_that_started_it(tmp_path):
    command = [sys.executable, "-P", "-c", PARENT, str(tmp_path / "broker")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "waiting\n"
        broker_pid = int((tmp_path / "broker" / "store" / "LOCK").read_text())
        broker = os.pidfd_open(broker_pid)
        parent.kill()
        ended, _, _ = select.select([broker], [], [], 30)
        os.close(broker)
    assert ended
    BrokerDirectory(tmp_path / "broker").clear()


# --- where it is started


def with_strangers(directory):
    """Write modules with the names of ours and of our dependencies; return the contents of the directory."""
    for name in ("ackstate", "limits", "numpy", "pyarrow"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text("raise SystemExit('a stranger was imported')")
    return tree(directory)


def test_modules_in_the_current_directory_are_not_taken_for_ours(tmp_path):
    before = with_strangers(tmp_path)
    outcome = run_apart("crash", "--layer", "L3", "--runs", "3", cwd=tmp_path)
    assert (outcome.status, outcome.err) == (0, "")
    assert tree(tmp_path) == before
