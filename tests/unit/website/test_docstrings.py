"""Docstrings become Markdown: examples are code, errors of other calls are sentences."""

from __future__ import annotations

import pytest

pytest.importorskip("griffe", reason="needs the extra docs")

from website.docstrings import in_markdown


def test_an_example_becomes_a_code_block_that_ends_with_it():
    assert in_markdown("Do it.\n\n>>> 1 + 1\n2\n\nMore.") == "Do it.\n\n```python\n>>> 1 + 1\n2\n```\n\nMore."
    assert in_markdown("Do it::\n\n    >>> 1\n    1") == "Do it:\n\n    ```python\n    >>> 1\n    1\n    ```"


def test_errors_of_another_call_become_a_sentence():
    text = "Do it.\n\nRaises:\n    ValueError: Bad\n        number.\n    As `persist`; nothing\n        is stored."
    assert in_markdown(text) == (
        "Do it.\n\nRaises errors as `persist`; nothing is stored.\n\nRaises:\n    ValueError: Bad\n        number.\n"
    )
    assert in_markdown("Do it.\n\nRaises:\n    As `persist`.\n").rstrip() == "Do it.\n\nRaises errors as `persist`."


def test_a_plain_docstring_stays():
    text = "Do it.\n\nArgs:\n    a: The first.\n\nRaises:\n    ValueError: Bad.\n    TypeError: Worse."
    assert in_markdown(text) == text
