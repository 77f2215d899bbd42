"""`ackstate pulsar snapshot` against servers that redirect, drip and swell: real TLS, and tokens that are checked."""

from __future__ import annotations

import gzip
import http.server
import json
import socket
import ssl
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import trustme

from ackstate.analysis.admin_client import AdminError, AdminServer, PulsarAdmin, ServerOptions
from command_line import assert_one_line, run, write_token

VECTORS = Path(__file__).parents[3] / "vectors" / "internal-stats"
TOPIC = "persistent://public/default/smoke"
PATH = "/admin/v2/persistent/public/default/smoke"
TOKEN = "header.s3cr3t-payload.signature"
ANSWERS = {
    "/admin/v2/brokers/version": b"4.2.4",
    "/admin/v2/brokers/configuration/runtime": b"{}",
    f"{PATH}/partitions": b'{"partitions": 0}',
    "/admin/v2/namespaces/public/default": b"{}",
    f"{PATH}/internalStats": (VECTORS / "internalStats-smoke-alternate.json").read_bytes(),
    f"{PATH}/stats": (VECTORS / "stats-smoke-alternate.json").read_bytes(),
}
READ_HERE = f"{PATH}/internalStats"


class TokenBroker(http.server.ThreadingHTTPServer):
    """Answers who has the token as a broker does, others with 401. Changes: path -> (status, content, headers)."""

    daemon_threads = True

    def __init__(self, changes, context, address="127.0.0.1"):
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), TokenHandler)
        self.changes, self.tokens = changes, []
        if context:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        host = f"[{address}]" if ":" in address else address
        self.place = f"{host}:{self.server_port}"
        self.url = f"{'https' if context else 'http'}://{self.place}"

    def handle_error(self, request, client_address):
        """Keep standard error for the command: a client that refuses a certificate breaks the connection."""


class TokenHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        token = self.headers.get("Authorization")
        self.server.tokens.append(token)
        self.server.encoding = self.headers.get("Accept-Encoding")
        status, content, headers = self.server.changes.get(self.path) or self.own(token)
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    def own(self, token):
        if token != f"Bearer {TOKEN}":
            return 401, b"", {}
        content = ANSWERS.get(self.path.partition("?")[0])
        return (404, b"", {}) if content is None else (200, content, {})

    def log_message(self, *arguments):
        """Keep standard error for the command."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate authority, the path of its certificate, and a context for servers at this machine's addresses."""
    made = trustme.CA()
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    made.cert_pem.write_to_path(path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.issue_cert("127.0.0.1", "::1").configure_cert(context)
    return path, context


@pytest.fixture
def make_broker(authority):
    brokers = []

    def make(changes=None, *, encrypted=True, address="127.0.0.1"):
        broker = TokenBroker(changes or {}, authority[1] if encrypted else None, address)
        thread = threading.Thread(target=broker.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        brokers.append((broker, thread))
        return broker

    yield make
    for broker, thread in brokers:
        broker.shutdown()
        broker.server_close()
        thread.join()


@pytest.fixture
def snapshot(capsys, authority, tmp_path):
    token_file = write_token(tmp_path / "token", TOKEN)

    def snapshot(url, *more, token=token_file):
        options = ["--token-file", token] if token else []
        outcome = run(
            capsys,
            "pulsar",
            "snapshot",
            url,
            "--topic",
            "smoke",
            *options,
            "--tls-trust-cert-path",
            authority[0],
            *more,
        )
        assert "s3cr3t" not in outcome.out + outcome.err
        return outcome

    return snapshot


def moved(place, path=READ_HERE):
    return {READ_HERE: (307, b"", {"Location": f"{place}{path}"})}


# --- Who gets the token


def test_a_token_is_sent_over_tls_to_the_named_host(snapshot, make_broker):
    broker = make_broker()
    outcome = snapshot(broker.url)
    assert (outcome.status, outcome.err) == (0, "")
    assert set(broker.tokens) == {f"Bearer {TOKEN}"}
    assert broker.encoding == "identity"


def test_a_redirection_on_the_named_host_keeps_the_token(snapshot, make_broker):
    broker = make_broker(moved("", f"{READ_HERE}?authoritative=true"))
    assert snapshot(broker.url).status == 0
    assert set(broker.tokens) == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("encrypted", [True, False])
def test_another_host_gets_the_token_only_if_an_option_lists_it(snapshot, make_broker, encrypted):
    """Another port of the same host is another host."""
    owner = make_broker(encrypted=encrypted)
    asked = make_broker(moved(owner.url), encrypted=encrypted)
    outcome = snapshot(asked.url)
    assert_one_line(outcome, owner.url, "HTTP 401", f"--token-host {owner.place}")
    assert "--token-file" not in outcome.err
    assert owner.tokens == [None]
    assert snapshot(asked.url, "--token-host", owner.place).status == 0
    assert owner.tokens[1:] == [f"Bearer {TOKEN}"]


def test_a_listed_host_without_a_port_has_that_of_the_url(snapshot, make_broker):
    owner = make_broker()
    assert_one_line(snapshot(make_broker(moved(owner.url)).url, "--token-host", "127.0.0.1"), "HTTP 401")
    assert owner.tokens == [None]


def test_a_token_that_was_left_behind_does_not_come_back(snapshot, make_broker):
    """Else any host could choose the resource that is read with it."""
    named, other = make_broker(), make_broker()
    named.changes |= moved(other.url)
    other.changes |= moved(named.url, f"{PATH}/stats")
    assert_one_line(snapshot(named.url), "HTTP 401")
    assert named.tokens[-1] is None


def test_nothing_is_followed_from_https_to_http(snapshot, make_broker):
    plain = make_broker(encrypted=False)
    asked = make_broker(moved(plain.url))
    assert_one_line(snapshot(asked.url, "--token-host", plain.place), plain.url, "not encrypted")
    assert plain.tokens == []


def test_a_certificate_that_is_not_trusted_gets_no_request(capsys, snapshot, make_broker, tmp_path):
    broker = make_broker()
    other = trustme.CA()
    other.cert_pem.write_to_path(tmp_path / "other.pem")
    outcome = snapshot(broker.url, "--tls-trust-cert-path", tmp_path / "other.pem")
    assert_one_line(outcome, broker.url, "CERTIFICATE_VERIFY_FAILED")
    assert broker.tokens == []
    assert_one_line(snapshot(broker.url.replace("127.0.0.1", "localhost")), "CERTIFICATE_VERIFY_FAILED")


def test_a_url_may_have_an_address_of_ipv6(snapshot, make_broker):
    try:
        owner = make_broker(address="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    asked = make_broker(moved(owner.url), address="::1")
    assert_one_line(snapshot(asked.url), f"--token-host [::1]:{owner.server_port}")
    assert snapshot(asked.url, "--token-host", owner.place).status == 0


def test_the_environment_adds_nothing(snapshot, make_broker, monkeypatch, tmp_path):
    broker, proxy = make_broker({}, encrypted=False), make_broker(encrypted=False)
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password s3cr3t-netrc\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert_one_line(snapshot(broker.url, token=None), "HTTP 401", "give a token with --token-file")
    assert (set(broker.tokens), proxy.tokens) == ({None}, [])


def test_advice_about_a_token_is_of_what_happened(snapshot, make_broker, tmp_path):
    broker = make_broker()
    outcome = snapshot(broker.url, token=write_token(tmp_path / "wrong", "wrong-token"))
    assert_one_line(outcome, "HTTP 401", "not accepted")
    assert "give a token" not in outcome.err
    broker.changes["/admin/v2/brokers/version"] = (403, b"", {})
    assert_one_line(snapshot(broker.url), "HTTP 403", "the token's role is not allowed to read it")
    assert "token" not in snapshot(broker.url, token=None).err


@pytest.mark.parametrize("token", ["a\r\nX-Other: 1", "a\nb", "a b", "", "tökén", "a\x00b", "t" * 100_000])
def test_a_file_without_a_token_is_refused_and_not_shown(snapshot, tmp_path, token):
    (tmp_path / "bad").write_bytes(token.encode())
    (tmp_path / "bad").chmod(0o600)
    outcome = snapshot("http://127.0.0.1:1", token=tmp_path / "bad")
    assert_one_line(outcome, "expected a token")
    assert not token or token[:5] not in outcome.err


def test_a_token_is_in_no_text_of_an_object():
    assert "s3cr3t" not in repr(AdminServer("http://broker", TOKEN))
    assert "s3cr3t" not in repr(ServerOptions(auth_params=f"token:{TOKEN}"))
    with pytest.raises(AdminError) as caught:
        AdminServer("http://broker", "s3cr3t\r\nX: 1")
    assert "s3cr3t" not in str(caught.value)


# --- Where a redirection leads


@pytest.mark.parametrize(
    ("location", "naming"),
    [
        (None, ["HTTP 307 without a Location"]),
        ("", ["without a Location"]),
        ("file:///etc/passwd", ["file:///etc/passwd", "not a URL of http"]),
        ("ftp://127.0.0.1/x", ["ftp://127.0.0.1/x"]),
        ("https://", []),
        ("https://[::1/x", ["ocation"]),
        ("https://127.0.0.1:99999/x", ["not a URL"]),
        ("https://127.0.0.1:0/x", ["not a URL"]),
        ("https://user:pa55word@127.0.0.1/x", ["user or password"]),
        ("https://127.0.0.1\\@evil/x", ["malformed"]),
        (READ_HERE, ["more than 5 redirections"]),
    ],
)
@pytest.mark.parametrize("status", [302, 307])
def test_a_redirection_that_leads_nowhere_is_one_line(snapshot, make_broker, status, location, naming):
    headers = {} if location is None else {"Location": location}
    outcome = snapshot(make_broker({READ_HERE: (status, b"", headers)}).url)
    assert_one_line(outcome, *(text.replace("307", str(status)) for text in naming))
    assert "pa55word" not in outcome.err


@pytest.mark.parametrize("status", [300, 304, 399])
def test_any_other_status_is_one_line(snapshot, make_broker, status):
    assert_one_line(snapshot(make_broker({READ_HERE: (status, b"", {})}).url), f"HTTP {status}")


@pytest.mark.parametrize("host", ["", "a:b", "a:0", "a:99999", "user@a", "a/b", "https://a", "*.a", "[::1"])
def test_a_token_host_that_is_none_is_one_line(snapshot, host):
    assert_one_line(snapshot("http://127.0.0.1:1", "--token-host", host), "--token-host", "HOST:PORT")


def test_a_user_in_the_url_is_refused_and_not_shown(snapshot):
    outcome = snapshot("http://user:pa55word@127.0.0.1:1")
    assert_one_line(outcome, "--token-file")
    assert "pa55word" not in outcome.err


# --- How long, and how much


@contextmanager
def raw_server(first, more):
    """Answer the first connection with bytes, and then go on with others until the client has closed."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                try:
                    connection.sendall(first)
                    while not closed.wait(0.05):
                        connection.sendall(more)
                except OSError:
                    return

        closed = threading.Event()
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        closed.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
)
def test_one_deadline_covers_the_content_of_an_answer(first, more):
    """Each read has its bytes at once, so that no timeout of a read ends it."""
    late = pytest.raises(AdminError, match="did not end in time")
    with raw_server(first, more) as url, PulsarAdmin(AdminServer(url, timeout_s=0.4)) as admin, late:
        admin.get("/")


def nested(depth):
    content = bytes(1_000_000)
    for _ in range(depth):
        content = gzip.compress(content)
    return content


@pytest.mark.parametrize("encoding", ["gzip", "gzip, gzip", "deflate", "br", "zstd", "IDENTITY, gzip"])
def test_an_encoding_that_was_not_requested_is_refused(snapshot, make_broker, encoding):
    content = nested(encoding.count("gzip") or 1)
    broker = make_broker({READ_HERE: (200, content, {"Content-Encoding": encoding})})
    assert_one_line(snapshot(broker.url), "encoding", "not requested")


def test_a_refusal_with_an_encoding_is_told_by_its_status(snapshot, make_broker):
    broker = make_broker({READ_HERE: (502, nested(1), {"Content-Encoding": "gzip"})})
    assert_one_line(snapshot(broker.url), "HTTP 502")


def test_identity_may_be_named(snapshot, make_broker):
    broker = make_broker({READ_HERE: (200, ANSWERS[READ_HERE], {"Content-Encoding": "identity"})})
    assert snapshot(broker.url).status == 0


@pytest.mark.slow
def test_a_longer_answer_than_allowed_is_refused(snapshot, make_broker):
    broker = make_broker({READ_HERE: (200, json.dumps({"a": "b" * 1_200_000}).encode(), {})})
    assert_one_line(snapshot(broker.url, "--answer-mib-max", 1), "over 1048576 bytes")
    assert_one_line(snapshot(broker.url), "internalStats", "ledgers")
