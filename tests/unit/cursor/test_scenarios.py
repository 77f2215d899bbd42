"""The scenarios of Apache Pulsar's issue 19966: the disk after each persist, and the cost of a crash.

Each file of `scenarios` is a story with its expected states. A line of it is a time and an event; indented lines below
give for each configuration the result of a crash at that instant: the mark-delete position, the ranges as Pulsar prints
them, and how many acked messages are lost, by cause. Larger ones, whose ranges follow a formula, are in this file.

The disk is really read: the story is replayed up to that line, the process dies, another one opens.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

from ackstate import CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.selection import Keep

FILES = sorted((Path(__file__).parent / "scenarios").glob("*.toml"))
CAUSES = ("unwritten", "young", "cut")
STEP = re.compile(r"(?P<seconds>[\d.]+) s +(?P<verb>\w+)(?: +(?P<what>.+))?")
EXPECTED = re.compile(
    r" +(?P<name>\w+) +(?P<mark_delete>\S+) +(?P<ranges>\[\S*\]) +lost (?P<lost>\d+)(?:: (?P<by>.+))?"
)


class ExpectedCrash(NamedTuple):
    """The result of a crash: mark-delete position, ranges, and the messages that it loses, by cause."""

    mark_delete: str
    ranges: str
    lost: dict[str, int]


class CursorStep(NamedTuple):
    at_ms: int
    verb: str
    what: str
    expected: dict[str, ExpectedCrash]


class CursorScenario(NamedTuple):
    ledgers: dict[int, int]
    configurations: dict[str, CursorConfig]
    steps: list[CursorStep]


def read(path):
    written = tomllib.loads(path.read_text())
    configurations = {name: config(settings) for name, settings in written["configurations"].items()}
    steps = []
    for line in written["story"]["steps"].splitlines():
        if not line or line.startswith("#"):
            continue
        if expected := EXPECTED.fullmatch(line):
            assert expected["name"] not in steps[-1].expected
            steps[-1].expected[expected["name"]] = expected_of(expected)
        else:
            step = STEP.fullmatch(line)
            assert step, f"{path.name}: {line!r}"
            steps.append(CursorStep(round(float(step["seconds"]) * 1000), step["verb"], step["what"] or "", {}))
    for step in steps:
        assert set(step.expected) == (set(configurations) if step.verb in {"persist", "tick"} else set()), step
    return CursorScenario({int(name): count for name, count in written["ledgers"].items()}, configurations, steps)


def config(settings):
    return CursorConfig(**{name: Keep[value] if name == "keep" else value for name, value in settings.items()})


def expected_of(match):
    """Return the expectation of a line; its total is given beside the causes, so that either checks the other."""
    by_cause = [part.split() for part in match["by"].split(", ")] if match["by"] else []
    lost = {cause: int(count) for count, cause in by_cause}
    assert set(lost) <= set(CAUSES)
    assert sum(lost.values()) == int(match["lost"]), match[0]
    return ExpectedCrash(match["mark_delete"], match["ranges"], lost)


def entries(text):
    """Return the entries that a line names: single ones, ``first..last`` and ``first..last/stride``."""
    for part in text.split():
        first, _, rest = part.partition("..")
        last, _, stride = rest.partition("/")
        yield from range(int(first), int(last or first) + 1, int(stride or 1))


class OneCursor:
    """Does the steps with one cursor; a crash drops it and opens another on the disk."""

    def __init__(self, ledgers, config):
        self.log = LedgerMap.from_counts(ledgers)
        self.config = config
        self.store = MemoryStore()
        self.cursor = self.open(0)

    def open(self, now_ms):
        return ManagedCursor.open(
            self.store, topic="t", subscription="s", ledgers=self.log, config=self.config, now_ms=now_ms
        )

    def crash(self, now_ms):
        self.store = MemoryStore(self.store.disk)
        self.cursor = self.open(now_ms)

    def do(self, step):
        match step.verb:
            case "deliver":
                self.cursor.delivered(Position.parse(step.what), now_ms=step.at_ms)
            case "ack":
                ledger_id, _, entry_ids = step.what.partition(":")
                self.cursor.ack_entries(int(ledger_id), list(entries(entry_ids)), now_ms=step.at_ms)
            case "persist":
                self.cursor.persist(now_ms=step.at_ms)
            case "tick":
                self.cursor.tick(now_ms=step.at_ms)
            case "crash":
                self.crash(step.at_ms)
            case _:
                raise ValueError(f"no step is called {step.verb!r}")

    def check(self, expected, now_ms):
        """Compare the gauge with the expectation, then crash and compare the disk."""
        stats, backlog = self.cursor.stats(), self.cursor.backlog
        gauge = {cause: getattr(stats, f"redelivery_{cause}") for cause in CAUSES}
        assert gauge == {cause: expected.lost.get(cause, 0) for cause in CAUSES}
        assert self.cursor.redelivery_if_crashed == sum(gauge.values())
        self.crash(now_ms)
        assert str(self.cursor.mark_delete_position) == expected.mark_delete
        assert str(self.cursor.deleted) == expected.ranges
        assert self.cursor.backlog - backlog == sum(gauge.values())


def tell(scenario, name):
    """Check every expectation that a scenario has for a configuration, each in a story of its own."""
    for at, (at_ms, _, _, expected) in enumerate(scenario.steps):
        if expected:
            broker = OneCursor(scenario.ledgers, scenario.configurations[name])
            for step in scenario.steps[: at + 1]:
                broker.do(step)
            broker.check(expected[name], at_ms)


def stories():
    for path in FILES:
        for name in read(path).configurations:
            yield pytest.param(path, name, id=f"{path.stem}-{name}")


STORIES = list(stories())


@pytest.mark.parametrize(("path", "name"), STORIES)
def test_a_scenario(path, name):
    tell(read(path), name)
