"""Links of pages lead to pages of the site, to source files if these can be read somewhere, or become text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from website.navigation import completed
from website.repository import Repository

ROOT = Path(__file__).parents[3]


@pytest.fixture
def root(tmp_path):
    for name in ("README.md", "docs/a.md", "docs/sub/b.md", "benchmarks/README.md", "benchmarks/c.svg", "cursor/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    return tmp_path


@pytest.mark.parametrize(
    ("path", "link", "adapted"),
    [
        ("README.md", "[a](docs/a.md#x)", "[a](a.md#x)"),
        ("docs/sub/b.md", "[a](../a.md)", "[a](../a.md)"),
        ("docs/sub/b.md", "[start](../../README.md)", "[start](../index.md)"),
        ("docs/a.md", "[costs](../benchmarks/README.md#y)", "[costs](benchmarks.md#y)"),
        ("docs/a.md", "[costs](../benchmarks)", "[costs](benchmarks.md)"),
        ("docs/sub/b.md", "![plot](../../benchmarks/c.svg)", "![plot](../pictures/benchmarks/c.svg)"),
        ("docs/sub/b.md", "[keys](../../website/settings.py#keys)", "[keys](../reference/settings.md#keys)"),
        ("docs/a.md", "[`d`](../cursor/d.py)", "`d`"),
        ("docs/a.md", "[a file\nof ours](../cursor)", "a file\nof ours"),
        ("docs/a.md", "[gone](../cursor/gone.py)", "[gone](../cursor/gone.py)"),
        ("docs/a.md", "[outside](../../etc)", "[outside](../../etc)"),
        ("docs/a.md", "[here](#x) [web](https://x.org/a.md)", "[here](#x) [web](https://x.org/a.md)"),
        ("docs/a.md", "```\n[d](../cursor/d.py)\n```\n", "```\n[d](../cursor/d.py)\n```\n"),
        ("docs/a.md", "```\nx\n```\n[d](../cursor/d.py)\n", "```\nx\n```\nd\n"),
    ],
)
def test_a_link_is_adapted(root, path, link, adapted):
    assert Repository(root).adapt(link, path=path) == adapted


def test_a_source_file_is_linked_if_it_can_be_read_somewhere(root):
    there = Repository(root, "https://x.org/blob/main")
    assert there.adapt("[`d`](../cursor/d.py)", path="docs/a.md") == "[`d`](https://x.org/blob/main/cursor/d.py)"
    assert there.adapt("[a](docs/a.md)", path="README.md") == "[a](a.md)"


def test_a_file_that_is_no_page_is_refused(root):
    with pytest.raises(ValueError, match=r"cursor/d\.py is no page"):
        Repository(root).adapt("", path="cursor/d.py")


def test_pictures_outside_of_docs_are_found(root):
    assert Repository(root).pictures() == {"pictures/benchmarks/c.svg": root / "benchmarks" / "c.svg"}


def test_pages_that_the_navigation_does_not_list_become_guides():
    nav = [{"Start": "index.md"}, {"Guides": ["a.md"]}, {"Reference": [{"API": "api/"}]}]
    api = [{"core": "api/core.md"}]
    assert completed(nav, pages=["z.md", "a.md", "b.md"], sections={"api/": api}) == [
        {"Start": "index.md"}, {"Guides": ["a.md", "b.md", "z.md"]}, {"Reference": [{"API": api}]},
    ]  # fmt: skip
    with pytest.raises(ValueError, match="'Guides'"):
        completed(["a.md"], pages=[], sections={})


def test_links_for_a_package_index_are_absolute():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    adapted = Repository(ROOT, "https://example.org/blob/v1").absolute(text)
    links = re.findall(r"\]\(([^)]*)\)", adapted)
    assert len(links) > 20
    assert all(re.match(r"https://example\.org/blob/v1/\w", each) for each in links), links
    assert "](" not in Repository(ROOT).absolute(text)
    assert Repository(ROOT, "https://a").absolute("[x](#y) [z](https://b)\n```\n[c](d)\n```\n") == (
        "[x](https://a/README.md#y) [z](https://b)\n```\n[c](d)\n```\n"
    )
