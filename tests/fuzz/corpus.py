"""The inputs that are kept: `corpus.zip` has a folder for each target, and files named by their SHA-1."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

from fuzz.targets import TARGETS

ARCHIVE = Path(__file__).with_name("corpus.zip")
INPUT_BYTES_MAX = 4_096
INPUTS_MAX = 60
_EPOCH = (1980, 1, 1, 0, 0, 0)


def kept(name: str) -> list[bytes]:
    """Return the inputs of a target that are kept."""
    if not ARCHIVE.exists():
        return []
    with zipfile.ZipFile(ARCHIVE) as archive:
        return [archive.read(each) for each in archive.namelist() if each.partition("/")[0] == name]


def unpack(name: str, directory: Path) -> None:
    """Write the seeds and the inputs of a target into a new directory."""
    directory.mkdir(parents=True)
    for data in (*TARGETS[name].seeds(), *kept(name)):
        (directory / hashlib.sha1(data, usedforsecurity=False).hexdigest()).write_bytes(data)


def keep(name: str, directory: Path) -> None:
    """Add the smallest new inputs of a directory to those that are kept."""
    seeds = set(TARGETS[name].seeds())
    found = {path.read_bytes() for path in directory.iterdir()} | set(kept(name))
    small = sorted((each for each in found - seeds if len(each) <= INPUT_BYTES_MAX), key=lambda each: (len(each), each))
    step = max(1, -(-len(small) // INPUTS_MAX))
    inputs = {other: kept(other) for other in TARGETS} | {name: small[::step]}
    with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for other, all_of in sorted(inputs.items()):
            for data in all_of:
                digest = hashlib.sha1(data, usedforsecurity=False).hexdigest()
                archive.writestr(zipfile.ZipInfo(f"{other}/{digest}", _EPOCH), data, zipfile.ZIP_DEFLATED)
