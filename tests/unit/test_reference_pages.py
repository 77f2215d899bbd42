"""The pages of the reference have every public name, setting, metric and command."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import typer
from prometheus_client import CollectorRegistry

from ackstate import MemoryStore
from ackstate.analysis.admin.app import PolicyCollector, RequestCounter
from ackstate.analysis.cli.main import app
from ackstate.limits import PolicyStore
from ackstate.metrics import BacklogCollector, CursorCollector, PublishCollector
from ackstate.pulsar_conf import SETTINGS
from ackstate.topic import PublishCounters
from shown_consoles import BLOCK

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
PACKAGES = ("aio", "cursor", "delay", "dispatch", "limits", "stores", "testing", "topic")


def text_of(page):
    return (REFERENCE / page).read_text(encoding="utf-8")


def documented():
    return [
        name
        for page in sorted((REFERENCE / "api").iterdir())
        for name in re.findall(r"^::: (\S+)", text_of(page), re.M)
    ]


def test_every_public_name_is_in_the_table_and_on_one_page():
    table = set(re.findall(r"^\| \[`(\w+)`\]\([\w-]+\.md\) \| `([\w.]+)` \|$", text_of("api/names.md"), re.M))
    modules = ["ackstate", *(f"ackstate.{each}" for each in PACKAGES)]
    assert table == {(name, module) for module in modules for name in import_module(module).__all__}
    assert len(table) <= 70
    names = [each.rpartition(".")[2] for each in documented()]
    assert {name for name, _ in table} <= set(names)
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", documented())
def test_a_documented_name_exists(name):
    module, _, attribute = name.rpartition(".")
    assert hasattr(import_module(module), attribute)


def test_the_page_of_settings_has_the_keys_and_defaults_of_the_table():
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|", text_of("settings.md"), re.M)
    assert rows == [(each.key, each.default, each.default_5 or each.default) for each in SETTINGS if each.default]


def test_the_page_of_metrics_has_those_of_each_collector():
    async def application(scope, receive, send):
        """Answer nothing: only the descriptions are read."""

    registry = CollectorRegistry()
    RequestCounter(application, registry=registry)
    publishes = PublishCollector(PublishCounters(cluster="here"))
    policies = PolicyCollector(PolicyStore(MemoryStore().metadata))
    collectors = (CursorCollector(), BacklogCollector(), publishes, policies)
    metrics = [each for collector in collectors for each in collector.describe()] + list(registry.collect())
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", text_of("metrics.md"), re.M)
    expected = [
        (f"{each.name}_total" if each.type == "counter" else each.name, each.type, each.documentation)
        for each in metrics
    ]
    assert rows == [(name, kind, " ".join(text.split()).replace("|", "\\|")) for name, kind, text in expected]


def shown_commands():
    """Yield the words of each command line of ours in a block of a page, up to a pipe or a redirection."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for _, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for found in re.findall(r"^(?:\$ )?(ackstate (?!.*\.\.\.).*)", block, re.M):
                yield page.name, shlex.split(re.split(r" [&|#>]|;", found)[0])


def test_every_command_that_a_page_shows_exists_with_its_options():
    checked = 0
    for page, words in shown_commands():
        command = typer.main.get_command(app)
        for word in words[1:]:
            if word not in getattr(command, "commands", {}):
                break
            command = command.commands[word]
        options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        for word in words:
            name = word.partition("=")[0]
            if name.startswith("--") and name not in {"--help", "--version", "--install-completion"}:
                checked += 1
                assert name in options, (page, words)
    assert checked > 30
