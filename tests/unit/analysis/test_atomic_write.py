"""A file that appears by rename: a link in its way is replaced or refused, and never followed."""

import os

import pytest

from ackstate.analysis.atomic_write import write_atomically
from ackstate.analysis.estimate.checkpoint import claimed


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_text("keep me")
    return path


@pytest.mark.parametrize("name", ["report.html", ".report.html.unfinished"])
@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_replaced_and_its_target_left_alone(tmp_path, victim, name, link):
    link(victim, tmp_path / name)
    write_atomically(tmp_path / "report.html", "new")
    assert victim.read_text() == "keep me"
    assert (tmp_path / "report.html").read_text() == "new"
    assert not (tmp_path / "report.html").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "victim"]


def test_a_pipe_that_an_earlier_run_might_wait_for_is_replaced(tmp_path):
    os.mkfifo(tmp_path / ".totals.json.unfinished")
    write_atomically(tmp_path / "totals.json", "{}")
    assert (tmp_path / "totals.json").read_text() == "{}"


def test_a_state_directory_whose_lock_is_a_link_is_refused(tmp_path, victim):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / ".lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), claimed(tmp_path / "state"):
        pass
    assert victim.read_text() == "keep me"
