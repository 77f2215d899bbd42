"""Deletes the ledgers of a message log that no subscription needs, and reports how much the others take.

A ledger is needed until every subscription that the store has for the topic has acked all of it durably, whether the
subscription is open or not. One that cannot be read may have acked nothing: it needs every ledger. Without any
subscription, no ledger is needed, as in Pulsar. In addition, `Retention` keeps a minimum of size and of age, by the
clock of the log's owner: the publish time of a message is its producer's.

Source: ``ManagedLedgerImpl.internalTrimLedgers`` and ``BacklogQuotaManager`` of Apache Pulsar.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ackstate.checks import LONG_MAX, check_within, integer
from ackstate.cursor.persist import has_record
from ackstate.errors import AckStateError
from ackstate.position import Position
from ackstate.topic.subscriptions import stored_subscriptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from ackstate.cursor.cursor import ManagedCursor
    from ackstate.topic.log import MessageLog

    Cursors = Mapping[str, ManagedCursor]
    MarkDeletes = Mapping[str, Position | None]

_NO_CURSORS: Mapping[str, ManagedCursor] = MappingProxyType({})


class BacklogQuotaExceededError(AckStateError):
    """The backlog of the topic is larger than `Retention.backlog_bytes_max`; nothing was published."""


class BacklogPolicy(Enum):
    """The consequence of a backlog above its limit; the values are Pulsar's where it has one."""

    REPORT = "report"
    """Nothing: the report and the metrics have it."""

    REFUSE_PUBLISH = "producer_exception"
    """Publishing raises `BacklogQuotaExceededError` until the backlog is small enough."""


@dataclass(frozen=True, slots=True)
class Retention:
    """How much of a topic's log is kept although every subscription has acked it, and how large its backlog may be.

    A ledger is deleted once the rest of the log has `size_bytes` and the last publish to it is `age_ms` ago: both
    minimums hold. (Pulsar deletes when either is reached, and requires -1 for the one that is not to count.)

    Attributes:
        size_bytes: The least bytes of entries to keep; Pulsar's ``retentionSizeInMB``.
        age_ms: How long to keep a ledger at least after the last publish to it, by the times that the broker passes to
            publishes and trims; Pulsar's ``retentionTimeInMinutes``. Messages' own publish times do not count.
        backlog_bytes_max: The limit of the backlog of the slowest subscription, included; None for no limit. Pulsar's
            backlog quota.
        backlog_policy: The consequence of a backlog above that limit.

    Raises:
        ValueError: A number is negative, or 2**63 or more.
        TypeError: A number is not an integer, or the policy no `BacklogPolicy`.
    """

    size_bytes: int = 0
    age_ms: int = 0
    backlog_bytes_max: int | None = None
    backlog_policy: BacklogPolicy = BacklogPolicy.REPORT

    def __post_init__(self) -> None:
        for name in ("size_bytes", "age_ms", "backlog_bytes_max"):
            if (value := getattr(self, name)) is not None or name != "backlog_bytes_max":
                check_within(name, value, least=0, most=LONG_MAX)
        if not isinstance(self.backlog_policy, BacklogPolicy):
            raise TypeError(f"backlog_policy must be a BacklogPolicy, got {self.backlog_policy!r}")

    @property
    def refuses_publish(self) -> bool:
        """Whether a backlog above its limit has messages refused."""
        return self.backlog_policy is BacklogPolicy.REFUSE_PUBLISH


