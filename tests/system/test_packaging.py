"""A user's installation: one package, one command, and a core that needs neither Spark nor Java."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("analysis", "cursor", "delay", "limits")
HEAVY = {
    "pyspark",
    "pyarrow",
    "pandas",
    "typer",
    "rich",
    "fastapi",
    "httpx",
    "kazoo",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
}


IS_CHECKOUT = (ROOT / "cursor").is_dir()
"""Whether this is a checkout: a source distribution has no links to the folders."""
LEFT_BEHIND = shutil.ignore_patterns(".git", ".venv", ".*_cache", "__pycache__", "*.egg-info", "build", "dist", "out")
# Both matter: times in an archive are those of the clock otherwise, and modes those of the user.
SOURCE = "https://example.org/ackstate/blob/main"
REPRODUCIBLE = {**os.environ, "SOURCE_DATE_EPOCH": "1700000000", "ACKSTATE_SOURCE_URL": SOURCE}


def built(kind, place):
    """Build a distribution from a copy of the sources, without leftovers of earlier builds, and return its file."""
    tree = place / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_BEHIND)
    build = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", place, tree]
    done = subprocess.run(build, capture_output=True, text=True, check=False, env=REPRODUCIBLE, umask=0o022)
    assert done.returncode == 0, done.stderr
    (found,) = (path for path in place.iterdir() if path.suffix in {".whl", ".gz"})
    return found


def fresh_environment(directory):
    """Create an environment that has the packages of this one, but not ackstate; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    # The packages are there already, and need not be fetched.
    (place,) = directory.glob("lib/python*/site-packages")
    (place / "needed.pth").write_text(sysconfig.get_path("purelib"))
    return directory / "bin" / "python"


def install(python, *what):
    command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
    installed = subprocess.run([*command, "--ignore-installed", *what], capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.soak
@pytest.mark.slow
def test_two_builds_give_the_same_wheel(wheel, tmp_path):
    assert built("wheel", tmp_path).read_bytes() == wheel.read_bytes()


@pytest.mark.soak
@pytest.mark.slow
def test_the_source_distribution_has_all_that_its_tests_need(tmp_path):
    with tarfile.open(built("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    here = Path(__file__).relative_to(ROOT).as_posix()
    assert {here, ".ci/setup", "Makefile", "docs/design.md", "examples/broker/__main__.py"} <= names
    assert {f"ackstate/{folder}/__init__.py" for folder in FOLDERS} <= names
    vectors = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "vectors").iterdir()}
    assert vectors <= names
    (unpacked,) = tmp_path.glob("ackstate-*/")
    python = fresh_environment(tmp_path / "fresh")
    install(python, "--no-deps", "--no-build-isolation", unpacked)
    some = ["tests/unit/limits", "tests/unit/test_formats.py"]
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *some], cwd=unpacked, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.slow
def test_the_wheel_ships_one_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
        (entry_points,) = [archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"ackstate"}
    assert {f"ackstate/{folder}/__init__.py" for folder in FOLDERS} | {"ackstate/py.typed"} <= names
    assert "ackstate/analysis/spark/log4j2.properties" in names
    assert not [name for name in names if "calibration/" in name]
    assert "ackstate = ackstate.analysis.cli:main" in entry_points
    assert "Provides-Extra: spark" in metadata
    required = {
        re.match(r"[\w-]+", each)[0] for each in re.findall(r"^Requires-Dist: ([^;\n]+)$", metadata, re.MULTILINE)
    }
    assert not required & {"pyspark", "pandas", "pyarrow", "typer", "kazoo", "httpx", "fastapi", "prometheus-client"}
    assert "pyroaring" in required
    assert f"Project-URL: Source, {SOURCE}\n" in metadata
    assert f"]({SOURCE}/docs/tutorial.md)" in metadata
    assert "](docs/" not in metadata
    assert "ackstate/wire/pulsar/cursor_state.proto" in names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imported", "allowed"),
    [("ackstate.limits, ackstate.delay, ackstate.cursor", set()), ("ackstate.analysis.cli", {"typer", "rich"})],
)
def test_an_import_does_not_wait_for_what_only_a_command_needs(imported, allowed):
    program = f"import {imported}, sys; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert not (HEAVY - allowed) & {name.partition(".")[0] for name in loaded.stdout.split()}


WITHOUT_THE_EXTRA = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        if package in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {package!r}", name=package)

sys.meta_path.insert(0, Absent())
from ackstate.analysis.cli import main

main(["--help"])
"""


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_the_command_says_which_extra_it_lacks(missing):
    refused = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_EXTRA, missing], capture_output=True, text=True, check=False
    )
    assert refused.stderr == f"ackstate: {missing} is missing: install ackstate[cli]\n"
    assert (refused.returncode, refused.stdout) == (2, "")


@pytest.mark.skipif(not IS_CHECKOUT, reason="only a checkout has links to the folders")
@pytest.mark.parametrize("name", ["analysis", "limits.gate", "cursor.nothing"])
def test_a_package_is_not_imported_under_its_short_name(name):
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    folder = name.partition(".")[0]
    assert done.stderr.endswith(f"ImportError: {folder} is a link to a folder of ackstate: import ackstate.{folder}\n")
