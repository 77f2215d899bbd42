"""The records that Pulsar's own cursor wrote in the benchmark have the state of our cursor after the same acks."""

from __future__ import annotations

import json
from base64 import b64decode

import pytest

from ackstate import LedgerMap, Position
from ackstate.wire.pulsar import decode_position_info
from benchmarks.measurement import RESULTS
from benchmarks.pulsar import workloads
from benchmarks.pulsar.bench_pulsar import CHECKED_ACKS, CHECKED_HOLES, FORMS, NAME
from benchmarks.pulsar.ours import Ours
from benchmarks.pulsar.release import VERSIONS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("version", VERSIONS)
def test_pulsars_record_has_the_state_of_our_cursor(tmp_path, version, form):
    rows = workloads.every_other(CHECKED_HOLES + CHECKED_ACKS)
    log = LedgerMap.from_counts({workloads.FIRST_LEDGER: workloads.LEDGER_SIZE, workloads.FIRST_LEDGER + 1: 1})
    record = json.loads((RESULTS / f"{NAME}.json").read_text())["records"][f"Pulsar {version}"][form]
    info = decode_position_info(b64decode(record), log)
    file = workloads.written(rows, tmp_path / "acks")
    ours = Ours().run("ack", file=file, holes=CHECKED_HOLES, acks=CHECKED_ACKS, list=1, persist=1)
    assert info.position == Position(ours["mark_delete_ledger"], ours["mark_delete_entry"])
    assert (info.deleted.range_count, len(info.deleted)) == (ours["ranges"], ours["acked"])
    assert [run.first for run in info.deleted.runs()] == sorted(rows[:, 1].tolist())
