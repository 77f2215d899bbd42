"""`docs/tutorial.md` is true: its broker is started, killed and started again, with the output that the page shows."""

import re
import socket
from pathlib import Path

import pytest

import shown_consoles

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
FILES = shown_consoles.files(PAGE)
STEPS = shown_consoles.steps(PAGE)

pytestmark = pytest.mark.slow


def masked(line):
    """Return the headline and a row of the table without what depends on time; any other line as it is."""
    line = re.sub(
        r"^(Had the broker crashed, )[\d.]+( acked .*; at worst 1, at )[\d-]+ [\d:.]+( UTC)$", r"\1\2\3", line
    )
    return re.sub(r"^(billing +)│.*│.*│.*│(.*│.*)$", r"\1 \2", line)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def test_every_block_is_run_here():
    assert set(FILES) == {"broker.py", "ask.py"}
    languages = [language for language, _ in shown_consoles.BLOCK.findall(PAGE)]
    assert languages.count("python") == len(FILES)
    assert set(languages) == {"python", "console", "sh"}
    assert languages.count("sh") == 1  # makes the environment
    assert len(STEPS) == 17


def test_the_broker_is_killed_and_redelivers_as_shown(tmp_path):
    port = free_port()
    for name, content in FILES.items():
        assert content.count("6650") == 1
        (tmp_path / name).write_text(content.replace("6650", port))
    with shown_consoles.Shell(tmp_path) as shell:
        for step in STEPS:
            output = [masked(line) for line in shell.run(step)]
            if "--report" in step.command:
                assert "report.html" in output[-1]
                continue
            assert output[: len(step.shown)] == [masked(line) for line in step.shown], step
    assert "billing" in (tmp_path / "report.html").read_text(encoding="utf-8")
