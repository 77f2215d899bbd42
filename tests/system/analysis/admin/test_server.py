"""The command `ackstate serve` as its users meet it: real requests to a real process, which is also killed."""

import contextlib
import os
import signal
import socket
import threading
from contextlib import closing
from urllib.parse import quote

import httpx
import pytest

from ackstate import SqliteStore
from ackstate.limits.policies import PolicyOwner, PolicyStore
from waiting import wait_until

pytestmark = pytest.mark.slow

TOPIC = "/admin/v2/persistent/public/default/orders"
NAMESPACE = "/admin/v2/namespaces/public/default"
TOKEN = "a-token-of-some-length"


def stored_tick_time(path):
    with closing(SqliteStore(path)) as store:
        found = PolicyStore(store.metadata).read(PolicyOwner("public", "default", "orders"))
    return found.policies.delayed_delivery.tick_time_ms


def is_listening(port):
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionError:
        return False
    return True


def test_it_says_where_it_is_takes_a_broker_conf_and_answers_requests_under_way_before_it_ends(start, tmp_path):
    (tmp_path / "broker.conf").write_text(
        "delayedDeliveryEnabled=false\ndelayedDeliveryTickTimeMillis=250\ndelayedDeliveryMaxDelayInMillis=86400000\n"
        "becomeOldAckRecordSeconds=30\nmaxUnPersistAckRecordsBytes=2048\n"
    )
    store, options = tmp_path / "new" / "store", ("--conf", tmp_path / "broker.conf", "--topic-may-disable")
    environment = {name: text for name, text in os.environ.items() if name != "ACKSTATE_ADMIN_TOKEN"}
    with start(store, *options, env=environment) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        assert server.told == "no token: only this machine can connect"
        with server.client(params={"applied": "true"}) as client:
            assert client.get(f"{TOPIC}/delayedDelivery").json() == {
                "active": False,
                "tickTime": 250,
                "maxDeliveryDelayInMillis": 86_400_000,
                "fixedDeliveryDelayInMillis": 0,
            }
            assert client.get(f"{TOPIC}/becomeOldAckRecordSeconds").json() == 30
            assert client.get(f"{NAMESPACE}/maxUnPersistAckRecordsBytes").json() == 2048
            enforced = {"active": True, "fixedDeliveryDelayInMillis": 5}
            assert client.post(f"{NAMESPACE}/delayedDelivery", json=enforced).status_code == 204
            assert client.post(f"{TOPIC}/delayedDelivery", json={"fixedDeliveryDelayInMillis": 0}).status_code == 204
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(
                f"POST {TOPIC}/delayedDelivery HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                "Content-Length: 14\r\nExpect: 100-continue\r\n\r\n".encode()
            )
            assert connection.recv(1_000).startswith(b"HTTP/1.1 100 ")
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: not is_listening(server.port))
            connection.sendall(b'{"tickTime":7}')
            assert connection.recv(1_000).startswith(b"HTTP/1.1 204 ")
        assert server.process.wait(30) == 0
    assert stored_tick_time(store) == 7


def test_policies_survive_a_kill(start, tmp_path):
    """A change answered with 204 is there after SIGKILL, in two lives, each killed while it is written to."""
    path, known = f"{TOPIC}/delayedDelivery", 0
    for life in range(2):
        with start(tmp_path) as server, server.client() as client:
            found = (client.get(path).json() or {}).get("tickTime", 0)
            assert known <= found <= known + 1
            assert (found == 0) == (life == 0)
            known = write_until_killed(server, client, path, begin=found)
    assert known <= stored_tick_time(tmp_path) <= known + 1


def write_until_killed(server, client, path, *, begin):
    """Write rising numbers, have the server killed after some; return the last one that it said was written."""
    killer, known = threading.Thread(target=server.process.kill), begin
    with contextlib.suppress(httpx.TransportError):
        while client.post(path, json={"tickTime": known + 1}).status_code == 204:
            known += 1
            if known == begin + 5:
                killer.start()
    killer.join()
    assert server.process.wait(30) == -signal.SIGKILL
    assert known >= begin + 5
    return known


def test_each_change_is_a_line_of_the_log_that_says_where_from_and_what(start, tmp_path):
    """Whether a name that would make a line of its own is refused or logged, the server began each line."""
    (tmp_path / "token").write_bytes(f" {TOKEN}\r\n".encode())
    with start(tmp_path / "store", "--token-file", tmp_path / "token", "--host", "0.0.0.0") as server:
        assert server.told == "bearer token required"
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", trust_env=False) as client:
            refused = client.get(f"{TOPIC}/delayedDelivery")
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            client.headers = {"Authorization": f"Bearer {TOKEN}"}
            assert client.post(f"{NAMESPACE}/delayedDelivery", json={"tickTime": 5}).status_code == 204
            assert client.post(f"{NAMESPACE}/delayedDelivery", json={"active": True}).status_code == 204
            assert client.post(f"{NAMESPACE}/delayedDelivery", json={"tickTime": 0}).status_code == 412
            assert client.get(f"{NAMESPACE}/delayedDelivery").status_code == 200
            assert client.delete(f"{NAMESPACE}/delayedDelivery").status_code == 204
            path = f"{TOPIC}/becomeOldAckRecordSeconds"
            assert client.post(path, json=30).status_code == 204
            assert client.delete(path).status_code == 204
            assert client.post(path, json=1, headers={"Authorization": "Bearer absent"}).status_code == 401
            accepted = []
            for name in ("or\nders", "or\r\nders", "\u2028", "\x1b[2J", "a\u202eb", '","client":"root', "é\u00a0"):
                path = f"/admin/v2/persistent/public/default/{quote(name, safe='')}/delayedDelivery"
                status = client.post(path, json={"tickTime": 5}).status_code
                assert status in {204, 400, 412}
                accepted += [name] * (status == 204)
        status, errors = server.stop()
    entries, _ = server.audited(errors)
    assert status == 0
    delays = {"client": "127.0.0.1", "owner": "public/default", "policy": "delayedDelivery"}
    number = delays | {"owner": "persistent://public/default/orders", "policy": "becomeOldAckRecordSeconds"}
    assert entries[:5] == [
        delays | {"action": "POST", "before": None, "after": {"tickTime": 5}},
        delays | {"action": "POST", "before": {"tickTime": 5}, "after": {"active": True, "tickTime": 5}},
        delays | {"action": "DELETE", "before": {"active": True, "tickTime": 5}, "after": None},
        number | {"action": "POST", "before": None, "after": 30},
        number | {"action": "DELETE", "before": 30, "after": None},
    ]
    assert [each["owner"].partition("default/")[2] for each in entries[5:]] == accepted
    assert TOKEN not in errors
    assert "absent" not in errors


