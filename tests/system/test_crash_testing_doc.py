"""`docs/guides/crash-test-your-cursor.md` is true: its programs are run, and its commands end and say as it shows."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import assert_one_line, run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guides" / "crash-test-your-cursor.md").read_text(encoding="utf-8")
FILES = {
    name: (ROOT / "examples" / name).read_text(encoding="utf-8") for name in re.findall(r"\[`(my_cursor\.\w+)`\]", TEXT)
}
CONSOLES = re.findall(r"```console\n(.*?)```", TEXT, re.DOTALL)
CONVERSATION = re.search(r"```text\n(.*?)```", TEXT, re.DOTALL)[1]
SYNC = "        os.fsync(self.log.fileno())\n"


def commands(console):
    """The commands of a console, each with its output and its exit status."""
    found = []
    for line in console.splitlines():
        if line.startswith("$ echo $?"):
            continue
        if line.startswith("$ "):
            found.append((line[2:], [], []))
        else:
            found[-1][2 if line.isdecimal() else 1].append(line)
    return [(command, shown, int(status[0]) if status else 0) for command, shown, status in found]


COMMANDS = [command for console in CONSOLES for command in commands(console)]
NEEDS_ROOT = [command for command in COMMANDS if "--layer L4" in command[0]]
NEEDS_NOBODY = [command for command in COMMANDS if command not in NEEDS_ROOT]


def masked(line):
    """A line without the parts that differ between runs."""
    line = re.sub(r"(another program syncs .*then )?(the power is cut) .*", r"\2", line)
    return re.sub(r"\d+", "N", re.sub(r"\b(ack|mark_delete)\b", "ack", line)).strip()


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Where the files of the page are, as the current directory; no module of there stays."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("my_cursor", None)


def run_command(command, capsys):
    """Run a command of ours for a few runs instead of a minute: enough for a verdict."""
    runs = 3 if "--layer L4" in command else 2
    words = shlex.split(re.sub(r"--budget \d+s", f"--budget 5m --runs {runs}", command))
    assert words[0] == "ackstate"
    return run(capsys, *words[1:])


def run_all(shown_commands, capsys):
    for command, shown, status in shown_commands:
        outcome = run_command(command, capsys)
        assert outcome.status == status, (command, outcome)
        said = {masked(line) for line in outcome.out.splitlines()}
        assert {masked(line) for line in shown} <= said, (command, outcome.out)


def test_every_block_is_one_that_is_run_here():
    assert set(FILES) == {"my_cursor.py", "my_cursor.pl", "my_cursor.go", "my_cursor.mjs"}
    assert TEXT.count("\n```") == 2 * (len(CONSOLES) + 2)
    assert len(NEEDS_ROOT) == 2
    assert len(NEEDS_NOBODY) == 7


@pytest.mark.slow
def test_its_commands_do_as_it_shows(directory, capsys):
    run_all(NEEDS_NOBODY, capsys)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.usefixtures("power_can_be_cut")
def test_its_power_cuts_do_as_it_shows(directory, capsys):
    run_all(NEEDS_ROOT, capsys)


PROGRAMS = {"perl": "perl my_cursor.pl", "go": "./my_cursor_go", "node": "node my_cursor.mjs"}
GO = pytest.param("go", marks=pytest.mark.soak)  # compiles its library


def make(program):
    """Return the command of one of the page's programs; Go and Node.js need not be installed."""
    if not shutil.which(program):
        pytest.skip(f"{program} is not installed")
    if program == "go":
        subprocess.run(["go", "build", "-o", "my_cursor_go", "my_cursor.go"], check=True)
    return PROGRAMS[program]


@pytest.mark.parametrize("program", ["perl", "node", GO])
def test_its_conversation_is_what_its_programs_say(directory, program):
    command = shlex.split(make(program))
    lines = CONVERSATION.replace("DIRECTORY", str(directory)).splitlines()
    # The recovery at its end is one of another process.
    for part in (lines[:-2], lines[-2:]):
        requests = "".join(line[2:] + "\n" for line in part if line.startswith("> "))
        ended = subprocess.run(command, input=requests, capture_output=True, text=True, check=True)
        answers = [json.loads(line) for line in ended.stdout.splitlines()]
        assert answers == [json.loads(line[2:]) for line in part if line.startswith("< ")]


# What the page leaves to the reader.
REPAIRS = {
    "go": (
        """, "acked.json")))\n}\n\nfunc markDelete""",
        """, "acked.json")))\n\tsyncDirectory()\n}\n\nfunc markDelete""",
    ),
    "node": (
        "  fs.writeFileSync(name, state);\n  sync(name);\n",
        "  fs.writeFileSync(`${name}.new`, state);\n  sync(`${name}.new`);\n  fs.renameSync(`${name}.new`, name);\n",
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("program", REPAIRS)
def test_the_bug_of_each_program_is_found_and_its_repair_passes(directory, program, capsys):
    command = f"ackstate crash --layer L6 --subject '{make(program)}' --budget 10s"
    outcome = run_command(command, capsys)
    assert (outcome.status, "  the disk lost" in outcome.out) == (1, True), outcome
    file = directory / ("my_cursor.go" if program == "go" else "my_cursor.mjs")
    broken, repaired = REPAIRS[program]
    assert file.read_text().count(broken) == 1
    file.write_text(file.read_text().replace(broken, repaired))
    make(program)
    outcome = run_command(command, capsys)
    assert outcome.status == 0, outcome


@pytest.mark.slow
@pytest.mark.parametrize(("layer", "status"), [("L3", 0), ("L6", 1), pytest.param("L4", 1, marks=pytest.mark.root)])
def test_without_the_sync_it_is_caught_by_the_power_cuts_alone(request, directory, capsys, layer, status):
    if layer == "L4":
        request.getfixturevalue("power_can_be_cut")
    assert FILES["my_cursor.py"].count(SYNC) == 1
    (directory / "my_cursor.py").write_text(FILES["my_cursor.py"].replace(SYNC, ""))
    command = f"ackstate crash --layer {layer} --subject my_cursor:MyCursor --runs 2"
    assert run_command(command, capsys).status == status


SAYS_LAST = "synced($log); say_line({durable => [splice @unsynced]})"
SAYS_FIRST = "say_line({durable => [splice @unsynced]}); synced($log)"


@pytest.mark.soak
def test_a_receipt_before_the_write_is_caught_by_a_kill_at_a_system_call(directory, capsys):
    assert FILES["my_cursor.pl"].count(SAYS_LAST) == 1
    (directory / "my_cursor.pl").write_text(FILES["my_cursor.pl"].replace(SAYS_LAST, SAYS_FIRST))
    outcome = run_command("ackstate crash --layer L2 --subject 'perl my_cursor.pl' --runs 1", capsys)
    assert (outcome.status, "SIGKILL before its call" in outcome.out) == (1, True)


def test_a_subject_that_is_not_there_is_status_2(directory, capsys):
    assert_one_line(run_command("ackstate crash --layer L3 --subject my_cursor:YourCursor", capsys), "YourCursor")
