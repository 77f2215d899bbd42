"""The worst patterns of unplain English become fewer: each file has at most as many as `plain_english.txt` allows.

Run this file as a program to rewrite the allowed counts: `.venv/bin/python tests/unit/test_plain_english.py`.
"""

from __future__ import annotations

import ast
import os
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
ALLOWED = ROOT / "tests" / "plain_english.txt"
FOLDERS = (
    ".ci", ".github", "ackstate", "analysis", "benchmarks", "cursor", "delay", "docs", "examples", "limits", "tests",
    "website",
)  # fmt: skip
SUFFIXES = (".py", ".md", ".toml", ".yml", ".yaml", ".proto", ".c", ".h", ".java", ".js", ".css", ".pl", ".properties")
PROGRAMS = ("Makefile", "run", "setup", "store_jars")
RECORDED = ("tests/vectors", "tests/golden")
NOT_WRITTEN_BY_HAND = ("_pb2.py",)
REWRITE = f".venv/bin/python {Path(__file__).resolve().relative_to(ROOT)}"

PATTERNS = {
    # A clause where a noun belongs. A question is no such clause, nor is a name such as `what` or what=1.
    "what": re.compile(r"\bwhat\s+\w(?!(?:[^.!?]|[.!?](?=\S))*\?(?:\s|$))", re.IGNORECASE),
    "what-ever": re.compile(r"\bwhatever\b", re.IGNORECASE),
    "who": re.compile(r"(?:^|[.:;]\s+)Who\s+\w(?!(?:[^.!?]|[.!?](?=\S))*\?(?:\s|$))", re.MULTILINE),
    "whoever": re.compile(r"\bwho(?:m?ever)\b", re.IGNORECASE),
    "nobody": re.compile(r"\b(?:no|some|every|any)body\b", re.IGNORECASE),
    "anew": re.compile(r"\banew\b", re.IGNORECASE),
    "so-many": re.compile(r"\bso\s+(?:many|long(?!\s+as))\b", re.IGNORECASE),
    "may-not": re.compile(r"\bmay\s+not\b", re.IGNORECASE),
    # The noun belongs first: "At most 64 messages of a large hole".
    "of": re.compile(r"(?:^|[.:;]\s+)Of\s(?!course\b)", re.MULTILINE),
    # Things that act like people.
    "tell": re.compile(r"\b(?:tells?|told|telling)\b", re.IGNORECASE),
    "hear": re.compile(r"\b(?:hears?|heard|hearing)\b", re.IGNORECASE),
    "say": re.compile(r"\b(?:says?|said|saying)\b", re.IGNORECASE),
    "know": re.compile(r"\bknows\b", re.IGNORECASE),
    "ask": re.compile(r"\bask(?:s|ed|ing)?\b", re.IGNORECASE),
    "want": re.compile(r"\bwants\b", re.IGNORECASE),
    "let": re.compile(r"\blets?\b", re.IGNORECASE),
    "go-on": re.compile(r"\b(?:go|goes|going|went)\s+on\b", re.IGNORECASE),
    "come-back": re.compile(r"\b(?:comes?|came|coming)\s+back\b", re.IGNORECASE),
}
QUESTION = "question"
FOUND = "found"
GOT_SOMETHING = re.compile(r"\bfound (?:\{|%)")


