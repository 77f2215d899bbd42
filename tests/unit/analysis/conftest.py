"""A store behind a URL, which is a directory."""

import pyarrow.fs
import pytest

from ackstate.analysis import location


@pytest.fixture
def url_store(tmp_path, monkeypatch):
    """Return the root behind a URL, whose store is the directory ``store`` of this machine."""
    (tmp_path / "store").mkdir()
    # Of pyarrow, which has one interface for all of them.
    system = pyarrow.fs.SubTreeFileSystem(str(tmp_path / "store"), pyarrow.fs.LocalFileSystem())
    monkeypatch.setattr(location, "_file_system", lambda _scheme, _authority: (system, ""))
    return location.StorePath("s3a", "bucket", ())
