"""The gate, one behaviour at a time: grants, marks, verdicts, a look at the use, the limit of a broker, waiters."""

import logging
import threading

import pytest

from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Rule, Usage, Verdict

NOTHING_USED = Usage(0, 0, 0)
BYTES = {"max_unpersisted_ack_record_bytes": 1024}
MESSAGES, RANGES, OF_CONSUMER = "max_unacked_messages", "max_unacked_ranges", "max_unacked_messages_per_consumer"


def gate_of(broker=None, **limits):
    """A gate with no limits but these."""
    off = {"max_unpersisted_ack_record_bytes": 0, MESSAGES: 0, OF_CONSUMER: 0}
    return DispatchGate(GateLimits(**{**off, **limits}), broker=broker)


def messages(unacked):
    return Usage(0, 0, unacked, consumer_unacked_messages=unacked)


def ranges(count, reserved=0):
    return Usage(0, 0, 0, count, reserved)


def ask(gate, usage, costs, **more):
    """Ask for messages of these costs, or for so many; return how many are granted."""
    return gate.request([17] * costs if isinstance(costs, int) else costs, usage=usage, **more).granted


@pytest.mark.parametrize(
    ("limits", "usage", "request_of_one", "rule"),
    [
        (BYTES, Usage(600, 400, 9), ([24], None), None),
        (BYTES, Usage(600, 400, 9), ([25], None), Rule.UNPERSISTED_ACK_RECORD_BYTES),
        ({MESSAGES: 4}, messages(3), ([17], (1,)), None),
        ({MESSAGES: 4}, messages(4), ([17], (1,)), Rule.UNACKED_MESSAGES),
        ({OF_CONSUMER: 4}, messages(3), ([17], (1,)), None),
        ({OF_CONSUMER: 4}, messages(4), ([17], (1,)), Rule.CONSUMER_UNACKED_MESSAGES),
        ({RANGES: 10}, ranges(4, 5), ([17], None), None),
        ({RANGES: 10}, ranges(4, 6), ([17], (1,)), Rule.UNACKED_RANGES),
        ({RANGES: 10}, ranges(4, 6), ([17], (0,)), None),
        ({RANGES: 10}, ranges(4, 4), ([17], (3,)), Rule.UNACKED_RANGES),
    ],
)
def test_one_redelivery_is_granted_up_to_each_limit(limits, usage, request_of_one, rule):
    costs, range_costs = request_of_one
    verdict = gate_of(**limits).request_redelivery(costs, usage=usage, range_costs=range_costs)
    assert (verdict.granted, verdict.rule) == (rule is None, rule)


def test_the_defaults_are_pulsars():
    assert GateLimits() == GateLimits(5 * 1024 * 1024, 200_000, 0.8, 0.5, 0, 50_000)


GRANTS = {  # limits -> for each usage and request, how many messages it is granted
    "a byte limit below one is off": ({"max_unpersisted_ack_record_bytes": -1}, [(Usage(10**12, 10**12, 0), 1, 1)]),
    "a message limit of zero is off": ({}, [(messages(10**9), 3, 3)]),
    "bytes to the last": (BYTES, [(Usage(600, 400, 9), [24], 1), (Usage(600, 400, 9), [25], 0)]),
    "what would fit behind waits": (BYTES, [(Usage(1000, 0, 0), [30, 1], 0)]),
    "nothing is granted": (BYTES, [(Usage(5000, 0, 0), [], 0)]),
    "bytes open at their mark": (BYTES, [(Usage(used, 0, 0), 1, used in {819, 836}) for used in (1020, 820, 819, 836)]),
    "one larger than the limit": (BYTES, [(NOTHING_USED, [2000], 0), (NOTHING_USED, 1, 1)]),
    "a part leaves the rule open": ({MESSAGES: 4}, [(NOTHING_USED, 5, 4), (messages(3), 1, 1)]),
    "the last range goes out": ({RANGES: 10}, [(ranges(4, 5), 1, 1), (ranges(4, 4), 3, 2), (ranges(4, 6), 1, 0)]),
    "ranges open at their mark": ({RANGES: 10}, [(ranges(10), 1, 0), (ranges(9), 1, 0), (ranges(8), 1, 1)]),
    "a consumer opens at half": ({OF_CONSUMER: 5}, [(messages(used), 1, used == 2) for used in (5, 3, 2)]),
    **{
        f"{limit} messages open below half as in Pulsar": (
            {MESSAGES: limit}, [(messages(limit), 1, 0), (messages(opens_at + 1), 1, 0), (messages(opens_at), 1, 1)]
        )
        for limit, opens_at in [(1, 0), (2, 0), (3, 0), (4, 1), (5, 1), (50_000, 24_999)]
    },
}  # fmt: skip


