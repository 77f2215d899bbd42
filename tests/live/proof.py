"""Compares a real broker with ackstate, and writes docs/pulsar-live.md and the counts in docs/pulsar-record.md.

python -P -m live.proof PAGE [SECTION ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

from live.cluster import Cluster
from live.handovers import Handovers
from live.inspection import Inspection
from live.java_process import JARS
from live.kills import Kills
from live.opening import JARS_VARIABLE, OpensOurs
from live.page import write_counts, write_page
from live.standalone import StandaloneMetadata
from live.transfer import Transfer

_RECORD_PAGE = Path("docs", "pulsar-record.md")
_PARTS = {
    "inspection": Inspection,
    "transfer": Transfer,
    "opening": OpensOurs,
    "handovers": Handovers,
    "standalone": StandaloneMetadata,
    "kills": Kills,
}


def main(page, names):
    """Run the parts on one cluster, write the page, and return the exit status."""
    os.environ[JARS_VARIABLE] = str(JARS)
    sections = []
    with tempfile.TemporaryDirectory(prefix="ackstate-live-") as directory:
        cluster = Cluster(Path(directory), bookie_count=3)
        try:
            cluster.start()
            for name in names or _PARTS:
                begun_s = time.monotonic()
                sections += _PARTS[name](cluster).run()
                print(f"{name}: {time.monotonic() - begun_s:.0f} s", flush=True)
        finally:
            cluster.stop()
    for section in sections:
        if section.title == Kills.TITLE:
            write_counts(_RECORD_PAGE, section)
    # The kills have a page of their own, and take longer than all others.
    if _PARTS.keys() - {"kills"} <= set(names or _PARTS):
        others = [section for section in sections if section.title != Kills.TITLE]
        write_page(page, others, release=(JARS / ".stamp").read_text().strip())
    for section in sections:
        print(section.title, section.counts, len(section.wrong), "wrong", flush=True)
    return 1 if any(section.wrong for section in sections) else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
