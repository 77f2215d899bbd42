"""A server that answers as the admin interface of a Pulsar broker does, from recorded answers."""

from __future__ import annotations

import http.server
import json
import threading
from contextlib import contextmanager
from pathlib import Path

VECTORS = Path(__file__).parent / "vectors" / "internal-stats"
TOPIC = "persistent://public/default/smoke"
PATH = "/admin/v2/persistent/public/default/smoke"
NAMESPACE = "/admin/v2/namespaces/public/default"
RUNTIME = "/admin/v2/brokers/configuration/runtime"
INTERNALS = json.loads((VECTORS / "internalStats-smoke-alternate.json").read_text())
STATS = json.loads((VECTORS / "stats-smoke-alternate.json").read_text())
CONFIGURATION = {"managedLedgerMaxUnackedRangesToPersist": "10000", "maxUnackedMessagesPerConsumer": "50000"}


class AnsweringBroker(http.server.ThreadingHTTPServer):
    """Answers each path as told: JSON, or (status, content, headers), or a list of these one after the other."""

    daemon_threads = True

    def __init__(self, answers):
        super().__init__(("127.0.0.1", 0), AnsweringHandler)
        self.answers = answers
        self.tokens = set()
        self.asked = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class AnsweringHandler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.tokens.add(self.headers.get("Authorization"))
        self.server.asked.append(self.path)
        answer = self.server.answers.get(self.path, (404, b'{"reason": "Topic not found"}', {}))
        if isinstance(answer, list) and answer and isinstance(answer[0], dict | tuple):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        status, content, headers = answer if isinstance(answer, tuple) else (200, json.dumps(answer).encode(), {})
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(content))} | headers).items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)

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
        NAMESPACE: {"max_unacked_messages_per_consumer": None},
    } | topic_answers()


@contextmanager
def serving(changes=None):
    """Yield a broker with the answers of `answers` and some changes."""
    broker = AnsweringBroker(answers() | (changes or {}))
    thread = threading.Thread(target=broker.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield broker
    finally:
        broker.shutdown()
        broker.server_close()
        thread.join()
