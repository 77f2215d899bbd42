"""`ackstate explain URL` against servers that answer wrongly: one line on standard error, and no control characters."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from command_line import assert_one_line, run

ORDERS, RETURNS = "persistent://public/default/orders", "persistent://public/default/returns"
PATH = "/admin/v2/persistent/public/default"
HOLE = {
    "first": "3:0", "last": "3:4", "entry_count": 5, "age_ms": None, "why": "IN_FLIGHT", "detail": "in flight",
    "consumers": ["ann"], "deliver_at_ms": None, "delivery_count": 1, "cost_bytes": 14, "freed_bytes": 14,
    "freed_ranges": 1, "mark_delete_advance": 5,
}  # fmt: skip
SUBSCRIPTION = {
    "subscription": "billing", "type": "Shared", "mark_delete": "3:-1", "backlog": 5, "range_count": 1,
    "record_bytes": 14, "redelivery_if_crashed": 3, "hole_count": 2, "holes": [HOLE], "blocked": [],
}  # fmt: skip


class ExplainHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = self.server.answers.get(self.path.partition("?")[0])
        content = json.dumps(found if found is not None else {"reason": "Not Found"}).encode()
        self.send_response(200 if found is not None else 404)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments):
        """Keep standard error for the command."""


@pytest.fixture
def server():
    """A server with two open topics, of which one is explained."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ExplainHandler)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.answers = {
        "/admin/v2/brokers/version": "5.0.0",
        "/admin/v2/brokers/configuration/runtime": {},
        "/admin/v2/tenants": ["public", "pulsar"],
        "/admin/v2/namespaces/public": ["public/default"],
        PATH: [ORDERS, RETURNS],
        f"{PATH}/orders/explain": {"topic": ORDERS, "now_ms": 7, "subscriptions": [SUBSCRIPTION]},
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_topic_that_cannot_be_read_is_named(server, capsys):
    outcome = run(capsys, "explain", server.url, "--json")
    assert (outcome.status, outcome.err) == (1, "")
    answer = json.loads(outcome.out)
    assert answer["now_ms"] == 7
    assert answer["cursors"] == [{"topic": ORDERS, "status": "ok", "problems": []} | SUBSCRIPTION]
    ((missing),) = answer["missing"]
    assert missing["topic"] == RETURNS
    assert "HTTP 404" in missing["why"]


def test_a_tenant_and_a_namespace_that_cannot_be_listed_are_named(server, capsys):
    server.answers["/admin/v2/tenants"] = ["demo", "public"]
    server.answers["/admin/v2/namespaces/public"] = ["public/default", "public/standalone/ns1"]
    server.answers[PATH] = [ORDERS]
    outcome = run(capsys, "explain", server.url, "--json")
    assert (outcome.status, outcome.err) == (1, "")
    answer = json.loads(outcome.out)
    assert [each["topic"] for each in answer["cursors"]] == [ORDERS]
    missing = {each["topic"]: (each["kind"], each["reason"]) for each in answer["missing"]}
    assert missing == {"demo": ("tenant", "gone"), "public/standalone/ns1": ("namespace", "unsupported")}
    assert "tenant demo does not exist" in run(capsys, "explain", server.url).out


def test_a_broker_that_explains_nothing_is_refused(server, capsys):
    del server.answers[f"{PATH}/orders/explain"]
    assert_one_line(run(capsys, "explain", server.url), "HTTP 404", "/orders/explain")


@pytest.mark.parametrize(
    "change",
    [
        {"subscriptions": "none"},
        {"subscriptions": [SUBSCRIPTION | {"backlog": "5"}]},
        {"subscriptions": [SUBSCRIPTION | {"holes": [HOLE | {"age_ms": 1.5}]}]},
        {"now_ms": None},
    ],
)
def test_a_malformed_answer_is_refused(server, capsys, change):
    server.answers[f"{PATH}/orders/explain"] |= change
    server.answers[PATH] = [ORDERS]
    assert_one_line(run(capsys, "explain", server.url), f"{ORDERS}: explain: ")


def test_control_characters_are_not_printed(server, capsys):
    odd = "a\x1b[31m"
    hole = HOLE | {"first": odd, "last": odd, "detail": odd, "why": odd}
    block = {"rule": odd, "consumer": odd, "used": 1, "limit": 1, "released_at": 0, "since_ms": None, "detail": odd}
    subscription = SUBSCRIPTION | {
        "subscription": odd,
        "type": odd,
        "mark_delete": odd,
        "holes": [hole],
        "blocked": [block],
    }
    server.answers[f"{PATH}/orders/explain"]["subscriptions"] = [subscription]
    server.answers[PATH] = [ORDERS]
    outcome = run(capsys, "explain", server.url)
    assert outcome.status == 0
    assert outcome.out.count("a\\x1b") == 7
    assert "\x1b" not in outcome.out
