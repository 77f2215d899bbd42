"""A file that appears by rename: a link in its way is replaced or refused, and never followed."""

import os

import pytest

from ackstate.analysis.location import write_atomically


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