def prose_of_markdown(text):
    """Return the text outside of code blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def strings(nodes):
    """Yield each string of a module as one text, in which `{}` stands for each expression of an f-string."""
    parts = set()
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts.update(part for part in node.values if isinstance(part, ast.Constant))
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.value


def first_lines(nodes):
    """Yield the summary of each docstring of a module."""
    for node in nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield (ast.get_docstring(node, clean=False) or "").strip().partition("\n\n")[0]


def comments(source):
    """Return all comments of a module as one text. Faster than `tokenize`, by which this test would take 20 s."""
    return "\n".join(re.findall(r"(?:^|\s)#:?\s(.*)$", source, re.MULTILINE))


def matches(name, text):
    """Return the matches in a file: pattern -> the texts that match. The name of the file says its language."""
    found = {}
    if name.endswith(".md"):
        proses = [prose_of_markdown(text)]
    elif not name.endswith(".py"):
        proses = [text]
    else:
        nodes = [*ast.walk(ast.parse(text))]
        messages = [*strings(nodes)]
        # One text, in which each string ends a sentence: a search in each string would take ten times as long.
        proses = [".\n\n".join(messages), comments(text)]
        found[FOUND] = [prose for prose in messages for _ in GOT_SOMETHING.findall(prose)]
        found[QUESTION] = [first for first in first_lines(nodes) if first.endswith("?")]
    for pattern, expression in PATTERNS.items():
        found[pattern] = [
            " ".join(prose[max(0, match.start() - 40) : match.end() + 40].split())
            for prose in proses for match in expression.finditer(prose)
        ]  # fmt: skip
    return found


def counts(root):
    """Return the counts above 0 of all files of a checkout: (file, pattern) -> count."""
    return Counter({
        (name, pattern): len(texts)
        for name in names(root)
        for pattern, texts in matches(name, (root / name).read_text(encoding="utf-8")).items()
        if texts
    })  # fmt: skip


def names(root):
    """Yield the names of the files to read, relative to a checkout. This test is not one of them."""
    yield from (path.name for path in root.iterdir() if path.is_file() and is_prose(path.name))
    for folder in FOLDERS:
        for directory, _, files in os.walk(root / folder):
            for file in files:
                path = Path(directory, file)
                name = path.relative_to(root).as_posix()
                if is_prose(name):
                    yield name


def is_prose(name):
    is_own = name.endswith(NOT_WRITTEN_BY_HAND) or Path(name).name == Path(__file__).name or name.startswith(RECORDED)
    return not is_own and (name.endswith(SUFFIXES) or Path(name).name in PROGRAMS)


def written(counted):
    """Return counts as text: a line for each file."""
    files = {}
    for (name, pattern), count in sorted(counted.items()):
        files.setdefault(name, []).append(f"{pattern}={count}")
    return "".join(f"{name} {' '.join(numbers)}\n" for name, numbers in files.items())


def read(text):
    """Return the counts of a text by `written`."""
    lines = [line.split(" ") for line in text.splitlines()]
    parts = [(name, number.partition("=")) for name, *numbers in lines for number in numbers]
    return Counter({(name, pattern): int(count) for name, (pattern, _, count) in parts})


def risen(root, counted, allowed):
    """Return a line for each count above the allowed one, with places to look at."""
    lines = []
    for (name, pattern), count in sorted((counted - allowed).items()):
        texts = matches(name, (root / name).read_text(encoding="utf-8"))[pattern]
        places = "".join(f"\n    ... {text} ..." for text in texts[:10])
        lines.append(f"{name}: {count} more of {pattern!r} than allowed, among these:{places}")
    return lines


@cache
def counts_now():
    return counts(ROOT)


@pytest.mark.skipif(not (ROOT / "cursor").is_dir(), reason="the folders of a source distribution are in other places")
def test_no_count_rises():
    lines = risen(ROOT, counts_now(), read(ALLOWED.read_text(encoding="utf-8")))
    assert not lines, "write plainer English:\n" + "\n".join(lines)


@pytest.mark.skipif(not (ROOT / "cursor").is_dir(), reason="the folders of a source distribution are in other places")
def test_counts_that_fell_are_written_down():
    is_up_to_date = written(counts_now()) == ALLOWED.read_text(encoding="utf-8")
    assert is_up_to_date, f"run `{REWRITE}` and commit {ALLOWED.relative_to(ROOT)}"


PLANTED = {
    "what": ("a.md", "It reports what a persist leaves out."),
    "what-ever": ("a.c", "/* It is stored, whatever its size. */"),
    "who": ("a.md", "# Embed\n\nWho writes a broker embeds it."),
    "whoever": ("a.md", "Whoever persists calls it."),
    "anew": ("a.py", "x = 1  # begins anew\n"),
    "nobody": ("a.py", 'def f():\n    """Call somebody."""\n'),
    "so-many": ("a.md", "It waits until so\nmany messages are due."),
    "may-not": ("a.md", "It may not be closed."),
    "of": ("a.py", "x = 1  #: Of a large hole 64 messages are looked at.\n"),
    "tell": ("a.py", '"""Tells when to persist."""\n'),
    "hear": ("a.md", "The listener hears of it."),
    "say": ("a.md", "The record says that."),
    "know": ("a.md", "The cursor knows it."),
    "ask": ("Makefile", "# Asks the gate.\n"),
    "want": ("a.md", "An ack wants a record."),
    "let": ("a.toml", "# Let it pass.\n"),
    "go-on": ("a.md", "It goes\non."),
    "come-back": ("a.md", "The message comes back."),
    "question": ("a.py", 'def f():\n    """Is the gate open?"""\n'),
    "found": ("a.py", 'raise ValueError(f"n is an integer, found {n!r}")\n'),
}
PLAIN = (
    ("a.md", "It reports the excluded acks. What does it cost? A field is named `what`.\n```\nwhat a persist\n```"),
    ("a.py", '"""X does Y.\n\nDoes it?\n"""\nwhat = 1 if what is None else 2\nraise ValueError(f"got {n!r}")\n'),
)


def test_each_pattern_is_seen_where_it_is_planted():
    for pattern, (name, text) in PLANTED.items():
        seen = {each: len(texts) for each, texts in matches(name, text).items() if texts}
        assert seen == {pattern: 1}, text
    for name, text in PLAIN:
        assert not any(matches(name, text).values()), text


def test_a_planted_sentence_fails_and_a_removed_one_asks_for_an_update(tmp_path):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("It counts what is acked.")
    allowed = read(written(counts(tmp_path)))
    assert written(allowed) == "docs/page.md what=1\n"
    assert not risen(tmp_path, counts(tmp_path), allowed)

    page.write_text("It counts what is acked, and what is not.")
    (line,) = risen(tmp_path, counts(tmp_path), allowed)
    assert line.startswith("docs/page.md: 1 more of 'what' than allowed")

    page.write_text("It counts acks.")
    assert not risen(tmp_path, counts(tmp_path), allowed)
    assert written(counts(tmp_path)) != written(allowed)


if __name__ == "__main__":
    ALLOWED.write_text(written(counts(ROOT)), encoding="utf-8")
