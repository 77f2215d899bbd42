"""Version, completion, and suggestions for unknown names."""

from importlib.metadata import version

from command_line import run


def test_the_version_is_that_of_the_distribution(capsys):
    assert run(capsys, "--version") == (0, f"ackstate {version('ackstate')}\n", "")
