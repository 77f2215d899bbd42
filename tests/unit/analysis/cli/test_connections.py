"""Commands that connect: who gets the token, which certificates are trusted, where a redirection may lead."""

import contextlib
import gzip
import json
import logging
import os
import socket
import ssl
import subprocess
import threading

import pytest
import trustme

from ackstate.analysis.admin_client import AdminError, AdminServer, read_token
from ackstate.analysis.pulsar import import_through_broker as through_broker
from ackstate.analysis.pulsar.import_through_broker import connected
from ackstate.errors import AckStateError
from command_line import ENTRY, assert_one_line, run, write_token
from pulsar_admin import INTERNALS, PATH, serving
from waiting import wait_until

TOKEN = "header.s3cr3t-payload.signature"
READ_HERE = f"{PATH}/internalStats"


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def trusted(authority, tmp_path_factory):
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority.cert_pem.write_to_path(path)
    return path


def context_of(authority, *hosts):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(*hosts).configure_cert(context)
    return context


@pytest.fixture
def make_broker(authority):
    """Make brokers that answer who has the token."""
    with contextlib.ExitStack() as stack:

        def make(changes=None, *, hosts=("127.0.0.1", "::1"), address="127.0.0.1"):
            context = context_of(authority, *hosts) if hosts else None
            return stack.enter_context(serving(changes, context=context, address=address, token=TOKEN))

        yield make


@pytest.fixture
def token_file(tmp_path):
    return write_token(tmp_path / "token", TOKEN)


@pytest.fixture
def snapshot(capsys, trusted, token_file):
    def snapshot(url, *more, token=token_file):
        options = ["--topic", "smoke", "--tls-trust-cert-path", trusted, *more]
        outcome = run(capsys, "pulsar", "snapshot", url, *options, *(["--token-file", token] if token else []))
        assert "s3cr3t" not in outcome.out + outcome.err
        return outcome

    return snapshot


def moved(place, path=READ_HERE):
    return {READ_HERE: (307, b"", {"Location": f"{place}{path}"})}


# --- who gets the token


def test_the_named_host_gets_the_token_also_after_a_redirection_on_it(snapshot, make_broker):
    broker = make_broker(moved("", f"{PATH}/here"))
    broker.answers[f"{PATH}/here"] = INTERNALS
    outcome = snapshot(broker.url)
    assert (outcome.status, outcome.err) == (0, "")
    assert set(broker.tokens) == {f"Bearer {TOKEN}"}
    assert {request.headers["accept-encoding"] for request in broker.requests} == {"identity"}


@pytest.mark.parametrize("hosts", [("127.0.0.1",), ()])
def test_another_host_gets_the_token_only_if_an_option_lists_it(snapshot, make_broker, hosts):
    """Another port of the same host is another host."""
    owner = make_broker(hosts=hosts)
    asked = make_broker(moved(owner.url), hosts=hosts)
    outcome = snapshot(asked.url)
    assert_one_line(outcome, owner.url, "HTTP 401", f"--token-host {owner.place}")
    assert "--token-file" not in outcome.err
    assert_one_line(snapshot(asked.url, "--token-host", "127.0.0.1"), "HTTP 401")  # with the port of the URL
    assert owner.tokens == [None, None]
    assert snapshot(asked.url, "--token-host", owner.place).status == 0
    assert owner.tokens[2:] == [f"Bearer {TOKEN}"]


def test_a_token_that_was_left_behind_does_not_come_back(snapshot, make_broker):
    """Else any host could choose the resource that is read with it."""
    named, other = make_broker(), make_broker()
    named.answers |= moved(other.url)
    other.answers |= moved(named.url, f"{PATH}/stats")
    assert_one_line(snapshot(named.url), "HTTP 401")
    assert named.tokens[-1] is None


def test_nothing_is_followed_from_https_to_http(snapshot, make_broker):
    plain = make_broker(hosts=())
    asked = make_broker(moved(plain.url))
    assert_one_line(snapshot(asked.url, "--token-host", plain.place), plain.url, "not encrypted")
    assert plain.tokens == []


def test_a_url_may_have_an_address_of_ipv6(snapshot, make_broker):
    try:
        owner = make_broker(address="::1")
    except OSError:
        pytest.skip("this machine has no IPv6")
    asked = make_broker(moved(owner.url), address="::1")
    assert_one_line(snapshot(asked.url), f"--token-host [::1]:{owner.server_port}")
    assert snapshot(asked.url, "--token-host", owner.place).status == 0


def test_the_environment_adds_nothing(snapshot, make_broker, monkeypatch, tmp_path):
    broker, proxy = make_broker(hosts=()), make_broker(hosts=())
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
    broker.answers["/admin/v2/brokers/version"] = (403, b"", {})
    assert_one_line(snapshot(broker.url), "HTTP 403", "the token's role is not allowed to read it")
    assert "token" not in snapshot(broker.url, token=None).err


