"""Lists the packages of the lock file: their use and licences for docs/licences.md, and a bill of materials.

`python -m website.dependencies docs/licences.md` writes the page, and with a name that ends in `.json` the bill of
materials (CycloneDX 1.6) of the packages that users install.
"""

from __future__ import annotations

import os
import re
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from uuid import NAMESPACE_URL, uuid5

from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from importlib.metadata import PackageMetadata

ROOT = Path(__file__).parents[1]
LOCK = ROOT / ".ci" / "requirements.txt"
PAGE = ROOT / "docs" / "licences.md"
CORE, DEVELOPMENT = "core", "development"
_NOT_FOR_USERS = frozenset({"dev", "docs"})

_PINNED = re.compile(r"^(?P<name>[a-z0-9-]+)==(?P<version>\S+)(?: ; (?P<marker>.*?))? ?\\?$")
_HASH = re.compile(r"^ +--hash=sha256:[0-9a-f]{64}")
_ROW = re.compile(r"^\| (?P<name>[a-z0-9-]+) \| (?P<version>[^|]*) \| (?P<licence>[^|]*) \| (?P<use>[^|]*) \|$")
# Classifiers name families of licences; metadata of these packages says no more.
_CLASSIFIER = "License :: OSI Approved :: "
_TEXT_MAX = 60
"""Longer texts in a licence field are the licence itself."""


class Package(NamedTuple):
    """A package of the lock file.

    Attributes:
        name: Its normalized name.
        versions: Its versions: several if they depend on the version of Python.
        hash_count: The number of files that may be installed.
    """

    name: str
    versions: tuple[str, ...]
    hash_count: int


def locked(lock: str) -> Mapping[str, Package]:
    """Return the packages of a lock file by name, in order.

    Raises:
        ValueError: A line is no pinned package and no hash, or a package has no hash.
    """
    found: dict[str, Package] = {}
    name = ""
    for line in lock.splitlines():
        if pinned := _PINNED.match(line):
            name = pinned["name"]
            before = found.get(name, Package(name, (), 0))
            found[name] = before._replace(versions=(*before.versions, pinned["version"]))
        elif _HASH.match(line):
            found[name] = found[name]._replace(hash_count=found[name].hash_count + 1)
        elif line and not line.startswith("#"):
            raise ValueError(f"the lock file has an unexpected line: {line!r}")
    for each in found.values():
        if not each.hash_count:
            raise ValueError(f"the lock file has no hash of {each.name}")
    return found


def uses(packages: Mapping[str, Package]) -> Mapping[str, tuple[str, ...]]:
    """Return for each package the extras that install it; `CORE` for the library, `DEVELOPMENT` if no other does."""
    project = distribution("ackstate")
    found: dict[str, list[str]] = {name: [] for name in packages}
    for extra in ("", *sorted(project.metadata.get_all("Provides-Extra", []))):
        if extra not in _NOT_FOR_USERS:
            for name in _closure("ackstate", extra) & found.keys():
                found[name].append(extra or CORE)
    return {
        name: (CORE,) if CORE in extras else tuple(extras) or (DEVELOPMENT,) for name, extras in sorted(found.items())
    }


def _closure(name: str, extra: str) -> frozenset[str]:
    """Return the packages that an installation with an extra needs, as far as they are installed here."""
    seen: set[tuple[str, str]] = set()
    waiting = [(name, extra), (name, "")]
    while waiting:
        found = waiting.pop()
        if found not in seen:
            seen.add(found)
            waiting += _required(*found)
    return frozenset(name for name, _ in seen)


def _required(name: str, extra: str) -> Iterator[tuple[str, str]]:
    try:
        lines = distribution(name).requires or ()
    except PackageNotFoundError:
        return
    for each in map(Requirement, lines):
        if each.marker is None or each.marker.evaluate({"extra": extra}):
            needed = canonicalize_name(each.name)
            yield from ((needed, wanted) for wanted in {"", *each.extras})


def licence(name: str) -> str:
    """Return the licence that the metadata of an installed package names; empty if it is not installed."""
    try:
        metadata = distribution(name).metadata
    except PackageNotFoundError:
        return ""
    said = _field(metadata, "License-Expression") or _classified(metadata) or _written(metadata) or _title(name)
    return said.replace("|", "/") or "not stated"


def _field(metadata: PackageMetadata, name: str) -> str:
    return next(iter(metadata.get_all(name) or ()), "")


def _classified(metadata: PackageMetadata) -> str:
    found = metadata.get_all("Classifier") or []
    return ", ".join(each.removeprefix(_CLASSIFIER) for each in found if each.startswith(_CLASSIFIER))


