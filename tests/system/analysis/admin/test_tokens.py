"""Tokens of a real server: a changed file, wrong tokens, and the author of each change in the audit log."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from urllib.parse import quote

import pytest

from ackstate import AckStateError
from ackstate.analysis.admin.server import ServerSettings
from ackstate.analysis.admin.tokens import TokenFile, parse_tokens
from waiting import wait_until

pytestmark = pytest.mark.slow

NAMESPACE = "/admin/v2/namespaces/public/default"
DELAYS = f"{NAMESPACE}/delayedDelivery"
SECRET = b"s3cret-of-the-operators"


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


@pytest.fixture(autouse=True)
def files_of_ones_own():
    """Others can read no token file here, or each would be warned about."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def replace(path, content):
    draft = path.with_name("draft")
    draft.write_bytes(content)
    draft.replace(path)


class TestTokenFile:
    def test_it_may_hold_several_with_labels(self, tmp_path):
        (tmp_path / "tokens").write_bytes(b"ops  %s\r\n\n  %s \nci \t %s\n" % (SECRET, b"alone" * 4, b"other" * 4))
        tokens = TokenFile(tmp_path / "tokens")
        found = [tokens.label_of(each) for each in (SECRET, b"alone" * 4, b"other" * 4, b"ops", b"ops  " + SECRET, b"")]
        assert found == ["ops", "line 3", "ci", None, None, None]

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b" \n\n",
            b"three short words",
            b"ops fifteen-letters",
            b"ops %s\nops %s" % (SECRET, SECRET[::-1]),
            b"%s\n%s" % (SECRET, SECRET),
            b"ops %s\nci %s" % (SECRET, SECRET),
            b"\xff " + SECRET,
            b"a " + b"\xff" * 16,
            b"x" * 65 + b" " + SECRET,
            SECRET + b"\n" * 70_000,
        ],
    )
    def test_one_that_is_not_so_is_refused_and_not_shown(self, content):
        with pytest.raises(AckStateError, match="the file") as refused:
            parse_tokens(content, where="the file")
        assert "three" not in str(refused.value)
        assert "short" not in str(refused.value)

    def test_a_change_is_in_force_at_once(self, tmp_path, caplog):
        caplog.set_level("INFO", "ackstate.admin")
        path = tmp_path / "tokens"
        path.write_bytes(b"ops old-0123456789-old")
        tokens = TokenFile(path)
        for size_kept in (b"ops new-0123456789-new", b"ops now-0123456789-now"):
            stat = path.stat()
            replace(path, size_kept)
            os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            assert tokens.label_of(b"old-0123456789-old") is None
            assert tokens.label_of(size_kept.split()[1]) == "ops"
        assert [each.getMessage() for each in caplog.records] == [f"tokens were read again from {path}: ops"] * 2

    @pytest.mark.parametrize("break_it", ["remove", "empty", "two of a line", "directory", "pipe"])
    def test_one_that_cannot_be_read_changes_nothing_and_is_logged_once(self, tmp_path, caplog, break_it):
        path = tmp_path / "tokens"
        path.write_bytes(b"ops " + SECRET)
        tokens = TokenFile(path)
        path.unlink()
        if break_it == "directory":
            path.mkdir()
        elif break_it == "pipe":
            os.mkfifo(path)
        elif break_it != "remove":
            path.write_bytes(b"" if break_it == "empty" else b"a b c")
        for _ in range(3):
            assert tokens.label_of(SECRET) == "ops"
            assert tokens.label_of(b"b") is None
        assert len(caplog.records) == 1
        assert "the previous tokens stay valid: " in caplog.text
        assert str(path) in caplog.text
        if break_it == "directory":
            path.rmdir()
        replace(path, b"ops " + b"other" * 4)
        assert (tokens.label_of(SECRET), tokens.label_of(b"other" * 4)) == (None, "ops")

    def test_a_pipe_is_read_once(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"ops " + SECRET,))
        writer.start()
        tokens = TokenFile(tmp_path / "pipe")
        writer.join()
        assert tokens.label_of(SECRET) == tokens.label_of(SECRET) == "ops"

    def test_a_delay_that_would_outlast_the_server_is_refused(self, tmp_path):
        with pytest.raises(AckStateError, match="wrong_token_seconds must be from 0 to 4, got 5"):
            ServerSettings(tmp_path, wrong_token_seconds=5)


