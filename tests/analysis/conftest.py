"""What several tests of the analysis start or stand on: a browser, and a store behind a URL."""

from __future__ import annotations

import pyarrow.fs
import pytest

from ackstate.analysis import location
from chromium import chromium


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    driver = chromium(tmp_path_factory.mktemp("profile"))
    yield driver
    driver.quit()


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Return the root behind a URL, whose store is the directory ``store`` of this machine."""
    (tmp_path / "store").mkdir()
    # Of pyarrow, which has one interface for all of them.
    system = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "store"), pyarrow.fs.LocalFileSystem())
    monkeypatch.setattr(location, "_file_system", lambda _scheme, _authority: (system, ""))
    return location.StorePath("s3a", "bucket", ())
