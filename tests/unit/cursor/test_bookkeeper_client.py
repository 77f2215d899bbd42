"""The client of BookKeeper with a child process that dies or falls silent, and its parts that need no Java."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from ackstate.stores import bookkeeper_client
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, StoreError
from ackstate.stores.bookkeeper_client import BookKeeperClient, BookKeeperError, Replication, error_of, find_jars

CHILD = """
import marshal, sys
from multiprocessing.connection import Connection

connection = Connection(int(sys.argv[1]))
while True:
    for number, operation, arguments in marshal.loads(connection.recv_bytes()):
        result = [len(entry) for _, entry in arguments[0]] if operation == "append" else None
        if operation != "missing_bookies":
            connection.send_bytes(marshal.dumps([(number, True, result)]))
"""


@pytest.fixture
def connect(tmp_path, monkeypatch):
    """Start clients whose child replies to all but `missing_bookies`, and appends entries at their sizes."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "java.jar").touch()
    monkeypatch.setattr(bookkeeper_client, "_CHILD", tmp_path / "child.py")
    return lambda **settings: closing(BookKeeperClient("zk+null://h/ledgers", class_path=str(tmp_path), **settings))


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 5, f"signal {signal.SIGRTMIN + 5}")]
)
def test_a_call_under_way_ends_with_the_child_however_it_dies(connect, number, name):
    with connect() as client:
        reply = client.missing_bookies()
        os.kill(client.process_id, number)
        with pytest.raises(StoreError, match=f"was killed by {name}; close .*; the call may have happened"):
            reply.wait()
        with pytest.raises(StoreError, match=f"was killed by {name}"):
            client.delete(1)


def test_a_silent_child_is_given_up_although_another_process_has_inherited_its_socket(connect, monkeypatch):
    """A fork of another thread, at the wrong moment, keeps the connection open for ever."""
    pair, inherited = socket.socketpair, []

    def inheriting():
        ours, childs = pair()
        inherited.append(childs.dup())
        return ours, childs

    monkeypatch.setattr(socket, "socketpair", inheriting)
    with connect(call_timeout_s=0.3) as client:
        with pytest.raises(
            StoreError, match=r"no reply to missing_bookies within 0.3 s; .*; the call may have happened"
        ):
            client.missing_bookies().wait()
        client.close()
    for each in inherited:
        each.close()


def test_a_child_that_reads_no_requests_is_given_up(connect):
    with connect(call_timeout_s=0.3) as client:
        os.kill(client.process_id, signal.SIGSTOP)
        # More than fits into the socket, so that sending hangs, too.
        with pytest.raises(StoreError, match=r"accepts no request|no reply"):
            client.append([(7, bytes(2_000_000))]).wait()
        with pytest.raises(StoreError, match="open it again"):
            client.append([(7, b"")])


def test_only_some_bytes_of_a_large_append_are_under_way_at_once(connect, monkeypatch):
    sizes = [4_000_000, 300_000, 5, *[1_500_000] * 20]
    under_way, most = [], []
    append = BookKeeperClient.append

    def counting(self, entries):
        reply = append(self, entries)
        under_way.append(sum(len(entry) for _, entry in entries))
        most.append(sum(under_way))
        wait = reply.wait

        def waited():
            under_way.pop(0)
            return wait()

        reply.wait = waited
        return reply

    monkeypatch.setattr(BookKeeperClient, "append", counting)
    with connect() as client:
        assert client.append_all([(7, bytes(size)) for size in sizes]) == sizes
        assert client.append_all([]) == []
    assert max(most) <= 4 * (4 << 20)
    assert len(most) > 4


def test_errors_of_bookkeeper_become_ours():
    assert isinstance(error_of(-101, "fenced"), LedgerFencedError)
    assert isinstance(error_of(-25, "no ledger"), LedgerNotFoundError)
    error = error_of(-6, "Not enough non-faulty bookies available")
    assert isinstance(error, BookKeeperError)
    assert (error.code, str(error)) == (-6, "BookKeeper: Not enough non-faulty bookies available (code -6)")


@pytest.mark.parametrize(
    "values", [{"ensemble_size": 1}, {"ack_quorum": 0}, {"write_quorum": 1}, {"digest_type": "MD5"}]
)
def test_replication_that_makes_no_sense_is_refused(values):
    with pytest.raises(ValueError, match="must be"):
        Replication(**values)


def test_the_class_path_comes_from_the_option_then_the_environment_then_pulsar(tmp_path, monkeypatch):
    folders = {name: tmp_path / name for name in ("option", "variable", "pulsar/lib")}
    for name, folder in folders.items():
        folder.mkdir(parents=True)
        (folder / f"{Path(name).name}.jar").touch()
    monkeypatch.delenv("ACKSTATE_BOOKKEEPER_CLASSPATH", raising=False)
    monkeypatch.delenv("PULSAR_HOME", raising=False)
    with pytest.raises(StoreError, match=r"^BookKeeper's Java client is missing: name a folder .* PULSAR_HOME$"):
        find_jars(None)
    monkeypatch.setenv("PULSAR_HOME", str(tmp_path / "pulsar"))
    assert find_jars(None) == [str(folders["pulsar/lib"] / "lib.jar")]
    monkeypatch.setenv("ACKSTATE_BOOKKEEPER_CLASSPATH", f"{folders['variable']}/*")
    assert find_jars(None) == [str(folders["variable"] / "variable.jar")]
    jar = folders["option"] / "option.jar"
    assert find_jars(f"{jar}:{folders['variable']}") == [str(jar), str(folders["variable"] / "variable.jar")]
    with pytest.raises(StoreError, match=f"{tmp_path}/nothing has no jars"):
        find_jars(f"{tmp_path}/nothing")


def test_bookies_that_do_not_answer_or_are_not_registered_are_named():
    from ackstate.stores.bookkeeper_java import unavailable_bookies

    def answer():
        for _ in range(2):
            connection, _ = bookie.accept()
            with connection:
                connection.sendall(connection.recv(24))

    with (
        socket.create_server(("127.0.0.1", 0)) as bookie,
        socket.create_server(("127.0.0.1", 0)) as hanging,
        socket.socket() as unheard,
        ThreadPoolExecutor(1) as thread,
    ):
        bookie.settimeout(5)
        unheard.bind(("127.0.0.1", 0))
        up, hangs, down = (f"127.0.0.1:{each.getsockname()[1]}" for each in (bookie, hanging, unheard))
        answered = thread.submit(answer)
        assert unavailable_bookies([up, hangs, down], {up, hangs, down}) == [hangs, down]
        assert unavailable_bookies([up, down, "a-name"], {down}) == [up, down, "a-name"]
        answered.result()
