"""Rounds of dispatches: who receives what and in which order, no wake-up is lost, and the statistics are exact."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from ackstate import AckRefusedError, CursorConfig, DeadLetterPolicy, SubscriptionType
from ackstate.dispatch import SubscriptionOptions
from ackstate.limits import GateLimits
from ackstate.message import NO_DELAY, Message
from topics import NumberedTopic

NAMES = "abc"
KEYS = "klmn"
PICKS = st.integers(0, 1_000)
DELAYED = (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED)


class NotTakenError(Exception):
    """The receiver of dead letters fails."""


class CountingWaiter:
    """Counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1


class RoundsMachine(RuleBasedStateMachine):
    """A broker that dispatches in rounds; the model keeps permits, who has what, and what was counted.

    At the begin of each round it is known whether the waiter was called, or its time has come. If neither, the round
    must send nothing. Messages of a key keep their order, unless they are published for later.
    """

    @initialize(
        kind=st.sampled_from([*SubscriptionType, SubscriptionType.KEY_SHARED, SubscriptionType.KEY_SHARED]),
        turn=st.sampled_from([1, 2, 20]),
        round_max=st.sampled_from([3, 1_000]),
        look_ahead=st.sampled_from([3, 20_000]),
        limits=st.sampled_from(
            [
                {},
                {"max_unacked_messages": 4},
                {"max_unacked_messages_per_consumer": 3},
                {"max_unacked_messages": 6, "max_unacked_messages_per_consumer": 4},
                {"max_unacked_ranges": 2},
                {"max_unacked_ranges": 3, "max_unacked_messages_per_consumer": 3},
                {"max_unpersisted_ack_record_bytes": 1_024},
            ]
        ),
        old_s=st.sampled_from([0, 0, 1]),
        names=st.sampled_from(["", "ab", "abc"]),
        is_eager=st.sampled_from([False, True, True]),
        keeps_order=st.sampled_from([True, True, False]),
        redeliveries_max=st.sampled_from([None, None, 1]),
    )
    def open(
        self, *, kind=SubscriptionType.SHARED, turn=20, round_max=1_000, look_ahead=20_000, limits=None, old_s=0,
        names="", is_eager=False, keeps_order=False, redeliveries_max=None,
    ):  # fmt: skip
        self.kind, self.limits = kind, {} if kind.is_single_active else limits or {}
        self.keeps_order = kind is SubscriptionType.KEY_SHARED and keeps_order
        dead_letters = None if redeliveries_max is None else DeadLetterPolicy(redeliveries_max, self.hand_over)
        self.topic = NumberedTopic(
            kind,
            tick_time_ms=1 if kind in DELAYED else None,
            options=SubscriptionOptions(
                turn_entries=turn, round_entries_max=round_max, look_ahead_max=look_ahead, dead_letters=dead_letters
            ),
            config=CursorConfig(become_old_ack_record_seconds=old_s),
            **self.limits,
        )
        self.subscription = self.topic.subscription
        self.messages: list[Message] = []
        self.permits: dict[str, int] = {}
        self.priority: dict[str, int] = {}
        self.has: dict[int, str] = {}
        self.not_before: dict[int, int] = {}
        self.handed_over: list[Message] = []
        self.hands_over = True
        self.sent_count = self.sent_again = self.dead_count = 0
        self.now_ms = 0
        self.waiter: CountingWaiter | None = None
        self.wake_ms: int | None = None
        self.is_eager = is_eager
        for number, name in enumerate(names):
            self.consumer_opened(name, priority=number // 2, permits=10)

    def hand_over(self, delivery):
        if not self.hands_over:
            raise NotTakenError
        self.handed_over.append(delivery.message)

    @rule(
        keys=st.text(KEYS, min_size=1, max_size=6),
        delay_ms=st.sampled_from([None, None, None, 5, 50]),
        message_count=st.sampled_from([1, 1, 1, 3]),
        times=st.sampled_from([1, 1, 1, 20]),
    )
    def publish(self, keys="k", delay_ms=None, message_count=1, times=1):
        deliver_at_ms = NO_DELAY if delay_ms is None or self.keeps_order else self.now_ms + delay_ms
        messages = [
            Message(b"", key=key.encode(), deliver_at_ms=deliver_at_ms, message_count=message_count)
            for key in keys * times
        ]
        self.messages += messages
        self.topic.positions += self.topic.log.publish(messages)

    @rule(name=st.sampled_from(NAMES), priority=st.sampled_from([0, 0, 1]), permits=st.sampled_from([0, 0, 4]))
    def consumer_opened(self, name="a", priority=0, permits=0):
        if name in self.permits or (self.permits and self.kind is SubscriptionType.EXCLUSIVE):
            return
        active = self.active
        self.subscription.consumer_opened(name, priority=priority, permits=permits)
        self.permits[name], self.priority[name] = permits, priority
        if active is not None and self.active != active:
            self.has = {number: each for number, each in self.has.items() if each != active}

    @property
    def active(self):
        if not self.kind.is_single_active:
            return None
        return min(self.permits, key=lambda name: (self.priority[name], name), default=None)

    @rule(name=st.sampled_from(NAMES))
    def consumer_closed(self, name="a"):
        self.subscription.consumer_closed(name, now_ms=self.now_ms)
        self.permits.pop(name, None)
        self.has = {number: each for number, each in self.has.items() if each != name}

    @precondition(lambda self: self.permits)
    @rule(pick=PICKS, count=st.sampled_from([1, 3, 10, 200]))
    def add_permits(self, pick=0, count=10):
        name = sorted(self.permits)[pick % len(self.permits)]
        self.subscription.add_permits(name, count)
        self.permits[name] += count

    @precondition(lambda self: self.has)
    @rule(pick=PICKS, count=st.sampled_from([1, 1, 3, 100]), at_once=st.booleans())
    def ack(self, pick=0, count=1, at_once=False):
        numbers = sorted(self.has)
        chosen = [numbers[(pick + 7 * each) % len(numbers)] for each in range(min(count, len(numbers)))]
        chosen = list(dict.fromkeys(chosen))
        positions = [self.topic.positions[number] for number in chosen]
        if at_once:
            self.try_ack(self.subscription.ack_many, positions, chosen)
        else:
            for position, number in zip(positions, chosen, strict=True):
                self.try_ack(self.subscription.ack, position, [number])

    def try_ack(self, ack, what, numbers):
        try:
            ack(what, now_ms=self.now_ms)
        except AckRefusedError:
            return
        for number in numbers:
            self.has.pop(number, None)

    @precondition(lambda self: self.messages)
    @rule(pick=PICKS)
    def ack_late(self, pick=0):
        number = pick % len(self.messages)
        self.try_ack(self.subscription.ack, self.topic.positions[number], [number])

    @precondition(lambda self: self.messages)
    @rule(pick=PICKS)
    def ack_up_to(self, pick=0):
        unacked = self.topic.unacked()
        if not unacked:
            return
        number = unacked[pick % len(unacked)]
        self.subscription.ack_cumulative(self.topic.positions[number], now_ms=self.now_ms)
        self.has = {each: name for each, name in self.has.items() if each > number}

    @precondition(lambda self: self.has)
    @rule(pick=PICKS, delay_ms=st.sampled_from([0, 0, 5, 50]), looks_later=st.booleans())
    def nack(self, pick=0, delay_ms=0, looks_later=False):
        """Give a message back, and perhaps look when its time has come whether more can be sent than anyone said."""
        number = sorted(self.has)[pick % len(self.has)]
        self.subscription.nack(self.topic.positions[number], delay_ms=delay_ms, now_ms=self.now_ms)
        gone = [each for each in self.has if each >= number] if self.kind.is_single_active else [number]
        for each in gone:
            del self.has[each]
        if not self.kind.is_single_active:
            self.not_before[number] = self.now_ms + delay_ms
        if looks_later:
            self.wait(delay_ms)
            self.sent_in_round()

    @rule(name=st.sampled_from(NAMES))
    def redeliver_all(self, name="a"):
        mine = [number for number, each in self.has.items() if each == name]
        count = self.subscription.redeliver_all(name, now_ms=self.now_ms)
        assert count == sum(self.messages[number].message_count for number in mine)
        for number in mine:
            del self.has[number]

    @rule(elapsed_ms=st.sampled_from([1, 5, 50, 2_000]))
    def wait(self, elapsed_ms=50):
        self.now_ms += elapsed_ms

    @rule()
    def persist(self):
        self.topic.cursor.persist(now_ms=self.now_ms)

    @precondition(lambda self: self.limits)
    @rule(factor=st.sampled_from([1, 2, 100]))
    def change_limits(self, factor=2):
        limits = {
            name: limit * factor if "bytes" not in name or factor < 100 else 0 for name, limit in self.limits.items()
        }
        self.subscription.change_limits(GateLimits(**limits), now_ms=self.now_ms)

    @precondition(lambda self: self.messages)
    @rule(pick=PICKS)
    def seek(self, pick=0):
        self.subscription.seek(self.topic.positions[pick % len(self.messages)], now_ms=self.now_ms)
        self.has.clear()
        self.not_before.clear()

    @precondition(lambda self: self.permits)
    @rule(pick=PICKS, count=st.integers(1, 12), hands_over=st.booleans())
    def dispatch_to_one(self, pick=0, count=1, hands_over=True):
        name = sorted(self.permits)[pick % len(self.permits)]
        self.hands_over = hands_over
        try:
            deliveries = self.subscription.dispatch(name, count, now_ms=self.now_ms)
        except NotTakenError:
            deliveries = []
        self.hands_over = True
        self.count_dead_letters()
        if self.keeps_order and "max_unacked_ranges" not in self.limits:
            assert deliveries == sorted(deliveries, key=lambda each: each.position), "out of order within a dispatch"
        for delivery in deliveries:
            self.sent(name, delivery)

    @rule(is_awaited=st.sampled_from([True, True, True, False]), hands_over=st.booleans())
    def round(self, is_awaited=True, hands_over=True):
        self.hands_over = hands_over
        try:
            self.sent_in_round(is_awaited)
        except NotTakenError:  # It may send again.
            self.waiter = None
            self.count_dead_letters()
        self.hands_over = True

    def sent_in_round(self, is_awaited=True):
        """Dispatch in a round, and return how many entries that sent or handed over as dead letters."""
        earlier, earlier_wake_ms = self.waiter, self.wake_ms
        may_send = (
            earlier is None or earlier.calls > 0 or (earlier_wake_ms is not None and earlier_wake_ms <= self.now_ms)
        )
        waiter = CountingWaiter() if is_awaited else None
        before = dict(self.permits)
        deliveries, self.wake_ms = self.subscription.dispatch_all(now_ms=self.now_ms, waiter=waiter)
        assert may_send or not deliveries, "a wake-up was lost"
        assert len({name for name, _ in deliveries}) == len(deliveries)
        for name, mine in deliveries:
            for delivery in mine:
                assert self.permits[name] > 0, "more than the permits"
                self.permits[name] -= delivery.message.message_count
                self.sent(name, delivery)
        if waiter is not None:
            self.waiter = waiter
        for name in self.permits:
            assert self.subscription.permits(name) == self.permits[name]
        self.check_priorities(deliveries, before)
        return self.count_dead_letters() + sum(len(mine) for _, mine in deliveries)

    def count_dead_letters(self):
        entry_count = len(self.handed_over)
        self.dead_count += sum(message.message_count for message in self.handed_over)
        self.handed_over.clear()
        return entry_count

    def check_priorities(self, deliveries, before):
        if self.kind is not SubscriptionType.SHARED or not deliveries:
            return
        last = max(self.priority[name] for name, _ in deliveries)
        for name in self.permits:
            if self.priority[name] < last and before[name] > 0:
                room = self.limits.get("max_unacked_messages_per_consumer") or self.limits.get("max_unacked_messages")
                assert room or self.permits[name] <= 0, "passed over a consumer of a lower priority number"

    def sent(self, name, delivery):
        number = self.topic.positions.index(delivery.position)
        message = self.messages[number]
        assert not self.topic.cursor.is_acked(delivery.position)
        assert number not in self.has, "with two consumers at once"
        if self.kind is SubscriptionType.KEY_SHARED:
            holders = {self.has[other] for other in self.has if self.messages[other].key == message.key}
            assert holders <= {name}, "a key with two consumers at once"
        if self.keeps_order:
            self.check_order_of_key(number)
        assert self.not_before.pop(number, 0) <= self.now_ms, "given back with a delay, and too early"
        if self.kind.is_single_active:
            assert name == self.active
            assert not self.has or max(self.has) < number, "out of order"
        else:
            assert message.deliver_at_ms <= self.now_ms, "too early"
        self.has[number] = name
        self.sent_count += message.message_count
        self.sent_again += message.message_count if delivery.redelivery_count else 0

    def check_order_of_key(self, number):
        key = self.messages[number].key
        for earlier, position in enumerate(self.topic.positions[:number]):
            is_passed = self.messages[earlier].key == key and earlier not in self.has
            assert not is_passed or self.topic.cursor.is_acked(position), "passed an earlier message of its key"

    @invariant()
    def holds_together(self):
        if hasattr(self, "topic"):
            if self.is_eager:
                self.sent_in_round()
                self.settle()
            self.topic.check()
            assert sum(len(self.subscription.in_flight(name)) for name in self.subscription.consumers) == len(self.has)
            assert self.waiter is None or self.waiter.calls <= 1
            self.check_numbers()

    def check_numbers(self):
        """A call that raised counts for nothing."""
        stats, unacked = self.subscription.stats(), self.topic.unacked()
        assert (stats.sent_messages, stats.redelivered_messages) == (self.sent_count, self.sent_again)
        assert stats.dead_lettered_messages == self.dead_count
        assert stats.unacked_messages == sum(self.messages[number].message_count for number in self.has)
        assert stats.consumer_count == len(self.permits)
        assert stats.cursor.backlog == len(unacked)
        assert stats.oldest_unacked == (self.topic.positions[unacked[0]] if unacked else None)
        # Those that the reader has passed are in one place each; an index may hold some that it has not.
        is_passed = [self.topic.positions[number] < self.topic.cursor.read_position for number in unacked]
        held_count = stats.replay_entries + stats.delayed_entries + len(self.has)
        not_passed = [self.messages[number] for number, passed in zip(unacked, is_passed, strict=True) if not passed]
        known_count = sum(message.deliver_at_ms != NO_DELAY for message in not_passed)
        assert 0 <= held_count - sum(is_passed) <= known_count

    def teardown(self):
        if hasattr(self, "topic"):
            self.deliver_the_rest()

    def deliver_the_rest(self):
        """A loop that dispatches only when it is woken delivers everything."""
        if not self.permits:
            self.consumer_opened("a")
        idle_count = 0
        self.round()
        while self.topic.unacked():
            assert idle_count < 12, "never delivered"
            idle_count += 1
            for name, permits in list(self.permits.items()):
                if permits <= 0:
                    self.subscription.add_permits(name, 3 - permits)
                    self.permits[name] = 3
            self.settle()
            if self.has:
                self.ack(0, 100)
                idle_count = 0
            self.persist()
            self.wait(2_000)

    def settle(self):
        """Dispatch as often as the waiter is called."""
        rounds = 0
        while self.waiter.calls or (self.wake_ms is not None and self.wake_ms <= self.now_ms):
            rounds = 0 if self.sent_in_round() else rounds + 1
            assert rounds < 8, "woken again and again for nothing"


TestRounds = pytest.mark.slow(RoundsMachine.TestCase)
