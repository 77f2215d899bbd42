"""Requests that the server refuses before it reads them: wrong tokens, foreign hosts, large or endless bodies."""

import asyncio
import json

import httpx
import pytest

from ackstate import AckStateError, MemoryStore
from ackstate.analysis.admin.app import BODY_BYTES_MAX, ServerSettings, create_app

PATH = "/admin/v2/namespaces/public/default/delayedDelivery"
SCOPE = {"type": "http", "path": PATH, "raw_path": PATH.encode(), "client": ("127.0.0.1", 4444)}
TOKEN = b"eyJhbGciOiJIUzI1NiJ9.e30.x"


@pytest.fixture(scope="module")
def guarded(in_process):
    return in_process(create_app(MemoryStore(), token=TOKEN))


@pytest.fixture(scope="module")
def open_app():
    return create_app(MemoryStore())


class TestGuardTokens:
    @pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER "])
    def test_the_right_one_is_let_in(self, guarded, scheme):
        assert guarded("GET", PATH, headers={"Authorization": f"{scheme} {TOKEN.decode()}"}).status_code == 200

    @pytest.mark.parametrize(
        "header",
        [
            None,
            "",
            "Bearer",
            "Bearer ",
            TOKEN.decode(),
            f"Basic {TOKEN.decode()}",
            f"Bearer {TOKEN.decode()[:-1]}",
            f"Bearer {TOKEN.decode()}x",
            f"Bearer {TOKEN.decode().swapcase()}",
            b"Bearer \xff\xfe",
        ],
    )
    @pytest.mark.parametrize("path", [PATH, "/metrics", "/nothing"])
    def test_any_other_is_not(self, guarded, header, path):
        answer = guarded("GET", path, headers={} if header is None else {"Authorization": header})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json() == {"reason": "the bearer token is missing or wrong"}

    def test_a_write_without_it_changes_nothing(self, guarded):
        assert guarded("POST", PATH, json={"tickTime": 1}).status_code == 401
        assert guarded("GET", PATH, headers={"Authorization": f"Bearer {TOKEN.decode()}"}).json() is None

    @pytest.mark.parametrize("path", ["/healthz", "/openapi.json"])
    def test_what_tells_nothing_of_the_store_needs_none(self, guarded, path):
        assert guarded("GET", path).status_code == 200


class TestSettings:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "localhost"])
    def test_without_one_only_this_machine_is_served(self, tmp_path, host):
        with pytest.raises(AckStateError, match=r"without a token the host must be 127\.0\.0\.1"):
            ServerSettings(tmp_path, host=host)
        assert ServerSettings(tmp_path, host=host, token=TOKEN).host == host


class TestHosts:
    @pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8080", "localhost", "LOCALHOST:1"])
    def test_this_machine_is_served(self, ask, host):
        assert ask("GET", PATH, headers={"Host": host}).status_code == 200

    @pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost:1:2", "127.0.0.1@evil", "é"])
    def test_a_name_of_somebody_else_is_not(self, ask, host):
        answer = ask("GET", PATH, headers={"Host": host.encode()})
        assert answer.status_code == 400
        assert "Host" in answer.json()["reason"]


class TestPeers:
    """Without a token only processes of this machine are served, whatever server the application runs in."""

    @staticmethod
    def status(app, client, path=PATH, **headers):
        async def ask():
            transport = httpx.ASGITransport(app, client=client)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as asking:
                return (await asking.get(path)).status_code

        return asyncio.run(ask())

    @pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
    def test_this_machine_is_served(self, open_app, host):
        assert self.status(open_app, (host, 4444)) == 200

    @pytest.mark.parametrize(
        "client",
        [
            ("203.0.113.9", 4444),
            ("10.0.0.1", 4444),
            ("::ffff:203.0.113.9", 4444),
            ("2001:db8::1", 4444),
            ("fe80::1%lo", 4444),
            ("0.0.0.0", 4444),
            ("testclient", 50_000),
            ("", 0),
            None,  # a Unix socket, behind which there may be a proxy
        ],
    )
    @pytest.mark.parametrize("path", [PATH, "/metrics", "/healthz", "/openapi.json", "/nothing"])
    def test_nobody_else_is(self, open_app, client, path):
        assert self.status(open_app, client, path) == 403

    @pytest.mark.parametrize("client", [("203.0.113.9", 4444), None])
    def test_with_a_token_any_peer_is(self, client):
        app = create_app(MemoryStore(), token=TOKEN)
        assert self.status(app, client, Authorization=f"Bearer {TOKEN.decode()}") == 200
        assert self.status(app, client, Authorization="Bearer") == 401


class TestTokens:
    @pytest.mark.parametrize(
        "token", [b"", b"abc\n", b"x" * 15, TOKEN + b"\n", b"two words of a token", b"\xff" * 20, b"x" * 8_193]
    )
    def test_a_weak_one_is_refused_when_the_application_is_made(self, tmp_path, token):
        for make in (lambda: create_app(MemoryStore(), token=token), lambda: ServerSettings(tmp_path, token=token)):
            with pytest.raises(ValueError, match="the token must be one word of 16 to 8192") as refused:
                make()
            assert "words" not in str(refused.value)


class TestBodies:
    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
    def test_what_a_browser_sends_unasked_is_refused(self, ask, kind):
        answer = ask("POST", PATH, content=b'{"tickTime":1}', headers={"Content-Type": kind})
        assert answer.status_code == 415
        assert ask("GET", PATH).json() is None

    @pytest.mark.parametrize("method", ["POST", "DELETE"])
    def test_one_byte_too_many_is_refused_and_not_one_less(self, ask, method):
        headers = {"Content-Type": "application/json"}
        body = b'{"tickTime":1}'.ljust(BODY_BYTES_MAX)
        assert ask(method, PATH, content=body, headers=headers).status_code == 204
        answer = ask(method, PATH, content=body + b" ", headers=headers)
        assert answer.status_code == 413
        assert answer.json() == {"reason": "the body is larger than 65536 bytes"}

    def test_a_body_without_a_length_is_read_no_further_than_the_bound(self):
        assert exchange([b" " * 1024] * 1000) == (413, 65)

    def test_half_a_body_is_no_request(self):
        assert exchange([b'{"tickTime":1}', None]) == (400, 2)
        assert exchange([None]) == (400, 1)


def exchange(pieces, *, headers=()):
    """Send a POST piece by piece, None for a lost connection; return the status, and how many pieces were read."""
    left, sent = list(pieces), []
    headers = [(b"content-type", b"application/json"), *headers]
    scope = SCOPE | {"method": "POST", "headers": headers, "query_string": b""}

    async def receive():
        piece = left.pop(0)
        if piece is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": piece, "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    asyncio.run(create_app(MemoryStore())(scope, receive, send))
    if sent[0]["status"] >= 400:
        assert set(json.loads(sent[1]["body"])) == {"reason"}
    return sent[0]["status"], len(pieces) - len(left)
