"""No page states a measured figure as plain text: a number with a unit stands between marks, or has a reason below."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from benchmarks import figures

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = figures.ROOT / "docs"
GENERATED = {
    DOCS / name for name in (
        "calibration.md", "kill-matrix.md", "licences.md", "proof.md", "pulsar-benchmark.md", "pulsar-live.md",
        "pulsar-replay.md",
    )
}  # fmt: skip
"""Pages that are written as a whole from a result, which other tests compare with them."""
PAGES = [page for page in (*figures.PAGES, figures.ROOT / "examples" / "README.md") if page not in GENERATED]

NUMBER = r"\d[\d,]*(?:\.\d+)?"
UNIT = (
    r"(?:s|ms|us|µs|ns|min|minutes?|seconds?|h|hours?|core-(?:minutes|hours)|[kKMGT]i?B|bytes?|%|times"
    r"|kills|power cuts|crashes|comparisons|trials|tests|jars|cores|source files)(?![\w-])"
)
MEASURED = re.compile(
    rf"(?<![\w.:/^-]){NUMBER}(?: (?:to|or|and) {NUMBER})?(?:"
    rf"[ -]?(?:(?:thousand|million|billion) )?{UNIT}"  # 3 ms, 10 to 20 %, 2 million bytes
    rf"| of {NUMBER}(?!\w)"  # 20 of 20
    r"| (?:(?:thousand|million|billion) )?\w+ (?:a|per) (?:second|core)\b)"  # 5 writes a second
)
WITHOUT = (
    re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE),  # commands and their output
    re.compile(r"^\|[^\n]*\| *default *\|[^\n]*\n(?:\|[^\n]*(?:\n|\Z))+", re.MULTILINE),  # tables of settings
    re.compile(r"<!-- (?:tables|counts).*?<!-- end of .*? -->", re.DOTALL),  # written as a whole from results
    re.compile(r"<!--.*?-->[^<]*<!--/-->"),  # figures
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"`[^`]*`"),
    re.compile(r"\]\([^)]*\)"),
)

SIZE = re.compile(rf"{NUMBER} (?:bytes|KiB)(?![\w-])")
"""In the description of formats, these are parts of a format."""

LIMIT = "a limit, a default or a constant of the code"
PULSAR = "a default or a behaviour of Pulsar or ZooKeeper"
SETUP = "the set-up of a measurement or a test, which is chosen"
GOAL = "a goal of a benchmark"
ARITHMETIC = "arithmetic from numbers beside it"
ADVICE = "a rule of thumb"
EXAMPLE = "an example"
PLAIN = {
    "docs/cluster.md": {
        "one core and 1 GiB of heap": SETUP,
        "16,384 events x 5 columns x 8 bytes = 0.7 MB": ARITHMETIC,
        "10^9 messages with every second one unacked are 125 MB": ARITHMETIC,
        "65,536 values of 16 bytes for each policy: 1 MB": ARITHMETIC,
        "Plan 1 GB per task: 4 cores need 4 to 6 GB of overhead, beside 2 GB of heap": ADVICE,
        "10 % of 10^12 events": EXAMPLE,
        "At 1 KB per subscription and policy, 10^6 subscriptions are 1 GB": EXAMPLE,
    },
    "docs/crash-testing.md": {"writes nothing for 60 s": LIMIT, "everything else every 10 s": LIMIT},
    "docs/decisions/bookkeeper-client.md": {"100 appends of 100 bytes": SETUP},
    "docs/decisions/journal.md": {"at least 64 KiB, by default": LIMIT},
    "docs/decisions/own-log-file.md": {"An append of 150 bytes": SETUP},
    "docs/embedding.md": {"as soon as it has 1 MiB": LIMIT, "session has ended, after 30 s": PULSAR},
    "docs/guides/choose-a-store.md": {"one request has less than 1 MB": PULSAR},
    "docs/guides/record-a-cluster.md": {"at most 100 requests a second": LIMIT},
    "docs/guides/set-limits.md": {"here 4 of 10": EXAMPLE},
    "docs/operations.md": {
        "more than 4 GiB, holes included": LIMIT,
        "this takes about 4 s under traffic": ARITHMETIC,
        "a flush and two writes, which need 65 s": ARITHMETIC,
        "all topics every 30 s": LIMIT,
        "750 topics take 30 s": ARITHMETIC,
        "64 KiB and 4 s to arrive": LIMIT,
        "1 ms in place of 5 s": EXAMPLE,
        "0 of 0 if it would read none": "the text of an output",
    },
    "docs/proposals/issue-19966.md": {"5 MiB by default": PULSAR, "at least 1 KiB": PULSAR},
    "docs/proposals/pip-437.md": {"2^63 - 1 ms": LIMIT},
    "docs/proposals/pip-448.md": {"a bound (1 MiB)": LIMIT},
    "docs/pulsar-record.md": {
        "At 100 requests a second, 100 topics are polled every second, and 3,000 topics every 30 s": ARITHMETIC,
        "at most 20 times a second, and each at least every 30 s": LIMIT,
        "when it has 256 MiB": LIMIT,
        "Acks of the last 100 ms": LIMIT,
    },
    "docs/redelivery.md": {
        "from 1 to 60 s": EXAMPLE,
        "at least 1 % and half a message": LIMIT,
        "5 writes per second, a flush every 10 s": LIMIT,
        "at most 600 kB": LIMIT,
        "more than 24 times": LIMIT,
        "up to 2 MiB of columns": LIMIT,
    },
    "docs/results.md": {"100 messages of 100 bytes": SETUP},
    "docs/traces.md": {
        "16 GiB, decompressed": LIMIT,
        "below 946,684,800 ms": LIMIT,
        "128 times as slow as the fastest": LIMIT,
        "the slowest 2 s behind the fastest": LIMIT,
        "delayed by 1, 3 and 10 s": LIMIT,
        "those between 3 s later": LIMIT,
        "at most 5 ms later": LIMIT,
    },
    "docs/wire-format.md": {"more than 128 times its payload": LIMIT, "the first 200 times": LIMIT},
    "benchmarks/README.md": {
        "at most 1.2 times as long for 10 thousand events, 1.5 times for 10 million, with _ 1 s and 2 s": GOAL,
        "Fills 4 GB": SETUP,
        "at most 2.5 times the CPU seconds": GOAL,
        "one subscription with 90 % of the events at most 1.2 times as long": GOAL,
    },
    "examples/README.md": {"100 times by SIGKILL and 100 times by a power cut": SETUP},
}
"""By page and text: why a figure may be plain text."""


def prose(text: str) -> str:
    """Return a page in one line, without code, figures and links."""
    for pattern in WITHOUT:
        text = pattern.sub(" _ ", text)
    return " ".join(text.split())


def unmarked(page: str, text: str) -> Iterator[str]:
    """Yield the measured-looking figures of a page with their context, except for those with a reason."""
    text = prose(text)
    if page == "docs/wire-format.md":
        text = SIZE.sub("_", text)
    for plain in PLAIN.get(page, ()):
        text = text.replace(plain, "_")
    for found in MEASURED.finditer(text):
        yield f"...{text[max(0, found.start() - 50) : found.end() + 30]}..."


def name_of(page):
    return page.relative_to(figures.ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_states_no_measured_figure_outside_of_marks(page):
    assert not list(unmarked(name_of(page), page.read_text(encoding="utf-8"))), "see benchmarks/figures.py"


def test_every_exception_is_still_needed():
    for page, plain in PLAIN.items():
        text = prose((figures.ROOT / page).read_text(encoding="utf-8"))
        for each in plain:
            assert each in text, f"{page} no longer has {each!r}"
            assert MEASURED.search(each), f"{each!r} of {page} needs no exception"


@pytest.mark.parametrize(
    "text",
    [
        "It takes 3 s.", "It takes 3.5 to 4 ms.", "12 us an ack", "12 µs", "1,200 MB", "10 million bytes", "20 %",
        "| 3 GB |", "(7 ns)", "1.4 times as long", "20 of 20 runs", "2.7 million events a second",
        "5 writes per second", "20%", "1,800 kills", "586 source files", "It takes 3\ns.", "**3 s**",
        "6 core-hours", "4 GB/s", "a 30-minute run",
    ],
)  # fmt: skip
def test_a_figure_outside_of_marks_is_found(text):
    assert list(unmarked("a page", text))


@pytest.mark.parametrize(
    "text",
    [
        "<!--= scale :: a :: s :: .1f -->3<!--/--> s", "```console\n$ run\n3 s\n```", "`3 s`", "[a](b-3-s.md)",
        "| option | default |\n|---|---|\n| a | 3 s |", "version 3", "10 thousand holes", "a quarter", "L3 s", "3:7",
    ],
)  # fmt: skip
def test_other_numbers_are_not_found(text):
    assert not list(unmarked("a page", text))