@pytest.mark.parametrize("host", ["", "a:b", "a:0", "a:99999", "user@a", "a/b", "https://a", "*.a", "[::1"])
def test_a_token_host_that_is_none_is_one_line(snapshot, host):
    assert_one_line(snapshot("http://127.0.0.1:1", "--token-host", host), "--token-host", "HOST:PORT")


# --- where a token is


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n", b"a\r\nX-Other: 1 that is long", b"two words that are long", "tökén-of-some-length".encode()),
        *(b"\xff" * 20, b"a\0b" * 10, b"t" * 100_000),
    ],
)
def test_a_file_without_a_token_is_refused_and_not_shown(capsys, tmp_path, content):
    path = tmp_path / "bad"
    path.write_bytes(content)
    path.chmod(0o600)
    for words in (["pulsar", "snapshot", "http://127.0.0.1:1"], ["serve", "--store", tmp_path / "store"]):
        outcome = run(capsys, *words, "--token-file", path)
        assert_one_line(outcome, f"{path}: expected a token")
        assert not {"X-Other", "two words", "kén"} & {*outcome.err.split()}
    assert not (tmp_path / "store").exists()


def test_an_empty_token_in_the_environment_is_not_none(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("ACKSTATE_ADMIN_TOKEN", "")
    assert_one_line(run(capsys, "serve", "--store", tmp_path / "store"), "ACKSTATE_ADMIN_TOKEN holds no token")
    assert not (tmp_path / "store").exists()


def test_a_token_is_in_no_text_of_an_object():
    assert "s3cr3t" not in repr(AdminServer("http://broker", TOKEN))
    with pytest.raises(AdminError) as caught:
        AdminServer("http://broker", "s3cr3t\r\nX: 1")
    assert "s3cr3t" not in str(caught.value)


READERS = {
    "serve": lambda path: ["serve", "--port", "0", "--host", "no.such.host.invalid", "--token-file", path],
    "snapshot": lambda path: ["pulsar", "snapshot", "http://127.0.0.1:1", "--token-file", path],
    "policies": lambda path: [
        *("--admin-url", "http://127.0.0.1:1", "--auth-params", path.as_uri()),
        *("topics", "get-delayed-delivery", "t"),
    ],
}


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o644, 0o640, 0o604, 0o622])
@pytest.mark.parametrize("reader", READERS)
def test_a_token_file_that_others_can_use_is_warned_about_once(token_file, tmp_path, capsys, reader, mode):
    token_file.chmod(mode)
    words = READERS[reader](token_file)
    store = ["--store", tmp_path / "store"] if reader == "serve" else []
    warnings = [line for line in run(capsys, *words, *store).err.splitlines() if "warning" in line]
    expected = f"{token_file}: the mode of a token file must be 0600, got {mode:04o}: others can use the token"
    assert warnings == [f"ackstate: warning: {expected}"] * bool(mode & 0o077)


def test_a_pipe_is_read_without_a_word(tmp_path, caplog):
    os.mkfifo(tmp_path / "pipe", 0o644)
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"a-secret-of-the-server",))
    writer.start()
    with caplog.at_level(logging.WARNING):
        assert read_token(tmp_path / "pipe") == "a-secret-of-the-server"
    writer.join()
    assert not caplog.records


# --- which certificates are trusted


@pytest.fixture
def commands(token_file, tmp_path):
    """The arguments of each command that reads an admin server, without those of the certificates."""

    def commands(url):
        token = ["--token-file", token_file]
        return {
            "snapshot": ["pulsar", "snapshot", url, "--topic", "t", *token],
            "record": ["pulsar", "record", url, tmp_path / "trace", "--for", "1s", *token],
            "explain": ["explain", url, *token],
            "namespaces": ["--admin-url", url, "--auth-params", f"token:{TOKEN}", "namespaces", "get-delayed-delivery",
                           "a/b"],
        }  # fmt: skip

    return commands


@pytest.mark.parametrize("command", ["snapshot", "record", "explain", "namespaces"])
def test_a_command_trusts_the_named_certificates_and_no_others(capsys, make_broker, commands, trusted, command):
    right, stranger = make_broker(hosts=["127.0.0.1"]), make_broker(hosts=["attacker.example"])
    for broker in (right, stranger):
        broker.answers = {}
    # For policies the option precedes the command, as of `pulsar-admin`.
    option = ["--tls-trust-cert-path", trusted]
    before, after = (option, []) if command == "namespaces" else ([], option)
    for scheme in ("https", "HTTPS", "Https"):
        url = f"{scheme}://{right.place}"
        outcome = run(capsys, *commands(url)[command])
        assert outcome.status != 0
        assert "certificate verify failed" in outcome.err.lower()
        assert right.tokens == []
        run(capsys, *before, *commands(f"{scheme}://{stranger.place}")[command], *after)
        assert stranger.tokens == []
    run(capsys, *before, *commands(url)[command], *after)
    assert set(right.tokens) == {f"Bearer {TOKEN}"}


