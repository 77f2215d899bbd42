"""Each code block of the tutorial and the guides has a language, and consoles are marked as such."""

from __future__ import annotations

from pathlib import Path

import pytest

from shown_consoles import BLOCK

DOCS = Path(__file__).parents[3] / "docs"
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "guides").glob("*.md")), *sorted((DOCS / "proposals").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_has_a_language_and_a_console_begins_with_a_command(page):
    text = page.read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert text.count("```") == 2 * len(blocks), page
    for language, block in blocks:
        assert language in {"python", "console", "json"}, block
        assert (language == "console") == block.startswith("$ "), block
        # Examples of guides are run as doctests, those of the tutorial as programs.
        assert language != "python" or page.stem == "tutorial" or block.startswith(">>> "), block
