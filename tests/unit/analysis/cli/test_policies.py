"""`ackstate namespaces` and `ackstate topics`: the request of each command, and its output."""

import json
import re
import socket
import subprocess
import threading
import time

import pytest

from ackstate.analysis.admin_client import AdminError, topic_path
from command_line import ENTRY, run, write_token
from pulsar_admin import serving

PLUGIN = "org.apache.pulsar.client.impl.auth.AuthenticationToken"
TOPIC = "/admin/v2/persistent/a/b/orders/delayedDelivery"
POLICY = b'{"tickTime": 1000, "active": true, "maxDeliveryDelayInMillis": 3600000}'
PRINTED = '{\n  "tickTime" : 1000,\n  "active" : true,\n  "maxDeliveryDelayInMillis" : 3600000\n}\n'
GET = ("namespaces", "get-delayed-delivery", "a/b")


@pytest.fixture
def server():
    with serving() as broker:
        broker.answers, broker.otherwise = {}, (204, b"", {})
        yield broker


@pytest.fixture
def admin(server, capsys):
    """Run a command against the server, the options before it given apart."""
    return lambda *arguments, before=(): run(capsys, "--admin-url", server.url, *before, *arguments)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("topics get-delayed-delivery", ("GET", f"{TOPIC}?applied=false", b"")),
        ("topics get-delayed-delivery -ap", ("GET", f"{TOPIC}?applied=true", b"")),
        ("topics get-delayed-delivery --applied -g", ("GET", f"{TOPIC}?applied=true&isGlobal=true", b"")),
        ("topics set-delayed-delivery -e -t 2s", ("POST", TOPIC, b'{"active":true,"tickTime":2000}')),
        ("topics set-delayed-delivery -d --global", ("POST", f"{TOPIC}?isGlobal=true", b'{"active":false}')),
        ("topics remove-delayed-delivery", ("DELETE", TOPIC, b"")),
        ("topics remove-delayed-delivery -g", ("DELETE", f"{TOPIC}?isGlobal=true", b"")),
        ("topics cancel-delayed-message -l 3 -e 7", ("DELETE", f"{TOPIC}/3/7", b"")),
        ("topics reschedule-delayed-message -l 3 -e 7 --deliver-at 9000", ("POST", f"{TOPIC}/3/7", b"9000")),
    ],
)
def test_what_is_sent_for_a_topic(server, admin, line, expected):
    assert admin(*line.split(), "persistent://a/b/orders").status == 0
    (request,) = server.requests
    assert request[:3] == expected
    assert "authorization" not in request.headers
    assert request.headers.get("content-type", "") == ("application/json" if request.body else "")


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


# --- output


@pytest.mark.parametrize("line", ["namespaces get-delayed-delivery a/b", "topics get-delayed-delivery a/b/orders"])
def test_get_prints_as_pulsar_admin_does(server, admin, line):
    for content, printed in ((POLICY, PRINTED), (b"null", "null\n"), (b"", "null\n")):
        server.otherwise = (200, content, {})
        assert admin(*line.split()) == (0, printed, "")


@pytest.mark.parametrize(
    ("status", "content", "reason"),
    [
        (412, b'{"reason": "fixed delay while inactive"}', "fixed delay while inactive"),
        (404, b'{"reason": "Topic not found"}', "Topic not found"),
        (401, b"", "HTTP 401 Unauthorized"),
        (401, b'{"reason": null}', "HTTP 401 Unauthorized"),
        (500, b"<html>", "HTTP 500 Internal Server Error"),
        (503, b"[]", "HTTP 503 Service Unavailable"),
        (307, b"", "HTTP 307 Temporary Redirect"),
        (400, b'{"reason": "a\\u001b[31mb"}', "a\\x1b[31mb"),
    ],
)
def test_every_command_tells_of_a_refusal(server, admin, status, content, reason):
    server.otherwise = (status, content, {})
    for verb in ("get-delayed-delivery", "set-delayed-delivery -e", "remove-delayed-delivery"):
        assert admin("topics", *verb.split(), "orders") == (1, "", f"{reason}\n\nReason: {reason}\n")


CONFLICT = (409, b'{"reason": "changed by somebody else"}', {})


