"""How many of the messages at hand may be sent now, and if not all of them, which limit says so?

The ack of a sent message will add to what a crash would forget, and how much it adds is known only when it
comes. So each message is let out against the worst its ack could add, and that much stays reserved until it
is acked or taken back. Acking moves bytes from *reserved* to *un-persisted*, never more than were reserved:
no order of acks makes the sum pass the limit. Looking at the limit when the ack comes would be too late, the
consumer has done the work by then.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Sequence

# Below this the reservations of a handful of messages fill the limit, and the dispatcher would crawl.
RECORD_BYTES_LIMIT_MIN = 1024

# Stands in for the limit of a rule that is off: above every number that a running broker can count to.
_NO_LIMIT = 2**63


class Rule(Enum):
    """A limit of the gate, by the Pulsar setting it stands for."""

    UNPERSISTED_ACK_RECORD_BYTES = "maxUnPersistAckRecordsBytes"
    UNACKED_MESSAGES = "maxUnackedMessagesPerSubscription"


@dataclass(frozen=True, slots=True)
class GateLimits:
    """The limits of one subscription and how far its use must fall before a limit that was hit lets go.

    Attributes:
        max_unpersisted_ack_record_bytes: Most bytes of ack records in memory and not durable, with what is
            reserved for them. Below 1 the rule is off; 1 to 1023 is refused.
        max_unacked_messages: Most messages sent and not acked; 0 is off.
        unpersisted_release_ratio: The byte rule lets go at or below this part of its limit; 0 < ratio <= 1.
        unacked_release_ratio: The message rule lets go below this part of its limit; 0 < ratio <= 1.

    Raises:
        ValueError: A field is out of its bounds.

    Source: ``maxUnPersistAckRecordsBytes``; a dispatcher of Apache Pulsar blocked on unacked messages resumes
    below half the maximum, in whole numbers. With a maximum of 1 it never would; here it does, at 0.
    """

    max_unpersisted_ack_record_bytes: int = 5 * 2**20
    max_unacked_messages: int = 50_000
    unpersisted_release_ratio: float = 0.8
    unacked_release_ratio: float = 0.5

    def __post_init__(self) -> None:
        if 1 <= self.max_unpersisted_ack_record_bytes < RECORD_BYTES_LIMIT_MIN:
            raise ValueError(
                f"max_unpersisted_ack_record_bytes (maxUnPersistAckRecordsBytes) is "
                f"{self.max_unpersisted_ack_record_bytes}: below {RECORD_BYTES_LIMIT_MIN} bytes a few "
                f"messages in flight would fill it; use 0 to switch it off"
            )
        if self.max_unacked_messages < 0:
            raise ValueError(
                f"max_unacked_messages (maxUnackedMessagesPerSubscription) is {self.max_unacked_messages}: "
                f"it cannot be negative; use 0 to switch it off"
            )
        for name in ("unpersisted_release_ratio", "unacked_release_ratio"):
            ratio = getattr(self, name)
            if not 0 < ratio <= 1:
                raise ValueError(f"{name} is {ratio}: it must be above 0 and at most 1")


class Usage(NamedTuple):
    """What a subscription uses now.

    Attributes:
        unpersisted_record_bytes: Size of the ranges acked in memory and not durable.
        reserved_bytes: Worst case of what is sent and not yet acked.
        unacked_messages: How many messages are sent and not yet acked.
    """

    unpersisted_record_bytes: int
    reserved_bytes: int
    unacked_messages: int


class Verdict(NamedTuple):
    """How many messages may be sent and, unless that is all of them, which rule binds.

    Attributes:
        granted: The length of the prefix that may be sent.
        rule: The rule that keeps the rest back, the bytes first if both do; None if everything was granted.
        used: What that rule counts, this grant included. 0 if no rule binds, as are the next two.
        limit: What `used` may not pass.
        released_at: The highest use at which the rule, once closed, lets go again.
    """

    granted: int
    rule: Rule | None = None
    used: int = 0
    limit: int = 0
    released_at: int = 0


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

    A rule *closes* when it has no room for the first message of a `request`, and opens at the first `request`
    that finds the use down at `released_at`. The two rules close and open each for itself. Whoever sends the
    granted messages adds them to the `Usage` of the next call. Not safe for concurrent mutation.
    """

    def __init__(self, limits: GateLimits) -> None:
        self._limits = limits
        self._record_bytes = _RuleState(Rule.UNPERSISTED_ACK_RECORD_BYTES)
        self._messages = _RuleState(Rule.UNACKED_MESSAGES)
        self.change_limits(limits)

    @property
    def limits(self) -> GateLimits:
        """The limits in force."""
        return self._limits

    def change_limits(self, limits: GateLimits) -> None:
        """Put other limits in force from the next call on.

        Below the present use they keep everything back until it has fallen; what was granted stays granted. A
        closed rule stays closed until the use is down at its new mark, or the rule is off.
        """
        self._limits = limits
        # Down to the mark for bytes, below it for messages, as Pulsar has it.
        bytes_max = limits.max_unpersisted_ack_record_bytes
        self._record_bytes.change(bytes_max, mark=int(bytes_max * limits.unpersisted_release_ratio))
        messages_max = limits.max_unacked_messages
        self._messages.change(messages_max, mark=int(messages_max * limits.unacked_release_ratio) - 1)

    def request(self, worst_case_bytes: Sequence[int], *, usage: Usage) -> Verdict:
        """Grant the longest prefix of new messages that fits every limit; nothing while a rule is closed.

        Args:
            worst_case_bytes: For each message wanted, in order of dispatch, the most that its ack can add to
                the un-persisted ranges (`isolated_range_bytes`). Empty asks nothing and changes nothing.
            usage: What is used before this grant.

        Raises:
            ValueError: A worst case is negative.

        Complexity: O(granted).
        """
        if not worst_case_bytes:
            return _NOTHING_ASKED
        used = usage.unpersisted_record_bytes + usage.reserved_bytes
        # Both are asked, also if the first refuses: each closes for itself.
        has_byte_room = self._record_bytes.admits(worst_case_bytes[0], used=used)
        has_message_room = self._messages.admits(1, used=usage.unacked_messages)
        if not has_byte_room:
            return self._record_bytes.verdict(used)
        if not has_message_room:
            return self._messages.verdict(usage.unacked_messages)
        return self._longest_prefix(worst_case_bytes, used=used, unacked=usage.unacked_messages)

    def request_redelivery(self, worst_case_bytes: Sequence[int], *, usage: Usage) -> Verdict:
        """Grant the longest prefix of redeliveries that fits the limits, closed rules or not.

        Redeliveries fill ack holes, and that is what brings the use down: to hold them back until it has
        fallen would be to wait for itself. They too pass no limit. No rule closes or opens by it.

        Args:
            worst_case_bytes: As in `request`.
            usage: What is used before this grant, the redelivered messages not among it.

        Raises:
            ValueError: A worst case is negative.

        Complexity: O(granted).
        """
        used = usage.unpersisted_record_bytes + usage.reserved_bytes
        return self._longest_prefix(worst_case_bytes, used=used, unacked=usage.unacked_messages)

    def why_blocked(self, usage: Usage) -> tuple[Verdict, ...]:
        """Return a verdict for each rule that is closed and stays so at this use; changes nothing."""
        used = usage.unpersisted_record_bytes + usage.reserved_bytes
        counted = ((self._record_bytes, used), (self._messages, usage.unacked_messages))
        return tuple(state.verdict(used) for state, used in counted if state.is_closed and used > state.released_at)

    def blocked_count(self, rule: Rule) -> int:
        """Return how often a rule has closed since the gate was made."""
        state = self._record_bytes if rule is Rule.UNPERSISTED_ACK_RECORD_BYTES else self._messages
        return state.blocked_count

    def _longest_prefix(self, worst_case_bytes: Sequence[int], *, used: int, unacked: int) -> Verdict:
        bytes_limit = self._record_bytes.limit
        room = self._messages.limit - unacked
        granted = 0
        for cost in worst_case_bytes:
            if cost < 0:
                raise ValueError(f"worst case of message {granted} is {cost} bytes: it cannot be negative")
            if used + cost > bytes_limit:
                return self._record_bytes.verdict(used, granted=granted)
            if granted >= room:
                return self._messages.verdict(unacked + granted, granted=granted)
            used += cost
            granted += 1
        return _ONE_GRANTED if granted == 1 else Verdict(granted)