class BacklogReport(NamedTuple):
    """How much of a log one subscription needs: the one whose durable mark-delete position is the lowest.

    Attributes:
        entry_count: Entries from the first one that it has not acked durably to the end of the log, acked ones in
            between included: they are kept, too.
        byte_count: Their bytes. Those of a part of a ledger are estimated by the average entry of the ledger.
        log_entry_count: Entries of the whole log.
        log_byte_count: Their bytes.
        held_by: The name of the subscription, of those at the same position the first; None if the topic has none, or
            if each has acked everything.
        held_from: The first of those entries; None where `held_by` is.
        unreadable: Subscriptions that cannot be read, sorted. Each counts as one that has acked nothing.
        bytes_max: `Retention.backlog_bytes_max`.
        retained_ledger_id: The first ledger that the retention keeps and no subscription needs, nor one before it: from
            there on the retention keeps the log. None if there is none.
    """

    entry_count: int
    byte_count: int
    log_entry_count: int
    log_byte_count: int
    held_by: str | None
    held_from: Position | None
    unreadable: tuple[str, ...]
    bytes_max: int | None
    retained_ledger_id: int | None = None

    def __str__(self) -> str:
        text = f"backlog of {self.entry_count} entries in {self.byte_count} bytes"
        if self.held_by is not None:
            text += f", which subscription {self.held_by!r} needs from {self.held_from} on"
        text += f"; log of {self.log_entry_count} entries in {self.log_byte_count} bytes"
        if self.retained_ledger_id is not None:
            text += f", which the retention keeps from ledger {self.retained_ledger_id} on"
        return text

    @property
    def is_exceeded(self) -> bool:
        """Whether the backlog is above its limit."""
        return self.bytes_max is not None and self.byte_count > self.bytes_max

    def check(self, topic: str) -> None:
        """Raise `BacklogQuotaExceededError` if the backlog is above its limit.

        Args:
            topic: The name for the text of the error.
        """
        if self.is_exceeded:
            raise BacklogQuotaExceededError(
                f"the backlog of topic {topic!r} must have at most {self.bytes_max} bytes (backlog_bytes_max), "
                f"got {self.byte_count}; subscription {self.held_by!r} needs the messages from {self.held_from} on"
            )


def stored_mark_deletes(log: MessageLog, cursors: Cursors = _NO_CURSORS) -> dict[str, Position | None]:
    """Return the durable mark-delete of each stored subscription, None for an unreadable one."""
    own = {name: cursor for name, cursor in cursors.items() if has_record(cursor)}
    others = stored_subscriptions(log.store, log.topic, ledgers=log.ledgers, besides=own.keys())
    return {each.name: each.mark_delete for each in others} | {
        name: cursor.persisted_mark_delete_position for name, cursor in own.items()
    }


def trim_log(
    log: MessageLog, retention: Retention, cursors: Cursors, *, now_ms: int, stored: MarkDeletes | None = None
) -> int:
    """Delete the ledgers of a log that no subscription and no retention needs, and return how many left the log.

    The last ledger is never deleted. No call of a subscription or a cursor of the topic may run at the same time, nor
    a persist.

    Args:
        log: Opened by `MessageLog.open`.
        retention: How much to keep beyond the messages that the subscriptions need.
        cursors: **Every** open cursor of the topic, by the name of its subscription. After a seek that failed, the
            store may have a higher position than the one at which the cursor continues.
        now_ms: The present, 0 or more.
        stored: As `stored_mark_deletes` returns them, at least those of the subscriptions that are not open. By
            default they are read from the store, if there is a ledger that the retention does not keep.

    Raises:
        As `MessageLog.trim`; and as `stored_subscriptions`, then nothing was deleted.

    Complexity: O(ledgers); reads the whole of a ledger of unknown size if `size_bytes` is set (`LedgerSizes`).
    """
    return trim_behind(log, retention, lambda: _mark_deletes(log, cursors, stored), now_ms=now_ms)


def trim_behind(log: MessageLog, retention: Retention, mark_deletes: Callable[[], MarkDeletes], *, now_ms: int) -> int:
    """Trim a log as `trim_log`."""
    check_within("now_ms", now_ms := integer("now_ms", now_ms), least=0, most=LONG_MAX, unit="milliseconds")
    log.date_ledgers(now_ms=now_ms)
    keep_from = log.ledgers.first_ledger_id
    needed_from: int | None = None
    for ledger_id in _not_retained(log, retention, now_ms=now_ms):
        if needed_from is None:
            needed = (_lowest_unacked(log, mark_delete).ledger_id for mark_delete in mark_deletes().values())
            needed_from = min(needed, default=log.ledgers.current_ledger_id)
        following = log.ledgers.find_next_ledger(ledger_id)
        if ledger_id >= needed_from or following is None:
            break
        keep_from = following
    return log.trim(keep_from)


