"""A server that answers as the admin interface of a Pulsar broker does, from recorded answers."""

from __future__ import annotations

import http.server
import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ackstate import BatchIndexes, DeletedRanges, Position
from ackstate.analysis.pulsar.durable import DurableState

VECTORS = Path(__file__).parent / "vectors" / "internal-stats"
TOPIC = "persistent://public/default/smoke"
PATH = "/admin/v2/persistent/public/default/smoke"
RUNTIME = "/admin/v2/brokers/configuration/runtime"
INTERNALS = json.loads((VECTORS / "internalStats-smoke-alternate.json").read_text())
STATS = json.loads((VECTORS / "stats-smoke-alternate.json").read_text())
CONFIGURATION = {"managedLedgerMaxUnackedRangesToPersist": "10000"}


class KeptRequest(NamedTuple):
    method: str
    target: str
    body: bytes
    headers: dict  # by name in lower case


class AnsweringBroker(http.server.ThreadingHTTPServer):
    """Answers each path as told: JSON, or (status, content, headers), or a list of these one after the other.

    With a token, who sends another one gets 401 instead of an answer of 200 or 404.
    """

    daemon_threads = True

    def __init__(self, answers, *, context=None, address="127.0.0.1", token=None):
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, 0), AnsweringHandler)
        if context:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        self.answers, self.token = answers, token
        self.requests = []
        self.otherwise = 404, b'{"reason": "Topic not found"}', {}
        self.place = f"{f'[{address}]' if ':' in address else address}:{self.server_port}"
        self.url = f"{'https' if context else 'http'}://{self.place}"

    @property
    def asked(self):
        return [request.target for request in self.requests]

    @property
    def tokens(self):
        return [request.headers.get("authorization") for request in self.requests]

    def handle_error(self, request, client_address):
        """Keep standard error for the command: a client that refuses a certificate breaks the connection."""


class AnsweringHandler(http.server.BaseHTTPRequestHandler):
    def do(self):
        headers = {name.lower(): text for name, text in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        self.server.requests.append(KeptRequest(self.command, self.path, body, headers))
        answers = self.server.answers
        answer = answers.get(self.path, answers.get(self.path.partition("?")[0], self.server.otherwise))
        if isinstance(answer, list) and answer and isinstance(answer[0], dict | tuple):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        status, content, more = answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode(), {})
        if self.server.token and status in {200, 404} and headers.get("authorization") != f"Bearer {self.server.token}":
            status, content, more = 401, b"", {}
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(content))} | more).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_DELETE = do  # noqa: N815

    def log_message(self, *arguments):
        """Keep standard error for the command."""


def topic_answers(path=PATH, internals=INTERNALS, stats=STATS):
    return {f"{path}/internalStats": internals, f"{path}/stats": stats, f"{path}/partitions": {"partitions": 0}}


def answers():
    return {
        "/admin/v2/brokers/version": (200, b"4.2.4", {}),
        RUNTIME: CONFIGURATION,
        "/admin/v2/tenants": ["public", "pulsar"],
        "/admin/v2/namespaces/public": ["public/default"],
        "/admin/v2/persistent/public/default": [TOPIC],
    } | topic_answers()


@contextmanager
def serving(changes=None, **options):
    """Yield a broker with the answers of `answers` and some changes."""
    broker = AnsweringBroker(answers() | (changes or {}), **options)
    thread = threading.Thread(target=broker.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield broker
    finally:
        broker.shutdown()
        broker.server_close()
        thread.join()


def state(entries=(), version=1, mark_delete=-1, *, place=(-1, -1)):
    """Return the durable state of a cursor that has acked some entries of ledger 3, with the place of its record."""
    ranges = DeletedRanges()
    for entry in entries:
        ranges.add(Position(3, entry))
    return DurableState(Position(3, mark_delete), ranges, BatchIndexes(), (version, *place))


class Durable:
    """Stands in for a `DurableReader`: reads what it is told, one state after the other, or an error."""

    def __init__(self, *states):
        self.states = list(states) or [state()]

    def read(self, cursors):
        found = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return dict.fromkeys(cursors, found)

    def __enter__(self):
        return self

    def __exit__(self, *_exception):
        pass