_NOTHING_ASKED = Verdict(0)
# Most checks ask for one message and get it; a shared answer spares them half their time.
_ONE_GRANTED = Verdict(1)


@final
class _RuleState:
    """A rule's limit, and whether it is closed."""

    __slots__ = ("_mark", "blocked_count", "is_closed", "limit", "released_at", "rule")

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.limit = _NO_LIMIT
        self._mark = _NO_LIMIT
        self.is_closed = False
        # While closed: at this use it opens, and has room for the message that it closed on.
        self.released_at = _NO_LIMIT
        self.blocked_count = 0

    def change(self, limit: int, *, mark: int) -> None:
        """Take another limit, below 1 meaning none; a closed rule stays closed unless it is off now."""
        is_on = limit >= 1
        self.limit = limit if is_on else _NO_LIMIT
        self._mark = max(0, mark) if is_on else _NO_LIMIT
        self.released_at = self._mark
        self.is_closed = self.is_closed and is_on

    def admits(self, needed: int, *, used: int) -> bool:
        """Open if the use has fallen, close if there is no room, and say whether the rule is open now."""
        if self.is_closed and used > self.released_at:
            return False
        has_room = used + needed <= self.limit
        # Not closed twice when it opens and shuts in one call: in between it was open to nobody.
        self.blocked_count += not has_room and not self.is_closed
        self.is_closed = not has_room
        self.released_at = self._mark if has_room else max(0, min(self._mark, self.limit - needed))
        return has_room

    def verdict(self, used: int, *, granted: int = 0) -> Verdict:
        """Answer that this rule keeps the rest back."""
        return Verdict(granted, self.rule, used, self.limit, self.released_at)
