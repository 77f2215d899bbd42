"""The admin server as the command that a user starts."""

import json
import re
import signal
import subprocess
from contextlib import contextmanager

import httpx
import pytest

from command_line import ENTRY

_READY = re.compile(r"ackstate admin on (http://\S+) \((.*)\); read (http://\S+)/openapi.json\n")


class ServerProcess:
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
        """Send a signal; return exit status and standard error."""
        self.process.send_signal(with_signal)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors

    @staticmethod
    def audited(errors):
        """Return the entries of the audit log on standard error, and the lines that are none."""
        lines = [line.partition(" ackstate.admin.audit INFO ") for line in errors.splitlines()]
        return [json.loads(entry) for _, mark, entry in lines if mark], ["".join(line) for line in lines if not line[1]]


@contextmanager
def running(store, *options, env=None):
    """Run `ackstate serve` on a store until the end of the block, at any free port unless told otherwise."""
    command = [*ENTRY, "serve", "--port", "0", "--store", str(store), *map(str, options)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, env=env, **pipes)
    try:
        yield ServerProcess(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


@pytest.fixture(scope="session")
def start():
    """Start real servers: `with start(directory, *options) as server`."""
    return running
