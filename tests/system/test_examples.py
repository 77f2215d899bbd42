"""The examples run, as their README has it: processes, sockets, kill -9."""

import asyncio
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from ackstate.limits import GateLimits

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.slow


class LineClient:
    """One connection: says a line, hears lines."""

    def __init__(self, address):
        self.socket = socket.create_connection(address, timeout=20)
        self.lines = self.socket.makefile("rb")
        self.messages = []

    def say(self, *lines):
        self.socket.sendall("".join(f"{line}\n" for line in lines).encode())

    def answer(self):
        """The next answer; messages that come before it are kept."""
        while (line := self.line()).startswith("msg "):
            self.messages.append(line)
        return line

    def line(self):
        line = self.lines.readline().decode()
        assert line.endswith("\n"), "the broker hung up"
        return line.rstrip("\n")

    def ask(self, line):
        self.say(line)
        return self.answer()

    def message(self):
        """The next message, without `msg`."""
        if not self.messages:
            self.messages.append(self.line())
        return self.messages.pop(0).removeprefix("msg ")

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)
        self.lines.close()
        self.socket.close()


@contextmanager
def broker(store, *, idle_s=30):
    """Run the broker until the block ends, then kill it; yield its process and its address."""
    command = [sys.executable, "-P", EXAMPLES / "shell_broker.py", store, "0", str(idle_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            listening = re.fullmatch(r"listening on (127\.0\.0\.1) (\d+)\n", process.stdout.readline())
            assert listening, process.stderr.read()
            yield process, (listening[1], int(listening[2]))
        finally:
            process.send_signal(signal.SIGKILL)


def test_a_message_goes_through_the_broker(tmp_path):
    with broker(tmp_path / "store") as (_, address):
        client = LineClient(address)
        assert client.ask("sub billing") == f"ok {client.socket.getsockname()[1]}"
        assert client.ask("pub two apples") == "ok 1:0"
        assert client.message() == "1:0 0 two apples"
        assert client.ask("nack 1:0 50") == "ok True"
        assert client.ask("nack 1:0 50") == "ok False"
        assert client.message() == "1:0 1 two apples"
        assert client.ask("pub a pear") == "ok 1:1"
        assert client.message() == "1:1 0 a pear"
        assert client.ask("ack 1:1") == "ok 1"
        assert client.ask("ack 1:1") == "ok 0"
        assert client.ask("ack 1:0") == "ok 1"
        client.close()


def test_killed_and_started_again_the_broker_has_lost_nothing(tmp_path):
    """Two subscriptions, three lives: every published message comes, and of the acked ones at most the last."""
    store, published, acked = tmp_path / "store", {}, {"billing": set(), "shipping": set()}
    for life in range(3):
        with broker(store) as (process, address):
            producer = LineClient(address)
            consumers = {name: LineClient(address) for name in acked}
            for name, consumer in consumers.items():
                consumer.ask(f"sub {name}")
            for number in range(40):
                position = producer.ask(f"pub {life}-{number}").removeprefix("ok ")
                published[position] = f"{life}-{number}"
            for name, consumer in consumers.items():
                for _ in range(20 + 10 * life):
                    position, _, text = consumer.message().split()
                    assert published[position] == text
                    assert consumer.ask(f"ack {position}") == "ok 1"
                    acked[name].add(position)
            process.kill()
            for client in (producer, *consumers.values()):
                client.close()
    with broker(store, idle_s=1) as (process, address):
        clients = {name: LineClient(address) for name in acked}
        for name, client in clients.items():
            client.ask(f"sub {name}")
        clients["billing"].ask("pub end")
        for name, client in clients.items():
            rest = set()
            while (words := client.message().split())[2] != "end":
                rest.add(words[0])
                client.ask(f"ack {words[0]}")
            assert rest | acked[name] >= published.keys(), "lost"
            client.ask(f"ack {words[0]}")
            client.close()
        assert process.wait(timeout=20) == 0, "it stops by itself"
        assert process.stderr.read() == ""
    with broker(store) as (_, address):
        client = LineClient(address)
        client.ask("sub billing")
        client.ask("pub after")
        assert client.message().endswith(" 0 after"), "stopped in order, it had persisted every ack"
        client.close()


def load_broker():
    spec = importlib.util.spec_from_file_location("broker_example", EXAMPLES / "shell_broker.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def acks_every_other(broker, port):
    """Fill the limit with ack ranges that are not durable; then say nothing more, and wait for another message."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"sub billing\n")
    await reader.readline()
    broker.topic.subscriptions["billing"].change_limits(GateLimits(max_unpersisted_ack_record_bytes=1_024))
    writer.write(b"pub text\n" * 200)
    received = []
    while not broker.topic.subscriptions["billing"].why_blocked():
        await asyncio.sleep(0.01)
    writer.write(b"what has come so far?\n")
    while not (line := await reader.readline()).startswith(b"error"):
        if line.startswith(b"msg "):
            received.append(line.split()[1])
    assert 50 < len(received) < 100
    for position in received[::2]:
        writer.write(b"ack %b\n" % position)
    while not (line := await reader.readline()).startswith(b"msg "):
        assert line == b"ok 1\n"
    writer.close()


def test_a_limit_that_a_persist_opens_wakes_the_consumer(tmp_path, capsys):
    async def story():
        broker = load_broker().ShellBroker(str(tmp_path / "store"))
        running = asyncio.create_task(broker.run(0, 1))
        while not (printed := capsys.readouterr().out):
            await asyncio.sleep(0.01)
        await acks_every_other(broker, int(printed.split()[3]))
        await running

    asyncio.run(asyncio.wait_for(story(), 20))


def rows(text):
    """The rows of a table: how it saves, how it is mounted, whether another syncs; then the errors."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


@pytest.mark.root
@pytest.mark.usefixtures("power_can_be_cut")
def test_power_cuts_find_what_no_sigkill_does_in_the_kept_result_and_here():
    command = [sys.executable, "-P", EXAMPLES / "why_sigkill_is_not_enough.py", "5"]
    here = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "100"})
    kept = (EXAMPLES / "why_sigkill_is_not_enough.txt").read_text(encoding="utf-8")
    for text, all_of_them in ((here.stdout, "5"), (kept, "100")):
        assert rows(text) == [
            ["rename", "default", "no", "0", all_of_them, "0"],
            ["rename", "default", "yes", "0", "0", "0"],
            ["rename", "hostile", "yes", "0", "0", all_of_them],
            *(["fsync, rename, fsync", *disk, "0", "0", "0"] for disk in
              (["default", "no"], ["default", "yes"], ["hostile", "yes"])),
        ]  # fmt: skip