@pytest.mark.parametrize(("limits", "requests"), GRANTS.values(), ids=GRANTS)
def test_so_many_messages_are_granted(limits, requests):
    gate = gate_of(**limits)
    assert [ask(gate, usage, costs, consumer="a") for usage, costs, _ in requests] == [each[-1] for each in requests]


@pytest.mark.parametrize(
    ("limits", "costs", "usage", "verdict"),
    [
        (BYTES, [20, 20, 20, 1], Usage(480, 500, 9), (2, Rule.UNPERSISTED_ACK_RECORD_BYTES, 1020, 1024, 819)),
        ({MESSAGES: 4}, [17] * 3, Usage(0, 34, 2), (2, Rule.UNACKED_MESSAGES, 4, 4, 1)),
        ({RANGES: 10}, [17] * 3, ranges(4, 4), (2, Rule.UNACKED_RANGES, 10, 10, 8)),
        (BYTES | {MESSAGES: 1}, [17], Usage(0, 1024, 1), (0, Rule.UNPERSISTED_ACK_RECORD_BYTES, 1024, 1024, 819, 0)),
    ],
)
def test_the_verdict_says_what_stopped_the_longest_prefix_that_fits(limits, costs, usage, verdict):
    assert gate_of(**limits).request(costs, usage=usage) == Verdict(*verdict)


@pytest.mark.parametrize("name", [MESSAGES, OF_CONSUMER])
def test_a_batch_larger_than_the_limit_goes_out_alone(name):
    gate = gate_of(**{name: 5})
    assert ask(gate, messages(1), 1, weights=[9]) == 0
    assert ask(gate, NOTHING_USED, 2, weights=[9, 1]) == 1
    assert gate.request_redelivery([17] * 2, usage=NOTHING_USED, weights=[9, 1]).granted == 1
    assert gate.request_redelivery([17], usage=messages(1), weights=[9]).granted == 0


def test_limits_that_change_keep_a_rule_closed_until_the_use_has_fallen_and_may_free_it():
    gate = gate_of(**{MESSAGES: 100})
    gate.change_limits(GateLimits(0, 10))
    assert gate.request([17], usage=messages(100)) == Verdict(0, Rule.UNACKED_MESSAGES, 100, 10, 4, 0)
    assert gate.request_redelivery([17], usage=messages(99)).granted == 0
    gate.change_limits(GateLimits(0, 30))
    assert [ask(gate, messages(used), 1) for used in (15, 14, 30)] == [0, 1, 0]
    gate.change_limits(GateLimits(0, 0))
    assert (ask(gate, messages(30), 1), gate.limits) == (1, GateLimits(0, 0))
    gate = gate_of(**{OF_CONSUMER: 2})
    ask(gate, messages(2), 1, consumer="a")
    gate.change_limits(GateLimits(max_unacked_messages_per_consumer=0))
    assert (gate.closed_consumers, gate.is_closed) == ((), False)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"weights": [1]}, "2 messages and 1 of weight"),
        ({"weights": [1, 0]}, "weight of message 1 must be at least 1, got 0"),
        ({"range_costs": [-1, 0]}, "range cost of message 0 must be at least 0, got -1"),
        ({"range_costs": [1, 0, 0]}, "2 messages and 3 of range cost"),
        ({"record_bytes": [17, -1]}, "worst case in bytes of message 1 must be at least 0, got -1"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, message):
    costs = {"record_bytes": [17, 17], "usage": messages(1)} | costs
    gate = gate_of(**{MESSAGES: 1})
    with pytest.raises(ValueError, match=message):
        gate.request_redelivery(costs.pop("record_bytes"), **costs)
    with pytest.raises(ValueError, match="worst case in bytes of message 0 must be at least 0, got -1"):
        gate.observe(messages(1), next_record_bytes=-1)
    ask(gate, messages(1), 1)
    with pytest.raises(ValueError, match="weight of message 0 must be at least 1, got 0"):
        ask(gate, messages(1), 1, weights=[0])  # a closed gate, too


