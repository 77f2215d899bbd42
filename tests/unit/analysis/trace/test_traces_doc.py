"""`docs/traces.md` is true: its example is converted, and its schema is the one that the code reads."""

import json
import re
from pathlib import Path

import pytest

from ackstate.analysis import cli
from ackstate.analysis.trace.check import check_events
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.rows import KINDS, ROW_SCHEMA
from trace_files import read_back
from traces import last_state

DOCS = Path(__file__).parents[4] / "docs"
TEXT = (DOCS / "traces.md").read_text(encoding="utf-8")
SCHEMA = json.loads((DOCS / "trace-event.schema.json").read_text(encoding="utf-8"))


def test_the_example_is_converted_and_says_what_the_text_says(tmp_path, capsys):
    (example,) = re.findall(r"<!-- example.*?-->\n```json\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "example.jsonl").write_text(example)
    with pytest.raises(SystemExit) as ended:
        cli.main(["trace", "convert", str(tmp_path / "example.jsonl"), str(tmp_path / "trace"), "--json"])
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["events"] == len(example.splitlines())
    events = read_back(tmp_path / "trace")["orders", "billing"]
    assert events[1] == Event(1_700_000_000_100, EventKind.ACK, 3, 2, 4)
    assert last_state(events).redelivery == 1
    assert check_events(tmp_path / "trace").kinds == {
        "publish": 1, "ack": 3, "persist_begun": 1, "persist_ended": 1, "crash": 1,
    }  # fmt: skip


def names_in(header):
    """The names in the first column of the table that begins with a header."""
    rows = TEXT[TEXT.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [row.split("`")[1] for row in rows]


def test_the_fields_and_kinds_are_those_that_are_read():
    assert names_in("| field | type |") == ROW_SCHEMA.names == list(SCHEMA["properties"])
    assert sorted(names_in("| kind | entries |")) == sorted(KINDS) == sorted(SCHEMA["properties"]["kind"]["enum"])


def test_the_schema_asks_for_what_the_checks_ask_for():
    whose = {field["if"].get("not") is None: field for field in SCHEMA["allOf"]}
    naming = whose[True]["if"]["properties"]["kind"]["enum"]
    needed = [row.split("`")[1] for row in TEXT.splitlines() if row.startswith("| `") and "| needed |" in row]
    assert sorted(naming) == sorted(set(needed) & set(KINDS))
