"""Several subscriptions under the limit of one broker."""

import threading

import pytest

from ackstate.limits import BrokerLimit, DispatchGate, GateLimits, Rule, Usage, Verdict


class GatedSubscription:
    """As many unacked messages as were sent and not acked, told to the gate as a broker does it."""

    def __init__(self, broker, **limits):
        off = {"max_unpersisted_ack_record_bytes": 0, "max_unacked_messages": 0}
        self.gate = DispatchGate(GateLimits(**{**off, **limits}), broker=broker)
        self.unacked = 0

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


def test_the_total_is_the_sum_over_the_subscriptions():
    broker = BrokerLimit(10)
    one, two = GatedSubscription(broker), GatedSubscription(broker)
    assert one.send(1, 1, 1).granted == 3
    assert two.send(5).granted == 1
    assert broker.unacked_messages == 8
    verdict = one.send(1, 1, 1)
    assert verdict == Verdict(2, Rule.BROKER_UNACKED_MESSAGES, used=10, limit=10, released_at=4)
    one.ack(2)
    assert broker.unacked_messages == 8


def test_a_full_broker_lets_each_have_its_share_and_closes_who_wants_more():
    broker = BrokerLimit(100, 0.16)
    large, small = GatedSubscription(broker), GatedSubscription(broker)
    assert large.send(*[1] * 100).granted == 100
    assert (large.send(1, now_ms=5).granted, broker.is_blocked) == (0, True)
    assert small.send(*[1] * 20).granted == 16
    assert small.send(1).granted == 0
    assert broker.unacked_messages == 116
    (verdict,) = large.gate.why_blocked(Usage(0, 0, 100))
    assert verdict == Verdict(0, Rule.BROKER_UNACKED_MESSAGES, used=116, limit=100, released_at=49, since_ms=5)
    assert (large.gate.blocked_count(verdict.rule), small.gate.blocked_count(verdict.rule)) == (1, 1)


def test_one_below_half_its_share_goes_on_while_the_broker_is_blocked():
    broker = BrokerLimit(100, 0.16)
    large, small = GatedSubscription(broker), GatedSubscription(broker)
    large.send(*[1] * 100)
    small.send(*[1] * 16)
    assert small.send(1).granted == 0
    small.ack(8)
    assert small.send(1).granted == 0
    small.ack(1)
    assert (broker.is_blocked, small.send(*[1] * 20).granted) == (True, 9)


def test_all_go_on_when_the_total_is_below_half():
    broker = BrokerLimit(100, 0.16)
    large, small = GatedSubscription(broker), GatedSubscription(broker)
    large.send(*[1] * 100)
    small.send(*[1] * 17)
    small.send(1)
    assert (large.send(1).granted, small.gate.is_closed, large.gate.is_closed) == (0, True, True)
    large.ack(66)
    assert (broker.unacked_messages, broker.is_blocked, small.gate.is_closed) == (50, True, True)
    large.ack(1)
    assert (broker.unacked_messages, broker.is_blocked) == (49, False)
    assert (small.gate.is_closed, large.gate.is_closed) == (False, False)
    assert small.send(*[1] * 20).granted == 20


def test_one_with_nothing_unacked_always_gets_one_message():
    broker = BrokerLimit(10, 0.16)
    large, small = GatedSubscription(broker), GatedSubscription(broker)
    large.send(*[1] * 10)
    assert small.send(7, 1).granted == 1
    assert small.send(1).granted == 0


def test_redeliveries_pass_a_closed_broker_but_not_its_limit():
    broker = BrokerLimit(10, 0.2)
    one = GatedSubscription(broker)
    one.send(*[1] * 10)
    assert one.send(1).granted == 0
    one.ack(3)
    assert (one.send(1).granted, one.redeliver(5).granted, broker.unacked_messages) == (0, 3, 10)


def test_what_was_granted_is_nobody_elses_until_the_next_request_shows_that_it_was_not_sent():
    broker = BrokerLimit(2)
    one, two = GatedSubscription(broker), GatedSubscription(broker)
    assert one.gate.request([17, 17], usage=Usage(0, 0, 0)).granted == 2
    assert two.send(1, 1).granted == 1
    assert two.send(1).granted == 0
    assert one.gate.request([17], usage=Usage(0, 0, 0)).granted == 1
    assert broker.unacked_messages == 2


def test_a_subscription_that_leaves_takes_its_part_with_it():
    broker = BrokerLimit(10, 0.2)
    large, small = GatedSubscription(broker), GatedSubscription(broker)
    large.send(*[1] * 10)
    small.send(1, 1)
    assert (small.send(1).granted, large.send(1).granted) == (0, 0)
    large.gate.close()
    large.gate.close()
    assert (broker.unacked_messages, broker.is_blocked) == (2, False)
    assert small.send(*[1] * 8).granted == 8
    large.ack(10)
    assert broker.unacked_messages == 10
    assert large.gate.blocked_count(Rule.BROKER_UNACKED_MESSAGES) == 1


