"""Writes docs/pulsar-live.md, and the counts in docs/pulsar-record.md, from comparisons with real brokers.

python -P -m live.page RESULT
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path

from ackstate.analysis.atomic_write import write_atomically
from live.findings import Section

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "live.json"
PAGE = ROOT / "docs" / "pulsar-live.md"
RECORD_PAGE = ROOT / "docs" / "pulsar-record.md"
_KILLS = "kills"
"""The part of which the other page has the counts; it takes longer than all others."""

_HEAD = """# A real Pulsar broker and ackstate

`make live` starts a real Apache Pulsar {release} cluster from the jars of Maven Central: a ZooKeeper server, three
bookies and a broker, each in a process of its own on the loopback address. It compares the broker with this library,
and writes this page. It needs Maven, Java 17, and some minutes. It ends every process that it starts.

{compared:,} comparisons, {agreed:,} of which agree.

| section | comparisons | agree |
|---|---:|---:|
{table}

The commands are described in [operations](operations.md#live-cursors-of-a-pulsar-cluster), the layout in
[wire format](wire-format.md#pulsars-layout).
"""

_BEGIN, _END = "<!-- counts of make live -->", "<!-- end of the counts -->"

_DIFFERENCES = """
## Behaviour of Pulsar {release} to know

- **Partly acked batches.** A cursor that is closed writes them to its record in the metadata store, and the next broker
  does not read them from there: a batch of which one message is unacked is redelivered whole. From a cursor ledger it
  reads them.
- **A lone ack of a part of a batch** is written by the broker only when it closes the cursor, or with another ack.
- **The end of a ledger.** If the mark-delete position is the last entry of a ledger, the broker moves it to the
  position before the first entry of the next one when it opens the topic. `ManagedCursor` does so, too.
- **Loading a topic does not change a cursor's record.** The broker takes a cursor ledger over by recovery, so a former
  owner cannot append to it. A former owner whose state is in the record is kept out by the topic's ownership alone,
  until the broker writes the record. Write only while you hold the topic (`hold_topic`).
- **`topics unload` does not give a topic up**: its bundle stays the broker's. `namespaces unload` does.
- **A stopped broker** gives its bundles up at once, a killed one when its session ends
  (`metadataStoreSessionTimeoutMillis`).
"""


def render(result):
    """Return the page of a result, as `live.proof` writes it."""
    sections = [
        Section(**section) for name, part in result["parts"].items() if name != _KILLS for section in part
    ]  # fmt: skip
    rows = [(section.title, *_sum(section)) for section in sections]
    text = _HEAD.format(
        release=result["release"],
        compared=sum(row[2] for row in rows),
        agreed=sum(row[1] for row in rows),
        table="\n".join(f"| {title} | {total:,} | {good:,} |" for title, good, total in rows),
    )
    return text + "".join(map(_section, sections)) + _DIFFERENCES.format(release=result["release"])


def with_counts(page, result):
    """Return a page that is otherwise written by hand with the counts of the kills of a result."""
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"the page must have {_BEGIN} and {_END}")
    (section,) = result["parts"][_KILLS]
    text = "\n".join(_table(Section(**section)))
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main(file):
    """Write both pages."""
    result = json.loads(Path(file).read_text(encoding="utf-8"))
    write_atomically(PAGE, render(result))
    write_atomically(RECORD_PAGE, with_counts(RECORD_PAGE.read_text(encoding="utf-8"), result))


def _sum(section):
    return tuple(sum(numbers) for numbers in zip(*section.counts.values(), strict=True))


def _section(section):
    return "\n".join([f"\n## {section.title}\n", *_wrapped(section.says), "", *_table(section)]) + "\n"


def _table(section):
    lines = ["| compared | agree |", "|---|---:|"]
    lines += [f"| {what} | {good:,} of {total:,} |" for what, (good, total) in section.counts.items()]
    lines += [f"\n{note}" for note in section.notes]
    lines += ["", "Differences:", "", *(f"- {_escaped(each)}" for each in section.wrong)] if section.wrong else []
    return lines


def _wrapped(text):
    return textwrap.wrap(text, 120, break_long_words=False, break_on_hyphens=False)


def _escaped(text):
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main(sys.argv[1])
