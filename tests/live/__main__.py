"""Compares a real broker with ackstate, and writes the result as JSON.

The file is written after each part, so that a run that is cut off leaves the parts that it has finished. Parts that are
not run keep their earlier result.

python -P -m live RESULT [PART ...]

`ACKSTATE_PULSAR_JARS` names a directory with the jars of another release, as Maven copies them from .ci/pom.xml
(dependency:copy-dependencies with --activate-profiles pulsar -Dpulsar=VERSION), `KILLS` how often
a policy is tried, and `SEED` what the clients do.
"""

import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from ackstate.analysis.location import write_atomically
from live.cluster import Cluster
from live.handovers import Handovers
from live.inspection import Inspection
from live.java_process import JARS, release
from live.kills import BrokerKills
from live.opening import JARS_VARIABLE, OpensOurs
from live.snapshots import Snapshots
from live.transfer import Transfer

PARTS = {
    "inspection": Inspection,
    "transfer": Transfer,
    "opening": OpensOurs,
    "handovers": Handovers,
    "kills": BrokerKills,
    "snapshots": Snapshots,
}


def main(file, names):
    """Run the parts on one cluster, write the result, and return the exit status."""
    os.environ[JARS_VARIABLE] = str(JARS)
    sections = []
    with tempfile.TemporaryDirectory(prefix="ackstate-live-") as directory:
        cluster = Cluster(Path(directory), bookie_count=3)
        try:
            cluster.start()
            for name in names or PARTS:
                begun_s = time.monotonic()
                found = PARTS[name](cluster).run()
                sections += found
                write_atomically(file, json.dumps(_updated(file, name, found), indent=1) + "\n")
                print(f"{name}: {time.monotonic() - begun_s:.0f} s", flush=True)
        finally:
            cluster.stop()
    for section in sections:
        print(section.title, section.counts, len(section.wrong), "wrong", flush=True)
    return 1 if any(section.wrong for section in sections) else 0


def _updated(file, name, sections):
    """Return the result in a file, if there is one, with the sections of a part replaced."""
    parts = json.loads(file.read_text(encoding="utf-8"))["parts"] if file.exists() else {}
    parts[name] = [asdict(section) for section in sections]
    ordered = {each: parts[each] for each in PARTS if each in parts}
    return {"release": release(), "parts": ordered}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