@pytest.mark.parametrize("is_redelivery", [False, True])
def test_a_subscription_that_leaves_takes_what_it_was_promised_with_it(is_redelivery):
    """Granted and not yet counted as sent, when the gate closes: the others have that room again, and are woken."""
    broker = BrokerLimit(10)
    leaving, staying = GatedSubscription(broker), GatedSubscription(broker)
    staying.send(1, 1)
    leaving.send(1, 1)
    ask = leaving.gate.request_redelivery if is_redelivery else leaving.gate.request
    assert ask([17] * 6, usage=Usage(0, 0, 2)).granted == 6
    assert broker.unacked_messages == 10
    assert staying.send(1).granted == 0
    woken = []
    staying.gate.when_open(lambda: woken.append(True))
    leaving.gate.close()
    assert (broker.unacked_messages, woken) == (2, [True])
    leaving.gate.count_unacked(6)
    staying.ack(2)
    assert (broker.unacked_messages, broker.is_blocked) == (0, False)


def test_no_more_can_be_taken_off_than_was_counted():
    broker = BrokerLimit(10)
    one, two = GatedSubscription(broker), GatedSubscription(broker)
    two.send(1, 1)
    one.send(1)
    with pytest.raises(ValueError, match="unacked messages would become negative: -1"):
        one.gate.count_unacked(-2)
    assert broker.unacked_messages == 3


def test_a_broker_without_a_limit_counts_and_closes_nobody():
    broker = BrokerLimit()
    one = GatedSubscription(broker)
    assert one.send(*[1] * 500).granted == 500
    broker.change_limit(100, 0.5)
    assert (broker.unacked_messages, one.send(1).granted) == (500, 0)
    broker.change_limit(1_001)
    assert (broker.max_unacked_messages, broker.blocked_share, one.send(1).granted) == (1_001, 0.5, 0)
    broker.change_limit(1_002)
    assert one.send(1).granted == 1
    broker.change_limit(0)
    assert one.send(*[1] * 500).granted == 500


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
    with pytest.raises(error, match=keys):
        BrokerLimit(limit, share)
    with pytest.raises(error, match=keys):
        broker.change_limit(limit, share)
    assert (broker.max_unacked_messages, broker.blocked_share) == (7, 0.16)
    one = GatedSubscription(broker)
    assert (one.send(*[1] * 9).granted, one.send(1).granted) == (7, 0)


def test_a_waiter_is_called_by_the_acks_of_another_subscription():
    broker = BrokerLimit(10, 0.2)
    one, two, calls = GatedSubscription(broker), GatedSubscription(broker), []
    one.send(*[1] * 7)
    two.send(1, 1, 1)
    assert two.send(1).granted == 0
    two.gate.when_open(lambda: calls.append(two.send(1).granted))
    one.ack(5)
    assert calls == []
    one.ack(1)
    assert calls == [1]


@pytest.mark.parametrize("is_redelivery", [False, True])
def test_a_waiter_is_called_when_another_subscription_has_not_sent_what_it_was_granted(is_redelivery):
    broker, woken = BrokerLimit(10), []
    one, two = GatedSubscription(broker), GatedSubscription(broker)
    assert one.gate.request([17] * 10, usage=Usage(0, 0, 0)).granted == 10
    two.send(1)
    assert two.send(1).granted == 0
    two.gate.when_open(lambda: woken.append(True))
    assert not woken
    if is_redelivery:
        one.redeliver(1)
    else:
        one.send(1)
    assert woken == [True]


def test_a_waiter_that_raises_keeps_no_other_subscription_from_going_on():
    broker = BrokerLimit(10, 0.1)
    one, others, calls = GatedSubscription(broker), [GatedSubscription(broker) for _ in range(2)], []
    one.send(*[1] * 10)
    for it, waiter in zip(others, (lambda: 1 / 0, lambda: calls.append(1)), strict=True):
        it.send(1)
        assert it.send(1).granted == 0
        it.gate.when_open(waiter)
    one.ack(10)
    assert (calls, broker.unacked_messages, others[1].gate.is_closed) == ([1], 2, False)


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
        gate.request([17], usage=Usage(0, 0, 0))
        gate.count_unacked(1)
        gate.closes = True
        call(gate)
        assert broker.unacked_messages == 0


@pytest.mark.slow
def test_the_limit_holds_whatever_the_threads_do():
    broker = BrokerLimit(50, 0.1)
    subscriptions = [GatedSubscription(broker) for _ in range(4)]
    highest = []

    def dispatch(it):
        for step in range(2_000):
            it.send(1)
            highest.append(broker.unacked_messages)
            if step % 3:
                it.ack(min(it.unacked, step % 2))

    threads = [threading.Thread(target=dispatch, args=(it,)) for it in subscriptions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Above the maximum are only those that have no more than their share of 5.
    assert 50 <= max(highest) <= 50 + 4 * 5
    assert broker.unacked_messages == sum(it.unacked for it in subscriptions)
