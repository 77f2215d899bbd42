"""What a user gets: five packages, one command, and a core that needs neither Spark nor Java."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"ackstate", "analysis", "cursor", "delay", "limits"}
HEAVY = {
    "pyspark",
    "pyarrow",
    "pandas",
    "plotly",
    "typer",
    "rich",
    "fastapi",
    "httpx",
    "kazoo",
    "prometheus_client",
    "starlette",
    "uvicorn",
}


@pytest.mark.slow
def test_the_wheel_ships_the_packages_and_nothing_else(tmp_path):
    # From a copy of what is tracked: leftovers of earlier builds would be packed too.
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.splitlines():
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, tmp_path / "tree"]
    built = subprocess.run(build, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
        (entry_points,) = [archive.read(name).decode() for name in names if name.endswith("/entry_points.txt")]
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert "analysis/redelivery/log4j2.properties" in names
    assert "ackstate = analysis.cli:main" in entry_points
    assert "Provides-Extra: spark" in metadata
    assert "ackstate/wire/pulsar/cursor_state.proto" in names


@pytest.mark.slow
@pytest.mark.parametrize("package", ["ackstate", "limits", "delay", "cursor"])
def test_importing_the_core_imports_nothing_heavy(package):
    program = f"import {package}, sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not HEAVY & set(loaded.stdout.split())
