"""Admits messages and acks within the limits: the messages in flight, with room reserved for their acks."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from itertools import repeat
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

from ackstate.deleted_ranges import isolated_range_bytes, isolated_ranges_bytes
from ackstate.entry_bitmap import bitmaps_of
from ackstate.errors import AckStateError
from ackstate.limits import Rule, Usage
from ackstate.limits.broker import call_all
from ackstate.position_set import PositionSet
from ackstate.stores.base import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from pyroaring import BitMap

    from ackstate.cursor import ManagedCursor
    from ackstate.limits import DispatchGate, Verdict
    from ackstate.position import Position

    Waiter = Callable[[], object]

# How many settled messages are taken out of a bitmap at once at most, and how many faster one by one.
_SETTLED_MAX = 1_000
_FEW_MAX = 16
_PROMOTION_RETRY_MS = 1_000

_RULES = (Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES)
ACK_STATE_RULES = frozenset(_RULES)
"""The limits on the ack state: acks that fill holes reduce it."""


class AckRefusedError(AckStateError):
    """An ack would exceed a limit, and too little was reserved for it. Nothing was changed.

    Nothing was reserved if the message had been given back before: it will be sent again, and then its ack has room.
    The same happens if it was sent to join ranges at a full limit and these became durable meanwhile: its consumer may
    ack it later or give it back.
    """


class Sent(NamedTuple):
    """A message in flight."""

    consumer: str  # the consumer that has it
    key: bytes | None = None  # the key that assigns it to a consumer; None if any may have it
    delivery_count: int = 1  # how often it was sent, this time included
    message_count: int = 1  # how many messages of the entry are not acked
    record_bytes: int = 0  # the bytes reserved for its ack, of the limit on un-persisted ack records
    range_count: int = 0  # the ranges reserved for its ack: 1 or 0
    is_covered: bool = False  # whether the worst case of its ack is reserved


class Reservations(Protocol):
    """The messages in flight, as an admission needs them: `Deliveries` has them one by one, a replay in bitmaps."""

    @property
    def reserved_bytes(self) -> int: ...

    @property
    def reserved_ranges(self) -> int: ...

    @property
    def unacked_messages(self) -> int: ...

    def get(self, position: Position) -> Sent | None:
        """Return how a message was sent; None if it is not in flight."""
        ...

    def unacked_of(self, consumer: str) -> int:
        """Return how many messages a consumer has, those of a batch counted one by one."""
        ...

    def add(self, consumer: str, positions: Sequence[Position], sent: Sequence[Sent]) -> None:
        """Note messages that are sent to a consumer now; none of them is in flight yet."""
        ...


@final
class Deliveries:
    """The messages that were sent and neither acked nor given back."""

    def __init__(self, count_unacked: Callable[[int], object] | None = None) -> None:
        self._count_unacked = count_unacked  # reports to a broker's limit how many more messages are unacked
        self._sent: dict[Position, Sent] = {}
        # Invariant: the same positions as in _sent, and those in _settled, which are taken out many at once.
        self._in_order = PositionSet()
        self._settled: list[Position] = []
        # Invariant: the same as _sent, by consumer; no consumer has an empty set.
        self._of: dict[str, dict[Position, None]] = {}
        self._unacked_of: dict[str, int] = {}
        self.get: Callable[[Position], Sent | None] = self._sent.get
        """Returns how a message was sent; None if it is not in flight."""
        # Invariant: sums over _sent.
        self.reserved_bytes = self.reserved_ranges = self.unacked_messages = 0
        # Ever sent, those of a batch one by one, and each time that they were; and those that had been sent before.
        self.sent_messages = self.redelivered_messages = 0

    def __len__(self) -> int:
        return len(self._sent)

    def __contains__(self, position: object) -> bool:
        return position in self._sent

    def of(self, consumer: str) -> list[Position]:
        """Return the messages of a consumer, in the order they were sent."""
        return list(self._of.get(consumer, ()))

    def counts(self) -> dict[Position, tuple[int, int]]:
        """Return how often each message was sent, and that it waits for no time."""
        return {position: (sent.delivery_count, 0) for position, sent in self._sent.items()}

    def unacked_of(self, consumer: str) -> int:
        return self._unacked_of.get(consumer, 0)

    def in_order(self) -> PositionSet:
        """Return all positions: to be read at once, not changed."""
        if self._settled:
            self._forget_settled()
        return self._in_order

    def add(self, consumer: str, positions: Sequence[Position], sent: Sequence[Sent]) -> None:
        """Note messages that are sent to a consumer now. Complexity: bitmap operations; no call for each."""
        assert self._sent.keys().isdisjoint(positions)
        self._sent.update(zip(positions, sent, strict=True))
        in_order = self.in_order()
        held = self._of.setdefault(consumer, {})
        if len(sent) == 1:  # Redeliveries come one by one, and bitmaps would take a quarter of their time.
            _, _, delivery_count, unacked, record_bytes, range_count, _ = sent[0]
            in_order.add(positions[0])
            held[positions[0]] = None
            self.reserved_bytes += record_bytes
            self.reserved_ranges += range_count
            redelivered = unacked if delivery_count > 1 else 0
        else:
            for ledger_id, entries in bitmaps_of(positions).items():
                in_order.update_entries(ledger_id, entries)
            held.update(zip(positions, repeat(None), strict=False))
            _, _, _, message_counts, bytes_of_each, ranges_of_each, _ = zip(*sent, strict=True)
            unacked = sum(message_counts)
            self.reserved_bytes += sum(bytes_of_each)
            self.reserved_ranges += sum(ranges_of_each)
            redelivered = 0  # Several at once are sent for the first time.
        self.unacked_messages += unacked
        self.sent_messages += unacked
        self.redelivered_messages += redelivered
        self._unacked_of[consumer] = self._unacked_of.get(consumer, 0) + unacked
        if self._count_unacked is not None:
            self._count_unacked(unacked)

    def complete(self, position: Position) -> Sent | None:
        """Forget a message and its reservation; return how it was sent, None if it was not in flight."""
        sent = self._sent.pop(position, None)
        if sent is None:
            return None
        self._settled.append(position)
        if len(self._settled) > _SETTLED_MAX:
            self._forget_settled()
        consumer, _, _, message_count, record_bytes, range_count, _ = sent
        held = self._of[consumer]
        del held[position]
        # Written out, since each ack comes here.
        self.reserved_bytes -= record_bytes
        self.reserved_ranges -= range_count
        self.unacked_messages -= message_count
        self._unacked_of[consumer] -= message_count
        if not held:
            del self._of[consumer], self._unacked_of[consumer]
        if self._count_unacked is not None:
            self._count_unacked(-message_count)
        return sent

    def complete_all(self, positions: Sequence[Position], entries: Mapping[int, BitMap]) -> list[tuple[Position, Sent]]:
        """Forget messages, and return those that were in flight; `entries` has them by ledger."""
        # A third of the time of single calls of `complete`, which acks in lists need.
        take, of, unacked_of = self._sent.pop, self._of, self._unacked_of
        completed = [(position, sent) for position in positions if (sent := take(position, None)) is not None]
        for ledger_id, each in entries.items():
            self._in_order.discard_entries(ledger_id, each)
        reserved_bytes = reserved_ranges = unacked = 0
        for position, (consumer, _, _, message_count, record_bytes, range_count, _) in completed:
            held = of[consumer]
            del held[position]
            reserved_bytes += record_bytes
            reserved_ranges += range_count
            unacked += message_count
            unacked_of[consumer] -= message_count
            if not held:
                del of[consumer], unacked_of[consumer]
        self.reserved_bytes -= reserved_bytes
        self.reserved_ranges -= reserved_ranges
        self.unacked_messages -= unacked
        if self._count_unacked is not None and unacked:
            self._count_unacked(-unacked)
        return completed

    def uncount(self, sent: Sent) -> None:
        """Count a message as not sent, because it never reached its consumer."""
        self.sent_messages -= sent.message_count
        if sent.delivery_count > 1:
            self.redelivered_messages -= sent.message_count

    def reduce(self, position: Position, message_count: int) -> None:
        """Note how many messages of a batch are still unacked; never below 1."""
        sent = self._sent.get(position)
        if sent is None or not 1 <= message_count < sent.message_count:
            return
        self._sent[position] = sent._replace(message_count=message_count)
        acked = sent.message_count - message_count
        self.unacked_messages -= acked
        self._unacked_of[sent.consumer] -= acked
        if self._count_unacked is not None:
            self._count_unacked(-acked)

    def clear(self) -> None:
        """Forget everything."""
        if self._count_unacked is not None:
            self._count_unacked(-self.unacked_messages)
        self._sent.clear()
        self._in_order.clear()
        self._settled.clear()
        self._of.clear()
        self._unacked_of.clear()
        self.reserved_bytes = self.reserved_ranges = self.unacked_messages = 0

    def _forget_settled(self) -> None:
        if len(self._settled) <= _FEW_MAX:
            for position in self._settled:
                self._in_order.discard(position)
        else:
            for ledger_id, entries in bitmaps_of(self._settled).items():
                self._in_order.discard_entries(ledger_id, entries)
        self._settled.clear()

    def _check(self) -> None:
        """Assert every invariant. Complexity: O(in flight)."""
        assert list(self.in_order()) == sorted(self._sent)
        assert self.reserved_bytes == sum(sent.record_bytes for sent in self._sent.values())
        assert self.reserved_ranges == sum(sent.range_count for sent in self._sent.values())
        assert all(
            (sent.record_bytes, sent.range_count) == (isolated_range_bytes(*position), 1)
            for position, sent in self._sent.items()
            if sent.is_covered
        )
        assert self.unacked_messages == sum(self._unacked_of.values())
        assert self.unacked_messages == sum(sent.message_count for sent in self._sent.values())
        assert {position: consumer for consumer, held in self._of.items() for position in held} == {
            position: sent.consumer for position, sent in self._sent.items()
        }


def _first_deliveries(
    consumer: str,
    keys: Sequence[bytes | None] | bytes | None,
    message_counts: Sequence[int],
    costs: Sequence[int] | None,
) -> list[Sent]:
    """Return how messages are sent for the first time, with the worst cases of their acks reserved, if any is."""
    new = tuple.__new__  # a quarter of the time of the constructor
    is_covered = costs is not None
    range_count = int(is_covered)
    if costs is None:
        costs = [0] * len(message_counts)
    if keys is None or isinstance(keys, bytes):
        # Neighbours usually cost the same: they share an object.
        shared: dict[tuple[int, int], Sent] = {}
        found = []
        for each in zip(message_counts, costs, strict=False):
            sent = shared.get(each)
            if sent is None:
                sent = shared[each] = new(Sent, (consumer, keys, 1, *each, range_count, is_covered))
            found.append(sent)
        return found
    return [
        new(Sent, (consumer, key, 1, count, cost, range_count, is_covered))
        for key, count, cost in zip(keys, message_counts, costs, strict=False)
    ]


@final
class RoundWaiter:
    """At most one waiter, which is called once, and the kinds of events for which it is called."""

    # A round takes the waiter away, sends, and then arms it for every event that could change the outcome of the next
    # round. Events that happen during the round are not lost: then the waiter is called as soon as it is armed.
    # The callers of `room_made` and `messages_came` may hold any lock, also that of another subscription; a waiter runs
    # under these locks, and not under the one here.

    def __init__(self) -> None:
        # Whether a decrease of the usage of a limit is such an event, and whether a message that became ready is one.
        self.wants_room = self.wants_messages = False
        self.wake_ms: int | None = None  # when whoever waits will dispatch anyway: a message's time will have come
        self._lock = Lock()
        self._waiter: Waiter | None = None
        self._is_in_round = self._was_missed = False

    def begin_round(self) -> Waiter | None:
        """Take the waiter away, and remember from now on whether room was made; return the waiter."""
        with self._lock:
            waiter, self._waiter = self._waiter, None
            self._is_in_round = self.wants_room = True
            self._was_missed = self.wants_messages = False
        return waiter

    def arm(self, waiter: Waiter | None, *, messages: bool, room: bool) -> None:
        """End the round: call the waiter once at the next event; at once if there was one during the round."""
        with self._lock:
            self._is_in_round = False
            self._waiter = waiter
            self.wants_messages = messages and waiter is not None
            self.wants_room = room and waiter is not None
            was_missed = self._was_missed
        if was_missed:
            self.wake()

    def messages_came(self, *_: object) -> None:
        """Note that messages were published, or became ready, or have another owner than before."""
        if self.wants_messages:
            self.wake()

    def room_made(self) -> None:
        """Note that the usage of a limit decreased, or that the limit changed."""
        if self.wants_room:
            self.wake()

    def time_comes(self, next_ms: int | None) -> None:
        """Note when the time of a message comes next; None if none waits for a time."""
        if self.wants_messages and next_ms is not None and (self.wake_ms is None or next_ms < self.wake_ms):
            self.wake()

    def wake(self) -> None:
        """Call the waiter for an event that always counts: permits, consumers, a gate that opened, a seek, a close."""
        with self._lock:
            waiter, self._waiter = self._waiter, None
            self.wants_room, self.wants_messages = self._is_in_round, False
            self._was_missed = self._is_in_round
        if waiter is not None:
            call_all((waiter,))


_NOTHING_TO_CHECK = nullcontext()


@final
class Admission:
    """Compares the usage of a subscription with its limits, and admits messages and acks that exceed none."""

    def __init__(
        self,
        cursor: ManagedCursor,
        *,
        gate: DispatchGate | None,
        promotes_young: bool,
        sent: Reservations | None = None,
    ) -> None:
        self.cursor = cursor
        self.gate = gate
        self.deliveries = Deliveries(gate.count_unacked if gate is not None and gate.has_broker_limit else None)
        self.waiter = RoundWaiter()
        self.refused_by: Rule | None = None  # the rule that refused the last refused message
        self.refusals: set[Rule] = set()  # the rules that have refused a message in this round
        self.has_refused_again = False  # whether this round refused a message that a closed rule would admit
        self.store_error: AckStateError | None = None  # why the last persist failed
        self._view = cursor.view
        self._sent: Reservations = self.deliveries if sent is None else sent  # a replay has its own
        self._promotes_young = promotes_young and cursor.ruler.age_ms > 0
        self._promote_again_ms = 0

    # The usage of the limits: reading it changes nothing.

    def usage(self, consumer: str = "") -> Usage:
        """Return the present usage of the gate's limits; a named consumer's unacked messages count as its own."""
        sent, view = self._sent, self._view
        # How many ranges count, or entries where a limit of Pulsar's counts them.
        is_limited = self.gate is not None and self.gate.limits.max_unacked_ranges
        ranges = view.range_count_to_persist if is_limited else view.range_count
        return Usage(
            view.unpersisted_record_bytes,
            sent.reserved_bytes,
            sent.unacked_messages,
            ranges,
            sent.reserved_ranges,
            sent.unacked_of(consumer),
        )

    @property
    def _bytes_limit(self) -> int | None:
        """The value of `maxUnPersistAckRecordsBytes`, if it is on."""
        limit = 0 if self.gate is None else self.gate.limits.max_unpersisted_ack_record_bytes
        return limit if limit > 0 else None

    def record_bytes_max(self) -> int | None:
        """Return how much may be un-persisted beside the reservations; None if there is no limit."""
        limit = self._bytes_limit
        return None if limit is None else limit - self._sent.reserved_bytes

    def has_bytes_for(self, cost: int) -> bool:
        """Return whether the limit on bytes has room for the worst case of one more message."""
        limit = self._bytes_limit
        return limit is None or self._view.unpersisted_record_bytes + self._sent.reserved_bytes + cost <= limit

    def admits_new(self, consumer: str, *, now_ms: int) -> bool:
        """Return whether no limit on the ack state keeps new messages back: closed, or without room for one more."""
        # If one does, the gate learns of the waiting message. It reports since when it waits, and wakes its waiters
        # once it has room.
        gate, reader = self.gate, self.cursor.reader
        if gate is None:
            return True
        cost = isolated_range_bytes(*reader.next_unread)  # the worst case of the next message
        if self._promotes_young and reader.has_unread:
            self._promote_for(cost, now_ms=now_ms)
        ranges_max = gate.limits.max_unacked_ranges
        is_binding = (
            not self.has_bytes_for(cost)
            or 0 < ranges_max <= self._view.range_count_to_persist + self._sent.reserved_ranges
            or (gate.is_closed and not ACK_STATE_RULES.isdisjoint(self._closed_by(self.usage())))
        )
        if is_binding and reader.has_unread:
            gate.request((cost,), usage=self.usage(consumer), consumer=consumer, now_ms=now_ms)
        return not is_binding

    def _closed_by(self, usage: Usage) -> set[Rule | None]:
        """Return the rules for all consumers that are closed and stay so at a usage."""
        assert self.gate is not None
        return {verdict.rule for verdict in self.gate.why_blocked(usage)}

    def _added_by(self, position: Position) -> tuple[int, int]:
        """Return at most how many un-persisted bytes and ranges an ack now would add; below 0 it frees some."""
        effect = self._view.ack_effect(position)
        ranges = effect.range_count
        if self._view.counts_entries_to_persist:
            ranges = 0 if effect.mark_delete_advance else 1
        return self._view.unpersisted_bytes_added(position), ranges

    # Messages

    def send_new(
        self,
        consumer: str,
        positions: Sequence[Position],
        message_counts: Sequence[int],
        *,
        keys: Sequence[bytes | None] | bytes | None,
        now_ms: int,
    ) -> int:
        """Note messages as sent for the first time: as many of the first ones as the rules have room for now."""
        # Young acks are persisted early for the first message only, and only that one closes a rule. So another call
        # for the rest of them has the result that a call for each message would have. Returns how many were sent; 0 if
        # a rule holds new messages back.
        gate = self.gate
        if gate is None:
            self._sent.add(consumer, positions, _first_deliveries(consumer, keys, message_counts, None))
            return len(positions)
        costs = isolated_ranges_bytes(positions)
        self._promote_for(costs[0], now_ms=now_ms)
        weights = None if message_counts.count(1) == len(message_counts) else message_counts
        # With the cursor's lock, so that no persist uses the same room.
        with self.cursor.lock:
            verdict = gate.request(costs, usage=self.usage(consumer), consumer=consumer, weights=weights, now_ms=now_ms)
            granted = verdict.granted
            if not granted:
                self._refuse(verdict)
                return 0
            if granted < len(positions):
                positions, message_counts = positions[:granted], message_counts[:granted]
            self._sent.add(consumer, positions, _first_deliveries(consumer, keys, message_counts, costs))
            return granted

    def send_again(self, position: Position, sent: Sent, *, now_ms: int) -> bool:
        """Note a message as sent, also while new ones are held back, unless its ack could exceed a limit."""
        if self.gate is None:
            self._sent.add(sent.consumer, (position,), (sent,))
            return True
        cost = isolated_range_bytes(*position)
        if self._promotes_young and not self.has_bytes_for(cost):
            self._promote_for(cost, now_ms=now_ms)
        with self.cursor.lock:
            reserved = full = sent._replace(record_bytes=cost, range_count=1)
            verdict = self._request_again(reserved)
            if verdict.rule is Rule.UNACKED_RANGES:
                reserved = reserved._replace(range_count=max(0, self._added_by(position)[1]))
                verdict = self._request_again(reserved)
            if verdict.rule is Rule.UNPERSISTED_ACK_RECORD_BYTES:
                added, _ = self._added_by(position)
                reserved = reserved._replace(record_bytes=max(0, min(reserved.record_bytes, added)))
                verdict = self._request_again(reserved)
            if not verdict.granted:
                self.has_refused_again = True
                self._refuse(verdict)
                return False
            self._sent.add(sent.consumer, (position,), (reserved._replace(is_covered=reserved == full),))
            return True

    def _request_again(self, sent: Sent) -> Verdict:
        assert self.gate is not None
        return self.gate.request_redelivery(
            (sent.record_bytes,),
            usage=self.usage(sent.consumer),
            consumer=sent.consumer,
            weights=None if sent.message_count == 1 else (sent.message_count,),
            range_costs=(sent.range_count,),
        )

    def _refuse(self, verdict: Verdict) -> None:
        self.refused_by = verdict.rule
        if verdict.rule is not None:
            self.refusals.add(verdict.rule)

    # Acks

    def room_for(self, positions: Sequence[Position], *, now_ms: int) -> AbstractContextManager[None]:
        """Return a context in which acks of messages exceed no limit, and no persist takes the room that they need."""
        # Entering it raises `AckRefusedError` if too little is reserved for one of the acks, they would exceed a limit
        # together, and a persist made no room. O(messages); with such a one O(bytes of the bitmaps of all acks), too.
        if self.gate is None:
            return _NOTHING_TO_CHECK
        sent = list(map(self._sent.get, positions))
        if not [each for each in sent if each is None or not each.is_covered]:
            return _NOTHING_TO_CHECK
        return self._checked_room(dict(zip(positions, sent, strict=True)), now_ms=now_ms)

    @contextmanager
    def _checked_room(self, sent: Mapping[Position, Sent | None], *, now_ms: int) -> Iterator[None]:
        """Check, and keep the room meanwhile; `sent` is message -> how it was sent, None if it is not in flight."""
        self._check_room(sent, now_ms=now_ms)
        with self.cursor.lock:
            self._check_room(sent, now_ms=None)
            yield

    def _check_room(self, sent: Mapping[Position, Sent | None], *, now_ms: int | None) -> None:
        """Refuse acks that exceed a limit, after a persist of young acks if the time is given and it may make room."""
        refused_by = self._refused_by(sent)
        if refused_by is Rule.UNPERSISTED_ACK_RECORD_BYTES and now_ms is not None:
            with suppress(StoreError):  # The listener notes it.
                self.cursor.promote(0, now_ms=now_ms)
            refused_by = self._refused_by(sent)
        self.refused_by = refused_by
        if refused_by is not None:
            first, *others = sent
            raise AckRefusedError(
                f"too little is reserved for the ack of {first}{f' and {len(others)} others' * bool(others)}, and it "
                f"would pass a limit of the ack state: {refused_by}"
            ) from self.store_error

    def _refused_by(self, sent: Mapping[Position, Sent | None]) -> Rule | None:
        """Return the limit of the ack state that has no room for acks; None if all have."""
        view = self._view
        if len(sent) > 1:
            byte_count, range_count, entry_count = view.effect_of_all(bitmaps_of(sent))
            added = byte_count, entry_count if view.counts_entries_to_persist else range_count
        else:
            (position,) = sent
            if self.cursor.is_acked(position):
                return None
            added = self._added_by(position)
        own = [each for each in sent.values() if each is not None]
        reserved = sum(each.record_bytes for each in own), sum(each.range_count for each in own)
        assert self.gate is not None
        usage, limits = self.usage(), (self._bytes_limit, self.gate.limits.max_unacked_ranges or None)
        used = usage.unpersisted_record_bytes + usage.reserved_bytes, usage.range_count + usage.reserved_ranges
        for rule, limit, each, more, held in zip(_RULES, limits, used, added, reserved, strict=True):
            if limit is not None and more > 0 and each - held + more > limit:
                return rule
        return None

    # The gate

    def show_usage(self, *, now_ms: int) -> None:
        """Show the gate the present usage without a request: each rule without room for one more message closes."""
        if self.gate is not None:
            cost = isolated_range_bytes(*self.cursor.reader.next_unread)
            self.gate.observe(self.usage(), next_record_bytes=cost, now_ms=now_ms)

    def observe(self, *, now_ms: int) -> None:
        """Show the gate the usage, and wake the waiters that may go on: after a restart, or under other limits."""
        if self.gate is not None:
            self.show_usage(now_ms=now_ms)
            self.usage_decreased(now_ms=now_ms)

    def refresh(self, *, of: str | None = "") -> None:
        """Open the gate, and wake its waiters, if the usage fell enough."""
        if self.gate is not None and self.gate.is_closed:
            self.gate.refresh(self.usage(), None if of is None else self._sent.unacked_of, of or "")

    def usage_decreased(self, *, now_ms: int, of: str | None = "") -> None:
        """Open the gate as `refresh` does; also wake its waiters if a dispatch could open it now."""
        if self.gate is not None and self.gate.is_closed:
            self.refresh(of=of)
            if self.gate.is_closed and self._could_promote(now_ms=now_ms):
                self.gate.wake()
        self.waiter.room_made()

    def persisted(self, error: AckStateError | None, *, now_ms: int) -> None:
        """Note the outcome of a persist: an error or None."""
        if error is None:
            self._promote_again_ms = 0  # The store works.
        self.store_error = error
        if self.waiter.wants_room or (self.gate is not None and self.gate.is_closed):
            self.usage_decreased(now_ms=now_ms, of=None)

    # Young acks

    @property
    def promote_again_ms(self) -> int | None:
        """When to try again to persist young acks that keep the gate closed; None if they do not."""
        is_missing = self.gate is not None and self.gate.is_closed and self.store_error is not None
        return self._promote_again_ms or None if is_missing else None

    def _promote_for(self, cost: int, *, now_ms: int) -> None:
        """Persist young acks early, the oldest first, if they would close the gate, or keep it closed."""
        limit = self._bytes_limit if self._promotes_young else None
        if limit is None:
            return
        assert self.gate is not None
        reserved = self._sent.reserved_bytes
        if self.has_bytes_for(cost):
            if not self.gate.is_closed or not self._could_promote(now_ms=now_ms):
                return
        elif reserved + cost > limit or not self._may_promote(now_ms=now_ms):
            return  # To persist everything would not make room, or there is no young ack.
        mark = int(limit * self.gate.limits.unpersisted_release_ratio)
        try:
            self.cursor.promote(max(0, mark - reserved - cost), now_ms=now_ms)
        except StoreError:  # The listener notes it.
            self._promote_again_ms = now_ms + _PROMOTION_RETRY_MS

    def _could_promote(self, *, now_ms: int) -> bool:
        """Return whether the byte rule is closed and would open if all young acks were durable."""
        limit = self._bytes_limit if self._promotes_young else None
        if limit is None:
            return False
        assert self.gate is not None
        mark = int(limit * self.gate.limits.unpersisted_release_ratio)
        if self._sent.reserved_bytes > mark or not self._may_promote(now_ms=now_ms):
            return False
        return Rule.UNPERSISTED_ACK_RECORD_BYTES in self._closed_by(self.usage())

    def _may_promote(self, *, now_ms: int) -> bool:
        # A clock that went back by more than the pause ends it.
        is_paused = 0 < self._promote_again_ms - now_ms <= _PROMOTION_RETRY_MS
        return not is_paused and self._view.has_young(now_ms=now_ms)
