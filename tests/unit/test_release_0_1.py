"""Stores, a recording, a trace and a daily state of release 0.1.0 give the answers that this release gave.

`tests/golden/release-0.1.tar.gz` was written by the code and the commands of release 0.1.0, and never changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from ackstate import Position
from ackstate.cursor import FileStore, ManagedCursor, MessageLog, SqliteStore
from command_line import assert_one_line, run, status_of
from forked import in_child

GOLDEN = Path(__file__).parents[1] / "golden" / "release-0.1.tar.gz"
POLICY = ("--policy", "flush_interval_ms=1500", "--policy", "range_count_max=4", "--engine", "local", "--json")
STORES = {"sqlite": SqliteStore, "file": FileStore}
NOW_MS = 1_700_000_100_000


@pytest.fixture
def release(tmp_path, monkeypatch):
    """The files of the release, in the current directory."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_its_golden_files_have_not_changed():
    expected = dict(reversed(line.split()) for line in GOLDEN.with_name("release-0.1.sha256").read_text().splitlines())
    assert len(expected) == 28
    found = {name: hashlib.sha256(GOLDEN.with_name(name).read_bytes()).hexdigest() for name in expected}
    assert found == expected


def of_release(name):
    return json.loads(Path(name).read_text())


def answer(capsys, *words):
    done = run(capsys, *words)
    assert done.status == 0, done.err
    return json.loads(done.out)


def assert_has(found, expected):
    """A release may add members to objects, and change none."""
    if isinstance(expected, dict):
        for name, value in expected.items():
            assert_has(found[name], value)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_has(one, other)
    else:
        assert found == expected


def digests(directory):
    return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", STORES)
def test_a_store_shows_what_it_showed(release, capsys, kind):
    expected = of_release(f"inspect-{kind}.json")["cursors"]
    assert_has(answer(capsys, "inspect", kind, "--json")["cursors"], expected)


@pytest.mark.parametrize("kind", STORES)
def test_a_store_is_opened_and_continued(release, kind):
    expected = of_release("expected.json")
    shown = {each["subscription"]: each for each in of_release(f"inspect-{kind}.json")["cursors"]}
    store = STORES[kind](Path(kind))
    log = MessageLog.open(store, topic=expected["topic"])
    positions = list(map(Position.parse, expected["messages"]))
    messages = log.read(positions)
    found = [[each.publish_time_ms, each.deliver_at_ms, each.payload.decode(), each.key and each.key.decode()]
             for each in messages]  # fmt: skip
    assert found == list(expected["messages"].values())
    for name, state in shown.items():
        cursor = ManagedCursor.open(
            store, topic=expected["topic"], subscription=name, ledgers=log.ledgers, now_ms=NOW_MS
        )
        assert str(cursor.mark_delete_position) == state["mark_delete"]
        assert cursor.deleted.range_count == state["range_count"]
        receipt = cursor.ack(positions[-1], now_ms=NOW_MS)
        cursor.persist(now_ms=NOW_MS)
        assert cursor.durable(receipt)
    store.close()


def test_a_recording_and_a_trace_have_the_same_events(release, capsys):
    expected = of_release("trace-check.json")
    found = answer(capsys, "trace", "check", expected["trace"], "--json")
    assert found == expected | {"dropped_events": 0}
    assert run(capsys, "trace", "recording", "converted").status == 0
    names = ("events", "chunks", "kinds", "first_ts_ms", "last_ts_ms")
    converted = answer(capsys, "trace", "check", "converted", "--json")
    assert [converted[name] for name in names] == [expected[name] for name in names]


def test_a_migrated_trace_has_the_same_events(release, capsys):
    expected = of_release("trace-check.json")
    trace = expected["trace"]
    before = digests(release)
    assert "version 2" in run(capsys, "migrate", trace, "--dry-run").out
    assert digests(release) == before
    assert run(capsys, "migrate", trace, "new").status == 0
    found = answer(capsys, "trace", "check", "new", "--json")
    for name in ("events", "kinds", "topics", "subscriptions", "first_ts_ms", "last_ts_ms"):
        assert found[name] == expected[name]
    assert digests(release).items() >= before.items()
    assert answer(capsys, "migrate", "new", "--json")["is_needed"] is False


