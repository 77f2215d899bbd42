"""The limit on unacked messages that the subscriptions of a broker share."""

from __future__ import annotations

import logging
from threading import Lock
from typing import TYPE_CHECKING, final

from ackstate.checks import LONG_MAX, check_within
from ackstate.limits.rules import (
    NO_LIMIT,
    Closing,
    Rule,
    Verdict,
    check_ratio,
    fitting_count,
    total_of,
)
from ackstate.pulsar_conf import BLOCKED_SHARE, BROKER_UNACKED, read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

_LOG = logging.getLogger(__name__)
_SHARE_DEFAULT = 0.16


@final
class BrokerLimit:
    """The unacked messages of all subscriptions of a broker, and the subscriptions that wait when there are too many.

    Pass it to the `DispatchGate` of each subscription. When there is no room for a subscription's next message, the
    broker is *blocked* until its total is below half the maximum. Meanwhile each subscription may have its share of the
    maximum. A subscription that requests more is closed until it is below half its share, or the broker is no longer
    blocked. The total never exceeds the maximum for a subscription above its share. A subscription with no unacked
    messages is always granted one entry, of any weight.

    Args:
        max_unacked_messages: Most unacked messages of all subscriptions; 0 is off.
        blocked_share: The share of that, 0 < share <= 1. Both can be read later; `change_limit` changes them.

    Attributes:
        is_blocked: Whether subscriptions are limited to their share; to be read only.

    Raises:
        ValueError: A number is out of range.
        TypeError: One is of another type; True and False are not numbers.

    Safe for concurrent use.

    Source: ``BrokerService.checkUnAckMessageDispatching`` and ``addUnAckedMessages`` of Apache Pulsar, which check
    after a batch was sent and so exceed the maximum.
    """

    def __init__(self, max_unacked_messages: int = 0, blocked_share: float = _SHARE_DEFAULT) -> None:
        self._lock = Lock()
        # Invariants: the sum over all parts of their counted and promised messages; the closed parts; the highest
        # total at which one of those opens, -1 if none is closed.
        self._total = 0
        self._closed: dict[BrokerPart, None] = {}
        self._opens_at = -1
        self.is_blocked = False
        self._set_limit(max_unacked_messages, blocked_share)

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> BrokerLimit:
        """Read ``maxUnackedMessagesPerBroker`` and ``maxUnackedMessagesPerSubscriptionOnBrokerBlocked``.

        Missing or blank keeps Pulsar's default; if one of them is 0 or below, the limit is off, as in Pulsar. Errors as
        for `GateLimits.from_pulsar_conf`.
        """
        values = read_settings(source, "BrokerLimit", "GateLimits")
        limit, share = values.get(BROKER_UNACKED, 0), values.get(BLOCKED_SHARE, _SHARE_DEFAULT)
        return cls(limit, share) if limit > 0 and share > 0 else cls()

    @property
    def unacked_messages(self) -> int:
        """Unacked messages of all subscriptions, including those granted and not yet sent."""
        return self._total

    def change_limit(self, max_unacked_messages: int, blocked_share: float | None = None) -> None:
        """Put another maximum, and another share if one is given, in force from the next call on.

        Messages above the maximum stay unacked.

        Raises:
            As the class; nothing is changed then.
        """
        with self._lock:
            self._set_limit(max_unacked_messages, self.blocked_share if blocked_share is None else blocked_share)
            # Each closed subscription requests again, and closes again by the new numbers.
            self.is_blocked = self.is_blocked and self._total > self._mark
            opened = list(self._closed)
            self._open(opened)
        wake_all(opened)

    def part(self, wake: Callable[[], object]) -> BrokerPart:
        """Return the part of one more subscription; `wake` is called when the limit admits its messages again."""
        return BrokerPart(self, wake)

    def _set_limit(self, max_unacked_messages: int, blocked_share: float) -> None:
        name = f"max_unacked_messages ({BROKER_UNACKED})"
        check_within(name, max_unacked_messages, least=0, most=LONG_MAX)
        check_ratio(f"blocked_share ({BLOCKED_SHARE})", blocked_share)
        self.max_unacked_messages, self.blocked_share = max_unacked_messages, blocked_share
        self._limit = max_unacked_messages or NO_LIMIT
        self._mark = max(0, self._limit // 2 - 1)
        self._share = int(max_unacked_messages * blocked_share) if max_unacked_messages else NO_LIMIT

    def _open(self, parts: Iterable[BrokerPart]) -> None:
        for part in parts:
            part.is_closed = False
            part.since_ms = None
            self._closed.pop(part, None)
        self._opens_at = max((closed.released_at for closed in self._closed), default=-1)

    def _lower(self, count: int) -> list[BrokerPart]:
        """Subtract from the total, and return the parts that this opens."""
        self._total -= count
        self.is_blocked = self.is_blocked and self._total > self._mark
        if self._total > self._opens_at:
            return []
        opened = [part for part in self._closed if self._total <= part.released_at]
        self._open(opened)
        return opened


def wake_all(parts: Iterable[BrokerPart]) -> None:
    """Wake subscriptions; not under the lock, since they have locks of their own."""
    call_all(part.wake for part in parts)


def call_all(waiters: Iterable[Callable[[], object]]) -> None:
    """Call all waiters; the exceptions of one are logged, and stop neither the others nor the caller."""
    for waiter in waiters:
        try:
            waiter()
        except Exception:
            _LOG.exception("a waiter failed that was called because messages may be sent: %r", waiter)


NO_PARTS: tuple[BrokerPart, ...] = ()


@final
class BrokerPart(Closing):
    """One subscription's unacked messages within the limit of its broker.

    Granted messages are promised until the subscription counts them as sent. The promise of those that it has not
    counted at its next request lapses: they were not sent.
    """

    __slots__ = ("_broker", "_counted", "_has_left", "_promised", "_share_released_at", "wake")

    def __init__(self, broker: BrokerLimit, wake: Callable[[], object]) -> None:
        super().__init__()
        self._broker = broker
        self.wake = wake
        self._counted = self._promised = 0
        self._has_left = False
        # While closed, it opens at `released_at` of the broker's total, and at this count of its own.
        self._share_released_at = NO_LIMIT

    @property
    def refuses(self) -> bool:
        """Whether it is closed and no promise can lapse."""
        return self.is_closed and not self._promised and not self._has_left

    def grant_one(self) -> bool:
        """Grant a single message in the simple case; if False, call `grant`."""
        broker = self._broker
        with broker._lock:
            # A part that is closed while the broker is not blocked waits for room for a large batch.
            if broker._total >= broker._limit or self._promised or broker.is_blocked or self.is_closed:
                return False
            broker._total += 1
            self._promised = 1
        return True

    def grant(self, weights: Sequence[int] | None, count: int, *, now_ms: int) -> tuple[int, Sequence[BrokerPart]]:
        """Grant the longest prefix that fits, close if none does; return it and the parts to wake without a lock."""
        with self._broker._lock:
            opened = self._lapse()
            granted = 0 if self.is_closed else self._grant_open(weights, count, now_ms=now_ms)
        return granted, opened

    def grant_redelivery(self, weights: Sequence[int] | None, count: int) -> tuple[int, Sequence[BrokerPart]]:
        """Grant the longest prefix that the limit, closed or not, has room for; return as `grant`."""
        broker = self._broker
        with broker._lock:
            opened = self._lapse()
            room = max(broker._limit - broker._total, broker._share - self._counted)
            granted = self._promise(weights, count, room=room)
        return granted, opened

    def observe(self, *, now_ms: int) -> None:
        """Close if there is no room for one more message; promise nothing."""
        broker = self._broker
        with broker._lock:
            if self.is_closed or (not broker.is_blocked and broker._total < broker._limit):
                return
            broker.is_blocked = True
            if 0 < self._counted + self._promised >= broker._share:
                self._close(1, now_ms)

    def count(self, delta: int) -> None:
        """Count messages sent or, below 0, acked or given back; no-op after `close`. `ValueError` changes nothing."""
        with self._broker._lock:
            if delta == self._promised:
                # Usually all granted messages are sent: the total has them already.
                self._promised = 0
                self._counted += delta
                return
            if self._has_left:
                return
            if self._counted + delta < 0:
                raise ValueError(f"unacked messages would become negative: {self._counted + delta}")
            promised = min(self._promised, max(delta, 0))
            self._promised -= promised
            self._counted += delta
            opened = self._lower(promised - delta)
        wake_all(opened)

    def close(self) -> None:
        """Subtract the messages of this part from the total, for good."""
        with self._broker._lock:
            gone = self._counted + self._promised
            self._counted = self._promised = 0
            opened = self._lower(gone)
            self._broker._open([self])
            # Another thread may still have it. Closed, it grants no message that no one would subtract again.
            self.is_closed = self._has_left = True
        wake_all(part for part in opened if part is not self)

    def verdict(self, *, granted: int = 0) -> Verdict:
        broker = self._broker
        released_at = self.released_at if self.is_closed else broker._mark
        rule = Rule.BROKER_UNACKED_MESSAGES
        return Verdict(granted, rule, broker._total, broker._limit, released_at, self.since_ms)

    def _lapse(self) -> Sequence[BrokerPart]:
        promised, self._promised = self._promised, 0
        return self._broker._lower(promised) if promised else NO_PARTS

    def _lower(self, count: int) -> list[BrokerPart]:
        opened = self._broker._lower(count)
        if self.is_closed and self._counted <= self._share_released_at:
            self._broker._open([self])
            opened.append(self)
        return opened

    def _grant_open(self, weights: Sequence[int] | None, count: int, *, now_ms: int) -> int:
        broker = self._broker
        room = broker._limit - broker._total
        if not broker.is_blocked and fitting_count(weights, count, room=room):
            return self._promise(weights, count, room=room)
        broker.is_blocked = True
        granted = self._promise(weights, count, room=broker._share - self._counted)
        if not granted:
            self._close(total_of(weights, 1), now_ms)
        return granted

    def _promise(self, weights: Sequence[int] | None, count: int, *, room: int) -> int:
        granted = fitting_count(weights, count, room=room)
        if not self._counted:
            granted = max(granted, 1)
        self._promised = total_of(weights, granted)
        self._broker._total += self._promised
        return granted

    def _close(self, needed: int, now_ms: int) -> None:
        broker = self._broker
        self.close_at(min(broker._mark, broker._limit - needed), now_ms=now_ms)
        self._share_released_at = max(0, min(broker._share // 2 - 1, broker._share - needed))
        broker._closed[self] = None
        broker._opens_at = max(broker._opens_at, self.released_at)