def _written(metadata: PackageMetadata) -> str:
    text = _field(metadata, "License")
    return text if len(text) <= _TEXT_MAX and "\n" not in text else ""


def _title(name: str) -> str:
    """Return the first line of the licence that a package includes."""
    files = [each for each in distribution(name).files or () if re.match(r"LICEN[CS]E", each.name, re.IGNORECASE)]
    lines = [line.strip() for each in files[:1] for line in each.read_text().splitlines()]
    return next((line[:_TEXT_MAX] for line in lines if line), "")


def rows(page: str) -> Mapping[str, tuple[str, str, str]]:
    """Return the table of a page: name -> version, licence and use."""
    found = [match for line in page.splitlines() if (match := _ROW.match(line)) and match["name"] != "package"]
    return {row["name"]: (row["version"], row["licence"], row["use"]) for row in found}


def page(packages: Mapping[str, Package], before: Mapping[str, tuple[str, str, str]]) -> str:
    """Return docs/licences.md.

    Args:
        packages: See `locked`.
        before: The rows of the page as it is, for packages that another version of Python needs.
    """
    lines = [
        "# Licences of dependencies\n",
        "ackstate has the [Apache License 2.0](../LICENSE). It includes no code of the packages below: `pip` installs",
        "them. The licence is the one that the metadata of each package names. *core* is what `pip install ackstate`",
        "installs, other names in the last column are extras, and *development* packages come only with a checkout.",
        "`make lock` updates the lock file and this page; a test compares them.\n",
        "| package | version | licence | installed by |",
        "|---|---|---|---|",
    ]
    use = uses(packages)
    for name, each in sorted(packages.items()):
        _, known, known_use = before.get(name, ("", "not stated", DEVELOPMENT))
        found = licence(name)
        by = ", ".join(use[name]) if found else known_use
        lines.append(f"| {name} | {', '.join(each.versions)} | {found or known} | {by} |")
    return "\n".join(lines) + "\n"


def bill_of_materials(packages: Mapping[str, Package], licences: Mapping[str, tuple[str, str, str]]) -> str:
    """Return a CycloneDX document about the packages that users install, as JSON; the same for the same inputs.

    Args:
        packages: See `locked`.
        licences: See `rows`.
    """
    version = distribution("ackstate").version
    root = Component(
        name="ackstate", version=version, type=ComponentType.LIBRARY, bom_ref="ackstate",
        licenses=[DisjunctiveLicense(id="Apache-2.0")], purl=PackageURL("pypi", None, "ackstate", version),
    )  # fmt: skip
    components = {name: _components(each, *licences[name]) for name, each in packages.items()}
    bom = Bom(
        components=[each for several in components.values() for each in several],
        serial_number=uuid5(NAMESPACE_URL, f"ackstate {version} {packages}"),
        metadata=BomMetaData(component=root, timestamp=datetime.fromtimestamp(_built_s(), UTC)),
    )
    extras = distribution("ackstate").metadata.get_all("Provides-Extra", [])
    for component, name, asked in (
        (root, "ackstate", extras),
        *((each[0], name, []) for name, each in components.items() if each),
    ):
        needed = {other for extra in ("", *asked) if extra not in _NOT_FOR_USERS for other, _ in _required(name, extra)}
        bom.register_dependency(component, [each for other in sorted(needed) for each in components.get(other, ())])
    text: str = JsonV1Dot6(bom).output_as_string(indent=1)
    return text + "\n"


def _components(package: Package, _versions: str, licence_named: str, use: str) -> list[Component]:
    """Return the components of a package: one for each version, none if only developers install it."""
    if use == DEVELOPMENT:
        return []
    return [
        Component(
            name=package.name, version=version, type=ComponentType.LIBRARY, bom_ref=f"{package.name}=={version}",
            purl=PackageURL("pypi", None, package.name, version), licenses=[DisjunctiveLicense(name=licence_named)],
            scope=ComponentScope.REQUIRED if use == CORE else ComponentScope.OPTIONAL,
        )
        for version in package.versions
    ]  # fmt: skip


def _built_s() -> int:
    """Return the time of the build, which is that of the commit in `make dist`, in s since 1970."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", "0"))


def main(target: Path) -> None:
    """Write the page, or the bill of materials if the name of the file ends in `.json`."""
    packages = locked(LOCK.read_text(encoding="utf-8"))
    before = rows(PAGE.read_text(encoding="utf-8")) if PAGE.exists() else {}
    text = bill_of_materials(packages, before) if target.suffix == ".json" else page(packages, before)
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
