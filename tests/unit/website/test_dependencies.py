"""The lock file, the page of licences, and the bill of materials name the same packages."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from website import dependencies

ROOT = Path(dependencies.__file__).parents[1]
LOCKED = dependencies.locked(dependencies.LOCK.read_text())
PAGE = dependencies.PAGE.read_text()
ROWS = dependencies.rows(PAGE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def is_installed(package):
    try:
        return version(package.name) in package.versions
    except PackageNotFoundError:
        return False


def test_every_dependency_is_locked_with_a_version_that_it_allows():
    wanted = [
        *PROJECT["dependencies"],
        *(each for extra in PROJECT["optional-dependencies"].values() for each in extra),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name == "ackstate":
            assert requirement.extras <= PROJECT["optional-dependencies"].keys()
            continue
        found = LOCKED[canonicalize_name(requirement.name)]
        assert all(requirement.specifier.contains(each) for each in found.versions), requirement
    assert len(LOCKED) > 100


def test_a_lock_file_without_hashes_or_with_other_lines_is_refused():
    for lock, said in (("a==1\n", "no hash of a"), ("a>=1\n", "unexpected line: 'a>=1'")):
        with pytest.raises(ValueError, match=said):
            dependencies.locked(lock)


def test_the_page_has_the_packages_of_the_lock_file_and_their_licences():
    assert {name: row[0] for name, row in ROWS.items()} == {
        name: ", ".join(each.versions) for name, each in LOCKED.items()
    }, "run `make lock`"
    installed = [each for each in LOCKED.values() if is_installed(each)]
    assert len(installed) > 20
    for each in installed:
        assert ROWS[each.name][1] == dependencies.licence(each.name), each.name
    used = dependencies.uses(LOCKED)
    assert {name: used[name] for name in ("numpy", "typer", "pytest")} == {
        "numpy": ("core",), "typer": ("cli", "hdfs", "spark"), "pytest": ("development",),
    }  # fmt: skip
    assert {name for name, row in ROWS.items() if row[2] == "core"} == {
        "google-crc32c", "intervaltree", "numpy", "protobuf", "pyroaring", "sortedcontainers",
    }  # fmt: skip


def test_the_bill_of_materials_has_what_users_install():
    document = json.loads(dependencies.bill_of_materials(LOCKED, ROWS))
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["name"] == "ackstate"
    scopes = {each["name"]: each["scope"] for each in document["components"]}
    assert scopes["numpy"] == "required"
    assert scopes["pyspark"] == "optional"
    assert "pytest" not in scopes
    (needed,) = [each["dependsOn"] for each in document["dependencies"] if each["ref"] == "ackstate"]
    assert {"typer", "numpy"} <= {each.partition("==")[0] for each in needed}
    assert document == json.loads(dependencies.bill_of_materials(LOCKED, ROWS))


def test_the_changelog_begins_with_the_version_and_its_date():
    heading = re.search(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(PROJECT['version'])} \(\d{{4}}-\d\d-\d\d\)|Not yet released", heading[1])
