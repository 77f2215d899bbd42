"""The client of BookKeeper with a child process that dies or falls silent; no Java."""

import os
import signal
import socket
import sys
import threading
from contextlib import closing

import pytest

from ackstate.stores import bookkeeper_client
from ackstate.stores.base import StoreError
from ackstate.stores.bookkeeper_appends import append_all
from ackstate.stores.bookkeeper_client import BookKeeperClient
from ackstate.stores.busy_ledgers import BusyLedgers

CHILD = """
import socket, sys
from ackstate.stores.bookkeeper_frames import FrameReader, frame

requests, replies = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
reader = FrameReader(requests)
while (request := reader.read()) is not None:
    number, operation, arguments = request
    if operation == "append":
        replies.sendall(frame([(number, True, [len(entry) for _, entry in arguments[0]])]))
    elif operation != "missing_bookies":
        replies.sendall(frame([(number, True, None)]))
"""


@pytest.fixture
def connect(tmp_path, monkeypatch):
    """Start clients whose child replies to all but `missing_bookies`, and appends entries at their sizes."""
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "java.jar").touch()
    monkeypatch.setattr(bookkeeper_client, "_WORKER", "child")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
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


def test_a_silent_child_is_given_up_although_another_process_has_inherited_its_sockets(connect, monkeypatch):
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
        assert append_all(client, [(7, bytes(size)) for size in sizes]) == sizes
        assert append_all(client, []) == []
    assert max(most) <= 4 * (4 << 20)
    assert len(most) > 4


def test_calls_for_the_same_ledgers_take_turns_in_their_order():
    """A call for several ledgers, such as the last one of a store, is not passed by forever."""
    busy, order, never = BusyLedgers(), [], threading.Event()

    def single(number):
        with busy.holding({1 + number % 2}):
            order.append(number)

    def all_of_them():
        with busy.holding({1, 2}):
            order.append("all")

    threads = [threading.Thread(target=all_of_them), *(threading.Thread(target=single, args=[n]) for n in range(4))]
    with busy.holding({1}):
        for waiting, thread in enumerate(threads, 3):
            thread.start()
            while sum(map(len, busy._calls.values())) < waiting:
                never.wait(0.001)
        assert order == []
        with busy.holding({3}):
            order.append("other")
    for thread in threads:
        thread.join()
    assert order[:2] == ["other", "all"]
    assert sorted(order[2:]) == [0, 1, 2, 3]
    assert busy._calls == {}
