"""Commands that look at a store, in processes of their own."""

import pytest

from command_line import assert_one_line, run_apart
from sample_store import StoreDamage, filled


@pytest.fixture
def path(tmp_path):
    return filled(tmp_path / "store")


@pytest.mark.slow
def test_the_command_itself_says_it_by_its_status(path):
    assert run_apart("fsck", path).status == 0
    StoreDamage(path).flip(3)
    outcome = run_apart("fsck", path)
    assert (outcome.status, outcome.err) == (1, "")
    assert_one_line(run_apart("inspect", path, "--subscription", "biling"), "'billing'", "'audit'")
