"""Each command that connects with TLS checks the certificate and the host name, however the URL is spelled."""

from __future__ import annotations

import contextlib
import http.server
import socket
import ssl
import subprocess
import threading

import pytest
import trustme

from ackstate.analysis.pulsar import import_through_broker as through_broker
from ackstate.analysis.pulsar.import_through_broker import connected
from ackstate.errors import AckStateError
from command_line import ENTRY, assert_one_line, run, write_token
from waiting import wait_until

TOKEN = "s3cret-token-of-a-role"


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.tokens.append(self.headers["Authorization"])
        self.send_response(404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments):
        """Keep standard error for the command."""


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def trusted(authority, tmp_path_factory):
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


def context_of(authority, host):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)
    return context


@pytest.fixture
def serve(authority):
    """Return a function that starts an admin server with a certificate for a host; it notes the tokens that it gets."""
    with contextlib.ExitStack() as stack:

        def serve(host="127.0.0.1"):
            server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler))
            server.socket = context_of(authority, host).wrap_socket(server.socket, server_side=True)
            server.tokens = []
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server

        yield serve


@pytest.fixture
def commands(tmp_path):
    """The arguments of each command that reads an admin server, without those of the certificates."""
    token = write_token(tmp_path / "token", TOKEN)

    def commands(url):
        return {
            "snapshot": ["pulsar", "snapshot", url, "--topic", "t", "--token-file", token],
            "record": ["pulsar", "record", url, tmp_path / "trace", "--for", "1s", "--token-file", token],
            "explain": ["explain", url, "--token-file", token],
            "namespaces": ["--admin-url", url, "--auth-params", f"token:{TOKEN}", "namespaces", "get-delayed-delivery",
                           "a/b"],
        }  # fmt: skip

    return commands


def with_trust(arguments, path):
    """Return arguments with the option, which for policies precedes the command, as of `pulsar-admin`."""
    option = ["--tls-trust-cert-path", path]
    return [*option, *arguments] if "namespaces" in arguments else [*arguments, *option]


@pytest.mark.parametrize("command", ["snapshot", "record", "explain", "namespaces"])
def test_a_command_trusts_the_named_certificates_and_no_others(capsys, serve, commands, trusted, command):
    right, stranger = serve(), serve(host="attacker.example")
    for scheme in ("https", "HTTPS", "Https"):
        url = f"{scheme}://127.0.0.1:{right.server_port}"
        outcome = run(capsys, *commands(url)[command])
        assert outcome.status != 0
        assert "certificate verify failed" in outcome.err.lower()
        assert right.tokens == []
        run(capsys, *with_trust(commands(f"{scheme}://127.0.0.1:{stranger.server_port}")[command], trusted))
        assert stranger.tokens == []
    run(capsys, *with_trust(commands(url)[command], trusted))
    assert set(right.tokens) == {f"Bearer {TOKEN}"}


@pytest.mark.slow
def test_the_exporter_trusts_the_named_certificates_and_no_others(serve, trusted, tmp_path):
    right, stranger = serve(), serve(host="attacker.example")
    token = write_token(tmp_path / "token", TOKEN)
    for server in (stranger, right):
        url = f"HTTPS://127.0.0.1:{server.server_port}"
        options = ["--port", "0", "--token-file", token, "--tls-trust-cert-path", trusted]
        command = [*ENTRY, "pulsar", "exporter", url, *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as exporter:
            assert "/metrics" in exporter.stdout.readline()  # it has collected once
            exporter.terminate()
    assert (stranger.tokens, set(right.tokens)) == ([], {f"Bearer {TOKEN}"})


def test_no_option_switches_the_check_off(capsys, serve, commands):
    server = serve()
    arguments = commands(f"https://127.0.0.1:{server.server_port}")["namespaces"]
    assert run(capsys, "--tls-allow-insecure", *arguments).status == 2
    assert not server.tokens


def test_the_option_is_refused_where_nothing_connects_with_tls(capsys, tmp_path, trusted):
    assert_one_line(
        run(capsys, "explain", tmp_path, "--tls-trust-cert-path", trusted), "--tls-trust-cert-path", "https://"
    )


# --- The client of a broker


@pytest.fixture
def broker(authority, monkeypatch):
    """Return a function that starts a listener with a certificate for a host, and returns its port and what it got."""
    monkeypatch.setattr(through_broker, "_WAIT_MS", 2_000)
    with contextlib.ExitStack() as stack:

        def broker(host):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            context, got = context_of(authority, host), []

            def answer():
                with contextlib.suppress(OSError):  # the listener is closed
                    while True:
                        connection, _ = listener.accept()
                        with contextlib.suppress(OSError), connection:
                            got.append(b"")
                            with context.wrap_socket(connection, server_side=True) as encrypted:
                                got[-1] = encrypted.recv(4096)

            thread = threading.Thread(target=answer)
            thread.start()
            stack.callback(thread.join)
            stack.callback(listener.shutdown, socket.SHUT_RDWR)
            return listener.getsockname()[1], got

        yield broker


@pytest.mark.parametrize("scheme", ["pulsar+ssl", "PULSAR+SSL"])
@pytest.mark.parametrize(
    ("host", "is_trusted"), [("127.0.0.1", True), ("127.0.0.1", False), ("attacker.example", True)]
)
def test_only_the_broker_of_the_url_gets_the_token(broker, trusted, scheme, host, is_trusted):
    pulsar = pytest.importorskip("pulsar")
    port, got = broker(host)
    path = str(trusted) if is_trusted else ""
    with connected(f"{scheme}://127.0.0.1:{port}", token=TOKEN, trust_cert_path=path) as client:
        with pytest.raises(pulsar.PulsarException):
            client.create_reader("persistent://public/default/t", pulsar.MessageId.earliest)
        wait_until(lambda: got)
    assert any(TOKEN.encode() in each for each in got) == (is_trusted and host == "127.0.0.1")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1", "127.0.0.1:1", "pulsar+ssl:", ""])
def test_another_url_is_refused_before_anything_is_sent(url):
    pytest.importorskip("pulsar")
    with pytest.raises(AckStateError, match="pulsar://HOST:PORT"), connected(url, token=TOKEN):
        pass


def test_certificates_that_cannot_be_read_are_named(tmp_path):
    pytest.importorskip("pulsar")
    (tmp_path / "none.pem").write_text("nothing\n")
    for name in ("none.pem", "missing.pem"):
        with (
            pytest.raises(AckStateError, match=name),
            connected("pulsar+ssl://127.0.0.1:1", trust_cert_path=str(tmp_path / name)),
        ):
            pass
