"""`ackstate redelivery DIR --state STATE`: its report, an interrupt, a full disk."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
from html import escape

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ackstate.analysis.report.contents import count_text
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.recorder import Frame
from command_line import ENTRY, assert_one_line, run
from waiting import wait_until

KEY = ("persistent://p/n/t", "orders")
WORDS = ("--policy", "flush_interval_ms=700", "--policy", "range_count_max=2")


def write_days(directory, *, count):
    """Write days of ten seconds; on each every third message stays unacked for half of it, and a process dies."""
    for number in range(count):
        begin_ms = 1_700_000_000_000 + number * 10_000
        entries = range(number * 20, number * 20 + 20)
        acks = [Event(begin_ms + 200 * (entry - entries[0]) + 5_000 * (entry % 3 == 0), EventKind.ACK, 1, entry, entry)
                for entry in entries]  # fmt: skip
        died = [Event(begin_ms + 9_500, EventKind.CRASH), Event(begin_ms + 9_600, EventKind.RECOVER)]
        events = sorted([*acks, *died], key=lambda event: event.ts_ms)
        published = Frame(KEY[0], "", [Event(begin_ms, EventKind.PUBLISH, 1, entries[0], entries[-1])])
        parquet.write_trace([published, Frame(*KEY, events)], directory / f"day=2026-11-2{number}")


@pytest.mark.slow
def test_the_report_of_a_new_day_is_that_of_all_days(tmp_path, capsys):
    write_days(tmp_path / "all", count=2)
    report = tmp_path / "report.html"
    for number in range(2):
        shutil.rmtree(tmp_path / "days", ignore_errors=True)
        shutil.copytree(tmp_path / "all" / f"day=2026-11-2{number}", tmp_path / "days" / f"day=2026-11-2{number}")
        words = ["redelivery", tmp_path / "days", "--state", tmp_path / "state", *WORDS, "--engine", "local"]
        told = json.loads(run(capsys, *words, "--report", report, "--json").out)
    page = report.read_text(encoding="utf-8")
    total = next(each for each in told["policies"][0]["estimates"] if each["scope"] == "total")
    assert escape(f"{count_text(total['expected'])} acked messages would be redelivered") in page
    assert "Processes died at 2 moments" in page
    # Both days are plotted: the first millisecond of one, the last of the other.
    assert "20 s from 2023-11-14 22:13:20.000 UTC" in page


def reseal(checkpoint, change):
    """Change the text of every state of a checkpoint, and give it the right checksums."""
    (file,) = (checkpoint / "states").glob("*.parquet")
    table = pq.read_table(file)
    states = [change(text) for text in table["state"].to_pylist()]
    pq.write_table(table.set_column(2, "state", pa.array(states)), file)
    file.with_name(f".{file.name}.crc").unlink(missing_ok=True)
    manifest = checkpoint / "manifest.json"
    body = json.loads(manifest.read_text())["body"]
    body["files"][f"states/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    manifest.write_text(json.dumps({"body": body, "sha256": digest}))


@pytest.mark.spark
@pytest.mark.slow
def test_a_state_with_a_wrong_field_is_one_line_that_names_file_subscription_and_field(tmp_path, capsys):
    write_days(tmp_path / "days", count=1)
    state = tmp_path / "state"
    words = ["redelivery", tmp_path / "days", "--state", state, *WORDS[:2], "--format", "json", "--out"]
    assert run(capsys, *words, tmp_path / "out.json", "--engine", "local").status == 0
    reseal(state / "000001", lambda text: text.replace('"next_entry":', '"next_entry":-'))
    write_days(tmp_path / "days", count=2)
    field = "replay.groups[0].mark_delete.next_entry must be an integer from 0"
    assert_one_line(
        run(capsys, *words, tmp_path / "out.json"), "start again with another --state",
        f"{state}/000001/states: subscription 'orders' of persistent://p/n/t: the state is damaged: {field}",
    )  # fmt: skip
    assert [each.name for each in sorted(state.iterdir())] == [".lock", "000001"]


@pytest.mark.spark
@pytest.mark.soak
def test_an_interrupted_run_ends_in_a_line_and_leaves_no_state(tmp_path):
    write_days(tmp_path / "days", count=1)
    command = [*ENTRY, "redelivery", str(tmp_path / "days"), "--state", str(tmp_path / "state")]
    command += ["--format", "json", "--out", str(tmp_path / "out.json")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as live:
        wait_until((tmp_path / "state" / ".unfinished").is_dir)
        os.killpg(live.pid, signal.SIGINT)
        out, err = live.communicate(timeout=60)
    assert (live.returncode, out, err) == (130, "", "ackstate: interrupted\n")
    assert [each.name for each in (tmp_path / "state").iterdir()] == [".lock"]
    assert not (tmp_path / "out.json").exists()


@pytest.mark.root
@pytest.mark.spark
@pytest.mark.slow
def test_a_state_on_a_full_disk_is_one_line_and_none_is_left(tmp_path, capsys):
    write_days(tmp_path / "days", count=1)
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", disk], check=False).returncode
    ):
        pytest.skip("only root mounts file systems")
    try:
        words = ["redelivery", tmp_path / "days", "--state", disk / "state", "--format", "json", "--out"]
        assert_one_line(run(capsys, *words, tmp_path / "out.json"), disk, "the disk is full")
        assert [each.name for each in (disk / "state").iterdir()] == [".lock"]
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
    assert not (tmp_path / "out.json").exists()


@pytest.mark.spark
@pytest.mark.slow
def test_a_damaged_page_is_one_line_in_our_words_and_leaves_no_state(tmp_path, capsys):
    write_days(tmp_path / "days", count=1)
    (file,) = tmp_path.glob("days/*/part-00000.parquet")
    data = bytearray(file.read_bytes())
    row_group = pq.ParquetFile(file).metadata.row_group(0)
    columns = [row_group.column(number) for number in range(row_group.num_columns)]
    # One that is read by Spark alone: the last byte of its only page.
    (column,) = (each for each in columns if each.path_in_schema.startswith("first_entry"))
    data[column.data_page_offset + column.total_compressed_size - 1] ^= 1
    file.write_bytes(data)
    outcome = run(capsys, "redelivery", tmp_path / "days", "--state", tmp_path / "state")
    assert_one_line(outcome, f"ackstate: {file}: not a readable Parquet file, ")
    assert "file:" not in outcome.err
    assert not list((tmp_path / "state").glob("0*"))
