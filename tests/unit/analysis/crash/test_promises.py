"""Two pages list every promise once, in the words of `Promise`, which no other module repeats."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ackstate.analysis.crash import promises
from ackstate.analysis.crash.promises import Promise

ROOT = Path(__file__).parents[4]


def test_the_documentation_lists_every_promise_once():
    pages = (ROOT / "docs" / "crash-testing.md", ROOT / "CONTRIBUTING.md")
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    tables = re.findall(r"^\| Promise \|.*\n\| ---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    rows = [row.split(" | ")[0].removeprefix("| ") for table in tables for row in table.splitlines()]
    assert sorted(rows) == sorted(Promise)


@pytest.mark.parametrize("promise", [each for each in Promise if re.fullmatch(r"I\d+", each.name)])
def test_the_text_of_a_numbered_promise_begins_with_its_number(promise):
    assert promise.startswith(f"{promise.name}: ")


def test_no_other_module_words_a_promise():
    modules = [
        path for path in (ROOT / "ackstate" / "analysis").rglob("*.py") if path.name != Path(promises.__file__).name
    ]
    texts = "|".join(re.escape(each.partition(": ")[2] or each) for each in Promise)
    worded = re.compile(rf"""["']I\d+: |{texts}""")
    assert not [path for path in modules if worded.search(path.read_text(encoding="utf-8"))]
