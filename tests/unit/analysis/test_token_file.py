"""A token file that other users can read is warned about, wherever one is read."""

import logging
import os
import threading

import pytest

from ackstate.analysis.admin_client import _token as token_of_parameters
from ackstate.analysis.cli import main
from ackstate.analysis.cli.pulsar import read_token
from ackstate.analysis.cli.serve import _token as token_of_server
from ackstate.analysis.token_file import open_token_file

READERS = {
    "serve": token_of_server,
    "pulsar snapshot": lambda path: read_token(path).encode(),
    "policies": lambda path: token_of_parameters(path.as_uri()).encode(),
}


@pytest.fixture
def token(tmp_path):
    path = tmp_path / "token"
    path.write_bytes(b"a-secret-of-the-server\n")
    return path


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o622])
@pytest.mark.parametrize("reader", READERS)
def test_a_token_file_that_others_can_use_is_warned_about_once(token, caplog, reader, mode):
    token.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert READERS[reader](token) == b"a-secret-of-the-server"
    assert [record.getMessage() for record in caplog.records] == [
        f"{token}: the mode of a token file must be 0600, got {mode:04o}: others can use the token"
    ]


def test_the_command_line_shows_the_warning(token, capsys):
    token.chmod(0o644)
    with pytest.raises(SystemExit):
        main(["pulsar", "snapshot", "http://127.0.0.1:1", "--token-file", str(token)])
    warning, *_ = capsys.readouterr().err.splitlines()
    assert (
        warning
        == f"ackstate: warning: {token}: the mode of a token file must be 0600, got 0644: others can use the token"
    )


@pytest.mark.parametrize("mode", [0o600, 0o400])
@pytest.mark.parametrize("reader", READERS)
def test_a_token_file_of_ones_own_is_read_without_a_word(token, caplog, reader, mode):
    token.chmod(mode)
    with caplog.at_level(logging.WARNING):
        assert READERS[reader](token) == b"a-secret-of-the-server"
    assert not caplog.records


def test_a_pipe_is_read_without_a_word(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe", 0o644)
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"a-secret-of-the-server",))
    writer.start()
    with caplog.at_level(logging.WARNING), open_token_file(tmp_path / "pipe") as file:
        assert file.read() == b"a-secret-of-the-server"
    writer.join()
    assert not caplog.records