def backlog_report(
    log: MessageLog,
    retention: Retention,
    cursors: Cursors,
    *,
    stored: MarkDeletes | None = None,
    now_ms: int | None = None,
) -> BacklogReport:
    """Return how much of a log its subscriptions need, and which of them needs most.

    Args:
        log: The log.
        retention: Has the limit, and the minimums that the log is kept for.
        cursors: As for `trim_log`.
        stored: As for `trim_log`.
        now_ms: The present; without it, no ledger counts as older than `Retention.age_ms`.

    Raises:
        As `stored_subscriptions`, if `stored` is None.
        StoreError: The storage failed.

    Complexity: O(ledgers and subscriptions) without reading a message, but for ledgers of unknown size (`LedgerSizes`).
    """
    mark_deletes, ledgers = _mark_deletes(log, cursors, stored), log.ledgers
    held_by, lowest = min(
        ((name, _lowest_unacked(log, mark_delete)) for name, mark_delete in mark_deletes.items()),
        key=lambda each: (each[1], each[0]),
        default=(None, None),
    )
    before_all, last = ledgers.previous(ledgers.first_position), ledgers.last_confirmed
    if lowest is None or lowest > last:
        held_by, lowest, entry_count, byte_count = None, None, 0, 0
    else:
        entry_count = ledgers.count_between(Position(lowest.ledger_id, lowest.entry_id - 1), last)
        byte_count = _bytes_from(log, lowest)
    return BacklogReport(
        entry_count,
        byte_count,
        ledgers.count_between(before_all, last),
        log.sizes.whole,
        held_by,
        lowest,
        tuple(sorted(name for name, mark_delete in mark_deletes.items() if mark_delete is None)),
        retention.backlog_bytes_max,
        _retained_from(log, retention, lowest, now_ms=now_ms),
    )


def is_backlog_exceeded(log: MessageLog, limit: int, mark_deletes: Iterable[Position | None]) -> bool:
    """Return whether a `BacklogReport` would be above a limit, without the cost of one: O(subscriptions)."""
    lowest = min((_lowest_unacked(log, mark_delete) for mark_delete in mark_deletes), default=None)
    return lowest is not None and lowest <= log.ledgers.last_confirmed and _bytes_from(log, lowest) > limit


def _mark_deletes(log: MessageLog, cursors: Cursors, stored: MarkDeletes | None) -> MarkDeletes:
    """Return the durable mark-delete position of every subscription, also of open cursors of another store."""
    of_open = {name: cursor.persisted_mark_delete_position for name, cursor in cursors.items()}
    return of_open | stored_mark_deletes(log, cursors) if stored is None else {**stored, **of_open}


def _retained_from(log: MessageLog, retention: Retention, lowest: Position | None, *, now_ms: int | None) -> int | None:
    """Return the first ledger that the retention keeps, unless a subscription needs it or one before it."""
    not_retained = set(_not_retained(log, retention, now_ms=now_ms))
    needed_from = log.ledgers.current_ledger_id if lowest is None else lowest.ledger_id
    kept = next(ledger_id for ledger_id in log.ledgers if ledger_id not in not_retained)
    return kept if kept < needed_from else None


def _not_retained(log: MessageLog, retention: Retention, *, now_ms: int | None) -> Iterator[int]:
    """Yield the closed ledgers that the retention does not keep, lowest first."""
    closed = [ledger_id for ledger_id in log.ledgers if ledger_id != log.ledgers.current_ledger_id]
    rest = log.sizes.whole if closed and retention.size_bytes else 0
    for ledger_id in closed:
        if retention.size_bytes:
            rest -= log.sizes.of(ledger_id)
            if rest < retention.size_bytes:
                return
        if retention.age_ms and log.ledgers.entry_count(ledger_id):
            published_ms = log.published_ms.get(ledger_id)
            if now_ms is None or published_ms is None or now_ms - published_ms < retention.age_ms:
                return
        yield ledger_id


def _lowest_unacked(log: MessageLog, mark_delete: Position | None) -> Position:
    """Return the first entry without a durable ack of a subscription, or the next one to be written."""
    # A mark-delete position beyond the end of the log cannot be opened: the subscription counts as unreadable.
    ledgers = log.ledgers
    if mark_delete is None or (mark_delete > ledgers.last_confirmed and mark_delete.entry_id >= 0):
        return ledgers.next_valid(ledgers.first_position)
    return ledgers.next_valid(mark_delete)


def _bytes_from(log: MessageLog, first: Position) -> int:
    """Return about how many bytes the entries from one on have."""
    acked = log.sizes.of(first.ledger_id) * first.entry_id // max(1, log.ledgers.entry_count(first.ledger_id))
    return log.sizes.from_ledger(first.ledger_id) - acked
