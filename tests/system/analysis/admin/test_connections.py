"""Slow, silent, many and ambiguous connections to a real server, over real sockets."""

from __future__ import annotations

import contextlib
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ackstate.analysis.admin.connections import ConnectionLimits
from command_line import assert_one_line, run
from waiting import wait_until

pytestmark = pytest.mark.slow

GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
PATH = "/admin/v2/persistent/public/default/orders/delayedDelivery"
HEALTHY = b'{"status":"ok"}'


@pytest.fixture(scope="module")
def quick(start, tmp_path_factory):
    """A server that waits a second for everything, and on descriptors for a few dozen connections."""
    options = ("--header-timeout", 1, "--idle-timeout", 1, "--answer-timeout", 1, "--connections-per-client", 8)
    with start(tmp_path_factory.mktemp("quick"), *options) as running:
        yield running


def answer_to(connection):
    """Return the data up to the end of an answer of ``/healthz``."""
    answer = b""
    while not answer.endswith(HEALTHY) and (piece := connection.recv(1000)):
        answer += piece
    return answer


def drip(connection, data):
    """Send a byte every 50 ms until the server closes the connection; fail if it takes all of them."""
    connection.settimeout(0.05)
    for each in data:
        try:
            connection.sendall(bytes([each]))
            if not connection.recv(1000):
                return
        except TimeoutError:
            continue
        except ConnectionError:
            return
    pytest.fail("the server took all of it")


HEAD_WITHOUT_END = b"GET /healthz HTTP/1.1\r\n" + b"X: " + b"x" * 400


def post_head(content_type):
    return (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {content_type}\r\nContent-Length: 400\r\n\r\n"
    ).encode()


def headers_byte_by_byte(server):
    with server.connect() as connection:
        drip(connection, HEAD_WITHOUT_END)


def later_headers_byte_by_byte(server):
    with server.connect() as connection:
        connection.sendall(GET)
        assert answer_to(connection).endswith(HEALTHY)
        drip(connection, HEAD_WITHOUT_END)


def body_byte_by_byte(server):
    with server.connect() as connection:
        connection.sendall(post_head("application/json"))
        drip(connection, b"{" + b" " * 399)


