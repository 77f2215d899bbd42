"""The values of the dispatch gate: limits, usage and verdicts; and one rule, open or closed."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.checks import LONG_MAX, LONG_MIN, check_within
from ackstate.pulsar_conf import (
    BROKER_UNACKED,
    CONSUMER_UNACKED,
    PAUSE,
    RANGES,
    SUBSCRIPTION_UNACKED,
    UNPERSISTED_BYTES,
    fields_of,
    read_properties,
    read_settings,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Below this, the reservations of a few messages would fill the limit.
RECORD_BYTES_LIMIT_MIN = 1024

_RANGES_DEFAULT = 10_000


class Rule(Enum):
    """A limit of the gate. Its value is the Pulsar setting, its text `setting` with that."""

    UNPERSISTED_ACK_RECORD_BYTES = UNPERSISTED_BYTES
    UNACKED_RANGES = RANGES
    UNACKED_MESSAGES = SUBSCRIPTION_UNACKED
    CONSUMER_UNACKED_MESSAGES = CONSUMER_UNACKED
    BROKER_UNACKED_MESSAGES = BROKER_UNACKED

    @property
    def setting(self) -> str:
        """The setting of `GateLimits`, or of `BrokerLimit`, as its field is named."""
        return "max_unacked_messages of BrokerLimit" if self is Rule.BROKER_UNACKED_MESSAGES else _FIELDS[self]

    def __str__(self) -> str:
        return f"{self.setting} ({self.value})"


@dataclass(frozen=True, slots=True)
class GateLimits:
    """The limits of one subscription, and how far its usage must fall before a closed rule opens.

    Attributes:
        max_unpersisted_ack_record_bytes: Most bytes of ack records in memory and not durable, with reservations.
            Below 1 the rule is off; 1 to 1023 is refused. This and the other whole numbers fit 64 bits.
        max_unacked_messages: Most messages sent and not acked; 0 is off.
        unpersisted_release_ratio: The byte and the range rule open at or below this part of their limit;
            0 < ratio <= 1.
        unacked_release_ratio: The message rule opens below this part of its limit; 0 < ratio <= 1.
        max_unacked_ranges: Most ranges of acked entries above the mark-delete position, with reservations; 0 is off.
        max_unacked_messages_per_consumer: Most messages that one consumer was sent and has not acked; 0 is off.
            The rule opens at or below half.

    Raises:
        ValueError: A field is out of its bounds.
        TypeError: A field is of another type; True and False are not numbers.

    Source: ``maxUnPersistAckRecordsBytes``; a dispatcher of Apache Pulsar blocked on unacked messages resumes
    below half the maximum, in whole numbers, a consumer at half. With a maximum of 1 the dispatcher never would;
    here it does, at 0.
    """

    max_unpersisted_ack_record_bytes: int = 5 * 2**20
    max_unacked_messages: int = 200_000
    unpersisted_release_ratio: float = 0.8
    unacked_release_ratio: float = 0.5
    max_unacked_ranges: int = 0
    max_unacked_messages_per_consumer: int = 50_000

    def __post_init__(self) -> None:
        for rule, name in _FIELDS.items():
            least = LONG_MIN if rule is Rule.UNPERSISTED_ACK_RECORD_BYTES else 0
            check_within(str(rule), getattr(self, name), least=least, most=LONG_MAX)
        if 1 <= self.max_unpersisted_ack_record_bytes < RECORD_BYTES_LIMIT_MIN:
            raise ValueError(
                f"max_unpersisted_ack_record_bytes (maxUnPersistAckRecordsBytes) is "
                f"{self.max_unpersisted_ack_record_bytes}: below {RECORD_BYTES_LIMIT_MIN} bytes a few "
                f"messages in flight would fill it; use 0 to switch it off"
            )
        for name in ("unpersisted_release_ratio", "unacked_release_ratio"):
            check_ratio(name, getattr(self, name))

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> GateLimits:
        """Return the limits in a broker's properties, or in a ``broker.conf``; missing or blank keeps Pulsar's default.

        Reads ``maxUnPersistAckRecordsBytes``, ``maxUnackedMessagesPerSubscription`` and
        ``maxUnackedMessagesPerConsumer``, of which 0 and below are off, and
        ``managedLedgerMaxUnackedRangesToPersist``, a limit of the gate only where
        ``dispatcherPauseOnAckStatePersistentEnabled`` is true. Keys that do not concern the gate are ignored.

        Raises:
            ValueError: A value is malformed or out of range, or a key is misspelt; the text names the key.
            TypeError: A key or a value is not text.
            OSError: The file cannot be read.
        """
        properties = read_properties(source)
        values = read_settings(properties, "GateLimits", "BrokerLimit")
        for rule, name in _FIELDS.items():
            if name in properties:
                raise ValueError(f"unknown key of Pulsar {name!r}; did you mean {rule.value!r}?")
        is_pausing, ranges = values.pop(PAUSE, False), values.pop(RANGES, _RANGES_DEFAULT)
        if is_pausing and ranges < 1:
            raise ValueError(f"{RANGES} is {ranges}: with {PAUSE} the first ack hole would stop dispatch")
        return cls(**fields_of(values, "GateLimits"), max_unacked_ranges=ranges if is_pausing else 0)


_FIELDS = {
    Rule.UNPERSISTED_ACK_RECORD_BYTES: "max_unpersisted_ack_record_bytes",
    Rule.UNACKED_MESSAGES: "max_unacked_messages",
    Rule.UNACKED_RANGES: "max_unacked_ranges",
    Rule.CONSUMER_UNACKED_MESSAGES: "max_unacked_messages_per_consumer",
}


def check_ratio(name: str, value: object) -> None:
    """Refuse a value outside 0 < ratio <= 1."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value <= 1:
        found = hex(value) if isinstance(value, int) else value
        raise ValueError(f"{name} must be above 0 and at most 1, got {found}")


