"""Explains a subscription: its ack holes and their causes, the rules that keep messages back, and its numbers.

A running subscription and a stored cursor are explained alike, as far as a store has the causes without its broker.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from ackstate.ack_hole import holes
from ackstate.cursor.state import CursorAckState
from ackstate.cursor.view import AckView
from ackstate.errors import CorruptStateError
from ackstate.ledger_map import LedgerMap
from ackstate.limits import Rule
from ackstate.position import Position
from ackstate.stores.base import LedgerNotFoundError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ackstate.ack_hole import AckHole
    from ackstate.cursor import CursorStats
    from ackstate.cursor.formats import CursorState
    from ackstate.dispatch.admission import Admission
    from ackstate.dispatch.options import ReadableLog
    from ackstate.errors import AckStateError
    from ackstate.limits import DispatchGate, Verdict
    from ackstate.message import Message

SAMPLE_COUNT_MAX = 64
"""At most this many messages of a hole are examined; in a larger hole they are evenly spread."""


class HoleReason(StrEnum):
    """Why the entries of a hole are not acked."""

    IN_FLIGHT = "in flight"  # a consumer has them

    DELAYED = "delayed"  # they are not due yet

    NACKED = "nacked"  # a consumer gave them back

    NEVER_DELIVERED = "never delivered"
    OWNER_GONE = "owner gone"  # the consumer that had them closed

    DATA_LOST = "data lost"  # the message log cannot read them: no one will ever ack them

    UNKNOWN = "not acked"  # only the running broker has the reason


@dataclass(frozen=True, slots=True)
class HoleReport:
    """One ack hole.

    Attributes:
        first: Its first entry (included).
        last: Its last entry (included).
        entry_count: How many entries it has.
        age_ms: How long ago its first message was published; None if that is not known.
        why: The cause, as far as it can be seen; if it differs among the messages, `detail` has the numbers.
        detail: A text for people: the consumers, the times, and the numbers of messages.
        consumers: The consumers that have messages of it, each once, sorted.
        deliver_at_ms: When the last of its messages that are delayed is due; None if none is known to be.
        delivery_count: How often the most delivered of its messages was sent; None if that is not known.
        next_delivery_ms: When the first of its messages that wait after they were given back is sent again; None if
            none does. `detail` says what happens after that.
        cost_bytes: How many bytes of the ack record exist because of it.
        freed_bytes: How many acking the whole of it frees; below 0 it adds some.
        freed_ranges: The same in ranges.
        mark_delete_advance: How many entries the mark-delete position would move over, acked ones included.
    """

    first: Position
    last: Position
    entry_count: int
    age_ms: int | None
    why: HoleReason
    detail: str
    consumers: tuple[str, ...]
    deliver_at_ms: int | None
    delivery_count: int | None
    next_delivery_ms: int | None
    cost_bytes: int
    freed_bytes: int
    freed_ranges: int
    mark_delete_advance: int


class Look(NamedTuple):
    """The state of one unacked message."""

    reason: HoleReason
    consumer: str = ""
    until_ms: int | None = None
    delivery_count: int = 0
    is_counted: bool = True  # whether that is durable


def costliest(found: Iterable[AckHole], top: int) -> list[AckHole]:
    """Return the hole that holds back the mark-delete position, then those that cost most, ties by position."""
    # All of `found`, which is in order of position, is consumed, so that the holes can be counted, if `top` is above 0.
    if top < 1:
        return []
    lowest: list[AckHole] = []

    def others() -> Iterator[AckHole]:
        for hole in found:
            if not lowest and hole.mark_delete_advance:
                lowest.append(hole)
            else:
                yield hole

    most = heapq.nlargest(top, others(), key=lambda hole: hole.cost_bytes)
    return [*lowest, *most][:top]


def live_report(  # noqa: PLR0913 - named, not packed
    hole: AckHole,
    log: ReadableLog,
    look: Callable[[Position], Look],
    *,
    deliveries_max: int | None,
    store_error: AckStateError | None,
    now_ms: int,
) -> HoleReport:
    """Explain a hole of a running subscription; `look` returns where an unacked message is."""
    # `deliveries_max`: after so many a message is a dead letter. `store_error`: why the last persist failed.
    looks = list(map(look, _sample(hole)))
    reasons = Counter(each.reason for each in looks)
    why = max(reasons, key=lambda reason: reasons[reason])
    try:
        (first,) = log.read([hole.first_position])
    except (StoreError, CorruptStateError):
        first = None
    alike = [each for each in looks if each.reason is why]
    names = ", ".join(sorted({repr(each.consumer) for each in alike if each.consumer}))
    until = max((each.until_ms for each in alike if each.until_ms is not None), default=None)
    detail = {
        HoleReason.IN_FLIGHT: f"in flight with {names}",
        HoleReason.NACKED: f"given back by {names or 'a consumer'}"
        + ("" if until is None else f", not to be sent before {until} ms"),
        HoleReason.OWNER_GONE: f"its consumer {names} is gone",
        HoleReason.DELAYED: f"delayed until {until} ms",
    }.get(why, why.value)
    if len(alike) < len(looks):
        of = f"{len(looks)}" if len(looks) == hole.entry_count else f"{len(looks)} looked at, of {hole.entry_count},"
        detail = f"{len(alike)} of {of} messages: {detail}"
    most_delivered = max(each.delivery_count for each in looks)
    if most_delivered > 1 or (most_delivered and deliveries_max is not None):
        detail += f"; delivery {most_delivered}"
        detail += "" if deliveries_max is None else f" of {deliveries_max}, then a dead letter"
    if deliveries_max is not None and store_error is not None and not all(each.is_counted for each in looks):
        detail += f"; not sent again before its deliveries are counted durably, which failed: {store_error}"
    return _report(hole, looks, why, detail, first=first, delivery_count=most_delivered, now_ms=now_ms)


def _report(  # noqa: PLR0913 - the parts of the report
    hole: AckHole,
    looks: Sequence[Look],
    why: HoleReason,
    detail: str,
    *,
    first: Message | None,
    delivery_count: int | None = None,
    now_ms: int,
) -> HoleReport:
    retries = [each.until_ms for each in looks if each.until_ms is not None and each.reason is HoleReason.NACKED]
    due_ms = [each.until_ms for each in looks if each.until_ms is not None and each.reason is HoleReason.DELAYED]
    consumers = {each.consumer for each in looks if each.consumer and each.reason is HoleReason.IN_FLIGHT}
    return HoleReport(
        first=hole.first_position,
        last=hole.last_position,
        entry_count=hole.entry_count,
        age_ms=None if first is None else max(0, now_ms - first.publish_time_ms),
        why=why,
        detail=detail,
        consumers=tuple(sorted(consumers)),
        deliver_at_ms=max(due_ms, default=None),
        delivery_count=delivery_count,
        next_delivery_ms=min(retries, default=None),
        cost_bytes=hole.cost_bytes,
        freed_bytes=hole.freed_bytes,
        freed_ranges=hole.freed_ranges,
        mark_delete_advance=hole.mark_delete_advance,
    )


def _sample(hole: AckHole) -> list[Position]:
    """Return the positions to examine, in order, the first and the last of the hole among them."""
    sampled = min(hole.entry_count, SAMPLE_COUNT_MAX)
    numbers = (number * (hole.entry_count - 1) // max(1, sampled - 1) for number in range(sampled))
    return [Position(hole.ledger_id, hole.first + number) for number in numbers]


# Stored cursors


@dataclass(frozen=True, slots=True)
class StoredHoles:
    """A cursor as an open would find it, and the holes in it."""

    mark_delete: Position  # every entry up to it, included, is acked
    # Entries of the log that are not acked; None if the store does not hold the topic's message log.
    backlog: int | None
    range_count: int  # individually deleted ranges
    record_bytes: int  # their size as Pulsar would write them
    hole_count: int  # how many holes there are
    # First the one that holds back the mark-delete position, then the costliest; among equals, the lower one first.
    holes: tuple[HoleReport, ...]


def explain_stored(content: CursorState, log: ReadableLog | None, *, top: int, now_ms: int) -> StoredHoles:
    """Explain the `top` (1 or more) costliest holes of a stored cursor, as an open would read it; writes nothing."""
    # a ledger that has acks but is not in the log counts as one that ends with its last acked entry; its unacked
    # entries are lost. Without a log all ledgers count like that, and nothing is known to be lost.
    # `InvalidPositionError`: the state reaches beyond the end of the log.
    if top < 1:
        raise ValueError(f"top must be at least 1, got {top}")
    known = {} if log is None else log.ledgers.counts()
    # The least entry count of each ledger with acks, or of the mark-delete position's if there are none.
    ledger_id, entry_id = content.mark_delete
    least = {each_id: bitmap.max() + 1 for each_id, bitmap in content.deleted.bitmaps()} or {ledger_id: entry_id + 1}
    assumed = {each_id: entries for each_id, entries in least.items() if each_id not in known}
    with_assumed = LedgerMap.from_counts(dict(sorted((known | assumed).items())))
    ledgers = with_assumed if log is None else log.ledgers
    state = _state(content, ledgers)
    found = holes(state.deleted, ledgers, state.mark_delete)
    if log is not None and assumed:
        # a broker cannot ack in a ledger that the log does not have: its mark-delete position moves past it once
        # everything below is acked.
        lost = _state(content, with_assumed)
        all_holes = holes(lost.deleted, with_assumed, lost.mark_delete)
        found = heapq.merge((hole for hole in all_holes if not ledgers.has_ledger(hole.ledger_id)), found)
    numbers = count()
    shown = costliest((hole for hole, _ in zip(found, numbers, strict=False)), top)
    return StoredHoles(
        state.mark_delete,
        None if log is None else AckView(state).backlog,
        state.deleted.range_count,
        state.deleted.record_bytes,
        next(numbers),
        tuple(_stored_report(hole, log, now_ms=now_ms) for hole in shown),
    )


def _state(content: CursorState, ledgers: LedgerMap) -> CursorAckState:
    state = CursorAckState(ledgers)
    state.restore(content._replace(deleted=content.deleted.copy(), batch=content.batch.copy()))
    return state


_UNKNOWN = "the store does not record its consumer"
_UNKNOWN_REST = "the store does not record the consumers of the others"


def _stored_report(hole: AckHole, log: ReadableLog | None, *, now_ms: int) -> HoleReport:
    is_readable = log is not None and log.can_read(hole.ledger_id)
    sampled = [_read(log, position) for position in _sample(hole)] if log and is_readable else []
    lost_count = sampled.count(None)
    due = [
        Look(HoleReason.DELAYED, "", message.deliver_at_ms)
        for message in sampled
        if message is not None and message.deliver_at_ms > now_ms
    ]
    is_sampled = hole.entry_count > SAMPLE_COUNT_MAX
    of = f"{SAMPLE_COUNT_MAX} messages sampled" if is_sampled else f"{hole.entry_count} messages"
    why, detail = HoleReason.UNKNOWN, _UNKNOWN
    if log is None:
        detail = "the store has neither the topic's message log nor the consumers"
    elif not log.ledgers.has_ledger(hole.ledger_id):
        why, detail = HoleReason.DATA_LOST, f"the message log has no ledger {hole.ledger_id}"
    elif lost_count:
        why, detail = HoleReason.DATA_LOST, f"{lost_count} of {of} cannot be read"
    elif due:
        wait_s = (max(each.until_ms or 0 for each in due) - now_ms) / 1_000
        why, detail = HoleReason.DELAYED, f"the last message is due in {wait_s:,.1f} s"
        if len(due) < hole.entry_count:
            detail = f"{len(due)} of {of} are delayed, the last is due in {wait_s:,.1f} s; {_UNKNOWN_REST}"
    return _report(hole, due, why, detail, first=sampled[0] if sampled else None, now_ms=now_ms)


def _read(log: ReadableLog, position: Position) -> Message | None:
    """Return a message, or None if it can be read no more."""
    try:
        return next(log.read([position]), None)
    except (LedgerNotFoundError, CorruptStateError):
        return None


# Rules that keep messages back


class BlockReason(NamedTuple):
    """One rule that is closed.

    Attributes:
        rule: The rule.
        used: Its present usage, reservations included.
        limit: The most that `used` may be.
        released_at: The usage at which the rule opens.
        since_ms: When it closed; after a restart above the limit, when the cursor was opened.
        consumer: The consumer whose own limit it is; empty if the rule holds for all.
        store_error: Why the last persist failed, if it did: then the failing store is the cause.
        releases: For a limit on the ack state, the holes that reduce the usage when they are filled, by most first.
        frees: By how much each of them does: in bytes that are not durable, or in ranges.
        holders: The consumers with their numbers of unacked messages, most first.
        delayed_ranges: For a limit on ranges, how many are freed when holes that consist of delayed messages alone are
            filled: those are sent when they are due, also while the rule is closed.
    """

    rule: Rule
    used: int
    limit: int
    released_at: int
    since_ms: int | None
    consumer: str
    store_error: AckStateError | None
    releases: tuple[HoleReport, ...]
    frees: tuple[int, ...]
    holders: tuple[tuple[str, int], ...]
    delayed_ranges: int = 0

    @property
    def detail(self) -> str:
        """The same as a sentence or two."""
        whose = f" of consumer {self.consumer!r}" if self.consumer else ""
        parts = [f"{self.rule}{whose} is {self.limit}, and {self.used} are used; at {self.released_at} it opens."]
        if self.store_error is not None:
            parts.append(f"The store is the cause: {self.store_error}")
        unit = "ranges" if self.rule is Rule.UNACKED_RANGES else "bytes"
        parts += [
            f"Acking {hole.first} to {hole.last} ({hole.detail}) frees {freed} {unit}."
            for hole, freed in zip(self.releases, self.frees, strict=True)
        ]
        if self.delayed_ranges:
            parts.append(f"Delayed messages part {self.delayed_ranges} of the ranges until they are due.")
        if self.holders and not self.releases:
            parts.append("Unacked: " + ", ".join(f"{name!r} has {count}" for name, count in self.holders) + ".")
        return " ".join(parts)


def explain_blocks(
    admission: Admission,
    report: Callable[[AckHole], HoleReport],
    is_delayed: Callable[[AckHole], bool],
    *,
    consumers: Sequence[str],
    top: int,
) -> tuple[BlockReason, ...]:
    """Explain each rule that is closed, those of single consumers last: the cause, and the acks that would open it."""
    gate, view, unacked_of = admission.gate, admission.cursor.view, admission.deliveries.unacked_of
    if gate is None:
        return ()
    counted = ((name, unacked_of(name)) for name in consumers)
    holders = tuple(sorted((each for each in counted if each[1]), key=lambda each: -each[1])[:top])

    def reason(verdict: Verdict, consumer: str) -> BlockReason:
        rule, store_error = verdict.rule, admission.store_error
        assert rule is not None
        found: list[tuple[int, AckHole]] = []
        if rule is Rule.UNPERSISTED_ACK_RECORD_BYTES:
            found = [(view.unpersisted_bytes_freed(hole), hole) for hole in view.holes()]
        elif rule is Rule.UNACKED_RANGES:
            found = [(hole.freed_ranges, hole) for hole in view.holes()]
        else:
            store_error = None
        most = heapq.nlargest(top, (each for each in found if each[0] > 0), key=itemgetter(0))
        delayed_ranges = 0
        if rule is Rule.UNACKED_RANGES:
            delayed_ranges = sum(freed for freed, hole in found if freed > 0 and is_delayed(hole))
        return BlockReason(
            rule, verdict.used, verdict.limit, verdict.released_at, verdict.since_ms, consumer, store_error,
            tuple(report(hole) for _, hole in most), tuple(freed for freed, _ in most), holders,
            delayed_ranges,
        )  # fmt: skip

    return tuple(reason(verdict, consumer) for consumer, verdict in _closed(admission, gate))


def _closed(admission: Admission, gate: DispatchGate) -> list[tuple[str, Verdict]]:
    """Return each closed rule, with the consumer that it holds for; of all first, then the longest closed."""
    closed = [("", verdict) for verdict in gate.why_blocked(admission.usage())]
    for consumer in gate.closed_consumers:
        verdicts = gate.why_blocked(admission.usage(consumer), consumer)
        closed += [(consumer, each) for each in verdicts if each.rule is Rule.CONSUMER_UNACKED_MESSAGES]
    return closed


# Numbers


_ON_UNACKED_MESSAGES = frozenset({Rule.UNACKED_MESSAGES, Rule.BROKER_UNACKED_MESSAGES})


class RuleStats(NamedTuple):
    """One rule of a subscription's gate.

    Attributes:
        rule: The rule.
        is_closed: Whether it keeps new messages back, from all consumers or from at least one.
        since_ms: When it closed; None while it is open. After a restart above a limit, when the cursor was opened. If
            the rule closes for each consumer by itself, the earliest of these times.
        closed_count: How often it has closed since the gate was created, for any consumer.
    """

    rule: Rule
    is_closed: bool
    since_ms: int | None
    closed_count: int


class ConsumerUse(NamedTuple):
    """One consumer of a subscription.

    Attributes:
        name: Its name.
        unacked_messages: The messages that it has in flight, those of a batch one by one.
        is_blocked: Whether its own limit keeps new messages back.
    """

    name: str
    unacked_messages: int
    is_blocked: bool


@dataclass(frozen=True, slots=True)
class DispatchStats:
    """A subscription at one instant. Messages of a batch count one by one, unless entries are mentioned.

    Attributes:
        cursor: The numbers of its cursor.
        unacked_messages: Messages in flight.
        replay_entries: Entries that wait to be sent although the reader has passed them: given back, due, or, with
            Key_Shared, read for a consumer that cannot take them yet.
        delayed_entries: Entries that the reader has passed and that wait until they are due.
        consumer_count: Open consumers.
        sent_messages: Messages sent since the subscription was opened, each time that they were.
        redelivered_messages: Those of them that had been sent before.
        dead_lettered_messages: Messages handed over as dead letters since the subscription was opened.
        rules: The rules of its gate; empty if it has none.
        oldest_unacked: The lowest entry that is not acked; None if all are.
    """

    cursor: CursorStats
    unacked_messages: int
    replay_entries: int
    delayed_entries: int
    consumer_count: int
    sent_messages: int
    redelivered_messages: int
    dead_lettered_messages: int
    rules: tuple[RuleStats, ...]
    oldest_unacked: Position | None

    @property
    def backlog_not_delayed(self) -> int:
        """Entries of the log that are neither acked nor known to be delayed."""
        return max(0, self.cursor.backlog - self.delayed_entries)

    @property
    def is_blocked_on_unacked_messages(self) -> bool:
        """Whether the limit on unacked messages of the subscription or of the broker keeps new messages back."""
        return any(each.is_closed and each.rule in _ON_UNACKED_MESSAGES for each in self.rules)


def rule_stats(admission: Admission) -> tuple[RuleStats, ...]:
    """Return the rules of a gate, in their order; empty without one."""
    gate = admission.gate
    if gate is None:
        return ()
    closed = _closed(admission, gate) if gate.is_closed else []
    since_ms = {verdict.rule: verdict.since_ms for _, verdict in reversed(closed)}
    return tuple(
        RuleStats(rule, rule in since_ms, since_ms.get(rule), gate.blocked_count(rule)) for rule in Rule
    )  # fmt: skip