class TestRunningServer:
    def test_tokens_change_while_it_runs(self, start, tmp_path):
        path = tmp_path / "tokens"
        path.write_bytes(b"ops first-0123456789\n")
        with start(tmp_path / "store", "--token-file", path, "--wrong-token-delay", 0) as server:
            with server.client() as client:

                def status(token):
                    return client.get(DELAYS, headers=bearer(f"{token}-0123456789")).status_code

                assert (status("first"), status("second")) == (200, 401)
                replace(path, b"ops first-0123456789\nci second-0123456789\n")
                assert (status("first"), status("second")) == (200, 200)
                replace(path, b"ci second-0123456789\n")
                assert (status("first"), status("second")) == (401, 200)
                path.unlink()
                assert (status("first"), status("second")) == (401, 200)
            exit_status, errors = server.stop()
        assert exit_status == 0
        assert f"INFO tokens were read again from {path}: ops, ci\n" in errors
        assert "ERROR the previous tokens stay valid: " in errors
        assert "first" not in errors
        assert "second" not in errors

    def test_a_wrong_token_is_answered_late_and_holds_up_nobody(self, start, tmp_path):
        """One client guesses on as many connections as it may have; those with a token are answered meanwhile."""
        (tmp_path / "tokens").write_bytes(b"ops the-right-token-1\n")
        options = ("--token-file", tmp_path / "tokens", "--wrong-token-delay", 2, "--connections-per-client", 4)
        guess = f"GET {DELAYS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer wrong\r\n\r\n".encode()
        with start(tmp_path / "store", *options, "--header-timeout", 1) as server, contextlib.ExitStack() as held:
            client = held.enter_context(server.client())
            assert client.get(DELAYS, headers=bearer("the-right-token-1")).status_code == 200
            begin_s = time.monotonic()
            guesses = [held.enter_context(server.connect()) for _ in range(3)]
            for each in guesses:
                each.sendall(guess)
            for _ in range(20):
                assert client.get(DELAYS, headers=bearer("the-right-token-1")).status_code == 200
            # Nor does another client wait, nor one that has no token at all.
            with server.connect(source=("127.0.0.2", 0)) as other:
                other.sendall(guess.replace(b"Authorization", b"X-Other"))
                assert other.recv(1000).startswith(b"HTTP/1.1 401 ")
            answered = time.monotonic() - begin_s
            # Who gives up does not get to guess again before the time is over.
            for each in guesses:
                each.close()
            client.get("/healthz")
            assert server.exchange(guess).startswith(b"HTTP/1.1 429 ")
            wait_until(lambda: not server.exchange(guess[:20]).startswith(b"HTTP/1.1 429 "))
            waited = time.monotonic() - begin_s
            status, errors = server.stop()
        assert status == 0
        assert answered < waited
        assert waited >= 2
        assert errors.count("WARNING a wrong token from 127.0.0.1\n") == 1
        assert "wrong\n" not in errors.replace("a wrong token", "")

    def test_a_wrong_token_does_not_hold_up_the_end(self, start, tmp_path):
        (tmp_path / "tokens").write_bytes(b"the-right-token-1")
        options = ("--token-file", tmp_path / "tokens", "--wrong-token-delay", 2)
        with start(tmp_path / "store", *options) as server, server.connect() as connection, server.client() as client:
            connection.sendall(f"GET {DELAYS} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer x\r\n\r\n".encode())
            assert client.get("/healthz").status_code == 200
            status, errors = server.stop()
        assert status == 0
        assert "Traceback" not in errors


class TestAuditLog:
    def test_each_change_is_a_line_that_says_who_and_what(self, start, tmp_path):
        (tmp_path / "tokens").write_bytes(b"ops %s\n%s\n" % (SECRET, b"another" * 3))
        topic = "/admin/v2/persistent/public/default/orders"
        with start(tmp_path / "store", "--token-file", tmp_path / "tokens") as server:
            with server.client(headers=bearer(SECRET.decode())) as client:
                assert client.post(DELAYS, json={"tickTime": 5}).status_code == 204
                assert client.post(DELAYS, json={"active": True}).status_code == 204
                assert client.post(DELAYS, json={"tickTime": 0}).status_code == 412
                assert client.get(DELAYS).status_code == 200
                assert client.delete(DELAYS).status_code == 204
                path = f"{topic}/becomeOldAckRecordSeconds"
                assert client.post(path, json=30, headers=bearer("another" * 3)).status_code == 204
                assert client.delete(path).status_code == 204
                assert client.post(path, json=1, headers=bearer("absent")).status_code == 401
            status, errors = server.stop()
        entries, _ = server.audited(errors)
        assert status == 0
        delays = {"client": "127.0.0.1", "owner": "public/default", "policy": "delayedDelivery", "who": "ops"}
        number = delays | {"owner": "persistent://public/default/orders", "policy": "becomeOldAckRecordSeconds"}
        assert entries == [
            delays | {"action": "POST", "before": None, "after": {"tickTime": 5}},
            delays | {"action": "POST", "before": {"tickTime": 5}, "after": {"active": True, "tickTime": 5}},
            delays | {"action": "DELETE", "before": {"active": True, "tickTime": 5}, "after": None},
            number | {"action": "POST", "before": None, "after": 30, "who": "line 2"},
            number | {"action": "DELETE", "before": 30, "after": None},
        ]
        for each in ("s3cret", "another", "absent"):
            assert each not in errors

    def test_without_a_token_it_says_so(self, start, tmp_path):
        with start(tmp_path / "store") as server:
            with server.client() as client:
                assert client.post(DELAYS, json={"tickTime": 5}).status_code == 204
            entries, others = server.audited(server.stop()[1])
        assert [each["who"] for each in entries] == ["no token"]
        assert others == []

    def test_a_name_cannot_make_a_line_of_its_own(self, start, tmp_path):
        """Whether such a name is refused or logged, each line of the log is one that the server began."""
        names = ["or\nders", "or\r\nders", "\u2028", "\x1b[2J", "a\u202eb", '","who":"root', "é\u00a0"]
        with start(tmp_path / "store") as server:
            accepted = []
            with server.client() as client:
                for name in names:
                    path = f"/admin/v2/persistent/public/default/{quote(name, safe='')}/delayedDelivery"
                    status = client.post(path, json={"tickTime": 5}).status_code
                    assert status in {204, 400, 412}
                    accepted += [name] * (status == 204)
            entries, others = server.audited(server.stop()[1])
        assert others == []
        assert [each["owner"].partition("default/")[2] for each in entries] == accepted
        assert {each["who"] for each in entries} <= {"no token"}
