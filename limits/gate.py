"""How many of the messages at hand may be sent now, and if not all of them, which limit says so?

The ack of a sent message will add to what a crash would forget, and how much it adds is known only when it
comes. So each message is let out against the worst its ack could add, and that much stays reserved until it
is acked or taken back. Acking moves bytes from *reserved* to *un-persisted*, never more than were reserved:
no order of acks makes the sum pass the limit. Looking at the limit when the ack comes would be too late, the
consumer has done the work by then.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, final

from ackstate.limits.broker import NOBODY, BrokerLimit, wake_all
from ackstate.limits.rule_state import GateRequest, check
from ackstate.limits.rules import GateLimits, Rule, Usage, Verdict
from ackstate.limits.subscription_rules import SubscriptionRules
from ackstate.limits.waiters import Waiters, call_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ackstate.limits.broker import BrokerPart
    from ackstate.limits.rule_state import RuleState

__all__ = ["DispatchGate", "GateLimits", "Rule", "Usage", "Verdict"]


@final
class DispatchGate:
    """Lets messages out up to its limits, by not one byte more, and once shut waits until the use has fallen.

    >>> gate = DispatchGate(GateLimits(max_unpersisted_ack_record_bytes=0, max_unacked_messages=4))
    >>> gate.request([17, 17, 17], usage=Usage(0, 0, 2)).granted
    2
    >>> verdict = gate.request([17], usage=Usage(0, 68, 4))
    >>> verdict.granted, verdict.rule.name, verdict.used, verdict.limit, verdict.released_at
    (0, 'UNACKED_MESSAGES', 4, 4, 1)
    >>> gate.request([17], usage=Usage(0, 34, 2)).granted, gate.request([17], usage=Usage(0, 17, 1)).granted
    (0, 1)

    A rule *closes* when it has no room for the first message of a `request`, or the next one of an `observe`, and
    opens when one of them or a `refresh` finds the use down at `released_at`; while one is closed, a `request` does not
    ask the others. Each rule closes and opens for itself, the consumers' rule for each consumer. Whoever sends the
    granted messages adds them to the `Usage` of the next call.

    An entry that alone holds more messages than a limit on messages allows is let out when nothing else is unacked
    there, or it never would be; otherwise no limit is passed.

    Safe for concurrent use as far as the `Usage` given is true while the call runs: who changes it in another
    thread does both under a lock of its own.

    `broker` is the limit that the subscription shares with others.
    """

    def __init__(self, limits: GateLimits, *, broker: BrokerLimit | None = None) -> None:
        if broker is not None and not isinstance(broker, BrokerLimit):
            raise TypeError(f"broker must be a BrokerLimit, got {broker!r}")
        self.is_closed = False
        """Is any rule closed, be it for one consumer? To be read only; `refresh` has work to do only then."""
        self._lock = Lock()
        self._waiters = Waiters()
        self._rules = SubscriptionRules(self._waiters.release)
        self._record_bytes, self._ranges, self._messages = self._rules.for_all
        self._consumers = self._rules.consumers
        self._first_closed: RuleState | None = None  # of the rules for all consumers
        self._part: BrokerPart | None = None if broker is None else broker.part(self._wake_from_broker)
        self._part_closings = 0
        self._is_taken = False
        self._is_left = False
        # Is a rule of the whole subscription closed, or is there another reason to take the long way?
        self._asks_each_rule = False
        self.change_limits(limits)

    @property
    def limits(self) -> GateLimits:
        """The limits in force."""
        return self._limits

    @property
    def closed_consumers(self) -> tuple[str, ...]:
        """The consumers whose own limit keeps messages back from them, the longest closed first."""
        return tuple(self._consumers.closed)

    def take(self) -> None:
        """Note that a subscription has the gate from now on.

        Raises:
            ValueError: A subscription has it or has had it: the gate counts what is on its way there.
        """
        with self._lock:
            if self._is_taken or self._is_left:
                raise ValueError("gate must be a new DispatchGate, got one of another subscription")
            self._is_taken = True

    def change_limits(self, limits: GateLimits) -> None:
        """Put other limits in force from the next call on.

        Below the present use they keep everything back until it has fallen; what was granted stays granted. A
        closed rule stays closed until the use is down at its new mark, or the rule is off; one that is open closes
        when a `request` or an `observe` finds no room.

        Raises:
            TypeError: They are no `GateLimits`; nothing is changed.
        """
        if not isinstance(limits, GateLimits):
            raise TypeError(f"limits must be a GateLimits, got {limits!r}")
        with self._lock:
            self._limits = limits
            self._rules.change(limits)
            woken = self._settle()
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
            worst_case_bytes: For each entry wanted, in order of dispatch, the most that its ack can add to the
                un-persisted ranges (`isolated_range_bytes`). Empty asks nothing and changes nothing.
            usage: What is used before this grant.
            consumer: Who is to get them.
            weights: How many messages each entry holds, 1 or more; None if each is one message.
            now_ms: The present, for `Verdict.since_ms`.

        Raises:
            ValueError: A worst case is negative, a weight is not positive, or there are not as many of them.

        Complexity: O(messages wanted).
        """
        if len(worst_case_bytes) == 1 and weights is None and worst_case_bytes[0] >= 0:
            unpersisted, reserved, unacked, ranges, reserved_ranges, consumer_unacked = usage
            part = self._part
            if (
                not self._asks_each_rule
                and worst_case_bytes[0] <= self._record_bytes.limit - unpersisted - reserved
                and unacked < self._messages.limit
                and ranges + reserved_ranges < self._ranges.limit
                and consumer_unacked < self._consumers.opened.limit
                and consumer not in self._consumers.closed
                and (part is None or part.grant_one())
            ):
                return _ONE_GRANTED
        elif not worst_case_bytes:
            return _NOTHING_ASKED
        else:
            check(GateRequest(worst_case_bytes, None, weights))
        if self.is_closed and (refusal := self._plain_refusal(usage, consumer)):
            return refusal
        with self._lock:
            before = self._closed_rules(consumer)
            verdict, others = self._request(GateRequest(worst_case_bytes, None, weights), usage, consumer, now_ms)
            woken = self._settle() if self._closed_rules(consumer) != before else []
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

        Redeliveries fill ack holes, and that is what brings the use down: to hold them back until it has
        fallen would be to wait for itself. They too pass no limit. No rule closes or opens by it.

        Args:
            worst_case_bytes: As in `request`. One that costs nothing passes also where the use is above the limit.
            usage: What is used before this grant, the redelivered messages not among it.
            consumer: Who is to get them.
            weights: As in `request`.
            range_costs: For each entry 0 if its ack adds no range, since it lies next to an acked one, else 1;
                None for 1 each. Those of 0 pass a full range limit.

        Raises:
            ValueError: A worst case or a range cost is negative, a weight is not positive, or there are not as many
                of them.

        Complexity: O(messages wanted).
        """
        if not worst_case_bytes:
            return _NOTHING_ASKED
        wanted = GateRequest(worst_case_bytes, range_costs, weights)
        check(wanted)
        with self._lock:
            verdict = self._rules.longest_prefix(wanted, usage, consumer)
            part = self._part
            if part is None or not verdict.granted:
                return verdict
            granted, others = part.grant_redelivery(weights, verdict.granted)
        wake_all(others)
        return verdict if granted == verdict.granted else part.verdict(granted=granted)

    def observe(self, usage: Usage, *, next_record_bytes: int, consumer: str = "", now_ms: int = 0) -> bool:
        """Close each rule that has no room for one more new message, open what may open, and wake who waits for that.

        As `request` does for one message, but nothing is granted, nothing is counted at the broker, and each rule is
        asked, also if another is closed. To be called where the use or the limits changed and nothing was sent, so
        that `why_blocked` and `when_open` know it: after `change_limits`, and on what a restart brings back.

        Args:
            usage: What is used now.
            next_record_bytes: The worst case of the next message, as in `request`.
            consumer: Whose own rule is asked too.
            now_ms: The present, for `Verdict.since_ms`.

        Returns:
            Whether new messages are kept back from the consumer.

        Raises:
            ValueError: The worst case is negative; nothing is changed.
        """
        wanted = GateRequest((next_record_bytes,), None, None)
        check(wanted)
        with self._lock:
            self._rules.ask(wanted, usage, consumer, now_ms)
            if self._part is not None:
                self._part.observe(now_ms=now_ms)
            is_closed = self.is_closed_for(consumer)
            woken = self._settle()
        call_all(woken)
        return is_closed

    def is_closed_for(self, consumer: str) -> bool:
        """Tell whether a rule keeps new messages from a consumer until the use has fallen, as of the last call."""
        return any(self._closed_rules(consumer))

    def why_blocked(self, usage: Usage, consumer: str = "") -> tuple[Verdict, ...]:
        """Return a verdict for each rule that is closed for a consumer and stays so at this use; changes nothing."""
        with self._lock:
            return tuple(self._standing(usage, consumer))

    def blocked_count(self, rule: Rule) -> int:
        """Return how often a rule has closed since the gate was made, for whichever consumer.

        Raises:
            TypeError: It is no `Rule`.
        """
        if rule is Rule.BROKER_UNACKED_MESSAGES:
            part = self._part
            return self._part_closings if part is None else part.blocked_count
        return self._rules.blocked_count(rule)

    def refresh(
        self,
        usage: Usage,
        consumer_unacked: Mapping[str, int] | Callable[[str], int] | None = None,
        consumer: str = "",
    ) -> int:
        """Open what may open and wake who waits for that; to be called when the use fell.

        That is after acks, persists and returns, and after lowering what counts in any other way. While nothing is
        closed it does nothing.

        Args:
            usage: What is used now; its `consumer_unacked_messages` is not looked at.
            consumer_unacked: The unacked messages of a consumer by its name, a name that is not there having none;
                None leaves the consumers as they are.
            consumer: The only one who has fewer unacked messages than before; empty if it may be any.

        Returns:
            How many waiters were called.

        Complexity: O(1) while nothing is closed, and where nothing opens if a consumer is named or no numbers are
        given; else O(closed consumers). For those who are called or were added since, O(n log n) more.
        """
        if not self.is_closed:
            return 0
        with self._lock:
            self._rules.refresh(usage)
            if consumer_unacked is not None:
                self._consumers.refresh(consumer_unacked, consumer)
            woken = self._settle()
        call_all(woken)
        return len(woken)

    def when_open(self, waiter: Callable[[], object], consumer: str = "") -> None:
        """Call a waiter once, as soon as no rule is closed for a consumer: at once if none is now, or after `close`.

        It is called in whichever thread opens the gate, maybe that of another subscription of the broker, and is to
        say that it is time to dispatch, not to dispatch: the caller's grant may not have been counted yet. One that
        waits twice is called twice. What it raises is logged, and reaches only a caller of this method in whose call
        it was called at once.

        Raises:
            TypeError: It cannot be called.
        """
        if not callable(waiter):
            raise TypeError(f"a waiter is called, and {waiter!r} cannot be")
        with self._lock:
            is_waiting = self.is_closed_for(consumer) and not self._is_left
            if is_waiting:
                self._waiters.add(waiter, consumer)
        if not is_waiting:
            waiter()

    def wake(self) -> None:
        """Call each waiter once although a rule is closed: whoever asks next can make the room that is missing."""
        with self._lock:
            woken = self._waiters.take_all()
        call_all(woken)

    def forget_waiter(self, waiter: Callable[[], object]) -> None:
        """Do not call a waiter any more; one that does not wait is left alone."""
        with self._lock:
            self._waiters.forget(waiter)

    def consumer_closed(self, name: str) -> None:
        """Forget that a consumer was closed by its own limit, and wake who waits for that."""
        with self._lock:
            self._consumers.forget(name)
            woken = self._settle()
        call_all(woken)

    def count_unacked(self, delta: int) -> None:
        """Tell the broker's limit of messages that were sent, or taken off by acks and returns.

        What a request grants is to be counted before the next request: what is not, was not sent.

        Raises:
            ValueError: More are taken off than were counted; nothing is changed.
        """
        part = self._part  # once: another thread may close the gate meanwhile
        if part is not None:
            part.count(delta)

    def mark_persisted(self, unpersisted_record_bytes: int) -> None:
        """Keep what a persist left un-persisted, for `Accounting.ESTIMATE_AT_PERSIST`, which looks at nothing else."""
        self._rules.persisted_record_bytes = unpersisted_record_bytes

    def close(self) -> None:
        """Leave the broker's limit, take this subscription's part out of it, and call all who wait.

        They would wait for ever: whoever is woken looks what there still is. Closing twice does nothing.
        """
        with self._lock:
            part, self._part = self._part, None
            if part is not None:
                self._part_closings = part.blocked_count
            self._is_left = True
            woken = self._settle()
        if part is not None:
            part.close()
        call_all(woken)

    def _plain_refusal(self, usage: Usage, consumer: str) -> Verdict | None:
        """Return quickly what mostly is the first of the standing verdicts; None says nothing."""
        state, used = self._first_closed, usage.unacked_messages
        if state is None:
            state, used = self._consumers.closed.get(consumer), usage.consumer_unacked_messages
        elif state is not self._messages:
            used = self._rules.used(usage)[0 if state is self._record_bytes else 1]
        if state is None:
            part = self._part
            return part.verdict() if part is not None and part.refuses else None
        if used <= state.released_at:
            return None
        return Verdict(0, state.rule, used, state.limit, state.released_at, state.since_ms)

    def _request(
        self, wanted: GateRequest, usage: Usage, consumer: str, now_ms: int
    ) -> tuple[Verdict, Sequence[BrokerPart]]:
        """Return the verdict and whom it lets go on: they are to be told without the lock, having their own."""
        for standing in self._standing(usage, consumer):
            return standing, NOBODY
        refusal = self._rules.ask(wanted, usage, consumer, now_ms)
        if refusal is not None:
            return refusal, NOBODY
        verdict = self._rules.longest_prefix(wanted, usage, consumer)
        if self._part is None or not verdict.granted:
            return verdict, NOBODY
        # Asked last: it keeps what it grants from all other subscriptions.
        granted, others = self._part.grant(wanted.weights, verdict.granted, now_ms=now_ms)
        return verdict if granted == verdict.granted else self._part.verdict(granted=granted), others

    def _standing(self, usage: Usage, consumer: str) -> Iterator[Verdict]:
        """Yield a verdict for each rule that is closed and stays so at this use."""
        yield from self._rules.standing(usage, consumer)
        if self._part is not None and self._part.is_closed:
            yield self._part.verdict()

    def _closed_rules(self, consumer: str) -> tuple[bool, ...]:
        return *self._rules.closed(consumer), self._part is not None and self._part.is_closed

    def _settle(self) -> list[Callable[[], object]]:
        """Bring up to date what follows from the closed rules; return the waiters to be called without the lock."""
        self._first_closed = self._rules.first_closed()
        is_shut = self._first_closed is not None or (self._part is not None and self._part.is_closed)
        self._asks_each_rule = is_shut or not self._rules.is_exact
        self.is_closed = is_shut or bool(self._consumers.closed)
        if self._is_left:
            return self._waiters.take_all()
        return [] if is_shut else self._waiters.take(closed_consumers=self._consumers.closed)

    def _wake_from_broker(self) -> None:
        with self._lock:
            woken = self._settle()
        call_all(woken)


_NOTHING_ASKED = Verdict(0)
# Most checks ask for one message and get it; a shared answer spares them half their time.
_ONE_GRANTED = Verdict(1)
