"""`ackstate namespaces` and `ackstate topics`: the request of each command, and its output."""

from __future__ import annotations

import http.server
import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from typing import NamedTuple

import httpx  # noqa: F401 -- the first command would wait for it
import pytest

from ackstate.analysis.admin_client import AdminError, namespace_path, topic_path
from command_line import ENTRY, run, write_token

PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
NAMESPACE = "/admin/v2/namespaces/a/b/delayedDelivery"
TOPIC = "/admin/v2/persistent/a/b/orders/delayedDelivery"
POLICY = {"tickTime": 1000, "active": True, "maxDeliveryDelayInMillis": 3600000}
PRINTED = """{
  "tickTime" : 1000,
  "active" : true,
  "maxDeliveryDelayInMillis" : 3600000
}
"""


class KeptRequest(NamedTuple):
    method: str
    target: str
    body: bytes
    headers: dict


class PrescribedServer(http.server.ThreadingHTTPServer):
    """Keeps its requests, and answers as a test prescribes."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), PrescribedHandler)
        self.requests = []
        self.answer = (204, b"")
        self.first_answers = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    @property
    def asked(self):
        """The only request."""
        (request,) = self.requests
        return request


class PrescribedHandler(http.server.BaseHTTPRequestHandler):
    def do(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): text for name, text in self.headers.items()}
        self.server.requests.append(KeptRequest(self.command, self.path, body, headers))
        first = self.server.first_answers
        status, content = first.pop(0) if first else self.server.answer
        self.send_response(status)
        if status != 204:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do  # noqa: N815

    def log_message(self, *arguments):
        """Keep standard error for the command."""


@pytest.fixture
def server():
    with PrescribedServer() as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield served
        served.shutdown()
        thread.join()


@pytest.fixture
def admin(server, capsys):
    """Run a command against the server, the options before it given apart."""

    def ask(*arguments, before=()):
        return run(capsys, "--admin-url", server.url, *before, *arguments)

    return ask


def sent(request):
    """The verb, the target, and the JSON of the body, None when it has none."""
    return request.method, request.target, json.loads(request.body) if request.body else None


# --- requests


@pytest.mark.parametrize(
    ("flags", "body"),
    [
        (["-e"], {"active": True}),
        (["--enable"], {"active": True}),
        (["-d"], {"active": False}),
        (["--disable"], {"active": False}),
        (["-e", "-t", "90s"], {"active": True, "tickTime": 90_000}),
        (["-e", "-t90s"], {"active": True, "tickTime": 90_000}),
        (["-e", "-t=90s"], {"active": True, "tickTime": 90_000}),
        (["-et", "90s"], {"active": True, "tickTime": 90_000}),
        (["-e", "--time", "10m"], {"active": True, "tickTime": 600_000}),
        (["-e", "--time=10m"], {"active": True, "tickTime": 600_000}),
        (["-e", "-md", "3d"], {"active": True, "maxDeliveryDelayInMillis": 259_200_000}),
        (["-e", "--maxDelay", "0"], {"active": True, "maxDeliveryDelayInMillis": 0}),
        (["-e", "-fd", "5h"], {"active": True, "fixedDeliveryDelayInMillis": 18_000_000}),
        (["-e", "--fixed-delay=0s"], {"active": True, "fixedDeliveryDelayInMillis": 0}),
        (
            ["-t", "1s", "-md", "1h", "-fd", "1m", "-e"],
            {
                "active": True,
                "tickTime": 1_000,
                "maxDeliveryDelayInMillis": 3_600_000,
                "fixedDeliveryDelayInMillis": 60_000,
            },
        ),
    ],
)
def test_set_sends_what_is_named_and_no_default(server, admin, flags, body):
    assert admin("namespaces", "set-delayed-delivery", "a/b", *flags) == (0, "", "")
    assert sent(server.asked) == ("POST", NAMESPACE, body)
    assert server.asked.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("topics get-delayed-delivery", ("GET", f"{TOPIC}?applied=false", None)),
        ("topics get-delayed-delivery -ap", ("GET", f"{TOPIC}?applied=true", None)),
        ("topics get-delayed-delivery --applied -g", ("GET", f"{TOPIC}?applied=true&isGlobal=true", None)),
        ("topics set-delayed-delivery -e -t 2s", ("POST", TOPIC, {"active": True, "tickTime": 2000})),
        ("topics set-delayed-delivery -d --global", ("POST", f"{TOPIC}?isGlobal=true", {"active": False})),
        ("topics remove-delayed-delivery", ("DELETE", TOPIC, None)),
        ("topics remove-delayed-delivery -g", ("DELETE", f"{TOPIC}?isGlobal=true", None)),
    ],
)
def test_what_is_sent_for_a_topic(server, admin, line, expected):
    server.answer = (200, b"null") if expected[0] == "GET" else (204, b"")
    assert admin(*line.split(), "persistent://a/b/orders").status == 0
    assert sent(server.asked) == expected


@pytest.mark.parametrize(
    ("topic", "path"),
    [
        ("persistent://a/b/orders", "/admin/v2/persistent/a/b/orders"),
        ("a/b/orders", "/admin/v2/persistent/a/b/orders"),
        ("orders", "/admin/v2/persistent/public/default/orders"),
        ("orders-partition-3", "/admin/v2/persistent/public/default/orders-partition-3"),
        ("a/b/x y?z#%2F", "/admin/v2/persistent/a/b/x%20y%3Fz%23%252F"),
        ("a=b/c:d.e/größe", "/admin/v2/persistent/a%3Db/c%3Ad.e/gr%C3%B6%C3%9Fe"),
    ],
)
def test_the_path_of_a_topic(topic, path):
    assert topic_path(topic) == path


@pytest.mark.parametrize(
    "topic",
    [
        *("", "a/b", "/", "a/b/", "a//c", "/b/c", "persistent://", "persistent://orders", "a b/c/d", "\udcff"),
        *("persistent://a/cluster/b/orders", "non-persistent://a/b/orders", "other://a/b/orders"),
        *("../b/c", "a/../c", "a/b/..", "a/b/."),
    ],
)
def test_what_is_no_topic(topic):
    with pytest.raises(AdminError, match=r"persistent|not text"):
        topic_path(topic)


def test_the_path_of_a_namespace():
    assert namespace_path("a/b-c=1") == "/admin/v2/namespaces/a/b-c%3D1"
    for namespace in ("", "a", "a/", "/b", "a/b/c", "a/..", "./b", "a/b c", "a/b?c", "a\n/b"):
        with pytest.raises(AdminError, match="Invalid namespace format"):
            namespace_path(namespace)


# --- times


@pytest.mark.parametrize("flag", ["--time", "--maxDelay", "--fixed-delay"])
@pytest.mark.parametrize("text", ["-1s", "1h30m", "9e99"])
def test_a_time_that_is_refused_is_shown_as_given_with_its_flag(server, admin, flag, text):
    status, out, err = admin("namespaces", "set-delayed-delivery", "a/b", "-e", flag, text)
    assert (status, out, server.requests) == (1, "", [])
    assert err.startswith(f"Invalid value for '{flag}' / ")
    assert f"got {text!r}" in err


def test_a_tick_time_of_zero_is_refused(server, admin):
    status, out, err = admin("topics", "set-delayed-delivery", "orders", "-e", "-t", "0s")
    assert (status, out, server.requests) == (1, "", [])
    assert "Invalid value for '--time' / '-t': must be at least 1ms, got '0s'" in err


# --- output


@pytest.mark.parametrize("group", ["namespaces", "topics"])
def test_get_prints_as_pulsar_admin_does(server, admin, group):
    name = {"namespaces": "a/b", "topics": "a/b/orders"}[group]
    server.answer = (200, json.dumps(POLICY).encode())
    assert admin(group, "get-delayed-delivery", name) == (0, PRINTED, "")
    for nothing in (b"null", b""):
        server.answer = (200, nothing)
        assert admin(group, "get-delayed-delivery", name) == (0, "null\n", "")


@pytest.mark.parametrize(
    "words", ["namespaces a/b", "namespaces a/b -e -d", "topics orders -t 1s", "topics orders -ed"]
)
def test_one_of_enable_and_disable_must_be_given(server, admin, words):
    group, *others = words.split()
    expected = (1, "", "Need to specify either --enable or --disable\n\n")
    assert admin(group, "set-delayed-delivery", *others) == expected
    assert server.requests == []


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((412, b'{"reason": "fixed delay while inactive"}'), "fixed delay while inactive"),
        ((404, b'{"reason": "Namespace not found"}'), "Namespace not found"),
        ((409, b'{"reason": "Concurrent modification"}'), "Concurrent modification"),
        ((401, b""), "HTTP 401 Unauthorized"),
        ((401, b'{"reason": null}'), "HTTP 401 Unauthorized"),
        ((500, b"<html>"), "HTTP 500 Internal Server Error"),
        ((503, b"[]"), "HTTP 503 Service Unavailable"),
        ((307, b""), "HTTP 307 Temporary Redirect"),
        ((400, b'{"reason": "a\\u001b[31mb"}'), "a\\x1b[31mb"),
    ],
)
def test_a_refusal_is_told_with_its_reason(server, admin, answer, reason):
    server.answer = answer
    expected = (1, "", f"{reason}\n\nReason: {reason}\n")
    assert admin("namespaces", "set-delayed-delivery", "-e", "a/b") == expected


CONFLICT = (409, b'{"reason": "changed by somebody else"}')


@pytest.mark.parametrize(
    ("words", "method"), [("set-delayed-delivery -e", "POST"), ("remove-delayed-delivery", "DELETE")]
)
def test_what_meets_another_writer_is_sent_again(server, admin, words, method):
    server.first_answers = [CONFLICT] * 3
    assert admin("topics", *words.split(), "orders") == (0, "", "")
    assert [request.method for request in server.requests] == [method] * 4
    assert len({request.body for request in server.requests}) == 1


def test_it_is_not_sent_for_ever(server, admin):
    server.answer = CONFLICT
    assert admin("topics", "remove-delayed-delivery", "orders").status == 1
    assert len(server.requests) == 5


def test_what_is_read_is_asked_for_once(server, admin):
    server.first_answers = [CONFLICT]
    assert admin("topics", "get-delayed-delivery", "orders").status == 1
    assert len(server.requests) == 1


@pytest.mark.parametrize("verb", ["get", "remove"])
def test_every_command_tells_of_a_refusal(server, admin, verb):
    server.answer = (404, b'{"reason": "Topic not found"}')
    expected = (1, "", "Topic not found\n\nReason: Topic not found\n")
    assert admin("topics", f"{verb}-delayed-delivery", "orders") == expected


@pytest.mark.parametrize("content", [b"<html>", b"\xff", b"[" * 100_000, b" " * 1024 * 1024 + b"null"])
def test_an_answer_that_is_no_policy(server, admin, content):
    server.answer = (200, content)
    status, out, err = admin("namespaces", "get-delayed-delivery", "a/b")
    assert (status, out) == (1, "")
    assert err.startswith("the answer of the server is ")
    assert err.count("\n") == 1


def test_nobody_listens(capsys):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        status, out, err = run(capsys, "--admin-url", url, "namespaces", "get-delayed-delivery", "a/b")
    assert (status, out) == (1, "")
    assert err == f"Error connecting to: {url}: [Errno 111] Connection refused\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bytes_sent", "saying"),
    [
        (b"", "timed out"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nnull", "the answer of the server did not end in time"),
    ],
)
def test_a_silent_server_is_waited_for_no_longer_than_asked(capsys, bytes_sent, saying):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=lambda: keep(listener.accept()[0], bytes_sent), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        begun_s = time.monotonic()
        before = ["--admin-url", url, "--request-timeout", "1"]
        status, out, err = run(capsys, *before, "namespaces", "get-delayed-delivery", "a/b")
    assert (status, out) == (1, "")
    assert err in {f"Error connecting to: {url}: {saying}\n", f"{saying}\n"}
    assert 0.9 <= time.monotonic() - begun_s < 10


@pytest.mark.slow
def test_a_trickling_server_is_cut_off(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop = threading.Event()
        thread = threading.Thread(target=lambda: trickle(listener.accept()[0], stop))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        before = ["--admin-url", url, "--request-timeout", "1"]
        outcome = run(capsys, *before, "namespaces", "get-delayed-delivery", "a/b")
        stop.set()
        thread.join()
    assert outcome == (1, "", "the answer of the server did not end in time\n")


def keep(connection, content):
    """Send, and hold the connection until the other side lets go."""
    with connection:
        connection.recv(65536)
        connection.sendall(content)
        connection.recv(1)


def trickle(connection, stop):
    """Send a byte ten times a second; who gave up has closed."""
    with connection:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not stop.wait(0.1):
            try:
                connection.sendall(b" ")
            except OSError:
                return


@pytest.mark.parametrize(
    ("arguments", "saying"),
    [
        (["namespaces"], "Missing command\n\nsee ackstate namespaces --help"),
        (["namespaces", "nope"], "unknown command 'nope'"),
        (["topics", "get-delayed-delivery"], "Missing argument 'TOPIC'"),
        (["topics", "get-delayed-delivery", "a", "b"], "unexpected extra argument"),
        (["namespaces", "get-delayed-delivery", "a/b", "--applied"], "unknown option --applied"),
        (["namespaces", "get-delayed-delivery", "a"], "Invalid namespace format"),
        (["topics", "remove-delayed-delivery", "a/b"], "Invalid topic name 'a/b'"),
        (["topics", "set-delayed-delivery", "-e", "non-persistent://a/b/c"], "Need to provide a persistent topic name"),
    ],
)
def test_misuse_ends_with_1_and_asks_nobody(server, admin, arguments, saying):
    status, out, err = admin(*arguments)
    assert (status, out, server.requests) == (1, "", [])
    assert saying in err


# --- where the server is, and who asks


def test_a_token_is_sent(server, admin):
    before = ["--auth-plugin", PLUGIN, "--auth-params", "token:s3cr3t"]
    assert admin("namespaces", "remove-delayed-delivery", "a/b", before=before).status == 0
    assert server.asked.headers["authorization"] == "Bearer s3cr3t"


def test_without_a_token_none_is_sent(server, admin):
    assert admin("namespaces", "remove-delayed-delivery", "a/b").status == 0
    assert "authorization" not in server.asked.headers


def test_a_token_is_read_from_a_file(server, admin, tmp_path):
    file = tmp_path / "the token"
    file.write_text("s3cr3t\n")
    before = ["--auth-plugin", PLUGIN, "--auth-params", file.as_uri()]
    assert admin("topics", "remove-delayed-delivery", "orders", before=before).status == 0
    assert server.asked.headers["authorization"] == "Bearer s3cr3t"


@pytest.mark.parametrize(
    ("plugin", "parameters", "saying"),
    [
        (PLUGIN, "token:", "the token is empty"),
        (PLUGIN, "token:s3cr3t\r\nX: y", "has a character that no token has"),
        (PLUGIN, "s3cr3t", "must be token:TOKEN or file:///PATH"),
        (PLUGIN, "file:///nowhere/token", "file:///nowhere/token cannot be read"),
        (PLUGIN, "file:token", "is not of the form file:///PATH"),
        (PLUGIN, "file://host/token", "is not of the form file:///PATH"),
        (PLUGIN, "", "needs --auth-params"),
        ("org.apache.pulsar.client.impl.auth.AuthenticationTls", "token:s3cr3t", "AuthenticationTls is not supported"),
    ],
)
def test_what_is_wrong_with_a_token_is_told_without_it(server, admin, plugin, parameters, saying):
    before = ["--auth-plugin", plugin, "--auth-params", parameters]
    status, out, err = admin("namespaces", "get-delayed-delivery", "a/b", before=before)
    assert (status, out, server.requests) == (1, "", [])
    assert saying in err
    assert "s3cr3t" not in err


def test_proxies_of_the_environment_are_left_out(server, admin, monkeypatch):
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert admin("namespaces", "remove-delayed-delivery", "a/b").status == 0
    assert server.asked.target == NAMESPACE


@pytest.mark.parametrize(
    "url",
    [
        *("localhost:8080", "ftp://h", "http://", "http://h:0", "http://h:70000", "http://h:8080,i:8080"),
        *("http://h?x=1", "http://[::1", "http://h h", "http://h\n"),
    ],
)
def test_what_is_no_url(capsys, url):
    status, out, err = run(capsys, "--admin-url", url, "namespaces", "get-delayed-delivery", "a/b")
    assert (status, out) == (1, "")
    assert err == f"the URL of the server must look like http://localhost:8080, got {url!r}\n"


@pytest.mark.parametrize("url", ["http://a..b", f"http://{'a' * 300}", "http://xn--a"])
def test_a_host_that_no_name_server_knows(capsys, url):
    status, out, err = run(capsys, "--admin-url", url, "namespaces", "get-delayed-delivery", "a/b")
    assert (status, out) == (1, "")
    assert err.startswith(f"Error connecting to: {url}: ")
    assert err.count("\n") == 1


def test_a_password_in_a_url_is_refused_and_not_shown(capsys):
    url = "http://user:s3cr3t@localhost:8080"
    status, _, err = run(capsys, "--admin-url", url, "namespaces", "get-delayed-delivery", "a/b")
    assert status == 1
    assert "use --auth-params" in err
    assert "s3cr3t" not in err


def test_certificates_that_cannot_be_read_are_named(capsys, tmp_path):
    path = tmp_path / "none.pem"
    before = ["--admin-url", "https://127.0.0.1:1", "--tls-trust-cert-path", path]
    status, out, err = run(capsys, *before, "namespaces", "get-delayed-delivery", "a/b")
    assert (status, out) == (1, "")
    assert err.startswith(f"the certificates {path} cannot be read: ")


@pytest.fixture
def secured(server, tmp_path):
    """Make the server speak TLS, with a certificate that no other client trusts; return the certificate's path."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "ec",
                "-pkeyopt",
                "ec_paramgen_curve:P-256",
                "-nodes",
                "-days",
                "2",
            ),
            *("-subj", "/CN=a test", "-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = server.url.replace("http:", "https:")
    return certificate


@pytest.mark.slow
def test_a_certificate_is_held_to_what_is_trusted(server, secured, admin):
    status, out, err = admin("namespaces", "remove-delayed-delivery", "a/b")
    assert (status, out, server.requests) == (1, "", [])
    assert err.startswith(f"Error connecting to: {server.url}: ")
    assert "certificate verify failed" in err
    before = ["--tls-trust-cert-path", secured]
    assert admin("namespaces", "remove-delayed-delivery", "a/b", before=before) == (0, "", "")
    assert len(server.requests) == 1


# --- against the server itself


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Run `ackstate serve` with a token; return the options that reach it."""
    place = tmp_path_factory.mktemp("served")
    token = write_token(place / "token", "s3cr3t-of-the-test")
    command = [*ENTRY, "serve", "--port", "0", "--store", place / "store", "--token-file", token]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())[0]
            yield ["--admin-url", url, "--auth-plugin", PLUGIN, "--auth-params", token.as_uri()]
        finally:
            process.terminate()


@pytest.fixture
def ask(served, capsys):
    return lambda line: run(capsys, *served, *line.split())


def policy(outcome):
    assert (outcome.status, outcome.err) == (0, ""), outcome
    answer = json.loads(outcome.out)
    return answer and {name: value for name, value in answer.items() if value is not None}


@pytest.mark.slow
def test_a_policy_of_a_namespace_from_set_to_remove(ask):
    assert ask("namespaces get-delayed-delivery a/first") == (0, "null\n", "")
    assert ask("namespaces set-delayed-delivery a/first -e -t 10s -md 1h") == (0, "", "")
    expected = {"active": True, "tickTime": 10_000, "maxDeliveryDelayInMillis": 3_600_000}
    assert policy(ask("namespaces get-delayed-delivery a/first")) == expected
    assert ask("namespaces remove-delayed-delivery a/first") == (0, "", "")
    assert ask("namespaces get-delayed-delivery a/first") == (0, "null\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(("group", "name"), [("namespaces", "a/second"), ("topics", "a/other/orders")])
def test_what_is_not_named_keeps_its_value(ask, group, name):
    assert ask(f"{group} set-delayed-delivery {name} -e -t 10s --maxDelay 1h --fixed-delay 1m").status == 0
    assert ask(f"{group} set-delayed-delivery {name} -e -t 2s") == (0, "", "")
    assert policy(ask(f"{group} get-delayed-delivery {name}")) == {
        "active": True,
        "tickTime": 2_000,
        "maxDeliveryDelayInMillis": 3_600_000,
        "fixedDeliveryDelayInMillis": 60_000,
    }
    assert ask(f"{group} set-delayed-delivery {name} -e -md 0 -fd 0").status == 0
    changed = policy(ask(f"{group} get-delayed-delivery {name}"))
    assert (changed["maxDeliveryDelayInMillis"], changed["fixedDeliveryDelayInMillis"]) == (0, 0)


@pytest.mark.slow
def test_what_is_applied_to_a_topic_comes_from_its_namespace_too(ask):
    assert ask("namespaces set-delayed-delivery a/third -e -md 1h").status == 0
    assert ask("topics set-delayed-delivery a/third/orders -e -t 5s").status == 0
    assert policy(ask("topics get-delayed-delivery persistent://a/third/orders")) == {
        "active": True,
        "tickTime": 5_000,
    }
    applied = policy(ask("topics get-delayed-delivery a/third/orders --applied"))
    assert (applied["active"], applied["tickTime"], applied["maxDeliveryDelayInMillis"]) == (True, 5_000, 3_600_000)


@pytest.mark.slow
def test_a_fixed_delay_while_delayed_delivery_is_off_is_refused_with_the_reason(ask):
    status, out, err = ask("namespaces set-delayed-delivery a/fourth -d -fd 1m")
    assert (status, out) == (1, "")
    reason, empty, again, end = err.split("\n")
    assert (again, empty, end) == (f"Reason: {reason}", "", "")
    assert "fixed" in reason
    assert ask("namespaces get-delayed-delivery a/fourth") == (0, "null\n", "")


@pytest.mark.slow
def test_a_policy_of_all_clusters_is_not_set(ask):
    for words in ("set-delayed-delivery -e", "remove-delayed-delivery"):
        status, out, err = ask(f"topics {words} -g a/global/orders")
        assert (status, out) == (1, "")
        assert err.startswith("isGlobal: global policies are not supported")
    assert ask("topics get-delayed-delivery -g a/global/orders") == (0, "null\n", "")


@pytest.mark.slow
def test_a_wrong_token_is_refused(served, capsys):
    for parameters in ([], ["--auth-params", "token:wrong"]):
        outcome = run(capsys, *served[:2], *parameters, "namespaces", "set-delayed-delivery", "a/fifth", "-e")
        assert (outcome.status, outcome.out) == (1, "")
        assert "Reason: " in outcome.err
    assert run(capsys, *served, "namespaces", "get-delayed-delivery", "a/fifth") == (0, "null\n", "")


@pytest.mark.slow
def test_a_topic_of_any_name_is_reached(served, capsys):
    topic = "persistent://a=b/sixth/größe x?y#z%2F"
    assert run(capsys, *served, "topics", "set-delayed-delivery", topic, "-d").status == 0
    assert policy(run(capsys, *served, "topics", "get-delayed-delivery", topic)) == {"active": False}
    assert run(capsys, *served, "topics", "get-delayed-delivery", "a=b/sixth/x") == (0, "null\n", "")


# --- help

GROUPS = ("namespaces", "topics")
VERBS = ("get-delayed-delivery", "set-delayed-delivery", "remove-delayed-delivery")


@pytest.mark.parametrize("arguments", [[group, *verb] for group in GROUPS for verb in ([], *([v] for v in VERBS))])
def test_help_fits_80_columns(monkeypatch, capsys, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = run(capsys, *arguments, "-h")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert out.startswith(f"Usage: ackstate {' '.join(arguments)}")
    assert "..." not in out.replace("[ARGS]...", "")


WITHOUT_HTTPX = """
import sys
sys.modules["httpx"] = None
from ackstate.analysis.cli import main
main(sys.argv[1:])
"""


def run_without_httpx(*arguments):
    command = [sys.executable, "-P", "-c", WITHOUT_HTTPX, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


@pytest.mark.slow
def test_only_a_request_needs_the_extra():
    assert run_without_httpx("topics", "set-delayed-delivery", "--help") == (0, "")
    missing = "httpx is missing: install ackstate[admin]\n"
    assert run_without_httpx("topics", "get-delayed-delivery", "orders") == (1, missing)
