"""`docs/wire-format.md` has every field of every object in a state, in order, and of the type that it says."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from pyroaring import BitMap

from ackstate.analysis.estimate.checkpoint import Checkpoint, claimed, keep
from golden_states import GRID, golden

TEXT = (Path(__file__).parents[4] / "docs" / "wire-format.md").read_text(encoding="utf-8")
SECTION = TEXT[TEXT.index("\n## State of daily redelivery") :]


def tables():
    """Return the fields of each object that has a table: name of the object -> field -> type."""
    found = {}
    for name, table in re.findall(r"^\*\*([^*]+)\*\*[^\n]*\n\n((?:\|.*\n)+)", SECTION, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        found[name.lower()] = {field.strip("`"): kind for field, kind, _ in rows}
    return found


OBJECTS = tables()
NAMED_BY_KIND = {"curves", "replays"}
KINDS = {
    "recorded": "recorded curve", "policy": "policy curve", "counted": "counted replay",
    "with a cursor": "replay with a cursor", "gated": "gated replay",
}  # fmt: skip
NAMES = {
    "plotted": "plotted curve", "last": "last point", "acked": "acked entries", "recorded": "acked entries",
    "groups": "group", "mark_delete": "mark-delete position", "young": "excluded messages", "cut": "excluded messages",
    "young_age": "young age",
}  # fmt: skip


def name_of(field, value):
    if field in NAMED_BY_KIND:
        return KINDS[value["kind"]]
    if field == "journal":
        return "journal" if "pointer" in value else "journal size"
    return NAMES.get(field, field)


def is_integers(value):
    return all(type(each) is int for each in value)


def is_entries(value):
    return all(BitMap.deserialize(base64.b64decode(text)) is not None for _, text in value) and is_integers(
        [each for each, _ in value]
    )


IS_OF = {
    "integer": lambda value: type(value) is int,
    "text": lambda value: type(value) is str,
    "true or false": lambda value: type(value) is bool,
    "position": lambda value: len(value) == 2 and is_integers(value),
    "log": lambda value: all(len(each) == 2 and is_integers(each) for each in value),
    "entries": is_entries,
    "bytes": lambda value: bool(base64.b64decode(value, validate=True)),
    "list of bytes": lambda value: all(base64.b64decode(each, validate=True) for each in value),
    "list of integers": is_integers,
    "list of 4 integers": lambda value: len(value) == 4 and is_integers(value),
    "times": lambda value: [*value] == ["ts_ms", "ledger_id", "entry_id"] and len(set(map(len, value.values()))) == 1,
    "object": lambda value: type(value) is dict,
    "acked entries": lambda value: type(value) is dict,
    "list": lambda value: all(type(each) is dict for each in value),
}


def check(name, value, seen):
    seen.add(name)
    documented = OBJECTS[name]
    assert [*value] == [*documented], name
    for field, each in value.items():
        kind = documented[field]
        if each is None:
            assert kind.endswith(" or null"), field
            continue
        assert IS_OF[kind.removesuffix(" or null")](each), field
        if field == "cursor_replay":
            check("replay with a cursor", {"policy": 0, "kind": "", **each}, seen)
        elif isinstance(each, dict) and kind != "times":
            check(name_of(field, each), each, seen)
        elif kind == "list":
            for inner in each:
                check(name_of(field, inner), inner, seen)


def test_every_object_of_the_golden_states_has_the_fields_that_are_documented():
    seen = {"manifest body"}
    for name in (*GRID, "broker"):
        check("broker state" if name == "broker" else "subscription state", json.loads(golden(name)), seen)
    assert seen == set(OBJECTS)


@pytest.mark.parametrize("change", [
    lambda state: state["replay"].pop("is_alive"), lambda state: state["replay"].update(more=1),
    lambda state: state["replay"]["curves"][0]["costs"].update(write_count="1"),
])  # fmt: skip
def test_the_check_sees_a_field_that_is_missing_added_or_of_another_type(change):
    state = json.loads(golden("counted"))
    change(state)
    with pytest.raises(AssertionError):
        check("subscription state", state, set())


def test_a_manifest_has_the_fields_that_are_documented(tmp_path):
    place = tmp_path / "state" / "000001"
    with claimed(place.parent) as unfinished:
        keep(unfinished, Checkpoint(place, (None,), 1, {"day": "5f"}, 1, 2, golden("broker"), {}))
    body = json.loads((place / "manifest.json").read_text())["body"]
    assert [*body] == [*OBJECTS["manifest body"]]
    texts = dict(re.findall(r"^\| `(magic|schema)` \| text \| `([^`]*)`", SECTION, re.MULTILINE))
    assert {name: body[name] for name in ("magic", "schema")} == texts
