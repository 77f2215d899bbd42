"""The dispatch gate: how many messages may be sent now, and the limit that keeps the others back.

The ack of a sent message will add to the state that a crash would lose, and the amount is known only when the ack
comes. A check at that time would be too late: the consumer has done the work. So for each message sent, the gate
reserves the space of one extra range, until the message is acked or given back. An ack moves bytes from *reserved* to
*un-persisted*, never more than were reserved, so no order of acks makes the sum exceed the limit.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, final

from ackstate.limits.broker import NO_PARTS, BrokerLimit, call_all, wake_all
from ackstate.limits.rules import GateLimits, Rule, RuleState, Usage, Verdict, total_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ackstate.limits.broker import BrokerPart

    Waiter = Callable[[], object]
    # For each rule, the worst-case costs of the requested messages; None where each costs 1.
    Costs = tuple[Sequence[int], Sequence[int] | None, Sequence[int] | None, Sequence[int] | None]

__all__ = ["DispatchGate", "GateLimits", "Rule", "Usage", "Verdict"]


@final
class DispatchGate:
    """Admits messages up to the limits. Once closed, stays closed until usage falls to the release mark.

    >>> gate = DispatchGate(GateLimits(max_unpersisted_ack_record_bytes=0, max_unacked_messages=4))
    >>> gate.request([17, 17, 17], usage=Usage(0, 0, 2)).granted
    2
    >>> verdict = gate.request([17], usage=Usage(0, 68, 4))
    >>> verdict.granted, verdict.rule.name, verdict.used, verdict.limit, verdict.released_at
    (0, 'UNACKED_MESSAGES', 4, 4, 1)
    >>> gate.request([17], usage=Usage(0, 34, 2)).granted, gate.request([17], usage=Usage(0, 17, 1)).granted
    (0, 1)

    A rule *closes* when it has no room for the first message of a `request`, or for the next one of an `observe`. It
    opens when one of them or a `refresh` finds the usage at or below `released_at`. While a rule is closed, a `request`
    does not examine the others. Each rule closes and opens by itself, the consumers' rule for each consumer. The caller
    that sends the granted messages adds them to the `Usage` of the next call.

    An entry that alone holds more messages than a limit on messages allows is admitted when nothing else is unacked;
    otherwise no limit is exceeded.

    Safe for concurrent use if the given `Usage` is true while the call runs: a caller with several threads changes the
    usage and calls the gate under one lock of its own.

    Args:
        limits: The limits of the subscription.
        broker: The limit that the subscription shares with others; None if there is none.
    """

    def __init__(self, limits: GateLimits, *, broker: BrokerLimit | None = None) -> None:
        if broker is not None and not isinstance(broker, BrokerLimit):
            raise TypeError(f"broker must be a BrokerLimit, got {broker!r}")
        self.limits = limits
        """The limits in force. To be read only; `change_limits` puts others in force."""
        self.has_broker_limit = broker is not None
        """Whether `count_unacked` has work."""
        self.is_closed = False
        """Whether any rule is closed, for all or for one consumer. To be read only; `refresh` has work only then."""
        self._lock = Lock()
        self._waiters: list[tuple[str, Waiter]] = []  # each with its consumer, in the order they came
        self._record_bytes = RuleState(Rule.UNPERSISTED_ACK_RECORD_BYTES)
        self._ranges = RuleState(Rule.UNACKED_RANGES)
        self._messages = RuleState(Rule.UNACKED_MESSAGES)
        self._for_all = (self._record_bytes, self._ranges, self._messages)
        # The consumers' rule: its state for each consumer that it is closed for, the longest closed first, and for all
        # other consumers.
        self._closed_consumers: dict[str, RuleState] = {}
        self._consumer = RuleState(Rule.CONSUMER_UNACKED_MESSAGES)
        self._consumer_closings = 0
        self._part: BrokerPart | None = None if broker is None else broker.part(self._wake_from_broker)
        self._part_closings = 0
        self._is_taken = self._is_left = False
        self._is_shut = False  # whether a rule of the whole subscription is closed
        self._has_opened = False  # whether one opened for a consumer since the waiters were looked at
        self.change_limits(limits)

    @property
    def closed_consumers(self) -> tuple[str, ...]:
        """The consumers whose own limit keeps messages back, the longest closed first."""
        return tuple(self._closed_consumers)

    def take(self) -> None:
        """Note that a subscription owns the gate from now on.

        Raises:
            ValueError: A subscription owns it or did: the gate counts the messages in flight there.
        """
        with self._lock:
            if self._is_taken or self._is_left:
                raise ValueError("gate must be a new DispatchGate, got one of another subscription")
            self._is_taken = True

    def change_limits(self, limits: GateLimits) -> None:
        """Put other limits in force from the next call on.

        Below the present usage they keep all new messages back until it has fallen; granted messages stay granted. A
        closed rule stays closed until the usage is at its new mark, or the rule is off. An open rule closes when a
        `request` or an `observe` finds no room.

        Raises:
            TypeError: They are not `GateLimits`; nothing is changed.
        """
        if not isinstance(limits, GateLimits):
            raise TypeError(f"limits must be a GateLimits, got {limits!r}")
        with self._lock:
            self.limits = limits
            bytes_max, ranges_max, ratio = (
                limits.max_unpersisted_ack_record_bytes, limits.max_unacked_ranges, limits.unpersisted_release_ratio
            )  # fmt: skip
            messages_max = limits.max_unacked_messages
            # Down to the mark for bytes and ranges, below it for messages, as Pulsar has it.
            self._record_bytes.change(bytes_max, mark=int(bytes_max * ratio))
            self._ranges.change(ranges_max, mark=int(ranges_max * ratio))
            self._messages.change(messages_max, mark=int(messages_max * limits.unacked_release_ratio) - 1)
            self._consumer = self._open_consumer()
            of_consumer = limits.max_unacked_messages_per_consumer
            for name, state in tuple(self._closed_consumers.items()):
                state.change(of_consumer, mark=of_consumer // 2)
                if not state.is_closed:
                    self._forget_consumer(name)
            woken = self._update()
        call_all(woken)

    def request(
        self,
        worst_case_bytes: Sequence[int],
        *,
        usage: Usage,
        consumer: str = "",
        weights: Sequence[int] | None = None,
        now_ms: int = 0,
    ) -> Verdict:
        """Grant the longest prefix of new messages that fits every limit; nothing while a rule is closed.

        Args:
            worst_case_bytes: For each requested entry, in order of dispatch, the most that its ack can add to the
                un-persisted ranges (`isolated_range_bytes`). If empty, nothing is requested and nothing changes.
            usage: The usage before this grant.
            consumer: The consumer that is to receive them.
            weights: How many messages each entry holds, 1 or more; None if each is one message.
            now_ms: The present, for `Verdict.since_ms`.

        Raises:
            ValueError: A worst case is negative, a weight is not positive, or there are not as many of them.
        """
        if len(worst_case_bytes) == 1 and weights is None and worst_case_bytes[0] >= 0:
            unpersisted, reserved, unacked, ranges, reserved_ranges, consumer_unacked = usage
            part = self._part
            if (
                not self._is_shut
                and worst_case_bytes[0] <= self._record_bytes.limit - unpersisted - reserved
                and unacked < self._messages.limit
                and ranges + reserved_ranges < self._ranges.limit
                and consumer_unacked < self._consumer.limit
                and consumer not in self._closed_consumers
                and (part is None or part.grant_one())
            ):
                return _ONE_GRANTED
        elif not worst_case_bytes:
            return _NOTHING_ASKED
        else:
            _check(worst_case_bytes, None, weights)
        if self._is_shut and (refusal := self._quick_refusal(usage)):
            return refusal
        with self._lock:
            before = self._closed_rules(consumer)
            costs = (worst_case_bytes, None, weights, weights)
            verdict, others = self._request(costs, usage, consumer, now_ms)
            woken = self._update() if self._closed_rules(consumer) != before else []
        call_all([*(part.wake for part in others), *woken])
        return verdict

    def request_redelivery(
        self,
        worst_case_bytes: Sequence[int],
        *,
        usage: Usage,
        consumer: str = "",
        weights: Sequence[int] | None = None,
        range_costs: Sequence[int] | None = None,
    ) -> Verdict:
        """Grant the longest prefix of redeliveries that fits the limits, closed rules or not.

        Redeliveries fill ack holes, and that reduces the usage: a gate that held them back would never open. They do
        not exceed a limit either. No rule closes or opens.

        Args:
            worst_case_bytes: As in `request`. An entry that costs nothing is granted also above the limit.
            usage: The usage before this grant, without the redelivered messages.
            consumer: As in `request`.
            weights: As in `request`.
            range_costs: For each entry 0 if its ack adds no range, since it is next to an acked entry, else 1; None for
                1 each. Entries of 0 are granted also at a full range limit.

        Raises:
            ValueError: As in `request`, or a range cost is negative.
        """
        if len(worst_case_bytes) == 1 and weights is None and self._part is None and worst_case_bytes[0] >= 0:
            unpersisted, reserved, unacked, ranges, reserved_ranges, consumer_unacked = usage
            if (
                worst_case_bytes[0] <= self._record_bytes.limit - unpersisted - reserved
                and unacked < self._messages.limit
                and ranges + reserved_ranges < self._ranges.limit
                and consumer_unacked < self._consumer.limit
                and range_costs in (None, (0,), (1,))
            ):
                return _ONE_GRANTED
        elif not worst_case_bytes:
            return _NOTHING_ASKED
        _check(worst_case_bytes, range_costs, weights)
        with self._lock:
            verdict = self._longest_prefix((worst_case_bytes, range_costs, weights, weights), usage, consumer)
            part = self._part
            if part is None or not verdict.granted:
                return verdict
            granted, others = part.grant_redelivery(weights, verdict.granted)
        wake_all(others)
        return verdict if granted == verdict.granted else part.verdict(granted=granted)

    def observe(self, usage: Usage, *, next_record_bytes: int, consumer: str = "", now_ms: int = 0) -> bool:
        """Close each rule that has no room for one more new message, open the others if they may, and wake waiters.

        Return whether new messages are kept back from the consumer.

        As `request` does for one message, but nothing is granted, nothing is counted at the broker, and each rule is
        examined, also if another is closed. Call it when the usage or the limits changed and nothing was sent, so that
        `why_blocked` and `when_open` are up to date: after `change_limits`, and after a restart.

        Args:
            usage: The present usage.
            next_record_bytes: The worst case of the next message, as in `request`.
            consumer: The consumer whose own rule is examined too.
            now_ms: The present, for `Verdict.since_ms`.

        Raises:
            ValueError: The worst case is negative; nothing is changed.
        """
        costs = ((next_record_bytes,), None, None, None)
        _check(*costs[:3])
        with self._lock:
            self._refusal(costs, usage, consumer, now_ms)
            if self._part is not None:
                self._part.observe(now_ms=now_ms)
            is_closed = self.is_closed_for(consumer)
            woken = self._update()
        call_all(woken)
        return is_closed

    def is_closed_for(self, consumer: str) -> bool:
        """Return whether a rule keeps new messages from a consumer until the usage has fallen, as of the last call."""
        return any(self._closed_rules(consumer))

    def why_blocked(self, usage: Usage, consumer: str = "") -> tuple[Verdict, ...]:
        """Return a verdict for each rule that is closed for a consumer and stays so at this usage; change nothing."""
        with self._lock:
            return tuple(self._active(usage, consumer))

    def blocked_count(self, rule: Rule) -> int:
        """Return how often a rule has closed since the gate was created, for any consumer; TypeError if it is none."""
        if rule is Rule.BROKER_UNACKED_MESSAGES:
            part = self._part
            return self._part_closings if part is None else part.blocked_count
        if rule is Rule.CONSUMER_UNACKED_MESSAGES:
            return self._consumer_closings
        for state in self._for_all:
            if state.rule is rule:
                return state.blocked_count
        raise TypeError(f"rule must be a Rule of a subscription, got {rule!r}")

    def refresh(
        self,
        usage: Usage,
        consumer_unacked: Mapping[str, int] | Callable[[str], int] | None = None,
        consumer: str = "",
    ) -> int:
        """Open the rules that may open, and wake their waiters; to be called when the usage fell.

        That is after acks, persists and returns. While nothing is closed it does nothing. Return how many waiters were
        called.

        Args:
            usage: The present usage; its `consumer_unacked_messages` is ignored.
            consumer_unacked: The unacked messages of a consumer by its name, 0 for an unknown name; None leaves the
                consumers as they are.
            consumer: The only one that has fewer unacked messages than before; empty if it may be any.

        Complexity: O(1) while nothing is closed, and if nothing opens and a consumer is named or no numbers are given;
        else O(closed consumers), and if something opens O(waiters) more.
        """
        if not self.is_closed:
            return 0
        with self._lock:
            for state, used in zip(self._for_all, _used(usage), strict=False):
                state.open_at(used)
            if consumer_unacked is not None:
                of = consumer_unacked
                count_of = of if callable(of) else lambda name: of.get(name, 0)
                closed = self._closed_consumers
                asked = closed.keys() & {consumer} if consumer else closed
                for name in [name for name in asked if count_of(name) <= closed[name].released_at]:
                    self._forget_consumer(name)
            woken = self._update()
        call_all(woken)
        return len(woken)

    def when_open(self, waiter: Callable[[], object], consumer: str = "") -> None:
        """Call a waiter once, as soon as no rule is closed for a consumer: at once if none is now, or after `close`.

        The thread that opens the gate calls it, possibly that of another subscription of the broker. It must signal
        that it is time to dispatch, and not dispatch itself: the caller's grant may be counted later. A waiter that was
        added twice is called twice. Its exceptions are logged; one reaches the caller of this method only if the waiter
        is called at once.

        Raises:
            TypeError: It cannot be called.
        """
        if not callable(waiter):
            raise TypeError(f"a waiter is called, and {waiter!r} cannot be")
        with self._lock:
            is_waiting = self.is_closed_for(consumer) and not self._is_left
            if is_waiting:
                self._waiters.append((consumer, waiter))
        if not is_waiting:
            waiter()

    def wake(self) -> None:
        """Call each waiter once although a rule is closed: the next request can make the room that is missing."""
        with self._lock:
            woken = self._take_waiters()
        call_all(woken)

    def forget_waiter(self, waiter: Callable[[], object]) -> None:
        """Do not call a waiter any more; no-op if it does not wait."""
        with self._lock:
            self._waiters = [each for each in self._waiters if each[1] != waiter]

    def consumer_closed(self, name: str) -> None:
        """Forget that a consumer was closed by its own limit, and wake its waiters."""
        with self._lock:
            self._forget_consumer(name)
            woken = self._update()
        call_all(woken)

    def count_unacked(self, delta: int) -> None:
        """Report to the broker's limit messages that were sent or, below 0, acked or given back.

        Count granted messages before the next request: a message that is not counted was not sent.

        Raises:
            ValueError: More are subtracted than were counted; nothing is changed.
        """
        part = self._part  # once: another thread may close the gate meanwhile
        if part is not None:
            part.count(delta)

    def close(self) -> None:
        """Leave the broker's limit and call all waiters, which would wait for ever; closing twice does nothing."""
        with self._lock:
            part, self._part = self._part, None
            if part is not None:
                self._part_closings = part.blocked_count
            self._is_left = True
            woken = self._update()
        if part is not None:
            part.close()
        call_all(woken)

    def _quick_refusal(self, usage: Usage) -> Verdict | None:
        """Return the verdict of a rule for all that is closed and stays so; None if that takes a closer look."""
        for state, used in zip(self._for_all, _used(usage), strict=False):
            if state.is_closed:
                return state.verdict(used) if used > state.released_at else None
        part = self._part
        return part.verdict() if part is not None and part.refuses else None

    def _request(self, costs: Costs, usage: Usage, consumer: str, now_ms: int) -> tuple[Verdict, Sequence[BrokerPart]]:
        """Return the verdict, and the subscriptions to wake without the lock: they have locks of their own."""
        for verdict in self._active(usage, consumer):
            return verdict, NO_PARTS
        refusal = self._refusal(costs, usage, consumer, now_ms)
        if refusal is not None:
            return refusal, NO_PARTS
        verdict = self._longest_prefix(costs, usage, consumer)
        if self._part is None or not verdict.granted:
            return verdict, NO_PARTS
        # Last: messages that it grants are kept from all other subscriptions.
        granted, others = self._part.grant(costs[-1], verdict.granted, now_ms=now_ms)
        return verdict if granted == verdict.granted else self._part.verdict(granted=granted), others

    def _active(self, usage: Usage, consumer: str) -> Iterator[Verdict]:
        """Yield a verdict for each rule that is closed and stays so at this usage."""
        for state, used in zip(self._states(consumer), _used(usage), strict=True):
            if state.is_closed and used > state.released_at:
                yield state.verdict(used)
        if self._part is not None and self._part.is_closed:
            yield self._part.verdict()

    def _refusal(self, costs: Costs, usage: Usage, consumer: str, now_ms: int) -> Verdict | None:
        """Open and close the rules by the needs of the first message; return a verdict if one of them is closed."""
        states = self._states(consumer)
        refusal = None
        # All are examined, also if the first refuses: each closes by itself.
        for state, needed, used in zip(states, (total_of(each, 1) for each in costs), _used(usage), strict=True):
            if not state.admits(needed, used=used, now_ms=now_ms) and refusal is None:
                refusal = state.verdict(used)
        of_consumer = states[-1]
        if of_consumer is not self._consumer:
            if not of_consumer.is_closed:
                self._forget_consumer(consumer)
        elif of_consumer.is_closed:
            self._closed_consumers[consumer] = of_consumer
            self._consumer_closings += 1
            self._consumer = self._open_consumer()
        return refusal

    def _longest_prefix(self, costs: Costs, usage: Usage, consumer: str) -> Verdict:
        """Return how many messages the limits have room for, closed or not."""
        count = len(costs[0])
        granted, binding = count, None
        for state, each, used in zip(self._states(consumer), costs, _used(usage), strict=True):
            fitting = state.fitting(each, count, used=used)
            if fitting < granted:
                granted, binding = fitting, (state, each, used)
        if binding is None:
            return Verdict(granted)
        state, each, used = binding
        return state.verdict(used + total_of(each, granted), granted=granted)

    def _states(self, consumer: str) -> tuple[RuleState, ...]:
        """Return the rules for a consumer, in the order of `_used`."""
        return *self._for_all, self._closed_consumers.get(consumer, self._consumer)

    def _open_consumer(self) -> RuleState:
        """Return the state of the consumers' rule for those that it is not closed for."""
        state, limit = RuleState(Rule.CONSUMER_UNACKED_MESSAGES), self.limits.max_unacked_messages_per_consumer
        # At half, where the rule of the subscription opens below half: as Pulsar's Consumer has it.
        state.change(limit, mark=limit // 2)
        return state

    def _forget_consumer(self, consumer: str) -> None:
        if self._closed_consumers.pop(consumer, None) is not None:
            self._has_opened = True

    def _closed_rules(self, consumer: str) -> tuple[bool, ...]:
        is_part_closed = self._part is not None and self._part.is_closed
        return *(state.is_closed for state in self._states(consumer)), is_part_closed

    def _update(self) -> list[Waiter]:
        """Update the flags that depend on closed rules; return the waiters to call without the lock."""
        was_shut, closed = self._is_shut, self._closed_consumers
        self._is_shut = any(self._closed_rules("")[:3]) or (self._part is not None and self._part.is_closed)
        self.is_closed = self._is_shut or bool(closed)
        if self._is_left:
            return self._take_waiters()
        if self._is_shut or not self._waiters or not (was_shut or self._has_opened):
            return []
        # The longest waiting first; those of closed consumers are not looked at again before something opens.
        self._has_opened = False
        ready = [waiter for consumer, waiter in self._waiters if consumer not in closed]
        self._waiters = [each for each in self._waiters if each[0] in closed]
        return ready

    def _take_waiters(self) -> list[Waiter]:
        waiting, self._waiters = self._waiters, []
        return [waiter for _, waiter in waiting]

    def _wake_from_broker(self) -> None:
        with self._lock:
            woken = self._update()
        call_all(woken)


def _used(usage: Usage) -> tuple[int, int, int, int]:
    """Return the usage of each rule, in their order."""
    unpersisted, reserved, unacked, ranges, reserved_ranges, consumer_unacked = usage
    return unpersisted + reserved, ranges + reserved_ranges, unacked, consumer_unacked


def _check(worst_cases: Sequence[int], range_costs: Sequence[int] | None, weights: Sequence[int] | None) -> None:
    """Refuse impossible costs, or not one for each message."""
    named = (("worst case in bytes", worst_cases, 0), ("range cost", range_costs, 0), ("weight", weights, 1))
    for name, costs, least in named:
        if costs is None:
            continue
        if len(costs) != len(worst_cases):
            raise ValueError(f"{len(worst_cases)} messages and {len(costs)} of {name}: each has one")
        if min(costs) < least:
            index = next(index for index, cost in enumerate(costs) if cost < least)
            raise ValueError(f"{name} of message {index} must be at least {least}, got {costs[index]}")


_NOTHING_ASKED = Verdict(0)
# Most requests are for one message and are granted; a shared verdict halves their time.
_ONE_GRANTED = Verdict(1)
