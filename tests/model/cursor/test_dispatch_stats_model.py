"""The numbers of a subscription are those that its consumers can count: sent, sent again, handed over, in flight."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import DeadLetterPolicy, SubscriptionType
from ackstate.dispatch import SubscriptionOptions
from topics import NumberedTopic

CONSUMERS = st.sampled_from("ab")
REDELIVERIES_MAX = 1


class OutOfOrderError(Exception):
    """The receiver of dead letters fails."""


class DispatchStatsMachine(RuleBasedStateMachine):
    """Counts deliveries and dead letters; a call that raises counts for nothing."""

    @initialize(kind=st.sampled_from([SubscriptionType.SHARED, SubscriptionType.KEY_SHARED, SubscriptionType.FAILOVER]))
    def open(self, kind):
        self.hands_over, self.now_ms = True, 0
        options = SubscriptionOptions(dead_letters=DeadLetterPolicy(REDELIVERIES_MAX, self.hand_over))
        self.topic = NumberedTopic(kind, tick_time_ms=10, options=options)
        self.holders, self.counts = {}, {}  # in flight -> consumer; entry -> messages
        self.acked, self.handed_over = set(), []
        self.sent = self.sent_again = self.dead_letters = 0

    def hand_over(self, delivery):
        if not self.hands_over:
            raise OutOfOrderError
        self.handed_over.append(delivery.position)

    @rule(count=st.integers(1, 5), message_count=st.sampled_from([1, 1, 3]), key=st.sampled_from([b"k", b"l", None]),
          delay_ms=st.sampled_from([-1, -1, 25]))  # fmt: skip
    def publish(self, count, message_count, key, delay_ms):
        deliver_at_ms = -1 if delay_ms < 0 else self.now_ms + delay_ms
        self.topic.publish(count, key=key, message_count=message_count, deliver_at_ms=deliver_at_ms)
        self.counts |= dict.fromkeys(self.topic.positions[-count:], message_count)

    @rule(consumer=CONSUMERS, count=st.integers(0, 6), passed_ms=st.integers(0, 20), hands_over=st.booleans())
    def dispatch(self, consumer, count, passed_ms, hands_over):
        self.now_ms, self.hands_over = self.now_ms + passed_ms, hands_over
        if consumer not in self.topic.subscription.consumers:
            self.topic.subscription.consumer_opened(consumer)
            if self.topic.subscription.active_consumer == consumer:
                self.holders = {}
        try:
            deliveries = self.topic.subscription.dispatch(consumer, count, now_ms=self.now_ms)
        except OutOfOrderError:
            deliveries = []
        for each in deliveries:
            self.holders[each.position] = consumer
            self.sent += each.message.message_count
            self.sent_again += each.message.message_count if each.redelivery_count else 0
        for position in self.handed_over:
            self.acked.add(position)
            self.dead_letters += self.counts[position]
        self.handed_over.clear()

    @rule(data=st.data(), acks=st.booleans(), delay_ms=st.sampled_from([0, 30]))
    def answer(self, data, acks, delay_ms):
        if not self.holders:
            return
        position = data.draw(st.sampled_from(sorted(self.holders)))
        if acks:
            self.topic.subscription.ack(position, now_ms=self.now_ms)
            self.acked.add(position)
            del self.holders[position]
            return
        self.topic.subscription.nack(position, delay_ms=delay_ms, now_ms=self.now_ms)
        is_ordered = self.topic.subscription.kind.is_single_active
        self.holders = {
            each: who for each, who in self.holders.items() if each != position and not (is_ordered and each > position)
        }

    @rule(consumer=CONSUMERS)
    def close_consumer(self, consumer):
        self.topic.subscription.consumer_closed(consumer, now_ms=self.now_ms)
        self.holders = {each: who for each, who in self.holders.items() if who != consumer}

    @invariant()
    def the_numbers_agree(self):
        if not hasattr(self, "topic"):
            return
        stats, unacked = self.topic.subscription.stats(), self.counts.keys() - self.acked
        assert (stats.sent_messages, stats.redelivered_messages) == (self.sent, self.sent_again)
        assert stats.dead_lettered_messages == self.dead_letters
        assert stats.unacked_messages == sum(self.counts[each] for each in self.holders)
        assert stats.consumer_count == len(self.topic.subscription.consumers)
        assert stats.cursor.backlog == len(unacked)
        assert stats.oldest_unacked == min(unacked, default=None)
        passed = {each for each in unacked if each < self.topic.cursor.read_position}
        if passed:  # Each of them is in one place, and an index that no reader has used yet reports all that it holds.
            assert stats.replay_entries + stats.delayed_entries + len(self.holders) == len(passed)


TestDispatchStats = DispatchStatsMachine.TestCase


def test_a_batch_that_reached_no_consumer():
    machine = DispatchStatsMachine()
    machine.open(SubscriptionType.SHARED)
    machine.publish(2, 1, None, -1)
    machine.dispatch("a", 2, 0, hands_over=True)
    for given_back in ([1], [0, 1]):
        machine.the_numbers_agree()
        machine.topic.nack(*given_back)
        machine.holders = {each: "a" for each in machine.holders if each.entry_id not in given_back}
        machine.dispatch("a", len(given_back), 0, hands_over=False)
    # 0 was about to be sent again when 1 was not accepted as a dead letter.
    machine.the_numbers_agree()
