"""The files of a Parquet trace: each states whether it is the only one, and a manifest lists those of several.

``_manifest.json`` is an object with `magic`, `version` and `files`: name -> `bytes`, the file's size, and
`footer_sha256`, the SHA-256 of its Parquet footer, which lists the size and place of every page. Spark ignores the
manifest because of its name.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ackstate.analysis.atomic_write import write_atomically
from ackstate.analysis.trace.events import TraceError
from ackstate.errors import UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ackstate.analysis.location import Location

MANIFEST = "_manifest.json"
FILES_KEY = b"ackstate.trace.files"
"""Key-value metadata of a trace's Parquet file: `ONLY` or `SEVERAL`."""
ONLY, SEVERAL = b"1", b"several"
_MAGIC = "ackstate trace"
_VERSION = 1
_BYTES_MAX = 256 << 20
_FOOTER_END = 8  # The length of a Parquet file's footer, and its magic.
_AGAIN = "copy the whole trace again, or create it again"


def footer(file: Location) -> tuple[int, bytes]:
    """Return the size of a Parquet file, and its footer, unchecked."""
    with file.open("rb") as source:
        size = source.seek(0, 2)
        source.seek(max(0, size - _FOOTER_END))
        length = int.from_bytes(source.read(4), "little")
        source.seek(max(0, size - _FOOTER_END - length))
        return size, source.read()


def write_manifest(directory: Location, names: Iterable[str] | None = None) -> None:
    """List the Parquet files of a trace that is complete.

    Raises:
        OSError: The disk is full or failed.
    """
    if names is None:
        names = [file.name for file in directory.glob("*.parquet")]
    files = {name: _entry(directory / name) for name in sorted(names)}
    write_atomically(directory / MANIFEST, json.dumps({"magic": _MAGIC, "version": _VERSION, "files": files}, indent=1))


def listed_names(directory: Location) -> frozenset[str] | None:
    """Return the files that a manifest lists; None without one.

    Raises:
        TraceError: It is damaged.
        UnsupportedVersionError: It has another version.
        OSError: It cannot be read.
    """
    manifest = directory / MANIFEST
    return frozenset(_read(manifest)) if manifest.exists() else None


def check_names(path: Location, files: Sequence[Location]) -> Mapping[str, Mapping[str, Any]] | None:
    """Check that a trace has the files that its manifest lists, and return the manifest; None without one.

    Raises:
        TraceError: A file is missing, or does not belong to the trace; or the manifest is damaged.
        UnsupportedVersionError: A newer release wrote the manifest.
    """
    if not path.is_dir() or not (path / MANIFEST).exists():
        return None
    listed = _read(path / MANIFEST)
    names = [file.name for file in files]
    if missing := sorted(listed.keys() - set(names)):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise TraceError(f"{path}: {missing[0]}{more} of its {len(listed)} files is missing: {_AGAIN}")
    if strangers := sorted(set(names) - listed.keys()):
        raise TraceError(f"{path}: {strangers[0]} is not a file of this trace, {MANIFEST} does not list it: remove it")
    return listed


def check_files(
    path: Location, stated: Mapping[Location, bytes | None], listed: Mapping[str, Mapping[str, Any]] | None
) -> None:
    """Check that a trace is complete, and that its files were written together.

    Raises:
        TraceError: A file is missing, or belongs to another trace.
    """
    if listed is not None:
        for file in stated:
            if listed[file.name] != _entry(file):
                raise TraceError(f"{file}: the file differs from the one that {MANIFEST} lists: {_AGAIN}")
        return
    for file, said in stated.items():
        if said not in (ONLY, SEVERAL):
            raise TraceError(f"{file}: not a trace, it does not state whether it is one of several files")
    several = next((file for file, said in stated.items() if said == SEVERAL), None)
    if several is not None:
        where = f"{MANIFEST}, which lists them, is missing" if path.is_dir() else "give the directory with all of them"
        raise TraceError(f"{several}: it is one of several files of a trace: {where}")
    if len(stated) > 1:
        only = next(iter(stated))
        raise TraceError(f"{path}: {only.name} is a whole trace, and there are {len(stated)} files: keep them apart")


def _entry(file: Location) -> dict[str, Any]:
    size, end = footer(file)
    return {"bytes": size, "footer_sha256": hashlib.sha256(end).hexdigest()}


def _read(file: Location) -> Mapping[str, Mapping[str, Any]]:
    try:
        with file.open("rb") as source:
            text: bytes = source.read(_BYTES_MAX + 1)
        if len(text) > _BYTES_MAX:
            raise ValueError(f"it has more than {_BYTES_MAX} bytes")
        said = json.loads(text)
        if said["magic"] != _MAGIC or type(said["version"]) is not int:
            raise ValueError("it is not the manifest of a trace")
        if said["version"] > _VERSION:
            raise UnsupportedVersionError(
                f"{file}: manifest has version {said['version']}; this release reads up to {_VERSION}"
            )
        files = said["files"]
        if not isinstance(files, dict) or not all(isinstance(each, dict) for each in files.values()):
            raise ValueError("its files must be objects")
    except OSError as error:
        raise TraceError(f"{file}: the manifest cannot be read, {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise TraceError(f"{file}: the manifest is damaged, {error}: {_AGAIN}") from error
    return files
