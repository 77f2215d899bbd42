"""Refused state directories and daily traces, each with a line that names the remedy; no Spark."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import pytest

from ackstate.analysis.cli import main
from ackstate.analysis.estimate import checkpoint
from ackstate.analysis.estimate.checkpoint import Checkpoint, claimed, keep, next_path, settings_of
from ackstate.analysis.estimate.daily import days_of, fingerprint, unread
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.state_fields import VERSION, CheckpointError
from ackstate.analysis.trace import parquet
from ackstate.analysis.trace.events import Event, EventKind, TraceError
from ackstate.analysis.trace.recorder import Frame
from ackstate.errors import UnsupportedVersionError

POLICIES = [None, Policy()]


def add_day(directory, name, *, ack=0):
    return parquet.write_trace([Frame("t", "s", [Event(1, EventKind.ACK, 1, ack, ack)])], directory / name)


@pytest.fixture
def directory(tmp_path):
    """Return a directory with three days."""
    for number in range(3):
        add_day(tmp_path / "days", f"day=2026-11-2{number}")
    return tmp_path / "days"


@pytest.fixture
def state(tmp_path, directory):
    """Return a state that has seen two of them."""
    return kept(tmp_path / "state", days_of(directory)[:2])


def kept(state, days):
    with claimed(state) as unfinished:
        for name in ("states", "results"):
            (unfinished / name).mkdir()
            (unfinished / name / "part.parquet").write_bytes(bytes(range(256)))
        seen = {day.name: fingerprint(day) for day in days}
        place = state / f"{len(days):06}"
        keep(unfinished, Checkpoint(place, tuple(settings_of(POLICIES)), len(days), seen, 1, 2, "", {}))
    return state


@contextmanager
def claimed_in_store(state, tmp_path, days, claimed_run=None):
    """Claim a state behind a URL, yield the run's directory there and here, and keep the files that the block
    leaves."""
    with claimed(state) if claimed_run is None else nullcontext(claimed_run) as run:
        here = tmp_path / "store" / "/".join(run.parts)
        for name in ("states", "results"):
            (here / name).mkdir(parents=True)
            (here / name / "part.parquet").write_bytes(bytes(range(256)))
        yield run, here
        seen = {day.name: fingerprint(day) for day in days}
        place = next_path(run, len(days))
        keep(run, Checkpoint(place, tuple(settings_of(POLICIES)), len(days), seen, 1, 2, "", {}))


def plain_names(state):
    return sorted(re.sub("[0-9a-f]{32}", "*", each.name) for each in state.iterdir())


def test_in_a_store_the_manifest_is_the_checkpoint_and_the_one_before_is_deleted(store, tmp_path, directory):
    state, days = store / "state", days_of(directory)
    assert Checkpoint.latest(state, POLICIES) is None
    for count in (2, 3):
        with claimed_in_store(state, tmp_path, days[:count]) as (run, _):
            before = Checkpoint.latest(state, POLICIES)
            assert (before and before.day_count) == (None if count == 2 else 2)
        found = Checkpoint.latest(state, POLICIES)
        assert (found.day_count, found.path) == (count, run)
        assert plain_names(state) == [f"{count:06}.json", "run-*"]


def test_in_a_store_a_run_that_another_one_has_overtaken_is_refused(store, tmp_path, directory):
    state, days = store / "state", days_of(directory)

    def overtaken():
        with claimed_in_store(state, tmp_path, days), claimed_in_store(state, tmp_path, days) as (faster, _):
            runs.append(faster)

    runs = []
    with pytest.raises(CheckpointError, match=r"000003\.json: another run has written it meanwhile"):
        overtaken()
    assert Checkpoint.latest(state, POLICIES).path == runs[0]
    assert plain_names(state) == ["000003.json", "run-*"]


def test_in_a_store_an_error_leaves_what_was_there(store, tmp_path, directory):
    state, days = store / "state", days_of(directory)

    def failed():
        with claimed_in_store(state, tmp_path, days):
            raise LookupError("x")

    with claimed_in_store(state, tmp_path, days[:1]):
        pass
    with pytest.raises(LookupError):
        failed()
    assert plain_names(state) == ["000001.json", "run-*"]
    assert Checkpoint.latest(state, POLICIES).day_count == 1


def test_in_a_store_an_error_after_the_manifest_was_written_leaves_the_checkpoint(store, tmp_path, directory):
    state, days = store / "state", days_of(directory)

    def failed():
        with claimed(state) as run:
            with claimed_in_store(state, tmp_path, days, run):
                pass
            raise TimeoutError("no answer")

    with pytest.raises(TimeoutError):
        failed()
    assert Checkpoint.latest(state, POLICIES).day_count == 3


def test_in_a_store_damage_and_strangers_are_refused(store, tmp_path, directory):
    state = store / "state"
    with claimed_in_store(state, tmp_path, days_of(directory)[:1]) as (run, here):
        pass
    # The remains of a killed run.
    shutil.copytree(here, here.with_name("run-" + "a" * 32))
    assert Checkpoint.latest(state, POLICIES).path == run
    manifest = here.parent / "000001.json"
    good = json.loads(manifest.read_text())
    for files in (
        {},
        {"states/part.parquet": "x"},
        {"run-/x": "x"},
        {"../x": "x"},
        {f"{run.name}/x": "x", "run-b/x": "x"},
    ):
        body = good["body"] | {"files": files}
        manifest.write_text(json.dumps({"body": body, "sha256": checkpoint.body_digest(body)}))
        with pytest.raises(
            CheckpointError, match=r"000001\.json: the state is damaged: files must be files of one run"
        ):
            Checkpoint.latest(state, POLICIES)
    manifest.write_text(json.dumps(good))
    (here / "states" / "another.parquet").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"another\.parquet: the state is damaged"):
        Checkpoint.latest(state, POLICIES)
    (here / "states" / "another.parquet").unlink()
    (here / "states" / "part.parquet").unlink()
    with pytest.raises(CheckpointError, match=r"part\.parquet: the state is damaged"):
        Checkpoint.latest(state, POLICIES)
    (here.parent / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"not a state directory, it contains 'notes\.txt'"):
        Checkpoint.latest(state, POLICIES)


def test_what_was_kept_is_found(directory, state):
    found = Checkpoint.latest(state, POLICIES)
    assert (found.day_count, found.begin_ms, found.end_ms) == (2, 1, 2)
    assert [day.name for day in unread(directory, days_of(directory), found)] == ["day=2026-11-22"]
    assert sorted(each.name for each in state.iterdir()) == [".lock", "000002"]
    assert Checkpoint.latest(state.with_name("nothing"), POLICIES) is None


def test_the_next_replaces_it_and_the_later_of_two_counts(directory, state):
    earlier = state.with_name("earlier")
    shutil.copytree(state / "000002", earlier)
    kept(state, days_of(directory))
    assert sorted(each.name for each in state.iterdir()) == [".lock", "000003"]
    # The process died before it had deleted the one before.
    earlier.rename(state / "000002")
    assert Checkpoint.latest(state, POLICIES).day_count == 3


@pytest.mark.parametrize("what", ["a link to a checkpoint", "a directory", "a file"])
def test_what_is_no_checkpoint_is_neither_read_nor_removed_as_one(tmp_path, directory, state, what):
    other, name = kept(tmp_path / "other", days_of(directory)[:1]) / "000001", state / "000001"
    if what == "a link to a checkpoint":
        name.symlink_to(other)
    elif what == "a directory":
        name.mkdir()
        (name / "one.jpeg").write_bytes(b"keep me")
    else:
        name.write_bytes(b"keep me")
    with pytest.raises(CheckpointError, match="not a state directory, it contains '000001'"):
        Checkpoint.latest(state, POLICIES)
    # It may also appear after the look.
    kept(state, days_of(directory))
    assert sorted(each.name for each in state.iterdir()) == [".lock", "000001", "000003"]
    assert (other / "manifest.json").exists()
    assert what != "a directory" or (name / "one.jpeg").exists()


def test_days_that_were_read_may_be_deleted(directory, state):
    for name in ("day=2026-11-20", "day=2026-11-21"):
        shutil.rmtree(directory / name)
    found = unread(directory, days_of(directory), Checkpoint.latest(state, POLICIES))
    assert [day.name for day in found] == ["day=2026-11-22"]


@pytest.mark.parametrize("file", ["manifest.json", "states/part.parquet", "results/part.parquet"])
def test_every_flipped_byte_of_a_checkpoint_and_a_missing_file_are_noticed(state, file):
    path = state / "000002" / file
    whole = path.read_bytes()
    for at in range(0, len(whole), 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises((CheckpointError, UnsupportedVersionError), match=r"damaged|newer|reads up to"):
            Checkpoint.latest(state, POLICIES)
    for cut in (b"", whole[:-1]):
        path.write_bytes(cut)
        with pytest.raises(CheckpointError, match="damaged"):
            Checkpoint.latest(state, POLICIES)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"damaged.* start again with another --state"):
        Checkpoint.latest(state, POLICIES)


@pytest.mark.parametrize(("field", "value", "said"), [
    ("policies", [[]], "policies must be an object of texts, got []"),
    ("policies", {}, "policies must be a list, got {}"),
    ("day_count", "2", "day_count must be an integer from 1 to"),
    ("days", {}, "days must be an object with 1 to 2 days, got {}"),
    ("begin_ms", 2**70, "begin_ms must be an integer from"),
    ("broker", None, "broker must be a text"),
    ("files", {"states/part.parquet": 5}, "files must be an object of texts"),
    ("more", 5, "it has an unknown field, 'more'"),
])  # fmt: skip
def test_a_manifest_that_is_sealed_and_wrong_is_refused_by_the_name_of_its_field(state, field, value, said):
    path = state / "000002" / "manifest.json"
    body = json.loads(path.read_text())["body"] | {field: value}
    path.write_text(json.dumps({"body": body, "sha256": checkpoint.body_digest(body)}))
    with pytest.raises(CheckpointError) as refused:
        Checkpoint.latest(state, POLICIES)
    assert str(refused.value).startswith(f"{path}: the state is damaged: {said}")
    assert str(refused.value).endswith("; start again with another --state")


def test_a_file_that_the_manifest_does_not_name_is_refused(state):
    stranger = state / "000002" / "states" / "other.parquet"
    stranger.write_bytes(b"PAR1")
    with pytest.raises(CheckpointError, match=r"other\.parquet: the state is damaged, the file was changed"):
        Checkpoint.latest(state, POLICIES)


def test_a_newer_version_is_named(state):
    path = state / "000002" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["body"]["version"] = VERSION + 1
    path.write_text(json.dumps(manifest))
    with pytest.raises(UnsupportedVersionError, match=rf"version {VERSION + 1}; this release reads up to {VERSION}"):
        Checkpoint.latest(state, POLICIES)


def test_other_policies_are_refused(state):
    with pytest.raises(CheckpointError, match=r"started with the policies as recorded, default, not as recorded; use"):
        Checkpoint.latest(state, [None])
    with pytest.raises(
        CheckpointError, match=r"not the policies as recorded, flush_interval_ms=5; use the same policies, or"
    ):
        Checkpoint.latest(state, [None, Policy.from_mapping({"flush_interval_ms": 5})])


def test_an_older_version_is_refused_and_left_alone(state):
    path = state / "000002" / "manifest.json"
    path.write_text(path.read_text().replace(f'"version": {VERSION}', f'"version": {VERSION - 1}'))
    before = path.read_bytes()
    said = rf"state has version {VERSION - 1}, which only older .* read all days again, with another"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint.latest(state, POLICIES)
    assert path.read_bytes() == before


def test_a_directory_of_something_else_is_refused(directory):
    with pytest.raises(CheckpointError, match="not a state directory, it contains 'day=2026-11-20'"):
        Checkpoint.latest(directory, POLICIES)


def test_two_runs_at_once_are_refused(state):
    with claimed(state), pytest.raises(CheckpointError, match="another run is using it"), claimed(state):
        pass
    with claimed(state):
        assert Checkpoint.latest(state, POLICIES).day_count == 2


def test_a_day_that_changed_is_named(directory, state):
    found = Checkpoint.latest(state, POLICIES)
    shutil.rmtree(directory / "day=2026-11-21")
    add_day(directory, "day=2026-11-21", ack=7)
    with pytest.raises(CheckpointError, match=r"day=2026-11-21: it has changed since it was read; restore"):
        unread(directory, days_of(directory), found)


def test_a_day_that_came_late_is_named(directory, state):
    add_day(directory, "day=2026-11-19")
    with pytest.raises(CheckpointError, match=r"day=2026-11-19: it was added after day=2026-11-21 was read"):
        unread(directory, days_of(directory), Checkpoint.latest(state, POLICIES))


def test_a_missing_day_is_named_and_an_empty_one_is_none(directory, state):
    add_day(directory, "day=2026-11-24")
    with pytest.raises(TraceError, match=r"the day 2026-11-23 is missing between day=2026-11-22 and day=2026-11-24"):
        days_of(directory)
    (directory / "day=2026-11-23").mkdir()
    assert len(days_of(directory)) == 5
    # Those that were read may be gone, the next one may not.
    for name in ("day=2026-11-20", "day=2026-11-21", "day=2026-11-22"):
        shutil.rmtree(directory / name)
    with pytest.raises(TraceError, match="2026-11-22 is missing between day=2026-11-21 and day=2026-11-23"):
        unread(directory, days_of(directory), Checkpoint.latest(state, POLICIES))


def test_names_without_dates_are_in_order(tmp_path):
    for name in ("a", "b", "d"):
        add_day(tmp_path, name)
    (tmp_path / "_notes").write_text("")
    assert [day.name for day in days_of(tmp_path)] == ["a", "b", "d"]


def refused(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert not said.out
    (line,) = said.err.splitlines()
    return line


def test_the_command_refuses_before_spark_starts(directory, state, tmp_path, capsys, monkeypatch):
    def start(*_):
        raise AssertionError("started")

    monkeypatch.setattr("ackstate.analysis.spark.session._session", start)
    words = ["redelivery", directory, "--state"]
    assert "it was started with the policies as recorded, default, not as recorded" in refused([*words, state], capsys)
    impossible = ["--policy", "ledger_writable=false", "--policy", "metadata_bytes_max=1"]
    assert "not even an empty cursor can be written" in refused([*words, tmp_path / "new", *impossible], capsys)
    lost = ["--report", tmp_path / "report.html", "--calibration", tmp_path / "lost.json"]
    assert "lost.json" in refused([*words, tmp_path / "new", *lost], capsys)
    assert not (tmp_path / "new").exists()


def test_a_process_that_is_killed_leaves_the_state_and_its_lock_is_free(state):
    code = "import os, sys, pathlib; from ackstate.analysis.estimate.checkpoint import claimed\n"
    code += "with claimed(pathlib.Path(sys.argv[1])) as unfinished:\n"
    code += "    (unfinished / 'states').mkdir(); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-P", "-c", code, state], check=False, env=os.environ)
    assert done.returncode == -9
    assert (state / ".unfinished" / "states").is_dir()
    with claimed(state) as unfinished:
        assert not list(unfinished.iterdir())
    assert Checkpoint.latest(state, POLICIES).day_count == 2