def test_a_look_closes_each_rule_that_has_no_room_and_no_other():
    gate = gate_of(**BYTES, **{RANGES: 5, MESSAGES: 4, OF_CONSUMER: 3})
    usage = Usage(1000, 7, 3, range_count=3, reserved_ranges=1)
    assert not gate.observe(usage, next_record_bytes=17)
    assert gate.observe(usage, next_record_bytes=18)
    full = Usage(1000, 8, 3, range_count=4, reserved_ranges=1, consumer_unacked_messages=3)
    assert gate.observe(full, next_record_bytes=17, consumer="a")
    assert [verdict.rule for verdict in gate.why_blocked(full, "a")] == [
        Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES, Rule.CONSUMER_UNACKED_MESSAGES,
    ]  # fmt: skip
    assert not gate.observe(NOTHING_USED, next_record_bytes=17, consumer="b")
    assert gate.closed_consumers == ("a",)


# Several subscriptions of one broker


class GatedSubscription:
    """As many unacked messages as were sent and not acked, told to the gate as a broker does it."""

    def __init__(self, broker):
        self.gate, self.unacked = gate_of(broker), 0

    def send(self, *weights, now_ms=0):
        usage = Usage(0, 0, self.unacked)
        verdict = self.gate.request([17] * len(weights), usage=usage, weights=weights, now_ms=now_ms)
        return self.sent(weights[: verdict.granted], verdict)

    def redeliver(self, count):
        verdict = self.gate.request_redelivery([17] * count, usage=Usage(0, 0, self.unacked))
        return self.sent([1] * verdict.granted, verdict)

    def sent(self, weights, verdict):
        self.unacked += sum(weights)
        self.gate.count_unacked(sum(weights))
        return verdict

    def ack(self, count):
        self.unacked -= count
        self.gate.count_unacked(-count)


def two_of(broker):
    return GatedSubscription(broker), GatedSubscription(broker)


def test_a_full_broker_lets_each_have_its_share_until_the_total_is_below_half():
    broker = BrokerLimit(100, 0.16)
    large, small = two_of(broker)
    assert large.send(*[1] * 100).granted == 100
    assert (large.send(1, now_ms=5).granted, broker.is_blocked) == (0, True)
    assert [small.send(*[1] * 20).granted, small.send(1).granted] == [16, 0]
    (verdict,) = large.gate.why_blocked(Usage(0, 0, 100))
    assert verdict == Verdict(0, Rule.BROKER_UNACKED_MESSAGES, used=116, limit=100, released_at=49, since_ms=5)
    assert (large.gate.blocked_count(verdict.rule), small.gate.blocked_count(verdict.rule)) == (1, 1)
    small.ack(8)
    assert small.send(1).granted == 0
    woken = []
    small.gate.when_open(lambda: woken.append("its own share"))
    small.ack(1)
    assert woken == ["its own share"]
    assert (broker.is_blocked, small.send(*[1] * 20).granted) == (True, 9)
    small.send(1)
    large.ack(66)
    assert (broker.unacked_messages, broker.is_blocked, small.gate.is_closed) == (50, True, True)
    large.ack(1)
    assert (broker.unacked_messages, broker.is_blocked) == (49, False)
    assert (small.gate.is_closed, large.gate.is_closed) == (False, False)
    assert small.send(*[1] * 20).granted == 20


def test_a_look_at_a_full_broker_closes_who_has_its_share_and_no_other():
    broker = BrokerLimit(10, 0.2)
    (large, small), idle = two_of(broker), gate_of(broker)
    large.send(*[1] * 9)
    assert not large.gate.observe(Usage(0, 0, 9), next_record_bytes=17)
    small.send(1)
    assert large.gate.observe(Usage(0, 0, 9), next_record_bytes=17, now_ms=3)
    assert not small.gate.observe(Usage(0, 0, 1), next_record_bytes=17)
    assert not idle.observe(NOTHING_USED, next_record_bytes=17)
    assert large.gate.why_blocked(Usage(0, 0, 9)) == (Verdict(0, Rule.BROKER_UNACKED_MESSAGES, 10, 10, 4, 3),)
    large.ack(6)
    assert (large.gate.is_closed, large.gate.observe(Usage(0, 0, 3), next_record_bytes=17)) == (False, False)


@pytest.mark.parametrize("is_redelivery", [False, True])
def test_a_subscription_that_leaves_takes_what_it_was_promised_with_it(is_redelivery):
    """Granted and not yet counted as sent, when the gate closes: the others have that room again, and are woken."""
    broker = BrokerLimit(10)
    leaving, staying = two_of(broker)
    staying.send(1, 1)
    leaving.send(1, 1)
    request = leaving.gate.request_redelivery if is_redelivery else leaving.gate.request
    assert request([17] * 7, usage=Usage(0, 0, 2)).granted == 6
    assert (broker.unacked_messages, staying.send(1).granted) == (10, 0)
    woken = []
    staying.gate.when_open(lambda: woken.append(True))
    leaving.gate.close()
    leaving.gate.close()
    assert (broker.unacked_messages, woken) == (2, [True])
    leaving.gate.count_unacked(6)
    staying.ack(2)
    assert (broker.unacked_messages, broker.is_blocked) == (0, False)