# --- One server, which answers odd requests and many at once, and then ends


@pytest.fixture(scope="module")
def running(start, tmp_path_factory):
    with start(tmp_path_factory.mktemp("store")) as server:
        yield server


def exchange(server, request):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(request)
        answer = connection.recv(100_000)
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else answer


CHUNKED = (
    f"POST {TOPIC}/delayedDelivery HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    "Transfer-Encoding: chunked\r\n\r\n"
)
END = b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"
# Requests that no client library sends, and the statuses of which each gets one.
ODD = [
    (b"GET /admin/v2/namespaces/\xff\xfe/x/delayedDelivery HTTP/1.1" + END, {400}),
    (b"GET /admin/v2/namespaces/a/%zz/delayedDelivery HTTP/1.1" + END, {412}),
    (b"GET http://evil/healthz HTTP/1.1" + END, {400, 404}),
    (b"GET //evil.example/healthz HTTP/1.1" + END, {404}),
    (b"GET * HTTP/1.1" + END, {400, 404}),
    (b"GET healthz HTTP/1.1" + END, {400, 404}),
    (b"CONNECT evil:1 HTTP/1.1" + END, {400, 404, 405}),
    (b"GET /healthz\x00 HTTP/1.1" + END, {400}),
    (b"\x16\x03\x01\x02\x00" + END, {400}),
    (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n", {400, 431}),
    (CHUNKED.encode() + b"10000\r\n" + b" " * 0x10000 + b"\r\n1\r\n \r\n0\r\n\r\n", {413}),
]


@pytest.mark.parametrize(("request_bytes", "statuses"), ODD)
def test_an_odd_request_gets_4xx(running, request_bytes, statuses):
    assert exchange(running, request_bytes) in statuses


FIELDS = [("delayedDelivery", name) for name in ("tickTime", "maxDeliveryDelayInMillis", "fixedDeliveryDelayInMillis")]
NUMBERS = [("becomeOldAckRecordSeconds", None), ("maxUnPersistAckRecordsBytes", None)]
WRITES = 15
COUNTER = "/admin/v2/persistent/public/default/counter/becomeOldAckRecordSeconds"


def race(url):
    """Let eight threads write; fail if one of them loses a write that was answered with 204.

    Five have a field of the same topic each: a field that a thread wrote stays until it writes again, whatever others
    do. Three add to one number on the condition that it has not changed. Returns how many writes were refused.
    """
    failures, refused, added = [], [], []

    def own_field(policy, field):
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            expected = None
            for number in range(2_000, 2_000 + WRITES):
                answer = client.post(f"{TOPIC}/{policy}", json={field: number} if field else number)
                assert answer.status_code in {204, 409}, answer.text
                refused.extend([answer] * (answer.status_code == 409))
                expected = number if answer.status_code == 204 else expected
                found = client.get(f"{TOPIC}/{policy}").json()
                found = (found or {}).get(field) if field else found
                assert found == expected, f"{policy} {field}: wrote {expected}, found {found}"

    def add():
        with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
            for _ in range(WRITES):
                seen = client.get(COUNTER)
                tag = {"If-Match": seen.headers["etag"]}
                answer = client.post(COUNTER, json=(seen.json() or 0) + 1, headers=tag)
                assert answer.status_code in {204, 409, 412}, answer.text
                (added if answer.status_code == 204 else refused).append(answer)

    def noted(call, *arguments):
        try:
            call(*arguments)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=noted, args=(own_field, *each)) for each in (*FIELDS, *NUMBERS)]
    threads += [threading.Thread(target=noted, args=(add,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert (httpx.get(f"{url}{COUNTER}", trust_env=False).json() or 0) == len(added)
    return len(refused)


def test_of_eight_writers_at_once_none_loses_a_write(running):
    refused = race(running.url)
    assert refused > 0  # else they were never at it at the same time
    assert refused < 8 * WRITES


def test_after_all_that_it_is_healthy_has_said_nothing_and_ends_at_an_interrupt(running):
    with running.client() as client:
        assert client.get("/healthz").json() == {"status": "ok"}
    status, errors = running.stop(signal.SIGINT)
    assert (status, running.audited(errors)[1]) == (0, [])
