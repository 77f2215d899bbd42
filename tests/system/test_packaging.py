"""What a user gets: one package, one command, and a core that needs neither Spark nor Java."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
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
    "starlette",
    "uvicorn",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of what is tracked: leftovers of earlier builds would be packed too."""
    place = tmp_path_factory.mktemp("wheel")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.splitlines():
        (place / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place / "tree" / name, follow_symlinks=False)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place, place / "tree"]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (found,) = place.glob("*.whl")
    return found


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
    assert "ackstate/wire/pulsar/cursor_state.proto" in names


@pytest.mark.slow
@pytest.mark.parametrize("ours_first", [pytest.param(True, marks=pytest.mark.soak), False])
def test_the_wheel_and_flask_limiter_live_side_by_side(wheel, tmp_path, ours_first):
    """Flask-Limiter and slowapi stand on a distribution whose package is called `limits`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path], check=True)
    python = tmp_path / "bin" / "python"
    # What ours needs is there already, and need not be fetched.
    (place,) = tmp_path.glob("lib/python*/site-packages")
    (place / "needed.pth").write_text(sysconfig.get_path("purelib"))
    ours, theirs = ["--no-deps", "--ignore-installed", wheel], ["Flask-Limiter"]
    for what in (ours, theirs) if ours_first else (theirs, ours):
        install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--disable-pip-version-check"]
        installed = subprocess.run([*install, *what], capture_output=True, text=True, check=False)
        assert installed.returncode == 0, installed.stderr
    done = subprocess.run([python, "-P", "-c", SIDE_BY_SIDE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ackstate.limits.gate limits.limits 1\n"), done.stderr


SIDE_BY_SIDE = """
import ackstate.cursor, flask, flask_limiter, limits
from ackstate.limits import DispatchGate
from flask_limiter.util import get_remote_address

app = flask.Flask("app")
limiter = flask_limiter.Limiter(get_remote_address, app=app, default_limits=["1 per hour"], storage_uri="memory://")
app.route("/")(lambda: "")
client = app.test_client()
refused = [client.get("/").status_code for _ in range(2)].count(429)
print(DispatchGate.__module__, limits.RateLimitItem.__module__, refused)
"""


@pytest.mark.slow
@pytest.mark.parametrize("package", ["ackstate", "ackstate.limits", "ackstate.delay", "ackstate.cursor"])
def test_importing_the_core_imports_nothing_heavy(package):
    program = f"import {package}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not HEAVY & set(loaded.stdout.split())


SAME = """
import importlib, pkgutil, sys
folder = importlib.import_module(sys.argv[1])
ours = importlib.import_module(f"ackstate.{sys.argv[1]}")
assert folder is ours
names = [each.name for each in pkgutil.walk_packages(ours.__path__, f"{sys.argv[1]}.") if "__main__" not in each.name]
for name in names:
    there = importlib.import_module(name)
    assert there is importlib.import_module(f"ackstate.{name}"), name
    assert there.__spec__.name == f"ackstate.{name}"
print(len(names) > 3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["cursor", "delay", "limits"])
def test_a_folder_of_a_checkout_has_the_modules_of_the_package(folder):
    done = subprocess.run([sys.executable, "-c", SAME, folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


def test_a_module_of_a_folder_that_is_not_there_is_missing():
    program = "import limits.nothing"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'limits.nothing'\n")


@pytest.mark.slow
def test_a_folder_of_a_checkout_runs_as_a_module():
    help_ = subprocess.run(
        [sys.executable, "-m", "analysis.cli", "--version"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (help_.returncode, help_.stderr) == (0, "")