@pytest.mark.parametrize("is_redelivery", [False, True])
def test_what_was_granted_and_not_sent_is_free_again_with_the_next_request(is_redelivery):
    broker, woken = BrokerLimit(10), []
    one, two = two_of(broker)
    assert ask(one.gate, NOTHING_USED, 10) == 10
    assert [two.send(1).granted, two.send(1).granted] == [1, 0]
    two.gate.when_open(lambda: woken.append(True))
    assert not woken
    _ = one.redeliver(1) if is_redelivery else one.send(1)
    assert woken == [True]


def test_the_limit_of_a_broker_can_be_changed_and_switched_off():
    broker = BrokerLimit()
    one = GatedSubscription(broker)
    assert one.send(*[1] * 500).granted == 500
    granted = []
    for limit in ((100, 0.5), (1_001,), (1_002,), (0,)):
        broker.change_limit(*limit)
        granted.append(one.send(1).granted)
    assert (granted, broker.blocked_share) == ([0, 0, 1, 1], 0.5)


OUT_OF_RANGE = [(-1, 0.16), (2**63, 0.16), (10**400, 0.16), (5, 0), (5, 1.1), (5, float("nan")), (5, 10**400)]
NO_NUMBERS = [(2.5, 0.16), (float("nan"), 0.16), (True, 0.16), ("9", 0.16), (None, 0.16), (5, "0.5"), (5, True)]


@pytest.mark.parametrize(
    ("limit", "share", "error"),
    [(*refused, ValueError) for refused in OUT_OF_RANGE] + [(*refused, TypeError) for refused in NO_NUMBERS],
    ids=lambda value: repr(value)[:12],
)
def test_limits_that_make_no_sense_are_refused_and_change_nothing(limit, share, error):
    broker = BrokerLimit(7)
    keys = r"max_unacked_messages \(maxUnackedMessagesPerBroker\)|blocked_share \(maxUnackedMessagesPerSub"
    for call in (BrokerLimit, broker.change_limit):
        with pytest.raises(error, match=keys):
            call(limit, share)
    assert (broker.max_unacked_messages, broker.blocked_share) == (7, 0.16)


class ClosedMeanwhile(DispatchGate):
    """Another thread closes the gate as soon as this one has looked at its part."""

    closes = False

    @property
    def _part(self):
        part = self._parts[-1]
        if self.closes:
            self.closes = False
            self.close()
        return part

    @_part.setter
    def _part(self, part):
        self._parts = [part]


def test_a_gate_that_another_thread_closes_meanwhile_counts_nothing_any_more():
    broker = BrokerLimit(10)
    for call in (
        lambda gate: gate.count_unacked(-1),
        lambda gate: gate.count_unacked(2),
        lambda gate: gate.request([17], usage=Usage(0, 0, 1)),
        lambda gate: gate.blocked_count(Rule.BROKER_UNACKED_MESSAGES),
    ):
        gate = ClosedMeanwhile(GateLimits(), broker=broker)
        gate.request([17], usage=NOTHING_USED)
        gate.count_unacked(1)
        gate.closes = True
        call(gate)
        assert broker.unacked_messages == 0


@pytest.mark.slow
def test_the_limit_of_a_broker_holds_whatever_the_threads_do():
    broker = BrokerLimit(50, 0.1)
    subscriptions = [GatedSubscription(broker) for _ in range(4)]
    highest = []

    def dispatch(it):
        for step in range(2_000):
            it.send(1)
            highest.append(broker.unacked_messages)
            if step % 3:
                it.ack(min(it.unacked, step % 2))

    in_threads([lambda it=it: dispatch(it) for it in subscriptions])
    # Above the maximum are only those that have no more than their share of 5.
    assert 50 <= max(highest) <= 50 + 4 * 5
    assert broker.unacked_messages == sum(it.unacked for it in subscriptions)