def body_after_its_answer(server):
    with server.connect() as connection:
        connection.sendall(post_head("text/plain"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 415 ")
        drip(connection, b" " * 400)


SLOW_CLIENTS = {
    "nothing": lambda server: server.exchange(),
    "late headers": lambda server: server.exchange(GET[:30]),
    "half a request": lambda server: server.exchange(GET + GET[:30]),
    "idle": lambda server: server.exchange(GET),
    "headers": headers_byte_by_byte,
    "later headers": later_headers_byte_by_byte,
    "body": body_byte_by_byte,
    "body after its answer": body_after_its_answer,
}


@pytest.fixture(scope="module")
def slow(quick):
    """Let all slow clients try at once: each is cut off after a second. Return their results."""
    with ThreadPoolExecutor(len(SLOW_CLIENTS)) as pool:
        return {name: pool.submit(client, quick) for name, client in SLOW_CLIENTS.items()}


class TestSlowClients:
    def test_one_that_sends_nothing_is_closed(self, slow):
        assert slow["nothing"].result() == b""

    def test_headers_that_end_late_are_refused(self, slow):
        answer = slow["late headers"].result()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert answer.endswith(b'{"reason": "the headers did not arrive within 1 s"}')

    def test_headers_byte_by_byte_are_cut_off(self, slow):
        slow["headers"].result()

    def test_later_headers_byte_by_byte_are_cut_off(self, slow):
        slow["later headers"].result()

    def test_half_a_request_behind_a_whole_one_is_cut_off(self, slow):
        assert slow["half a request"].result().count(b"HTTP/1.1 200 ") == 1

    def test_one_that_is_idle_after_an_answer_is_closed(self, slow):
        assert slow["idle"].result().endswith(HEALTHY)

    def test_a_body_byte_by_byte_is_cut_off(self, slow):
        slow["body"].result()

    def test_a_body_that_nobody_waits_for_is_cut_off(self, slow):
        """A request that was answered before its body came does not keep its connection."""
        slow["body after its answer"].result()

    @pytest.mark.parametrize(
        "last", [b"GET /docs HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"\x00\r\n\r\n"]
    )
    def test_one_that_reads_no_answer_is_cut_off(self, quick, last):
        """The answers fill all buffers; the server waits for the client a second, and not for ever."""
        wait_until(lambda: not clients_of(quick))
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", quick.port))
            connection.settimeout(0.5)
            with contextlib.suppress(TimeoutError, ConnectionError):
                for _ in range(100_000):
                    connection.sendall(b"GET /docs HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
                connection.sendall(last)
            wait_until(lambda: not clients_of(quick))

    def test_the_server_is_as_well_as_before(self, quick):
        with quick.client() as client:
            assert client.get("/healthz").status_code == 200
        assert quick.process.poll() is None


def clients_of(server):
    """Return how many connections the server has, closed by a client or not."""
    served = re.findall(
        rf"^ *\d+: \w+:{server.port:04X} \w+:\w+ (?!0A).*", Path("/proc/net/tcp").read_text(), re.MULTILINE
    )
    directory, sockets = Path(f"/proc/{server.process.pid}/fd"), set()
    for each in directory.iterdir():
        with contextlib.suppress(OSError):
            sockets.add(str(each.readlink()))
    return sum(f"socket:[{line.split()[9]}]" in sockets for line in served)


class TestManyConnections:
    def test_one_client_more_than_its_share_is_refused_and_no_other(self, start, tmp_path):
        with start(tmp_path, "--connections-per-client", 3, "--header-timeout", 60) as server:
            with contextlib.ExitStack() as held:
                for _ in range(3):
                    connection = held.enter_context(server.connect())
                    connection.sendall(GET)
                    assert answer_to(connection).endswith(HEALTHY)
                refused = [server.exchange() for _ in range(4)]
                with server.connect(source=("127.0.0.2", 0)) as other:
                    other.sendall(GET)
                    assert answer_to(other).endswith(HEALTHY)
            assert {each.split(b"\r\n")[0] for each in refused} == {b"HTTP/1.1 429 Too Many Requests"}
            assert refused[0].endswith(b'{"reason": "too many connections: at most 3 of one client"}')
            wait_until(lambda: b"200 OK" in server.exchange(GET[:-2] + b"Connection: close\r\n\r\n"))
            status, errors = server.stop()
        assert status == 0
        assert errors.count("\n") == 1  # and not one for each
        assert "WARNING refused a connection of 127.0.0.1: it has 3 open" in errors

    def test_thousands_of_connections_come_and_go(self, start, tmp_path):
        """Each counted connection is taken off again, however it ends."""
        with start(tmp_path, "--connections-per-client", 4) as server:
            for number in range(1_000):
                with contextlib.suppress(ConnectionError), server.connect() as connection:
                    connection.sendall((GET, b"", b"\x00\r\n\r\n", GET[:20])[number % 4])
                    if number % 8 == 0:
                        connection.recv(1000)
            wait_until(lambda: b"200 OK" in server.exchange(GET[:-2] + b"Connection: close\r\n\r\n"))
            with contextlib.ExitStack() as held:
                four = [held.enter_context(server.connect()) for _ in range(4)]
                for connection in four:
                    connection.sendall(GET)
                    assert answer_to(connection).endswith(HEALTHY)

    def test_when_descriptors_run_out_the_log_says_so_and_the_rest_goes_on(self, start, tmp_path):
        with start(
            tmp_path, "--connections-per-client", 0, "--idle-timeout", 60, "--header-timeout", 60, descriptors=96
        ) as server:
            with contextlib.ExitStack() as held, server.client() as client:
                assert client.post(PATH, json={"tickTime": 1}).status_code == 204
                # Of more, the server would refuse a batch a second.
                many = [held.enter_context(server.connect()) for _ in range(120)]
                wait_until(lambda: many[-1].recv(1000).startswith(b"HTTP/1.1 503 "))
                for number in range(2, 10):  # the store has descriptors left
                    assert client.post(PATH, json={"tickTime": number}).status_code == 204
            wait_until(lambda: b"200 OK" in server.exchange(GET[:-2] + b"Connection: close\r\n\r\n"))
            status, errors = server.stop()
        entries, others = server.audited(errors)
        assert (status, len(entries), len(others)) == (0, 9, 1)
        assert "out of file descriptors: 48 connections are open, and the process is limited to 96" in others[0]

    def test_when_others_take_the_descriptors_the_log_says_so_once(self, start, tmp_path):
        """The share of connections is not full, and there is no descriptor to accept one."""
        options = ("--connections-per-client", 0, "--header-timeout", 2)
        with start(tmp_path, *options, descriptors=30) as server, contextlib.ExitStack() as held:
            for _ in range(50):
                held.enter_context(server.connect())
            held.close()
            assert server.exchange(b"GET /healthz HTTP/1.0\r\n\r\n").endswith(HEALTHY)
            status, errors = server.stop()
        assert (status, errors.count("\n")) == (0, 1)
        # Which of the two comes first depends on how fast the server accepts.
        assert re.search(
            "WARNING (cannot accept connections: Too many open files; they wait|out of file descriptors: )", errors
        )


class TestAmbiguousRequests:
    """Requests that a proxy could read differently from the server."""

    SMUGGLED = b"0\r\n\r\nGET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"

    @pytest.mark.parametrize("names", [("Content-Length: 5", "Transfer-Encoding: chunked")])
    @pytest.mark.parametrize("order", [1, -1])
    def test_a_length_with_an_encoding_ends_the_connection(self, quick, names, order):
        fields = "\r\n".join(names[::order])
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{fields}\r\n\r\n"
        answer = quick.exchange(head.encode() + self.SMUGGLED)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"connection: close" in answer.lower()

    @pytest.mark.parametrize(
        "field",
        [
            "Content-Length: 5\r\nContent-Length: 6",
            "Content-Length: +5",
            "Content-Length: 5,6",
            "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            "Transfer-Encoding: identity, chunked",
            "Transfer-Encoding : chunked",
            "Transfer-Encoding: xchunked",
        ],
    )
    def test_a_length_that_is_none_ends_the_connection(self, quick, field):
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{field}\r\n\r\n"
        answer = quick.exchange(head.encode() + self.SMUGGLED)
        assert (answer.count(b"HTTP/1.1 "), answer[:13]) == (1, b"HTTP/1.1 400 ")


class TestForms:
    """Forms of requests that are rare, and right."""

    def test_requests_may_come_together(self, quick):
        head = GET.replace(b"/healthz", b"/nothing")
        answer = quick.exchange(GET + head + GET)
        assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"200", b"404", b"200"]

    def test_the_old_protocol_gets_one_answer(self, quick):
        answer = quick.exchange(b"GET /healthz HTTP/1.0\r\n\r\n" + GET)
        assert answer.count(b"HTTP/1.1 200 ") == 1
        assert answer.endswith(HEALTHY)

    def test_a_head_has_no_body(self, quick):
        answer = quick.exchange(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\n")

    def test_a_chunked_body_may_have_trailers(self, quick):
        head = (
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
            "Transfer-Encoding: chunked\r\n\r\n"
        )
        body = b'8;x=y\r\n{"tickTi\r\n6\r\nme":7}\r\n0\r\nX-Checksum: 1\r\nHost: evil\r\n\r\n'
        assert quick.exchange(head.encode() + body).startswith(b"HTTP/1.1 204 ")

    @pytest.mark.parametrize(
        ("target", "host", "status"),
        [
            (b"http://localhost/healthz", b"localhost", b"200"),
            (b"HTTP://127.0.0.1:8080/healthz?x=y", b"evil.example", b"200"),
            (b"http://evil.example/healthz", b"localhost", b"400"),
            (b"http://localhost@evil.example/healthz", b"localhost", b"400"),
            (b"http://localhost", b"localhost", b"404"),
        ],
    )
    def test_a_whole_url_names_the_host(self, quick, target, host, status):
        answer = quick.exchange(b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\nConnection: close\r\n\r\n")
        assert answer.split()[1] == status

    def test_it_speaks_ipv6(self, start, tmp_path):
        if not has_ipv6():
            pytest.skip("no IPv6 on this machine")
        (tmp_path / "token").write_text("token-of-the-test")
        options = ("--host", "::1", "--token-file", tmp_path / "token", "--connections-per-client", 2)
        with start(tmp_path / "store", *options) as server:
            assert server.url == f"http://[::1]:{server.port}"
            with server.connect("::1"), server.connect("::1") as second:
                second.sendall(GET)
                assert answer_to(second).endswith(HEALTHY)
                assert server.exchange(host="::1").startswith(b"HTTP/1.1 429 ")


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


class TestLimits:
    @pytest.mark.parametrize("name", ["header_seconds", "idle_seconds", "answer_seconds"])
    def test_a_time_is_a_second_at_least(self, name):
        with pytest.raises(ValueError, match=f"{name} must be at least 1"):
            ConnectionLimits(**{name: 0})
        with pytest.raises(TypeError, match=name):
            ConnectionLimits(**{name: 1.5})

    def test_a_client_may_have_any_number(self):
        assert ConnectionLimits(per_client=0).per_client == 0
        with pytest.raises(ValueError, match="per_client must be at least 0"):
            ConnectionLimits(per_client=-1)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            *(("--header-timeout", 0), ("--idle-timeout", 0), ("--answer-timeout", "x")),
            *(("--connections-per-client", -1), ("--wrong-token-delay", 5)),
        ],
    )
    def test_an_option_out_of_its_bounds_is_named(self, capsys, tmp_path, option, value):
        assert_one_line(run(capsys, "serve", "--store", tmp_path / "store", option, value), option)
        assert not (tmp_path / "store").exists()