@pytest.mark.parametrize(
    ("words", "method"), [("set-delayed-delivery -e", "POST"), ("remove-delayed-delivery", "DELETE")]
)
def test_what_meets_another_writer_is_sent_again(server, admin, words, method):
    server.answers[f"{TOPIC.replace('a/b', 'public/default')}"] = [*[CONFLICT] * 3, (204, b"", {})]
    assert admin("topics", *words.split(), "orders") == (0, "", "")
    assert [request.method for request in server.requests] == [method] * 4
    assert len({request.body for request in server.requests}) == 1


@pytest.mark.parametrize(("verb", "count"), [("remove", 5), ("get", 1)])
def test_it_is_not_sent_for_ever(server, admin, verb, count):
    server.otherwise = CONFLICT
    assert admin("topics", f"{verb}-delayed-delivery", "orders").status == 1
    assert len(server.requests) == count


@pytest.mark.parametrize("content", [b"<html>", b"\xff", b"[" * 100_000, b" " * 1024 * 1024 + b"null"])
def test_an_answer_that_is_no_policy(server, admin, content):
    server.otherwise = (200, content, {})
    status, out, err = admin(*GET)
    assert (status, out) == (1, "")
    assert err.startswith("the answer of the server is ")
    assert err.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "more"),
    [
        (b"", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nnull", b""),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
    ],
)
def test_a_silent_or_trickling_server_is_waited_for_no_longer_than_asked(capsys, first, more):
    stop = threading.Event()

    def answer():
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            try:
                connection.sendall(first)
                while not stop.wait(0.1):
                    connection.sendall(more)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        begun_s = time.monotonic()
        status, out, err = run(capsys, "--admin-url", url, "--request-timeout", "1", *GET)
        stop.set()
        thread.join()
    late = "the answer of the server did not end in time" if first else f"Error connecting to: {url}: timed out"
    assert (status, out, err) == (1, "", f"{late}\n")
    assert 0.9 <= time.monotonic() - begun_s < 10


# --- where the server is, and who asks


def test_a_token_is_sent_as_given_or_from_a_file(server, admin, tmp_path):
    file = write_token(tmp_path / "the token", "s3cr3t")
    for parameters in ("token:s3cr3t", file.as_uri()):
        assert admin(*GET, before=["--auth-plugin", PLUGIN, "--auth-params", parameters]).status == 0
    assert server.tokens == ["Bearer s3cr3t"] * 2


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
    status, out, err = admin(*GET, before=["--auth-plugin", plugin, "--auth-params", parameters])
    assert (status, out, server.requests) == (1, "", [])
    assert saying in err
    assert "s3cr3t" not in err


def test_a_password_in_a_url_is_refused_and_not_shown(capsys):
    for words in (["--admin-url", "{}", *GET], ["pulsar", "snapshot", "{}"], ["pulsar", "exporter", "{}"]):
        outcome = run(capsys, *(word.format("http://user:s3cr3t@localhost:8080") for word in words))
        assert outcome.status in {1, 2}
        assert "has a user or password: use --auth-params or --token-file" in outcome.err
        assert "s3cr3t" not in outcome.err


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
            yield ["--admin-url", url, "--auth-params", token.as_uri()]
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
@pytest.mark.parametrize(
    ("group", "name"), [("namespaces", "a/second"), ("topics", "a/other/orders"), ("topics", "a=b/sixth/größe?y#z%2F")]
)
def test_a_policy_from_set_to_remove_keeps_what_is_not_named(ask, group, name):
    assert ask(f"{group} get-delayed-delivery {name}") == (0, "null\n", "")
    assert ask(f"{group} set-delayed-delivery {name} -e -t 10s --maxDelay 1h --fixed-delay 1m") == (0, "", "")
    assert ask(f"{group} set-delayed-delivery {name} -e -t 2s") == (0, "", "")
    expected = {"active": True, "tickTime": 2_000, "maxDeliveryDelayInMillis": 3_600_000}
    assert policy(ask(f"{group} get-delayed-delivery {name}")) == expected | {"fixedDeliveryDelayInMillis": 60_000}
    assert ask(f"{group} set-delayed-delivery {name} -e -md 0 -fd 0").status == 0
    changed = policy(ask(f"{group} get-delayed-delivery {name}"))
    assert (changed["maxDeliveryDelayInMillis"], changed["fixedDeliveryDelayInMillis"]) == (0, 0)
    assert ask(f"{group} remove-delayed-delivery {name}") == (0, "", "")
    assert ask(f"{group} get-delayed-delivery {name}") == (0, "null\n", "")
