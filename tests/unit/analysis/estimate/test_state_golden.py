"""States that this version of the format wrote are read, continued, and written again with the same bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ackstate.analysis.estimate.daily_state import decoded, decoded_broker, encoded, encoded_broker
from ackstate.analysis.replay.state_fields import VERSION
from ackstate.errors import UnsupportedVersionError
from golden_states import CUT_MS, GRID, broker, golden, parts, policies_of, run

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", GRID)
def test_a_golden_state_is_what_this_release_writes_and_is_continued(name):
    early, late = parts(name)
    state, _ = run(name, early, first_ms=1_000)
    assert state == golden(name)
    assert encoded(decoded(state, policies_of(name))) == state
    further, rows = run(name, late, state=golden(name), first_ms=CUT_MS)
    again, same = run(name, late, state=encoded(decoded(golden(name), policies_of(name))), first_ms=CUT_MS)
    assert (further, str(rows)) == (again, str(same))


def test_the_golden_states_have_every_kind_of_replay_and_a_shut_gate():
    text = "".join(map(golden, GRID))
    for kind in ("counted", "with a cursor", "gated"):
        assert f'"kind":"{kind}"' in text
    assert re.search(r'"released_at":\d', golden("shut"))
    assert '"waiting":{"ts_ms":[]' not in golden("shut")


def test_the_golden_state_of_the_broker_is_read_and_written_with_the_same_bytes():
    assert encoded_broker(decoded_broker(golden("broker"), 2)) == golden("broker") == encoded_broker(broker())


def test_a_state_of_a_newer_version_is_refused():
    newer = golden("counted").replace(f'"version":{VERSION}', f'"version":{VERSION + 1}')
    with pytest.raises(UnsupportedVersionError, match=rf"version {VERSION + 1}; this release reads up to {VERSION}$"):
        decoded(newer, policies_of("counted"))


CHECK_RENAMED = """
import sys

import ackstate
from ackstate.analysis.estimate.daily_state import decoded, encoded, encoded_broker
from golden_states import GRID, broker, golden, parts, policies_of, run

assert ackstate.__file__.startswith(sys.path[0]), ackstate.__file__
for name in GRID:
    assert encoded(decoded(golden(name), policies_of(name))) == golden(name), name
    assert run(name, parts(name)[0], first_ms=1_000)[0] == golden(name), name
assert encoded_broker(broker()) == golden("broker")
"""


def test_another_name_for_every_private_field_changes_no_format(tmp_path):
    renamed = copy_with_other_names(tmp_path / "ackstate")
    assert {"_flush_at", "_last_persist_ms", "_paid_at", "_waiting", "_acked_count", "_pointed_at"} <= renamed
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-P", "-c", CHECK_RENAMED], check=False, capture_output=True, text=True, cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def copy_with_other_names(place):
    """Copy the package with another name for every private field that is assigned somewhere; return the old names."""
    shutil.copytree(ROOT / "ackstate", place, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    texts = {file: file.read_text(encoding="utf-8") for file in place.rglob("*.py") if "_pb2" not in file.name}
    together = "\n".join(texts.values())
    fields = set(re.findall(r"\.(_[a-z]\w*)(?:: [^=\n]+)? = ", together))
    # A method may have the name of a field of another class.
    fields -= set(re.findall(r"def (_\w+)", together))
    name = re.compile(rf"(?<=[.\"'])({'|'.join(sorted(fields))})\b")
    for file, text in texts.items():
        file.write_text(name.sub(r"\1_by_another_name", text), encoding="utf-8")
    return fields
