"""The values of the dispatch gate: limits, usage and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ackstate.limits.broker_conf import read_conf
from ackstate.properties import LONG_MAX, LONG_MIN, flag, whole_number

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# Below this, the reservations of a few messages would fill the limit.
RECORD_BYTES_LIMIT_MIN = 1024

_PAUSE = "dispatcherPauseOnAckStatePersistentEnabled"
_RANGES_DEFAULT = 10_000


class Rule(Enum):
    """A limit of the gate, by its Pulsar setting."""

    UNPERSISTED_ACK_RECORD_BYTES = "maxUnPersistAckRecordsBytes"
    UNACKED_RANGES = "managedLedgerMaxUnackedRangesToPersist"
    UNACKED_MESSAGES = "maxUnackedMessagesPerSubscription"
    CONSUMER_UNACKED_MESSAGES = "maxUnackedMessagesPerConsumer"
    BROKER_UNACKED_MESSAGES = "maxUnackedMessagesPerBroker"


BLOCKED_SHARE_KEY = "maxUnackedMessagesPerSubscriptionOnBrokerBlocked"
GATE_KEYS = (*(rule.value for rule in Rule), BLOCKED_SHARE_KEY, _PAUSE)
"""The properties of a broker that `GateLimits` and `BrokerLimit` read."""


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
        for name, rule in _WHOLE_NUMBERS.items():
            check_whole(f"{name} ({rule.value})", getattr(self, name))
        if 1 <= self.max_unpersisted_ack_record_bytes < RECORD_BYTES_LIMIT_MIN:
            raise ValueError(
                f"max_unpersisted_ack_record_bytes (maxUnPersistAckRecordsBytes) is "
                f"{self.max_unpersisted_ack_record_bytes}: below {RECORD_BYTES_LIMIT_MIN} bytes a few "
                f"messages in flight would fill it; use 0 to switch it off"
            )
        for name, rule in _WHOLE_NUMBERS.items():
            if rule is not Rule.UNPERSISTED_ACK_RECORD_BYTES:
                check_not_negative(f"{name} ({rule.value})", getattr(self, name))
        for name in ("unpersisted_release_ratio", "unacked_release_ratio"):
            check_ratio(name, getattr(self, name))

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> GateLimits:
        """Return the limits in a broker's properties; a key that is missing or blank keeps Pulsar's default.

        Reads ``maxUnPersistAckRecordsBytes``, ``maxUnackedMessagesPerSubscription`` and
        ``maxUnackedMessagesPerConsumer``, of which 0 and below are off, and
        ``managedLedgerMaxUnackedRangesToPersist``, a limit of the gate only where
        ``dispatcherPauseOnAckStatePersistentEnabled`` is true. Keys that do not concern the gate are ignored.

        Args:
            source: The keys and their values, or the path of a ``broker.conf``.

        Raises:
            ValueError: A value is malformed or out of range, or a key is misspelt; the text names the key.
            TypeError: A key or a value is not text.
            OSError: The file cannot be read.
        """
        properties = read_conf(source, keys=GATE_KEYS)
        for name, rule in _WHOLE_NUMBERS.items():
            if name in properties:
                raise ValueError(f"unknown key of Pulsar {name!r}; did you mean {rule.value!r}?")
        defaults = cls()
        ranges = whole_number(properties, Rule.UNACKED_RANGES.value, least=LONG_MIN, most=LONG_MAX)
        ranges = _RANGES_DEFAULT if ranges is None else ranges
        is_pausing = flag(properties, _PAUSE) or False
        if is_pausing and ranges < 1:
            raise ValueError(
                f"{Rule.UNACKED_RANGES.value} is {ranges}: with {_PAUSE} the first ack hole would stop dispatch"
            )

        def limit(rule: Rule, default: int) -> int:
            number = whole_number(properties, rule.value, least=LONG_MIN, most=LONG_MAX)
            return default if number is None else max(0, number)

        return cls(
            max_unpersisted_ack_record_bytes=limit(
                Rule.UNPERSISTED_ACK_RECORD_BYTES, defaults.max_unpersisted_ack_record_bytes
            ),
            max_unacked_messages=limit(Rule.UNACKED_MESSAGES, defaults.max_unacked_messages),
            max_unacked_ranges=ranges if is_pausing else 0,
            max_unacked_messages_per_consumer=limit(
                Rule.CONSUMER_UNACKED_MESSAGES, defaults.max_unacked_messages_per_consumer
            ),
        )


_WHOLE_NUMBERS = {
    "max_unpersisted_ack_record_bytes": Rule.UNPERSISTED_ACK_RECORD_BYTES,
    "max_unacked_messages": Rule.UNACKED_MESSAGES,
    "max_unacked_ranges": Rule.UNACKED_RANGES,
    "max_unacked_messages_per_consumer": Rule.CONSUMER_UNACKED_MESSAGES,
}


def check_whole(name: str, value: object) -> None:
    """Refuse a value that is not a whole number of 64 bits.

    Raises:
        TypeError: It is not an int.
        ValueError: It does not fit.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if not LONG_MIN <= value <= LONG_MAX:
        # Not in decimals: Python refuses to write a very long number so.
        raise ValueError(f"{name} must fit 64 bits, got {value:#x}")


def check_not_negative(name: str, limit: int) -> None:
    """Refuse a limit below 0.

    Raises:
        ValueError: It is.
    """
    if limit < 0:
        raise ValueError(f"{name} must be at least 0, got {limit}; 0 switches it off")


def check_ratio(name: str, value: object) -> None:
    """Refuse a value outside 0 < ratio <= 1.

    Raises:
        TypeError: It is neither an int nor a float.
        ValueError: It is not in 0 < ratio <= 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value <= 1:
        found = hex(value) if isinstance(value, int) else value
        raise ValueError(f"{name} must be above 0 and at most 1, got {found}")


class Usage(NamedTuple):
    """The present usage of a subscription, and of the consumer of a request.

    Attributes:
        unpersisted_record_bytes: Size of the ranges acked in memory and not durable.
        reserved_bytes: Worst case of the messages that are sent and not yet acked.
        unacked_messages: How many messages are sent and not yet acked.
        range_count: How many ranges of acked entries there are above the mark-delete position.
        reserved_ranges: How many more there are at worst when all sent messages are acked.
        consumer_unacked_messages: How many messages the consumer was sent and has not yet acked.
    """

    unpersisted_record_bytes: int
    reserved_bytes: int
    unacked_messages: int
    range_count: int = 0
    reserved_ranges: int = 0
    consumer_unacked_messages: int = 0


class Verdict(NamedTuple):
    """How many messages may be sent and, unless that is all of them, which rule binds.

    Attributes:
        granted: The length of the prefix that may be sent.
        rule: The rule that keeps the others back, the first in the order of `Rule` if several do; None if everything
            was granted.
        used: The usage that the rule counts, this grant included. 0 if no rule binds, as are the next two.
        limit: The most that `used` may be.
        released_at: The highest usage at which the rule, once closed, opens again.
        since_ms: When the rule closed; None while it is open.
    """

    granted: int
    rule: Rule | None = None
    used: int = 0
    limit: int = 0
    released_at: int = 0
    since_ms: int | None = None
