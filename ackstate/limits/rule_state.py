"""The rules of a subscription: which ones are closed, and how many of the requested messages they have room for.

Not safe for concurrent use.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.limits.rules import Rule, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ackstate.limits.rules import GateLimits, Usage

# The limit of a rule that is off: above every number that a running broker can count to.
NO_LIMIT = 2**63

_COUNTS_MESSAGES = frozenset({Rule.UNACKED_MESSAGES, Rule.CONSUMER_UNACKED_MESSAGES})


@final
class RuleState:
    """A rule's limit, and whether it is closed.

    An entry is dispatched as a whole. If it alone holds more messages than a limit on messages allows, it is admitted
    when nothing else is unacked.
    """

    __slots__ = ("_has_lone_pass", "_mark", "blocked_count", "is_closed", "limit", "released_at", "rule", "since_ms")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self._has_lone_pass = rule in _COUNTS_MESSAGES
        self.limit = NO_LIMIT
        self._mark = NO_LIMIT
        self.is_closed = False
        # While closed: at this usage it opens, and has room for the message that it closed on.
        self.released_at = NO_LIMIT
        self.since_ms: int | None = None
        self.blocked_count = 0

    def change(self, limit: int, *, mark: int) -> None:
        """Take another limit, below 1 meaning none; a closed rule stays closed unless it is off now."""
        is_on = limit >= 1
        self.limit = limit if is_on else NO_LIMIT
        self._mark = max(0, mark) if is_on else NO_LIMIT
        self.released_at = self._mark
        if not is_on:
            self._open()

    def admits(self, needed: int, *, used: int, now_ms: int) -> bool:
        """Open if the usage has fallen, close if there is no room, and return whether the rule is open now."""
        if self.is_closed and used > self.released_at:
            return False
        if used + needed <= self.limit or (self._has_lone_pass and not used):
            self._open()
        else:
            self._close(needed, now_ms)
        return not self.is_closed

    def open_at(self, used: int) -> None:
        """Open if the usage has fallen far enough."""
        if self.is_closed and used <= self.released_at:
            self._open()

    def fitting(self, costs: Sequence[int] | None, count: int, *, used: int) -> int:
        """Return how many of the first messages the limit, closed or not, has room for."""
        fitting = fitting_count(costs, count, room=self.limit - used)
        return max(fitting, 1) if self._has_lone_pass and not used else fitting

    def verdict(self, used: int, *, granted: int = 0) -> Verdict:
        """Return the verdict that this rule keeps the other messages back."""
        return Verdict(granted, self.rule, used, self.limit, self.released_at, self.since_ms)

    def _open(self) -> None:
        self.is_closed = False
        self.since_ms = None
        self.released_at = self._mark

    def _close(self, needed: int, now_ms: int) -> None:
        # Not counted twice when it opens and closes in one call: no request saw it open.
        if not self.is_closed:
            self.is_closed = True
            self.since_ms = now_ms
            self.blocked_count += 1
        self.released_at = max(0, min(self._mark, self.limit - needed))


@final
class ConsumerStates:
    """The rule on a consumer's unacked messages, with a state only for consumers that it is closed for.

    Args:
        when_opened: Called with each consumer that the rule opens for.

    Attributes:
        closed: The states of the consumers that it is closed for, by name, the longest closed first.
        opened: The state of each other consumer.
        blocked_count: How often the rule has closed, for any consumer.
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
        """Open the rule for a consumer whose usage has fallen, or for each such consumer if none is named.

        Complexity: O(1) for a named consumer, else O(closed consumers).
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
    """The four rules that depend on this subscription's usage only.

    Args:
        when_opened: Called with each consumer that the consumers' rule opens for.

    Attributes:
        record_bytes, ranges, messages: The rules that hold for all consumers together.
        consumers: The rule that holds for each consumer.
    """

    __slots__ = ("consumers", "for_all", "messages", "ranges", "record_bytes")

    def __init__(self, when_opened: Callable[[str], None]) -> None:
        self.record_bytes = RuleState(Rule.UNPERSISTED_ACK_RECORD_BYTES)
        self.ranges = RuleState(Rule.UNACKED_RANGES)
        self.messages = RuleState(Rule.UNACKED_MESSAGES)
        self.for_all = (self.record_bytes, self.ranges, self.messages)
        self.consumers = ConsumerStates(when_opened)

    def change(self, limits: GateLimits) -> None:
        """Take other limits, valid ones: nothing here can fail halfway."""
        bytes_max, ranges_max = limits.max_unpersisted_ack_record_bytes, limits.max_unacked_ranges
        messages_max, ratio = limits.max_unacked_messages, limits.unpersisted_release_ratio
        # Down to the mark for bytes and ranges, below it for messages, as Pulsar has it.
        self.record_bytes.change(bytes_max, mark=int(bytes_max * ratio))
        self.ranges.change(ranges_max, mark=int(ranges_max * ratio))
        self.messages.change(messages_max, mark=int(messages_max * limits.unacked_release_ratio) - 1)
        self.consumers.change(limits.max_unacked_messages_per_consumer)

    def used(self, usage: Usage) -> tuple[int, int, int, int]:
        """Return the usage of each rule, in their order."""
        unpersisted, reserved, unacked, ranges, reserved_ranges, consumer_unacked = usage
        return unpersisted + reserved, ranges + reserved_ranges, unacked, consumer_unacked

    def first_closed(self) -> RuleState | None:
        """Return the first closed one of the rules for all consumers."""
        return next((state for state in self.for_all if state.is_closed), None)

    def closed(self, consumer: str) -> tuple[bool, ...]:
        """Return of each rule whether it is closed for a consumer."""
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
        raise TypeError(f"rule must be a Rule of a subscription, got {rule!r}")

    def refusal_of(self, state: RuleState, usage: Usage) -> Verdict | None:
        """Return the verdict of a closed rule, None if it may open; faster than `active`."""
        if state is self.messages:
            used = usage.unacked_messages
        elif state.rule is Rule.CONSUMER_UNACKED_MESSAGES:
            used = usage.consumer_unacked_messages
        else:
            used = self.used(usage)[0 if state is self.record_bytes else 1]
        if used <= state.released_at:
            return None
        return Verdict(0, state.rule, used, state.limit, state.released_at, state.since_ms)

    def refresh(self, usage: Usage) -> None:
        """Open the rules for all consumers that may open."""
        for state, used in zip(self.for_all, self.used(usage)[:3], strict=True):
            state.open_at(used)

    def active(self, usage: Usage, consumer: str) -> Iterator[Verdict]:
        """Yield a verdict for each rule that is closed and stays so at this usage."""
        for state, used in zip(self._states(consumer), self.used(usage), strict=True):
            if state.is_closed and used > state.released_at:
                yield state.verdict(used)

    def refusal(self, wanted: GateRequest, usage: Usage, consumer: str, now_ms: int) -> Verdict | None:
        """Open and close the rules by the needs of the first message; return a verdict if one of them is closed.

        All rules are examined, also if the first refuses: each closes by itself.
        """
        states, weight = self._states(consumer), total_of(wanted.weights, 1)
        refusal = None
        for state, needed, used in zip(
            states, (wanted.record_bytes[0], 1, weight, weight), self.used(usage), strict=True
        ):
            if not state.admits(needed, used=used, now_ms=now_ms) and refusal is None:
                refusal = state.verdict(used)
        self.consumers.keep(consumer, states[-1])
        return refusal

    def longest_prefix(self, wanted: GateRequest, usage: Usage, consumer: str) -> Verdict:
        """Return how many messages the limits have room for, closed or not."""
        count = len(wanted.record_bytes)
        granted, binding = count, None
        costs_of = (wanted.record_bytes, wanted.ranges, wanted.weights, wanted.weights)
        for state, costs, used in zip(self._states(consumer), costs_of, self.used(usage), strict=True):
            fitting = state.fitting(costs, count, used=used)
            if fitting < granted:
                granted, binding = fitting, (state, costs, used)
        if binding is None:
            return Verdict(granted)
        state, costs, used = binding
        return state.verdict(used + total_of(costs, granted), granted=granted)

    def _states(self, consumer: str) -> tuple[RuleState, RuleState, RuleState, RuleState]:
        return *self.for_all, self.consumers.state(consumer)


class GateRequest(NamedTuple):
    """The worst-case costs of each requested message; None where each costs 1."""

    record_bytes: Sequence[int]
    ranges: Sequence[int] | None
    weights: Sequence[int] | None


def check(wanted: GateRequest) -> None:
    """Refuse impossible costs.

    Raises:
        ValueError: A cost is negative, a weight is not positive, or there are not as many of them as messages.
    """
    record_bytes, ranges, weights = wanted
    for name, costs, least in (
        ("worst case in bytes", record_bytes, 0),
        ("range cost", ranges, 0),
        ("weight", weights, 1),
    ):
        if costs is None:
            continue
        if len(costs) != len(record_bytes):
            raise ValueError(f"{len(record_bytes)} messages and {len(costs)} of {name}: each has one")
        if min(costs) < least:
            index = next(index for index, cost in enumerate(costs) if cost < least)
            raise ValueError(f"{name} of message {index} must be at least {least}, got {costs[index]}")


def fitting_count(costs: Sequence[int] | None, count: int, *, room: int) -> int:
    """Return how many of the first messages fit; messages that cost nothing fit even if the room is negative.

    Args:
        costs: The cost of each message, 0 or more, for at least `count` messages; None if each costs 1.
        count: The number of requested messages.
        room: The most that they may cost together.

    Complexity: O(count) with costs.
    """
    room = max(room, 0)
    if costs is None:
        return min(count, room)
    return count if sum(costs[:count]) <= room else bisect_right(list(accumulate(costs[:count])), room)


def total_of(costs: Sequence[int] | None, count: int) -> int:
    """Return the cost of the first `count` messages together."""
    return count if costs is None else sum(costs[:count])