def test_a_migrated_state_gives_the_same_estimates(release, capsys):
    expected = of_release("redelivery.json")["policies"]
    before = digests(release)
    assert "version 5" in run(capsys, "redelivery", "days", "--state", "state", *POLICY).err
    dry = answer(capsys, "migrate", "state", "--traces", "days", "--dry-run", "--json")
    assert (dry["version"], dry["current"], dry["is_needed"], dry["target"]) == (5, 7, True, None)
    assert digests(release).items() >= before.items()
    assert run(capsys, "migrate", "state", "new", "--traces", "days").status == 0
    continued = answer(capsys, "redelivery", "days", "--state", "new", *POLICY)
    assert continued["days_read"] == []
    assert_has(continued["policies"], expected)
    assert digests(release).items() >= before.items()


def test_a_migration_that_dies_leaves_a_complete_target_or_none(release, capsys):
    trace = of_release("trace-check.json")["trace"]
    before = digests(release)
    for words in (("migrate", trace, "new"), ("migrate", "state", "new", "--traces", "days")):
        deaths = 0
        while died_before_sync(words, deaths):
            deaths += 1
            if run(capsys, "migrate", "new", "--dry-run").status == 0:
                break  # It died after the target had appeared, complete.
        assert deaths >= 2
        assert digests(release).items() >= before.items()
        assert answer(capsys, "migrate", "new", "--json")["is_needed"] is False
        Path("new").rename(words[1].replace("/", "-") + "-new")


def died_before_sync(words, number):
    """Run a command in a child that dies before its n-th sync; return whether it died."""
    from ackstate.analysis.estimate import checkpoint
    from ackstate.analysis.trace import rewrite

    def child():
        left = iter(range(number))

        def sync(path):
            if next(left, None) is None:
                os._exit(9)

        checkpoint.sync_path = rewrite.sync_path = sync
        return status_of(*words)

    return in_child(child) != "0"


def test_a_migration_refuses_what_it_cannot_migrate(release, capsys):
    Path("file.txt").write_text("text")
    Path("empty").mkdir()
    trace = of_release("trace-check.json")["trace"]
    shutil.copytree("state", "newer")
    (manifest,) = Path("newer").rglob("manifest.json")
    said = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({"body": said["body"] | {"version": 8}, "sha256": said["sha256"]}))
    shutil.copytree("state", "damaged")
    (manifest,) = Path("damaged").rglob("manifest.json")
    manifest.write_text(json.dumps({"body": said["body"] | {"day_count": 2}, "sha256": said["sha256"]}))
    shutil.copytree("days", "changed")
    assert run(capsys, "trace", "recording", f"changed/{Path(trace).name}").status == 0
    Path("other/day=2023-11-15").mkdir(parents=True)
    before = digests(release)
    for words, said in {
        ("nothing", "new"): "nothing: no such file",
        ("file.txt", "new"): "neither a daily state nor a trace",
        ("empty", "new"): "neither a daily state nor a trace",
        (trace,): "TARGET is missing",
        (trace, "file.txt"): "file.txt: it exists",
        (trace, "recording"): "recording: it exists",
        ("newer", "new"): "version 8; this release reads up to 7",
        ("damaged", "new", "--traces", "days"): "checksum is wrong",
        ("state", "new"): "name them with --traces",
        ("state", "new", "--traces", "empty"): "no daily traces",
        ("state", "new", "--traces", "other"): "the day day=2023-11-14, which is missing",
        ("state", "new", "--traces", "changed"): "it has changed since the state read it",
        ("state", "--dry-run", "--traces", "changed"): "it has changed since the state read it",
    }.items():
        assert_one_line(run(capsys, "migrate", *words), said)
    assert digests(release) == before
    assert not Path("new").exists()


def test_a_store_and_a_recording_need_no_migration(release, capsys):
    for source in ("sqlite", "file", "recording"):
        assert "nothing to do" in run(capsys, "migrate", source).out
