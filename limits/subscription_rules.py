"""What the limits of one subscription, and of each of its consumers, say of its use; not safe for concurrent use."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.limits.rule_state import RuleState, total_of
from ackstate.limits.rules import Accounting, Rule, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ackstate.limits.rule_state import GateRequest
    from ackstate.limits.rules import GateLimits, Usage


@final
class ConsumerStates:
    """The rule on a consumer's unacked messages, kept only for consumers that it is closed for.

    Args:
        when_opened: Is told of each consumer that the rule opens for.

    Attributes:
        closed: The states of those it is closed for, by name, the longest closed first.
        opened: The state of each other consumer.
        blocked_count: How often the rule has closed, for whichever consumer.
    """

    __slots__ = ("_limit", "_when_opened", "blocked_count", "closed", "opened")

    def __init__(self, when_opened: Callable[[str], None]) -> None:
        self._limit = 0
        self._when_opened = when_opened
        self.closed: dict[str, RuleState] = {}
        self.opened = RuleState(Rule.CONSUMER_UNACKED_MESSAGES)
        self.blocked_count = 0

    def change(self, limit: int) -> None:
        """Take another limit, 0 meaning none."""
        self._limit = limit
        self.opened = self._new_state()
        for name, state in tuple(self.closed.items()):
            state.change(limit, mark=limit // 2)
            self.keep(name, state)

    def state(self, consumer: str) -> RuleState:
        """Return the state of a consumer; `keep` it if it may have changed."""
        return self.closed.get(consumer, self.opened)

    def keep(self, consumer: str, state: RuleState) -> None:
        """Keep the state of a consumer as long as it is closed, and no longer."""
        if state is not self.opened:
            if not state.is_closed:
                self.forget(consumer)
        elif state.is_closed:
            self.closed[consumer] = state
            self.blocked_count += 1
            self.opened = self._new_state()

    def refresh(self, unacked: Mapping[str, int] | Callable[[str], int], consumer: str) -> None:
        """Open the rule for a consumer whose use has fallen, or for each of them if none is named.

        Complexity: O(1) for one that is named, else O(closed consumers).
        """
        count_of = unacked if callable(unacked) else lambda name: unacked.get(name, 0)
        asked = self.closed.keys() & {consumer} if consumer else self.closed
        for name in [name for name in asked if count_of(name) <= self.closed[name].released_at]:
            self.forget(name)

    def forget(self, consumer: str) -> None:
        """Open the rule for a consumer."""
        if self.closed.pop(consumer, None) is not None:
            self._when_opened(consumer)

    def _new_state(self) -> RuleState:
        state = RuleState(Rule.CONSUMER_UNACKED_MESSAGES)
        # At half, where the rule of the subscription opens below half: as Pulsar's Consumer has it.
        state.change(self._limit, mark=self._limit // 2)
        return state


@final
class SubscriptionRules:
    """The rules that look at nothing but this subscription's use.

    Args:
        when_opened: Is told of each consumer that the consumers' rule opens for.

    Attributes:
        record_bytes, ranges, messages: The rules that hold for all consumers together.
        consumers: The one that holds for each.
        is_exact: Whether `Accounting.EXACT` is in force.
        persisted_record_bytes: What the last persist left un-persisted.
    """

    __slots__ = ("consumers", "for_all", "is_exact", "messages", "persisted_record_bytes", "ranges", "record_bytes")

    def __init__(self, when_opened: Callable[[str], None]) -> None:
        self.record_bytes = RuleState(Rule.UNPERSISTED_ACK_RECORD_BYTES)
        self.ranges = RuleState(Rule.UNACKED_RANGES)
        self.messages = RuleState(Rule.UNACKED_MESSAGES)
        self.for_all = (self.record_bytes, self.ranges, self.messages)
        self.consumers = ConsumerStates(when_opened)
        self.is_exact = True
        self.persisted_record_bytes = 0

    def change(self, limits: GateLimits) -> None:
        """Take other limits, valid ones: nothing here can fail halfway."""
        bytes_max, ranges_max = limits.max_unpersisted_ack_record_bytes, limits.max_unacked_ranges
        messages_max, ratio = limits.max_unacked_messages, limits.unpersisted_release_ratio
        self.is_exact = limits.accounting is Accounting.EXACT
        # Down to the mark for bytes and ranges, below it for messages, as Pulsar has it.
        self.record_bytes.change(bytes_max, mark=int(bytes_max * ratio))
        self.ranges.change(ranges_max, mark=int(ranges_max * ratio) if self.is_exact else ranges_max)
        self.messages.change(messages_max, mark=int(messages_max * limits.unacked_release_ratio) - 1)
        self.consumers.change(limits.max_unacked_messages_per_consumer)

    def used(self, usage: Usage) -> tuple[int, int, int, int]:
        """Return what each rule counts, in their order."""
        unpersisted, reserved, unacked, ranges, reserved_ranges, consumer_unacked = usage
        if self.is_exact:
            return unpersisted + reserved, ranges + reserved_ranges, unacked, consumer_unacked
        return self.persisted_record_bytes, ranges, unacked, consumer_unacked

    def first_closed(self) -> RuleState | None:
        """Return the first closed one of the rules for all consumers."""
        return next((state for state in self.for_all if state.is_closed), None)

    def closed(self, consumer: str) -> tuple[bool, ...]:
        """Tell of each rule whether it is closed for a consumer."""
        return tuple(state.is_closed for state in self._states(consumer))

    def blocked_count(self, rule: Rule) -> int:
        """Return how often a rule has closed.

        Raises:
            TypeError: It is none of these.
        """
        if rule is Rule.CONSUMER_UNACKED_MESSAGES:
            return self.consumers.blocked_count
        for state in self.for_all:
            if state.rule is rule:
                return state.blocked_count
        raise TypeError(f"a rule of a subscription is a Rule, found {rule!r}")

    def refresh(self, usage: Usage) -> None:
        """Open what may open of the rules for all consumers."""
        for state, used in zip(self.for_all, self.used(usage)[:3], strict=True):
            state.open_at(used)

    def standing(self, usage: Usage, consumer: str) -> Iterator[Verdict]:
        """Yield a verdict for each rule that is closed and stays so at this use."""
        for state, used in zip(self._states(consumer), self.used(usage), strict=True):
            if state.is_closed and used > state.released_at:
                yield state.verdict(used)

    def ask(self, wanted: GateRequest, usage: Usage, consumer: str, now_ms: int) -> Verdict | None:
        """Open and close the rules by what the first message needs; return a verdict if one of them is closed.

        All are asked, also if the first refuses: each closes for itself.
        """
        states, weight = self._states(consumer), total_of(wanted.weights, 1)
        first_bytes, first_range = (wanted.record_bytes[0], 1) if self.is_exact else (1, 0)
        refusal = None
        for state, needed, used in zip(
            states, (first_bytes, first_range, weight, weight), self.used(usage), strict=True
        ):
            if not state.admits(needed, used=used, now_ms=now_ms) and refusal is None:
                refusal = state.verdict(used)
        self.consumers.keep(consumer, states[-1])
        return refusal

    def longest_prefix(self, wanted: GateRequest, usage: Usage, consumer: str) -> Verdict:
        """Return what the limits have room for, whether they are closed or not."""
        count = len(wanted.record_bytes)
        granted, binding = count, None
        for state, costs, used in self._costs(wanted, usage, consumer):
            fitting = state.fitting(costs, count, used=used)
            if fitting < granted:
                granted, binding = fitting, (state, costs, used)
        if binding is None:
            return Verdict(granted)
        state, costs, used = binding
        return state.verdict(used + total_of(costs, granted), granted=granted)

    def _costs(
        self, wanted: GateRequest, usage: Usage, consumer: str
    ) -> list[tuple[RuleState, Sequence[int] | None, int]]:
        record_bytes, ranges, messages, own = zip(
            self._states(consumer),
            (wanted.record_bytes, wanted.ranges, wanted.weights, wanted.weights),
            self.used(usage),
            strict=True,
        )
        # An estimate reserves nothing: once open, these two let everything through.
        return [record_bytes, ranges, messages, own] if self.is_exact else [messages, own]

    def _states(self, consumer: str) -> tuple[RuleState, RuleState, RuleState, RuleState]:
        return *self.for_all, self.consumers.state(consumer)
