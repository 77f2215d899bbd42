"""Threads that publish, trim or dispatch at once although they must not are refused, and nothing is changed."""

from __future__ import annotations

import sys
import threading
from functools import partial

import pytest

from ackstate import ManagedCursor, MemoryStore, Message, Subscription
from ackstate.topic import MessageLog
from ackstate.topic.log import SoleUse


class Elsewhere:
    """A thread that holds up one call of a store until it is told to go on."""

    def __init__(self, monkeypatch, ledgers, name):
        self._reached, self._passable = threading.Event(), threading.Event()
        call = getattr(type(ledgers), name)

        def slow(*args, **named):
            if threading.current_thread() is self._thread:
                self._reached.set()
                assert self._passable.wait(10)
            return call(*args, **named)

        monkeypatch.setattr(type(ledgers), name, slow)
        self._thread = None

    def starts(self, call, *args):
        self._thread = threading.Thread(target=call, args=args)
        self._thread.start()
        assert self._reached.wait(10)

    def ends(self):
        self._passable.set()
        self._thread.join()


def opened():
    store = MemoryStore()
    return store, MessageLog.open(store, topic="t", entries_per_ledger_max=1)


def test_a_publish_while_the_log_is_trimmed(monkeypatch):
    store, log = opened()
    for _ in range(3):
        log.publish([Message(b"x")])
    elsewhere = Elsewhere(monkeypatch, store.ledgers, "delete")
    elsewhere.starts(log.trim, 3)
    with pytest.raises(RuntimeError, match="the message log of topic 't' is used by two threads at once"):
        log.publish([Message(b"x")])
    elsewhere.ends()
    assert len(log.publish([Message(b"x")])) == 1


def test_a_dispatch_while_the_log_is_trimmed(monkeypatch):
    store, log = opened()
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    subscription = Subscription(log, cursor)
    for _ in range(3):
        log.publish([Message(b"x")])
    subscription.ack_cumulative(log.ledgers.last_confirmed, now_ms=0)
    log.publish([Message(b"y")])
    elsewhere = Elsewhere(monkeypatch, store.ledgers, "delete")
    elsewhere.starts(log.trim, 3)
    subscription.add_permits("ann", 1)
    for dispatch in (subscription.dispatch_all, partial(subscription.dispatch, "ann", 1)):
        with pytest.raises(RuntimeError, match="the message log of topic 't' is used by two threads at once"):
            dispatch(now_ms=0)
    elsewhere.ends()
    ((_, (delivery,)),) = subscription.dispatch_all(now_ms=0).deliveries
    assert delivery.message.payload == b"y"


def test_threads_that_only_check_do_not_refuse_each_other():
    use, refused = SoleUse("the thing"), []

    def check():
        try:
            for _ in range(20_000):
                use.check()
        except RuntimeError as error:
            refused.append(error)

    threads = [threading.Thread(target=check) for _ in range(4)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not refused
