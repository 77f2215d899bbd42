"""The admin server, in this process or as the command that a user starts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import pytest

from ackstate.analysis.admin.app import create_app
from ackstate.cursor import MemoryStore
from command_line import ENTRY

_READY = re.compile(r"ackstate admin on (http://\S+) \((.*)\); read (http://\S+)/docs\n")


class InProcess:
    """Sends requests to an application without a network."""

    def __init__(self, app):
        self.app = app

    def __call__(self, method, path, *, json=None, **options):
        async def ask():
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", trust_env=False) as client:
                if json is not None:
                    options["json"] = json
                return await client.request(method, path, **options)

        return asyncio.run(ask())


class Server:
    """A server in a process of its own."""

    def __init__(self, process):
        self.process = process
        self.line = process.stdout.readline()
        ready = _READY.fullmatch(self.line)
        assert ready, (self.line, process.communicate())
        self.url, self.told, page = ready.groups()
        assert page == self.url
        self.port = int(self.url.rpartition(":")[2])

    def client(self, **options):
        return httpx.Client(base_url=self.url, trust_env=False, **options)

    def stop(self, with_signal=signal.SIGTERM):
        """Send a signal; return exit status and what stands on standard error."""
        self.process.send_signal(with_signal)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    def connect(self, host="127.0.0.1", source=None):
        """Open a connection that gives up a wait after 20 s."""
        return socket.create_connection((host, self.port), timeout=20, source_address=source)

    def exchange(self, *requests, host="127.0.0.1"):
        """Send bytes over one connection; return all that comes until the server closes it."""
        with self.connect(host) as connection:
            for each in requests:
                connection.sendall(each)
            return self.received(connection)

    @staticmethod
    def received(connection):
        """Return all that comes until the other side closes the connection."""
        pieces = []
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(1 << 20):
                pieces.append(piece)
        return b"".join(pieces)

    @staticmethod
    def audited(errors):
        """Return the entries of the audit log on standard error, and the lines that are none."""
        lines = [line.partition(" ackstate.admin.audit INFO ") for line in errors.splitlines()]
        return [json.loads(entry) for _, mark, entry in lines if mark], ["".join(line) for line in lines if not line[1]]


@contextmanager
def running(store, *options, env=None, descriptors=None):
    """Run `ackstate serve` on a store until the end of the block, at any free port unless told otherwise."""
    limit = [] if descriptors is None else ["sh", "-c", f'ulimit -n {descriptors}; exec "$@"', "sh"]
    command = [*limit, *ENTRY, "serve", "--port", "0", "--store", str(store), *map(str, options)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=env, **pipes)
    try:
        yield Server(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


class Standing:
    """Stands for a store, or a part of one, that each test has anew: an application takes a while to make."""

    def __init__(self, find):
        self._find = find

    def __getattr__(self, name):
        return getattr(self._find(), name)


@pytest.fixture(scope="session")
def shared():
    """The store of the test that runs, and an application on it with Pulsar's defaults and without a token."""
    current = {}
    standing = Standing(lambda: current["store"])
    parts = {name: Standing(lambda name=name: getattr(standing, name)) for name in ("metadata", "ledgers")}
    return current, InProcess(create_app(SimpleNamespace(**parts)))


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def ask(shared, store):
    """Requests to the server with Pulsar's defaults, without a token."""
    shared[0]["store"] = store
    return shared[1]


@pytest.fixture
def ask_with(store):
    """Make requests to a server with other settings."""
    return lambda **settings: InProcess(create_app(store, **settings))


@pytest.fixture(scope="session")
def in_process():
    """Make requests to an application."""
    return InProcess


@pytest.fixture(scope="session")
def start():
    """Start real servers: `with start(directory, *options) as server`."""
    return running
