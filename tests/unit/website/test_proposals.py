"""The pages of Pulsar's proposals point to code and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = [page for page in sorted((ROOT / "docs" / "proposals").glob("*.md")) if page.name != "README.md"]
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
FUNCTION = re.compile(r"`(test_\w+)`(?!\])")
# Names in code spans: of classes, of their attributes, and of settings with an underscore.
NAME = re.compile(r"`([A-Z][a-z]\w+(?:\.\w+)*|[a-z]+(?:_[a-z]+)+|skip)`")


def linked_files(page):
    found = [(page.parent / target).resolve() for target in LINK.findall(page.read_text(encoding="utf-8"))]
    return [each for each in found if each.is_relative_to(ROOT)]


def sources():
    folders = ("ackstate", "benchmarks")
    return "\n".join(
        path.read_text(encoding="utf-8")
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_symlink()
    )


def test_there_is_a_page_for_each_proposal():
    assert [page.stem for page in PAGES] == ["issue-19966", "pip-195", "pip-437", "pip-448"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_linked_file_exists_and_has_the_tests_that_are_named(page):
    files = linked_files(page)
    assert len(files) > 8
    assert [str(path) for path in files if not path.exists() and not path.name.endswith(".md")] == []
    text = page.read_text(encoding="utf-8")
    tests = "\n".join(path.read_text(encoding="utf-8") for path in files if path.name.startswith("test_"))
    named = FUNCTION.findall(text)
    assert len(named) >= 3
    for name in named:
        assert f"def {name}(" in tests, name


def test_every_class_and_setting_that_is_named_exists():
    defined = set(re.findall(r"\w+", sources()))
    for page in PAGES:
        named = {word for name in NAME.findall(page.read_text(encoding="utf-8")) for word in name.split(".")}
        assert len(named) > 5
        assert named - defined - {name for name in named if name.startswith("test_")} == set(), page
