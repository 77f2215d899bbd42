"""Stores the results of the days already read: a directory of Parquet files with a manifest.

A state directory has one checkpoint, ``NNNNNN``, named by the number of days it covers. In it ``states`` has a row for
each subscription and ``results`` a row for each estimate. A complete checkpoint is renamed into place, and the previous
one is then deleted; if there are two, the later one counts. A store cannot rename: there the files are in a directory
unique to the run, and the manifest, ``NNNNNN.json`` beside it, is written last and only if it does not exist yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from ackstate.analysis.atomic_write import open_lock, write_atomically
from ackstate.analysis.location import StorePath, remove_tree
from ackstate.analysis.replay.state_fields import VERSION, CheckpointError, Fields, check_version
from ackstate.errors import UnsupportedVersionError
from ackstate.stores.directory_lock import sync_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ackstate.analysis.location import Location
    from ackstate.analysis.replay.policy import Policy

MAGIC = "ackstate redelivery state"
SCHEMA = "states: topic, subscription, state; results: a part as in analysis.redelivery.parts"
DAYS_KEPT = 400
"""Changes to this many of the latest days are detected; the bound keeps the state from growing with the days."""

_MANIFEST = "manifest.json"
# The directory of a run in a store.
_RUN = re.compile("run-[0-9a-f]{32}")
_STORE_MANIFEST = re.compile(r"\d{6,}\.json")
_PARTS = frozenset((_MANIFEST, "states", "results", "logs"))
RESTART = "start again with another --state"
"""The remedy for a state that cannot be continued."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The results after some days.

    Attributes:
        path: Its directory; in a store, that of the run that wrote it.
        policies: The grid, each as `Policy.to_mapping` returns it; None is the recording.
        day_count: The number of days it covers.
        days: The latest of these days: name -> fingerprint, in order.
        begin_ms: Time of the first event of all days.
        end_ms: Time of the last event.
        broker: A `BrokerState` as text.
        files: Path beside the manifest -> SHA-256.
    """

    path: Location
    policies: tuple[Mapping[str, str] | None, ...]
    day_count: int
    days: Mapping[str, str]
    begin_ms: int
    end_ms: int
    broker: str
    files: Mapping[str, str]

    @property
    def last_day(self) -> str:
        """The name of the last day that was read."""
        return list(self.days)[-1]

    @classmethod
    def latest(cls, state: Location, policies: Sequence[Policy | None]) -> Self | None:
        """Return the checkpoint of a state directory, None if there is none.

        Raises:
            CheckpointError: It is damaged, or has other policies.
            UnsupportedVersionError: A newer release wrote it.
            OSError: The directory cannot be read.
        """
        if not state.exists():
            return None
        manifest = latest_manifest(state)
        if manifest is None:
            return None
        checkpoint = cls._read(manifest)
        if list(checkpoint.policies) != settings_of(policies):
            raise CheckpointError(
                f"{state}: it was started with {_grid(checkpoint.policies)}, not {_grid(settings_of(policies))}; "
                f"use the same policies, or {RESTART}"
            )
        return checkpoint

    @classmethod
    def _read(cls, manifest: Location) -> Self:
        checkpoint, beside = cls._decode(manifest), manifest.parent
        for name in sorted({*checkpoint.files, *_parquet_files(checkpoint.path, beside)}):
            file = beside / name
            if not file.is_file() or _file_digest(file) != checkpoint.files.get(name):
                raise CheckpointError(f"{file}: the state is damaged, the file was changed; {RESTART}")
        return checkpoint

    @classmethod
    def _decode(cls, manifest: Location) -> Self:
        path = manifest.parent
        try:
            said = json.loads(manifest.read_text(encoding="utf-8"))
            body, digest = said["body"], said["sha256"]
            if body["magic"] != MAGIC:
                raise ValueError(f"its magic is {body['magic']!r}")
            version = body["version"]
            if type(version) is not int:
                raise ValueError(f"its version must be an integer, got {version!r}")
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"{path}: the state is damaged, {error}; {RESTART}") from None
        check_version(version, f"{path}: the state")
        if digest != body_digest(body):
            raise CheckpointError(f"{manifest}: the state is damaged, its checksum is wrong; {RESTART}")
        try:
            return cls._of(manifest, Fields(body))
        except CheckpointError as error:
            raise CheckpointError(f"{manifest}: {error}; {RESTART}") from None

    @classmethod
    def _of(cls, manifest: Location, fields: Fields) -> Self:
        """Build from the body of a manifest."""
        fields.word("magic", MAGIC)
        fields.integer("version", least=VERSION, most=VERSION)
        fields.word("schema", SCHEMA)
        policies, day_count = tuple(fields.all_texts("policies")), fields.integer("day_count", least=1)
        days = fields.texts("days")
        if not 1 <= len(days) <= min(day_count, DAYS_KEPT):
            fields.refuse("days", f"an object with 1 to {min(day_count, DAYS_KEPT)} days", days)
        begin_ms, end_ms, broker = fields.signed("begin_ms"), fields.signed("end_ms"), fields.text("broker", ".*")
        files = fields.texts("files")
        fields.end()
        path = manifest.parent
        if isinstance(path, StorePath):
            runs = {name.partition("/")[0] for name in files}
            if len(runs) != 1 or not all(map(_RUN.fullmatch, runs)):
                fields.refuse("files", "files of one run", sorted(runs))
            path /= runs.pop()
        return cls(path, policies, day_count, days, begin_ms, end_ms, broker, files)


def settings_of(policies: Sequence[Policy | None]) -> list[Mapping[str, str] | None]:
    """Return a grid as a checkpoint stores it."""
    return [None if policy is None else policy.to_mapping() for policy in policies]


@contextmanager
def claimed(state: Location) -> Iterator[Location]:
    """Create a directory for the next checkpoint; it is deleted at the end unless `keep` has moved it into place.

    In a store only a name is chosen, unique to this run, and `keep` detects if another run was faster.

    Raises:
        CheckpointError: Another process uses the same local state directory.
        OSError: It cannot be written.
    """
    if isinstance(state, StorePath):
        run = state / f"run-{uuid4().hex}"
        try:
            yield run
        except BaseException:
            # A store that did not answer may still have written the manifest.
            with suppress(OSError, CheckpointError, UnsupportedVersionError):
                if all(Checkpoint._decode(each).path != run for each in _manifests(state)):
                    run.rmtree()
            raise
        return
    state.mkdir(parents=True, exist_ok=True)
    unfinished = state / ".unfinished"
    with open_lock(state / ".lock") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"{state}: another run is using it; wait until it ends") from None
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()  # in the block, because Ctrl-C may come right after it
            yield unfinished
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def next_path(unfinished: Location, day_count: int) -> Location:
    """Return the final path of a checkpoint after `day_count` days, given the directory from `claimed`."""
    return unfinished.with_name(_number(day_count)) if isinstance(unfinished, Path) else unfinished


def keep(unfinished: Location, checkpoint: Checkpoint) -> None:
    """Write the manifest into the directory from `claimed`, move it into place, and delete the checkpoint it replaces.

    Args:
        unfinished: The directory, with ``states`` and ``results`` in it.
        checkpoint: The final path and all other fields except the files.

    Raises:
        CheckpointError: In a store, another run has meanwhile written a checkpoint after as many days.
        OSError: The disk is full or failed; the previous checkpoint is intact.
    """
    if isinstance(unfinished, StorePath):
        _keep_in_store(unfinished, checkpoint)
        return
    assert isinstance(checkpoint.path, Path)
    text = _manifest_text(unfinished, unfinished, checkpoint)
    write_atomically(unfinished / _MANIFEST, text)
    files = [unfinished / name for name in _parquet_files(unfinished, unfinished)]
    # Sync the directory entries too: the previous checkpoint is removed next.
    for each in [*files, unfinished / _MANIFEST, *{file.parent for file in files}, unfinished]:
        sync_path(each)
    unfinished.rename(checkpoint.path)
    sync_path(checkpoint.path.parent)
    for each in checkpoint.path.parent.iterdir():
        if _is_checkpoint(each) and each.name < checkpoint.path.name:
            shutil.rmtree(each)


def _keep_in_store(run: StorePath, checkpoint: Checkpoint) -> None:
    state = run.parent
    before = _manifests(state)
    manifest = state / f"{_number(checkpoint.day_count)}.json"
    with TemporaryDirectory() as directory:
        file = Path(directory, manifest.name)
        file.write_text(_manifest_text(run, state, checkpoint), encoding="utf-8")
        try:
            manifest.put_new(file)
        except FileExistsError:
            raise CheckpointError(
                f"{manifest}: another run has written it meanwhile; this run is discarded, repeat it"
            ) from None
    # The checkpoint is stored. Leftovers that cannot be deleted only take space.
    with suppress(OSError, CheckpointError, UnsupportedVersionError):
        for each in before:
            if each.name < manifest.name:
                replaced = Checkpoint._decode(each).path
                each.unlink()
                remove_tree(replaced)


def _manifest_text(directory: Location, beside: Location, checkpoint: Checkpoint) -> str:
    """Return the manifest of a complete directory, with file names relative to ``beside``."""
    digests = {name: _file_digest(beside / name) for name in _parquet_files(directory, beside)}
    fields = {key: value for key, value in asdict(checkpoint).items() if key != "path"}
    body: dict[str, Any] = {"magic": MAGIC, "version": VERSION, "schema": SCHEMA} | fields | {"files": digests}
    return json.dumps({"body": body, "sha256": body_digest(body)}, indent=1)


def latest_manifest(state: Location) -> Location | None:
    """Return the manifest of the latest checkpoint; raise CheckpointError if there are other files."""
    if isinstance(state, StorePath):
        return max(_manifests(state), default=None)
    entries = sorted(each for each in state.iterdir() if not each.name.startswith("."))
    found = [each for each in entries if _is_checkpoint(each)]
    _refuse_strangers(state, [each.name for each in entries if each not in found])
    return found[-1] / _MANIFEST if found else None


def _manifests(state: StorePath) -> list[StorePath]:
    if not state.exists():
        return []
    entries = [each for each in state.iterdir() if not each.name.startswith(".")]
    found = [each for each in entries if _STORE_MANIFEST.fullmatch(each.name) and each.is_file()]
    _refuse_strangers(
        state, sorted(each.name for each in entries if each not in found and not _RUN.fullmatch(each.name))
    )
    return found


def _refuse_strangers(state: Location, names: Sequence[str]) -> None:
    if names:
        raise CheckpointError(f"{state}: not a state directory, it contains {names[0]!r}")


def _number(day_count: int) -> str:
    return f"{day_count:06}"


def _parquet_files(directory: Location, beside: Location) -> list[str]:
    """Return the Parquet files below a directory, by their paths relative to ``beside``."""
    files: list[Any] = sorted(each for each in directory.rglob("*.parquet") if each.name[0] not in "._")
    return [str(each.relative_to(beside)) for each in files]


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is a checkpoint's directory, complete or half removed, and not a link."""
    if not path.name.isdigit() or path.is_symlink() or not path.is_dir():
        return False
    return all(each.name in _PARTS or each.name.startswith(".") for each in path.iterdir())


def _grid(policies: Sequence[Mapping[str, str] | None]) -> str:
    labels = [
        "as recorded" if each is None else " ".join(f"{key}={text}" for key, text in each.items()) or "default"
        for each in policies
    ]
    return "the policies " + ", ".join(labels) if len(labels) > 1 else labels[0]


def body_digest(body: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest's body."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _file_digest(file: Location) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()
