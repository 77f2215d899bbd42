"""Who waits for the gate is told once when it opens, whatever other threads do."""

import logging
import threading

import pytest

from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Usage
from waiting import wait_until

FULL, EMPTY = Usage(0, 0, 4), Usage(0, 0, 0)


def shut_gate() -> DispatchGate:
    gate = DispatchGate(GateLimits(0, 4, max_unacked_messages_per_consumer=0))
    assert gate.request([17], usage=FULL).granted == 0
    return gate


def test_a_waiter_is_called_at_once_if_nothing_is_closed():
    calls = []
    DispatchGate(GateLimits()).when_open(lambda: calls.append(1))
    assert calls == [1]


def test_a_waiter_is_called_once_when_the_use_has_fallen():
    gate, calls = shut_gate(), []
    gate.when_open(lambda: calls.append(1))
    assert (gate.refresh(Usage(0, 0, 2)), calls, gate.is_closed) == (0, [], True)
    assert (gate.refresh(Usage(0, 0, 1)), calls, gate.is_closed) == (1, [1], False)
    gate.request([17], usage=FULL)
    assert (gate.refresh(EMPTY), calls) == (0, [1])


def test_waiters_are_called_in_the_order_in_which_they_came():
    gate, calls = shut_gate(), []
    for name in "abc":
        gate.when_open(lambda name=name: calls.append(name))
    assert (gate.refresh(EMPTY), calls) == (3, ["a", "b", "c"])


def test_a_forgotten_waiter_is_not_called():
    gate, calls = shut_gate(), []
    gate.when_open(calls.clear)
    gate.when_open(calls.sort)
    gate.forget_waiter(calls.clear)
    gate.forget_waiter(calls.pop)
    assert gate.refresh(EMPTY) == 1


def test_a_waiter_of_a_closed_consumer_waits_for_both():
    gate, calls = DispatchGate(GateLimits(0, 4, max_unacked_messages_per_consumer=2)), []
    gate.request([17], usage=Usage(0, 0, 4, consumer_unacked_messages=2), consumer="a")
    for name in "ab":
        gate.when_open(lambda name=name: calls.append(name), name)
    gate.refresh(EMPTY, {"a": 2})
    assert (calls, gate.is_closed) == (["b"], True)
    gate.refresh(EMPTY, {"a": 1})
    assert (calls, gate.is_closed) == (["b", "a"], False)


def test_a_waiter_of_a_consumer_that_closes_is_called():
    gate, calls = DispatchGate(GateLimits(max_unacked_messages_per_consumer=2)), []
    gate.request([17], usage=Usage(0, 0, 2, consumer_unacked_messages=2), consumer="a")
    gate.when_open(lambda: calls.append(1), "a")
    gate.consumer_closed("a")
    assert calls == [1]


def test_switching_a_limit_off_and_a_request_that_opens_the_gate_call_waiters():
    gate, calls = shut_gate(), []
    gate.when_open(lambda: calls.append("changed"))
    gate.change_limits(GateLimits(0, 0))
    gate.change_limits(GateLimits(0, 4))
    gate.request([17], usage=FULL)
    gate.when_open(lambda: calls.append("requested"))
    gate.request([17], usage=EMPTY)
    assert calls == ["changed", "requested"]


def test_a_waiter_may_ask_and_wait_again():
    gate, calls = shut_gate(), []

    def again():
        calls.append(gate.request([17], usage=FULL).granted)
        gate.when_open(calls.sort)

    gate.when_open(again)
    gate.refresh(EMPTY)
    assert (calls, gate.is_closed) == ([0], True)


@pytest.mark.parametrize(
    ("opening", "returned"),
    [
        (lambda gate: gate.refresh(EMPTY), 2),
        (lambda gate: gate.request([17], usage=EMPTY).granted, 1),
        (lambda gate: gate.observe(EMPTY, next_record_bytes=17), False),
        (lambda gate: gate.change_limits(GateLimits(0, 0)), None),
    ],
)
def test_a_waiter_that_raises_disturbs_neither_the_others_nor_the_call_that_opens_the_gate(caplog, opening, returned):
    gate, calls = shut_gate(), []
    gate.when_open(lambda: 1 / 0)
    gate.when_open(lambda: calls.append(1))
    assert (opening(gate), calls, gate.is_closed) == (returned, [1], False)
    (record,) = caplog.records
    assert (record.levelno, record.name, record.exc_info[0]) == (
        logging.ERROR,
        "ackstate.limits.broker",
        ZeroDivisionError,
    )


def test_a_waiter_that_raises_disturbs_no_consumer_that_closes():
    gate = shut_consumers("a")
    gate.when_open(lambda: 1 / 0, "a")
    gate.consumer_closed("a")
    assert gate.closed_consumers == ()


def test_a_waiter_that_is_called_at_once_raises_to_its_caller():
    with pytest.raises(ZeroDivisionError):
        DispatchGate(GateLimits()).when_open(lambda: 1 / 0)


@pytest.mark.parametrize("make", [shut_gate, lambda: DispatchGate(GateLimits())])
def test_a_waiter_that_cannot_be_called_is_refused_at_once(caplog, make):
    gate = make()
    with pytest.raises(TypeError, match="None"):
        gate.when_open(None)
    assert (gate.refresh(EMPTY), caplog.records) == (0, [])


