"""An extension of Griffe that turns the conventions of our docstrings into Markdown."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import griffe

if TYPE_CHECKING:
    from collections.abc import Iterator

_RAISES = re.compile(r"^Raises:\n((?: {4}.*(?:\n|\Z))+)", re.MULTILINE)
_PROMPT = re.compile(r"^( *)>>> ")


class Conventions(griffe.Extension):
    """Puts examples into code blocks, which Markdown would read as quotations."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Adapt the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = in_markdown(obj.docstring.value)


def in_markdown(docstring: str) -> str:
    """Return a docstring as Griffe and Markdown read it.

    Examples are put into code blocks. Errors that are those of another call ("As `persist`.") become a sentence before
    the list of errors, in which each entry must be an exception. `::` before a literal block becomes `:`.
    """
    text = re.sub(r"(?<=\w)::$", ":", docstring, flags=re.MULTILINE)
    return "\n".join(_fenced(_RAISES.sub(_split_errors, text).split("\n")))


def _split_errors(section: re.Match[str]) -> str:
    entries = re.split(r"^ {4}(?=\S)", section[1], flags=re.MULTILINE)[1:]
    as_others = [" ".join(each.split()) for each in entries if each.startswith("As ")]
    listed = "".join(f"    {each}" for each in entries if not each.startswith("As "))
    sentences = "".join(f"Raises errors {each[0].lower()}{each[1:]}\n\n" for each in as_others)
    return sentences + (f"Raises:\n{listed}" if listed else "")


def _fenced(lines: list[str]) -> Iterator[str]:
    indent: str | None = None
    for line in lines:
        prompt = _PROMPT.match(line)
        if prompt and indent is None:
            indent = prompt[1]
            yield f"{indent}```python"
        elif indent is not None and not line.strip():
            yield f"{indent}```"
            indent = None
        yield line
    if indent is not None:
        yield f"{indent}```"