class Usage(NamedTuple):
    """The present usage of a subscription, and of the consumer of a request."""

    unpersisted_record_bytes: int  # of the ranges acked in memory and not durable
    reserved_bytes: int  # the worst case of the messages that are sent and not yet acked
    unacked_messages: int  # sent and not yet acked
    range_count: int = 0  # of acked entries above the mark-delete position
    reserved_ranges: int = 0  # how many more there are at worst when all sent messages are acked
    consumer_unacked_messages: int = 0  # sent to the consumer and not yet acked


class Verdict(NamedTuple):
    """How many messages may be sent and, unless that is all of them, which rule binds."""

    granted: int  # the length of the prefix that may be sent
    rule: Rule | None = None  # that keeps the others back, the first in the order of `Rule`; None if none does
    used: int = 0  # the usage that the rule counts, this grant included; 0 if no rule binds, as are the next two
    limit: int = 0  # the most that `used` may be
    released_at: int = 0  # the highest usage at which the rule, once closed, opens again
    since_ms: int | None = None  # when the rule closed; None while it is open


# The limit of a rule that is off: above every number that a running broker can count to.
NO_LIMIT = 2**63
_COUNTS_MESSAGES = frozenset({Rule.UNACKED_MESSAGES, Rule.CONSUMER_UNACKED_MESSAGES})


class Closing:
    """Whether a rule is closed, since when, and at which usage it opens."""

    __slots__ = ("blocked_count", "is_closed", "released_at", "since_ms")

    def __init__(self) -> None:
        self.is_closed = False
        # While closed: at this usage it opens, and has room for the message that it closed on.
        self.released_at = NO_LIMIT
        self.since_ms: int | None = None
        self.blocked_count = 0

    def close_at(self, released_at: int, *, now_ms: int) -> None:
        # Not counted twice when it opens and closes in one call: no request saw it open.
        if not self.is_closed:
            self.is_closed = True
            self.since_ms = now_ms
            self.blocked_count += 1
        self.released_at = max(0, released_at)


@final
class RuleState(Closing):
    """A rule of one subscription: its limit, and whether it is closed."""

    __slots__ = ("_has_lone_pass", "_mark", "limit", "rule")

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        # An entry is dispatched as a whole: one that alone exceeds a limit on messages is admitted if none is unacked.
        self._has_lone_pass = rule in _COUNTS_MESSAGES
        self.limit = self._mark = NO_LIMIT

    def change(self, limit: int, *, mark: int) -> None:
        """Take another limit, below 1 meaning none; a closed rule stays closed unless it is off now."""
        is_on = limit >= 1
        self.limit = limit if is_on else NO_LIMIT
        self.released_at = self._mark = max(0, mark) if is_on else NO_LIMIT
        if not is_on:
            self._open()

    def admits(self, needed: int, *, used: int, now_ms: int) -> bool:
        """Open if the usage has fallen, close if there is no room, and return whether the rule is open now."""
        if self.is_closed and used > self.released_at:
            return False
        if used + needed <= self.limit or (self._has_lone_pass and not used):
            self._open()
        else:
            self.close_at(min(self._mark, self.limit - needed), now_ms=now_ms)
        return not self.is_closed

    def open_at(self, used: int) -> None:
        if self.is_closed and used <= self.released_at:
            self._open()

    def fitting(self, costs: Sequence[int] | None, count: int, *, used: int) -> int:
        """Return how many of the first messages the limit, closed or not, has room for."""
        fitting = fitting_count(costs, count, room=self.limit - used)
        return max(fitting, 1) if self._has_lone_pass and not used else fitting

    def verdict(self, used: int, *, granted: int = 0) -> Verdict:
        return Verdict(granted, self.rule, used, self.limit, self.released_at, self.since_ms)

    def _open(self) -> None:
        self.is_closed = False
        self.since_ms = None
        self.released_at = self._mark


def fitting_count(costs: Sequence[int] | None, count: int, *, room: int) -> int:
    """Return how many of the first messages fit, each costing 1 if `costs` is None; free ones fit a negative room."""
    room = max(room, 0)
    if costs is None:
        return min(count, room)
    return count if sum(costs[:count]) <= room else bisect_right(list(accumulate(costs[:count])), room)


def total_of(costs: Sequence[int] | None, count: int) -> int:
    """Return the cost of the first `count` messages together."""
    return count if costs is None else sum(costs[:count])