def in_threads(calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# Who waits for the gate is called once when it opens.

FULL, EMPTY = Usage(0, 0, 4), NOTHING_USED


def shut_gate(*consumers):
    """A gate that is shut, or on which these consumers have 4 unacked messages each, which is their limit."""
    gate = DispatchGate(GateLimits(0, 4, max_unacked_messages_per_consumer=4 if consumers else 0))
    for name in consumers:
        assert ask(gate, Usage(0, 0, 3, consumer_unacked_messages=4), 1, consumer=name) == 0
    assert consumers or ask(gate, FULL, 1) == 0
    return gate


def test_a_waiter_is_called_once_when_the_use_has_fallen_or_at_once_if_nothing_is_closed():
    calls = []
    DispatchGate(GateLimits()).when_open(lambda: calls.append(0))
    gate = shut_gate()
    gate.when_open(lambda: calls.append(1))
    assert (gate.refresh(Usage(0, 0, 2)), calls, gate.is_closed) == (0, [0], True)
    assert (gate.refresh(Usage(0, 0, 1)), calls, gate.is_closed) == (1, [0, 1], False)
    ask(gate, FULL, 1)
    assert (gate.refresh(EMPTY), calls) == (0, [0, 1])


def test_a_forgotten_waiter_is_not_called():
    for consumers in ((), ("a",)):
        gate, calls = shut_gate(*consumers), []
        for waiter in (calls.clear, calls.sort, calls.clear):
            gate.when_open(waiter, *consumers)
        gate.forget_waiter(calls.clear)
        gate.forget_waiter(calls.pop)
        assert gate.refresh(EMPTY, {}) == 1


def test_a_waiter_of_a_closed_consumer_waits_for_both_and_who_waited_longest_is_called_first():
    gate, calls = shut_gate("a", "b"), []
    gate.observe(FULL, next_record_bytes=17)
    for name in "abcab":
        gate.when_open(lambda name=name: calls.append(name), name)
    gate.consumer_closed("b")
    assert (gate.refresh(EMPTY), calls) == (3, ["b", "c", "b"])
    assert (gate.refresh(EMPTY, {"a": 3}), gate.is_closed) == (0, True)
    assert (gate.refresh(EMPTY, {"a": 0}, "a"), calls[3:], gate.is_closed) == (2, ["a", "a"], False)


@pytest.mark.parametrize(
    ("opening", "returned"),
    [
        (lambda gate: gate.refresh(EMPTY), 2),
        (lambda gate: ask(gate, EMPTY, 1), 1),
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
    assert (record.levelno, record.exc_info[0]) == (logging.ERROR, ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        gate.when_open(lambda: 1 / 0)  # at once, to its caller


@pytest.mark.parametrize("make", [shut_gate, lambda: DispatchGate(GateLimits())])
def test_a_waiter_that_cannot_be_called_is_refused_at_once(make):
    gate = make()
    with pytest.raises(TypeError, match="None"):
        gate.when_open(None)
    assert gate.refresh(EMPTY) == 0


def test_no_more_can_be_taken_off_than_was_counted():
    broker = BrokerLimit(10)
    one, two = two_of(broker)
    two.send(1, 1)
    one.send(1)
    with pytest.raises(ValueError, match="unacked messages would become negative: -1"):
        one.gate.count_unacked(-2)
    assert broker.unacked_messages == 3


def test_a_refresh_of_a_consumer_looks_at_no_other():
    gate, asked = shut_gate("a", "b", "c"), []

    def unacked(name):
        asked.append(name)
        return 2

    assert (gate.refresh(EMPTY, unacked, "z"), asked, gate.closed_consumers) == (0, [], ("a", "b", "c"))
    gate.refresh(EMPTY, unacked, "b")
    assert (asked, gate.closed_consumers) == (["b"], ("a", "c"))
    gate.refresh(EMPTY, unacked)
    assert (asked, gate.closed_consumers) == (["b", "a", "c"], ())


@pytest.mark.slow
def test_no_wake_up_is_lost_whatever_the_threads_do():
    """Threads that send as soon as the gate is open, and one that acks the sent messages."""
    gate, lock = DispatchGate(GateLimits(0, 4)), threading.Lock()
    left, unacked, lost = 4_000, 0, 0

    def send():
        nonlocal left, unacked, lost
        while left > 0 and not lost:
            with lock:
                granted = ask(gate, Usage(0, 0, unacked), 1) if left else 0
                unacked, left = unacked + granted, left - granted
                assert unacked <= 4
            if left and not granted:
                opened = threading.Event()
                gate.when_open(opened.set)
                # As long as it waits, another thread acks: only a call that never comes takes so long.
                lost += not opened.wait(30)

    def ack():
        nonlocal unacked
        while (left > 0 or unacked) and not lost:
            with lock:
                unacked -= unacked > 0
                gate.refresh(Usage(0, 0, unacked))

    in_threads([send, send, send, ack])
    assert (lost, unacked) == (0, 0)
