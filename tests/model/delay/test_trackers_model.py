"""Whatever tracks delayed messages: never early, never lost, at most once to each subscription.

One machine drives all three trackers as dispatchers do; `test_tracker_stories` has stories without chance.
"""

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from delay_driver import ALL, NO_DELAY, DelayBroker
from strategies import few
from tracker_kinds import KINDS

# Long against the steps of time, so that something waits at most moments.
delays = st.sampled_from([NO_DELAY, 0, 9, 64]) | st.integers(1, 200)
picks = st.integers(0, 99)
subscriptions = st.integers(0, 1)


class TrackersMachine(RuleBasedStateMachine):
    """One topic, two subscriptions, a growing log; a subclass says which tracker."""

    kind: object

    @initialize(tick_ms=st.sampled_from([1, 10, 64, 100]))
    def open(self, tick_ms):
        self.broker = DelayBroker(self.kind, tick_ms=tick_ms)

    @rule(delays=st.lists(delays, min_size=1, max_size=6), which=subscriptions)
    def publish(self, delays, which):
        """To a reader that is at the log's end, one of two; the other comes to it later, if ever."""
        self.broker.publish(*delays)
        self.broker.dispatchers[which].read(len(delays))

    @rule(count=st.integers(1, 6))
    def feed(self, count):
        self.broker.feed(self.broker.fed_count + count)

    @rule(which=subscriptions, count=st.integers(1, 8))
    def read(self, which, count):
        self.broker.dispatchers[which].read(count)

    @rule(which=subscriptions, count=st.integers(1, 8))
    def read_fails(self, which, count):
        self.broker.dispatchers[which].rewind(count)

    @rule(which=subscriptions, max_messages=st.sampled_from([0, 1, 2, 3, ALL]))
    def poll(self, which, max_messages):
        self.broker.dispatchers[which].poll(max_messages)

    @rule(which=subscriptions, count=st.integers(1, 4))
    def send_again(self, which, count):
        self.broker.dispatchers[which].send_again(count)

    @rule(which=subscriptions, pick=picks)
    def ack(self, which, pick):
        """Also of messages that wait: they are cancelled."""
        if self.broker.log:
            self.broker.dispatchers[which].ack(self.broker.log[pick % len(self.broker.log)])

    @rule(which=subscriptions, count=st.integers(1, 6))
    def ack_in_order(self, which, count):
        dispatcher = self.broker.dispatchers[which]
        for position in sorted(dispatcher.lacks() | dispatcher.in_flight)[:count]:
            dispatcher.ack(position)

    @rule(which=subscriptions, pick=picks)
    def nack(self, which, pick):
        dispatcher = self.broker.dispatchers[which]
        if dispatcher.in_flight:
            dispatcher.nack(sorted(dispatcher.in_flight)[pick % len(dispatcher.in_flight)])

    @rule(forward_ms=st.integers(1, 40))
    def time_passes(self, forward_ms):
        self.broker.clock_ms += forward_ms

    @rule(back_ms=st.sampled_from([1, 30, 500]))
    def clock_jumps_back(self, back_ms):
        self.broker.clock_ms = max(0, self.broker.clock_ms - back_ms)

    @rule(which=subscriptions, tick_ms=st.sampled_from([1, 7, 50]))
    def reset_tick(self, which, tick_ms):
        self.broker.dispatchers[which].set_tick(tick_ms)

    @rule(which=subscriptions)
    def acks_become_durable(self, which):
        self.broker.dispatchers[which].durable = set(self.broker.dispatchers[which].acked)

    @rule()
    def crash(self):
        self.broker.crash()

    @rule(which=subscriptions)
    def new_subscription(self, which):
        self.broker.replace(which)

    @rule(which=subscriptions, pick=picks)
    def seek(self, which, pick):
        assume(self.broker.log)
        self.broker.dispatchers[which].seek(pick % len(self.broker.log))

    @rule()
    def trim(self):
        self.broker.trim()

    @invariant()
    def counts_are_exact(self):
        self.broker.check()

    def teardown(self):
        if hasattr(self, "broker"):
            self.broker.drain()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_message_comes_in_time_and_once(kind):
    # Thirteen of them: fewer examples each than of a machine that is alone.
    fewer = settings(max_examples=max(1, few.max_examples // 5))
    run_state_machine_as_test(type("Machine", (TrackersMachine,), {"kind": kind}), settings=fewer)