@pytest.mark.slow
def test_the_exporter_trusts_the_named_certificates_and_no_others(make_broker, trusted, token_file):
    right, stranger = make_broker(), make_broker(hosts=["attacker.example"])
    clusters = [f"{name}=HTTPS://{server.place}" for name, server in (("stranger", stranger), ("right", right))]
    options = ["--port", "0", "--token-file", token_file, "--tls-trust-cert-path", trusted]
    command = [*ENTRY, "pulsar", "exporter", *clusters, *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as exporter:
        assert "/metrics" in exporter.stdout.readline()  # it has collected once
        exporter.terminate()
    assert (stranger.tokens, set(right.tokens)) == ([], {f"Bearer {TOKEN}"})


def test_no_option_switches_the_check_off(capsys, make_broker, commands):
    server = make_broker()
    assert run(capsys, "--tls-allow-insecure", *commands(server.url)["namespaces"]).status == 2
    assert not server.tokens


@pytest.fixture
def listener(authority, monkeypatch):
    """Return a function that starts a listener with a certificate for a host, and returns its port and what it got."""
    monkeypatch.setattr(through_broker, "_WAIT_MS", 2_000)
    with contextlib.ExitStack() as stack:

        def start(host):
            server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            context, got = context_of(authority, host), []

            def answer():
                with contextlib.suppress(OSError):  # the listener is closed
                    while True:
                        connection, _ = server.accept()
                        with contextlib.suppress(OSError), connection:
                            got.append(b"")
                            with context.wrap_socket(connection, server_side=True) as encrypted:
                                got[-1] = encrypted.recv(4096)

            thread = threading.Thread(target=answer)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown, socket.SHUT_RDWR)
            return server.getsockname()[1], got

        yield start


@pytest.mark.parametrize(
    ("scheme", "host", "is_trusted"),
    [
        ("pulsar+ssl", "127.0.0.1", True),
        ("PULSAR+SSL", "127.0.0.1", True),
        ("PULSAR+SSL", "127.0.0.1", False),
        ("pulsar+ssl", "attacker.example", True),
    ],
)
def test_only_the_broker_of_the_url_gets_the_token_of_an_import(listener, trusted, scheme, host, is_trusted):
    pulsar = pytest.importorskip("pulsar")
    port, got = listener(host)
    path = str(trusted) if is_trusted else ""
    with connected(f"{scheme}://127.0.0.1:{port}", token=TOKEN, trust_cert_path=path) as client:
        with pytest.raises(pulsar.PulsarException):
            client.create_reader("persistent://public/default/t", pulsar.MessageId.earliest)
        wait_until(lambda: got)
    assert any(TOKEN.encode() in each for each in got) == (is_trusted and host == "127.0.0.1")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "https://127.0.0.1:1", "127.0.0.1:1", "pulsar+ssl:", ""])
def test_another_url_of_an_import_is_refused_before_anything_is_sent(url):
    pytest.importorskip("pulsar")
    with pytest.raises(AckStateError, match="pulsar://HOST:PORT"), connected(url, token=TOKEN):
        pass


def test_certificates_that_cannot_be_read_are_named(tmp_path):
    pytest.importorskip("pulsar")
    (tmp_path / "none.pem").write_text("nothing\n")
    for name in ("none.pem", "missing.pem"):
        path = str(tmp_path / name)
        with pytest.raises(AckStateError, match=name), connected("pulsar+ssl://127.0.0.1:1", trust_cert_path=path):
            pass


# --- where a redirection leads, and what an answer may be


@pytest.mark.parametrize(
    ("location", "naming"),
    [
        (None, "HTTP 307 without a Location"),
        ("", "without a Location"),
        ("file:///etc/passwd", "redirects to 'file:///etc/passwd', which is not a URL of http"),
        ("https://", ""),
        ("https://[::1/x", "ocation"),
        ("https://127.0.0.1:99999/x", "not a URL"),
        ("https://127.0.0.1:0/x", "not a URL"),
        ("https://127.0.0.1:1/x", "https://127.0.0.1:1"),
        ("https://user:pa55word@127.0.0.1/x", "user or password"),
        ("https://127.0.0.1\\@evil/x", "malformed"),
        (READ_HERE, "more than 5 redirections"),
    ],
)
def test_a_redirection_that_leads_nowhere_is_one_line(snapshot, make_broker, location, naming):
    headers = {} if location is None else {"Location": location}
    outcome = snapshot(make_broker({READ_HERE: (307, b"", headers)}).url)
    assert_one_line(outcome, naming)
    assert "pa55word" not in outcome.err


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
    broker.answers[READ_HERE] = (502, content, {"Content-Encoding": encoding})
    assert_one_line(snapshot(broker.url), "HTTP 502")
    broker.answers[READ_HERE] = (200, json.dumps(INTERNALS).encode(), {"Content-Encoding": "identity"})
    assert snapshot(broker.url).status == 0


@pytest.mark.slow
def test_a_longer_answer_than_allowed_is_refused(snapshot, make_broker):
    broker = make_broker({READ_HERE: (200, json.dumps({"a": "b" * 1_200_000}).encode(), {})})
    assert_one_line(snapshot(broker.url, "--answer-mib-max", 1), "over 1048576 bytes")
    assert_one_line(snapshot(broker.url), "internalStats", "ledgers")
