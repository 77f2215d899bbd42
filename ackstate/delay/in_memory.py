"""Pulsar's default tracker of delayed messages, one for each subscription.

A message that S subscriptions wait for is held S times; `TopicDelayIndex` holds it once. This tracker answers exactly
as Pulsar's, to the bit, and is the baseline of the benchmarks.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import chain, islice
from typing import TYPE_CHECKING, final

from pyroaring import BitMap

from ackstate.checks import integer
from ackstate.delay.view import TIME_MS_MAX, DelayedDeliveryTracker, check_deliver_at, check_time
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, check_position, positions_of

if TYPE_CHECKING:
    from ackstate.delay.config import DelayConfig
    from ackstate.position import Position

# How far a bucket's time is shifted to make room for a ledger id, which takes 63 bits.
_LEDGER_BITS = 63
_LEDGER_MASK = 2**_LEDGER_BITS - 1


@final
class InMemoryDelayTracker(DelayedDeliveryTracker):
    """The delayed messages of one subscription, in buckets as wide as the tick, rounded down to a power of two.

    >>> from ackstate import Position
    >>> tracker = InMemoryDelayTracker(tick_time_ms=1_000)
    >>> tracker.precision_ms, tracker.add_message(Position(3, 7), deliver_at_ms=10_000, now_ms=0)
    (512, True)
    >>> tracker.next_delivery_ms, tracker.scheduled_messages(10, now_ms=9_238)
    (9239, [])
    >>> tracker.scheduled_messages(10, now_ms=9_239)
    [Position(ledger_id=3, entry_id=7)]

    A message whose time has come, or is at most a tick away unless delivery is strict, is not held. Strict: the others
    are handed out up to `precision_ms` - 1 after their time and, but for the last times there are, never before. Else
    they are handed out up to a tick before it, or after it by less than a precision if the tick was reset below that.

    As in Pulsar, the same position offered with a time of another bucket is held twice, counted twice, and handed out
    twice unless both are due in one call. The time is that of each call, also if it went back.

    Unlike in Pulsar, no message waits for ever. Pulsar's timer is set to the time of a bucket, and not set again if the
    bucket is not due then, which can happen with a tick reset below the precision. `next_delivery_ms` is the time at
    which a bucket is really due.

    Not safe for concurrent use. Use after `close` raises `ValueError`.

    Args:
        tick_time_ms: How exactly messages are delivered, at least 0, which is as 1. It fixes `precision_ms`.
        is_deliver_at_time_strict: Whether a message must not be delivered before its time.
        fixed_delay_detection_lookahead: How many messages of one fixed delay must wait for deliveries to pause; 0 for
            never to pause.

    Raises:
        ValueError: A number is negative or above 2**63 - 1.
        TypeError: A number is no integer.

    Source: ``InMemoryDelayedDeliveryTracker`` of Apache Pulsar 5.0.1.
    """

    def __init__(
        self,
        *,
        tick_time_ms: int = 1_000,
        is_deliver_at_time_strict: bool = False,
        fixed_delay_detection_lookahead: int = 50_000,
    ) -> None:
        tick_time_ms = check_time(tick_time_ms, name="tick_time_ms")
        self._precision_ms = 1 << max(tick_time_ms.bit_length() - 1, 0)
        if not isinstance(is_deliver_at_time_strict, bool):
            raise TypeError(f"is_deliver_at_time_strict must be True or False, got {is_deliver_at_time_strict!r}")
        self._is_strict = is_deliver_at_time_strict
        # A bucket's time is that of its messages rounded down or, if delivery is strict, up; but not past the end of
        # time.
        self._bucket_mask = -self._precision_ms
        self._round_up_ms = self._precision_ms - 1 if is_deliver_at_time_strict else 0
        self._lookahead = check_time(fixed_delay_detection_lookahead, name="fixed_delay_detection_lookahead")
        self._set_tick(tick_time_ms)
        self._is_closed = False
        # Invariant: the waiting messages, none of the bitmaps empty. A key is the time of a bucket and below it, in
        # _LEDGER_BITS bits, a ledger. _keys is a heap of the keys: the earliest bucket first, of its ledgers the
        # lowest. _count is the sum of the bitmaps' lengths.
        self._bitmaps: dict[int, BitMap] = {}
        self._keys: list[int] = []
        self._count = 0
        # The latest time of a message held, and whether all came in the order of their times, within a tick.
        self._highest_ms = 0
        self._has_fixed_delay = True

    @classmethod
    def from_config(cls, config: DelayConfig) -> InMemoryDelayTracker:
        """Return a tracker with the settings that concern one; `DelayConfig.tracker` is ignored."""
        return cls(
            tick_time_ms=config.tick_time_ms,
            is_deliver_at_time_strict=config.is_deliver_at_time_strict,
            fixed_delay_detection_lookahead=config.fixed_delay_detection_lookahead,
        )

    @property
    def precision_ms(self) -> int:
        """Due times are rounded to a multiple of this: the greatest power of two up to the tick first given."""
        return self._precision_ms

    def add_message(self, position: Position, *, deliver_at_ms: int, now_ms: int) -> bool:
        """Return whether a message that the reader has met must wait; see `DelayedDeliveryTracker.add_message`.

        Complexity: O(log buckets).
        """
        # Called for each message that is read, so it calls a function only to refuse.
        if self._is_closed:
            self._check_open()
        ledger_id, entry_id = position
        if type(ledger_id) is not int or type(entry_id) is not int:
            ledger_id, entry_id = check_position(position, entry_id_min=0)
        if not 0 <= ledger_id <= LEDGER_ID_MAX or not 0 <= entry_id <= ENTRY_ID_MAX:
            check_position(position, entry_id_min=0)
        if type(now_ms) is not int or not 0 <= now_ms <= TIME_MS_MAX:
            now_ms = check_time(now_ms, name="now_ms")
        if type(deliver_at_ms) is not int or deliver_at_ms > TIME_MS_MAX:
            deliver_at_ms = check_deliver_at(deliver_at_ms)
        if deliver_at_ms < 0 or deliver_at_ms <= now_ms + self._early_ms:
            self._has_fixed_delay = False
            return False
        bucket_ms = deliver_at_ms + self._round_up_ms & self._bucket_mask
        if bucket_ms > TIME_MS_MAX:
            bucket_ms = deliver_at_ms & self._bucket_mask
        key = bucket_ms << _LEDGER_BITS | ledger_id
        bitmap = self._bitmaps.get(key)
        if bitmap is None:
            self._bitmaps[key] = BitMap((entry_id,))
            heappush(self._keys, key)
            self._count += 1
        elif entry_id not in bitmap:
            bitmap.add(entry_id)
            self._count += 1
        if deliver_at_ms < self._highest_ms - self._tick_time_ms:
            self._has_fixed_delay = False
        elif deliver_at_ms > self._highest_ms:
            self._highest_ms = deliver_at_ms
        return True

    def has_message_available(self, *, now_ms: int) -> bool:
        """Return whether `scheduled_messages` would hand out anything now."""
        self._check_open()
        now_ms = check_time(now_ms, name="now_ms")
        return bool(self._keys) and self._keys[0] < self._due_keys_end(now_ms)

    def scheduled_messages(self, max_messages: int, *, now_ms: int) -> list[Position]:
        """Hand out, and forget, messages of the buckets that are due, at most `max_messages`, in position order.

        If there are more, the messages of the earliest bucket come first, and in a bucket the lowest positions. If
        `max_messages` is 0 or below, none is handed out.

        Complexity: O(buckets * log buckets) of those handed out, and O(1) a message.
        """
        self._check_open()
        now_ms = check_time(now_ms, name="now_ms")
        due: dict[int, BitMap] = {}
        wanted, due_keys_end = integer("max_messages", max_messages), self._due_keys_end(now_ms)
        while wanted > 0 and self._keys and self._keys[0] < due_keys_end:
            ledger_id = self._keys[0] & _LEDGER_MASK
            entries = self._take_first(wanted)
            wanted -= len(entries)
            self._count -= len(entries)
            if ledger_id in due:
                due[ledger_id] |= entries
            else:
                due[ledger_id] = entries
        if not self._keys:
            self._forget_all()
        return list(chain.from_iterable(positions_of(ledger_id, due[ledger_id]) for ledger_id in sorted(due)))

    @property
    def delayed_message_count(self) -> int:
        """How many messages wait; a position that is in two buckets is counted twice."""
        self._check_open()
        return self._count

    def should_pause_all_deliveries(self, *, now_ms: int) -> bool:
        """Return whether reading on is useless: as many messages wait as the lookahead, of one delay, and none is due.

        The delay counts as fixed until a message was not held, or was due more than a tick before one met earlier, and
        again once a poll found or left nothing waiting.
        """
        is_in_vain = 0 < self._lookahead <= self.delayed_message_count and self._has_fixed_delay
        return not self.has_message_available(now_ms=now_ms) and is_in_vain

    @property
    def next_delivery_ms(self) -> int | None:
        """When the first bucket is, or was, due: the first time at which `scheduled_messages` hands out something.

        Pulsar's timer waits until the bucket's own time. That is up to `precision_ms` - 1 later or, with a tick reset
        below the precision, before the bucket is due.
        """
        self._check_open()
        return max((self._keys[0] >> _LEDGER_BITS) - self._lead_ms, 0) if self._keys else None

    def reset_tick_time(self, tick_time_ms: int) -> None:
        """Deliver by another tick from now on, also the messages that wait; the rounding of times stays the same.

        Raises:
            ValueError: The tick is negative or above 2**63 - 1.
            TypeError: The tick is no integer.
        """
        self._check_open()
        self._set_tick(check_time(tick_time_ms, name="tick_time_ms"))

    def clear(self) -> None:
        """Forget every message and whether they had a fixed delay."""
        self._check_open()
        self._forget_all()

    def close(self) -> None:
        """Release everything; no-op if closed."""
        self._forget_all()
        self._is_closed = True

    def _set_tick(self, tick_time_ms: int) -> None:
        self._tick_time_ms = tick_time_ms
        # How long before its time a message may be delivered.
        self._early_ms = 0 if self._is_strict else tick_time_ms
        # How long before its own time a bucket is due. The last of the times that were rounded down must not be
        # delivered early, so this may be negative.
        self._lead_ms = 0 if self._is_strict else tick_time_ms - self._precision_ms + 1

    def _forget_all(self) -> None:
        # New objects, since an emptied dict or list does not release all its memory.
        self._bitmaps, self._keys, self._count = {}, [], 0
        self._highest_ms, self._has_fixed_delay = 0, True

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError("the tracker is closed")

    def _due_keys_end(self, now_ms: int) -> int:
        """The lowest key there could be that is not due."""
        return (now_ms + self._lead_ms + 1) << _LEDGER_BITS

    def _take_first(self, count_max: int) -> BitMap:
        """Take the lowest entries of the first key, at most `count_max`."""
        bitmap = self._bitmaps[self._keys[0]]
        if len(bitmap) <= count_max:
            return self._bitmaps.pop(heappop(self._keys))
        taken = BitMap(islice(bitmap, count_max))
        bitmap.remove_range(0, taken.max() + 1)
        return taken

    def _check(self) -> None:
        assert sorted(self._keys) == sorted(self._bitmaps)
        assert not self._keys or self._keys[0] == min(self._bitmaps)
        assert all(self._bitmaps.values())
        assert self._count == sum(map(len, self._bitmaps.values()))
        assert all((key >> _LEDGER_BITS) % self._precision_ms == 0 for key in self._keys)
