"""Links of the README lead to source files if these can be read somewhere, or become text."""

from __future__ import annotations

import re
from pathlib import Path

from website.repository import Repository

ROOT = Path(__file__).parents[3]


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