def shut_consumers(*names) -> DispatchGate:
    """A gate on which each of these has 4 unacked messages, and its limit is 4."""
    gate = DispatchGate(GateLimits(0, 4, max_unacked_messages_per_consumer=4))
    for name in names:
        gate.request([17], usage=Usage(0, 0, 3, consumer_unacked_messages=4), consumer=name)
    assert gate.closed_consumers == names
    return gate


def test_who_waited_longest_is_called_first_whenever_its_consumer_opened():
    gate, calls = shut_consumers("a", "b"), []
    gate.observe(FULL, next_record_bytes=17)
    for name in "abcab":
        gate.when_open(lambda name=name: calls.append(name), name)
    gate.consumer_closed("b")
    assert (gate.refresh(EMPTY), calls) == (3, ["b", "c", "b"])
    assert (gate.refresh(EMPTY, {"a": 0}, "a"), calls[3:]) == (2, ["a", "a"])


def test_a_waiter_of_a_closed_consumer_can_be_forgotten():
    gate, calls = shut_consumers("a"), []
    for waiter in (calls.clear, calls.sort, calls.clear):
        gate.when_open(waiter, "a")
    assert gate.refresh(EMPTY) == 0
    gate.forget_waiter(calls.clear)
    assert gate.refresh(EMPTY, {}) == 1


def test_a_refresh_of_a_consumer_looks_at_no_other():
    gate, asked = shut_consumers("a", "b", "c"), []

    def unacked(name):
        asked.append(name)
        return 2

    assert (gate.refresh(EMPTY, unacked, "z"), asked, gate.closed_consumers) == (0, [], ("a", "b", "c"))
    gate.refresh(EMPTY, unacked, "b")
    assert (asked, gate.closed_consumers) == (["b"], ("a", "c"))
    gate.refresh(EMPTY, unacked)
    assert (asked, gate.closed_consumers) == (["b", "a", "c"], ())


def test_all_can_be_woken_while_the_gate_stays_shut():
    gate, calls = shut_consumers("a"), []
    gate.observe(FULL, next_record_bytes=17)
    for name in "ab":
        gate.when_open(lambda name=name: calls.append(name), name)
    gate.wake()
    gate.wake()
    assert (calls, gate.is_closed, gate.refresh(EMPTY, {})) == (["a", "b"], True, 0)


@pytest.mark.parametrize("broker", [None, BrokerLimit(9)])
def test_a_gate_that_closes_for_good_calls_everyone_once_and_lets_nobody_wait(broker):
    gate, calls = DispatchGate(GateLimits(0, 4, max_unacked_messages_per_consumer=4), broker=broker), []
    gate.request([17], usage=Usage(0, 0, 4, consumer_unacked_messages=4), consumer="a")
    gate.when_open(lambda: 1 / 0)
    for name in "abab":
        gate.when_open(lambda name=name: calls.append(name), name)
    gate.close()
    assert calls == ["a", "b", "a", "b"]
    gate.close()
    gate.refresh(EMPTY, {})
    assert calls == ["a", "b", "a", "b"]
    gate.request([17], usage=FULL)
    gate.when_open(lambda: calls.append("late"))
    assert calls[4:] == ["late"]


class Dispatchers:
    """Threads that send through one gate as soon as it is open, and one that acks the sent messages."""

    def __init__(self, gate, *, messages, senders, lost_after_s=30.0):
        self.gate, self.left, self.senders, self.lost_after_s = gate, messages, senders, lost_after_s
        self.lock = threading.Lock()
        self.unacked = 0
        self.lost = 0

    def send_one(self) -> bool:
        with self.lock:
            if not self.left:
                return True
            granted = self.gate.request([17], usage=Usage(0, 0, self.unacked)).granted
            self.unacked += granted
            self.left -= granted
            assert self.unacked <= 4
            return bool(granted)

    def send(self):
        while self.left > 0 and not self.lost:
            if not self.send_one():
                opened = threading.Event()
                self.gate.when_open(opened.set)
                # As long as it waits, another thread acks: only a call that never comes takes so long.
                self.lost += not opened.wait(self.lost_after_s)

    def ack(self):
        while (self.left > 0 or self.unacked) and not self.lost:
            with self.lock:
                self.unacked -= self.unacked > 0
                self.gate.refresh(Usage(0, 0, self.unacked))

    def run(self):
        threads = [threading.Thread(target=self.send) for _ in range(self.senders)]
        threads.append(threading.Thread(target=self.ack))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.lost


@pytest.mark.slow
def test_no_wake_up_is_lost_whatever_the_threads_do():
    dispatchers = Dispatchers(DispatchGate(GateLimits(0, 4)), messages=4_000, senders=3)
    assert dispatchers.run() == 0
    assert dispatchers.unacked == 0


class LooksBeforeItLocks(DispatchGate):
    """Between the look and the lock another thread may open the gate, and wake those who wait so far."""

    def when_open(self, waiter, consumer=""):
        if not self.is_closed:
            waiter()
            return
        wait_until(lambda: not self.is_closed)
        with self._lock:
            self._waiters.append((consumer, waiter))


@pytest.mark.slow
def test_threads_lose_a_wake_up_of_a_gate_that_looks_before_it_locks():
    assert Dispatchers(LooksBeforeItLocks(GateLimits(0, 4)), messages=100, senders=1, lost_after_s=1.0).run() == 1
