"""Judges each subscription of a topic from looks at its broker, and at what is durable where that can be read.

Redelivered if a broker dies are the entries that are acked in its memory and not durable. Entries are messages if there
are no batches; a broker does not report partly acked batches.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_plus

from ackstate import pulsar_conf
from ackstate.analysis.pulsar.durable import CursorGoneError, DurableState
from ackstate.analysis.pulsar.sources import MESSAGE_BYTES, PAUSE, UNPERSISTED_BYTES, SnapshotError, acked, acked_in
from ackstate.errors import AckStateError
from ackstate.stores.base import ABSENT
from ackstate.wire.pulsar import (
    CursorInfo,
    PositionInfo,
    RangeForm,
    encode_cursor_info,
    encode_position_info,
    limit_ranges,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.pulsar.durable import DurableReader
    from ackstate.analysis.pulsar.sources import (
        Acked,
        BrokerSettings,
        CursorInternals,
        LiveBroker,
        SubscriptionStats,
        TopicInternals,
        TopicStats,
    )


class ComesBack(NamedTuple):
    """Acked entries that are redelivered: at least `low`, at most `high`, both inclusive."""

    low: int
    high: int
    why: str
    is_moving: bool = False  # whether something changed while the durable state was read

    @property
    def is_exact(self) -> bool:
        """Whether that is one number."""
        return self.low == self.high


def exactly(before: Acked, after: Acked, durable: DurableState, counts: Mapping[int, int]) -> ComesBack:
    """Return the redelivered entries at the moment at which the durable state was read, between two looks at memory.

    Args:
        before: The acks in memory at the look before.
        after: Those at the look after.
        durable: What was read between.
        counts: The entries of each existing ledger of the topic; entries of others cannot be redelivered.

    Complexity: O(ledgers from the durable mark-delete on, and bytes of their acks).
    """
    low = high = 0
    for ledger_id, count in _existing(counts, after, durable.mark_delete.ledger_id):
        kept = acked_in(durable, ledger_id, count)
        later = acked_in(after, ledger_id, count)
        earlier = acked_in(before, ledger_id, count)
        low += len((earlier & later) - kept)
        high += len((earlier | later) - kept)
    _, cursor_ledger, last = durable.version
    place = (
        f"entry {last} of cursor ledger {cursor_ledger}" if cursor_ledger >= 0 else "its record in the metadata store"
    )
    is_moving, why = low != high, f"acked in memory, and not in {place}"
    if is_moving:
        why += "; more was acked while it was read"
    if durable.has_transactions and high:
        low, why = 0, f"{why}; acks of committed transactions are restored from a log of their own"
    return ComesBack(low, high, why, is_moving)


def at_most(acked: Acked, counts: Mapping[int, int], reason: str, *, unlisted_count: int = 0) -> ComesBack:
    """Return a bound for a cursor whose durable state is unknown for a reason: all that is acked and still exists.

    `unlisted_count` is the number of entries that exist in ledgers that the counts lack: they may be acked.
    """
    existing = [*_existing(counts, acked)]
    above = sum(len(acked.deleted.entries(ledger_id)) for ledger_id, _ in existing)
    below = sum(len(acked_in(acked, ledger_id, count)) for ledger_id, count in existing) - above + unlisted_count
    more = f", and {below:,} up to it that still exist" if below else ""
    return ComesBack(0, above + below, f"every entry acked above the mark-delete{more}: {reason}")


def _existing(counts: Mapping[int, int], acked: Acked, first_ledger_id: int = 0) -> Iterator[tuple[int, int]]:
    """Yield each existing ledger from one on, with its entries. One that is newer than the counts has acks alone."""
    yield from ((ledger_id, count) for ledger_id, count in counts.items() if ledger_id >= first_ledger_id)
    last = max(counts)
    newer = {acked.mark_delete.ledger_id, *(ledger_id for ledger_id, _ in acked.deleted.bitmaps())}
    yield from ((ledger_id, 0) for ledger_id in sorted(newer) if ledger_id > last)


_ZOOKEEPER_BYTES_MAX = 0xFFFFF  # jute.maxbuffer, which a request passes with its path and headers


class LimitUse(NamedTuple):
    """The use of one limit."""

    setting: str  # Pulsar's name of the setting
    unit: str  # The counted unit
    used: int  # The used amount
    limit: int  # The limit
    holes_left: int | None  # Number of further ack holes of one entry that fit; None if the limit does not count holes
    advice: str  # The remedy if it is close

    @property
    def percent(self) -> float:
        """Used of the limit, in percent."""
        return 100 * self.used / self.limit if self.limit else 100.0


def limit_uses(acks: Acked, cursor: CursorInternals, settings: BrokerSettings) -> list[LimitUse]:
    """Return the limits on the state of a cursor, the closest first; limits that are off are omitted.

    The limit of the metadata store is last, because exceeding it loses nothing: a closing cursor then keeps its ledger.

    Complexity: O(bytes of the acked ranges in either form).
    """
    found = _limit_uses(acks, cursor, settings)
    return sorted(found, key=lambda use: (use.setting == pulsar_conf.METADATA_RANGES, -use.percent))


def _limit_uses(acks: Acked, cursor: CursorInternals, settings: BrokerSettings) -> Iterator[LimitUse]:
    ranges, limit, is_list = cursor.range_count, settings.range_count_max, settings.form is RangeForm.LIST
    or_words = f", or set {pulsar_conf.AS_WORDS}=true" if is_list and settings.can_have_words else ""
    if is_list:
        kept = settings.ranges_kept_max
        yield LimitUse(pulsar_conf.RANGES, "ranges", ranges, kept, max(kept - ranges, 0), f"raise it{or_words}")
    else:
        # Whole ledgers up to the limit: acked entries use it, and holes save it.
        advice = "raise it above the acked entries: in this form it counts them"
        yield LimitUse(pulsar_conf.RANGES, "acked entries", len(acks.deleted), limit, None, advice)
        if settings.is_paused_by_ranges:
            advice = f"raise {pulsar_conf.RANGES}: above it dispatch pauses"
            yield LimitUse(PAUSE, "ranges", ranges, limit, max(limit - ranges, 0), advice)
    limit = settings.metadata_range_count_max
    advice = "nothing is lost: with more ranges a closing cursor writes to its ledger, not to the metadata store"
    yield LimitUse(pulsar_conf.METADATA_RANGES, "ranges", ranges, limit, max(limit - ranges, 0), advice)
    info = PositionInfo(acks.mark_delete, acks.deleted, properties=dict(cursor.properties))
    size, limit = len(encode_position_info(info, form=settings.form, limits=settings.limits)), settings.record_bytes_max
    left = _holes_left(limit - size, acks) if is_list else None
    advice = f"raise it on brokers and bookies{or_words}"
    yield LimitUse(MESSAGE_BYTES, "bytes of the cursor record", size, limit, left, advice)
    if settings.metadata_url:
        fallback = CursorInfo(-1, acks.mark_delete, acks.deleted, properties=dict(cursor.properties))
        size, limit = len(encode_cursor_info(fallback, limits=settings.limits)), _ZOOKEEPER_BYTES_MAX
        advice = "raise it on ZooKeeper and brokers: above it there is no way out when the cursor ledger fails"
        left = _holes_left(limit - size, acks)
        yield LimitUse("jute.maxbuffer", "bytes in the metadata store", size, limit, left, advice)
    gate, size = settings.unpersisted_bytes_max or 0, acks.deleted.record_bytes
    if gate > 0:
        advice = "raise it, or write more often: at most this much is not durable"
        left = _holes_left(gate - size, acks)
        yield LimitUse(UNPERSISTED_BYTES, "bytes of ranges, if none is durable", size, gate, left, advice)


def _holes_left(bytes_left: int, acks: Acked) -> int:
    """Return the number of further ranges of the present mean size that fit."""
    ranges = acks.deleted.range_count
    mean = acks.deleted.record_bytes / ranges if ranges else 24.0  # for ledger ids up to 3,000,000 and 50,000 entries
    return max(int(bytes_left / mean), 0)


def _messages_per_entry(
    stats: SubscriptionStats | None, internals: TopicInternals, topic: TopicStats | None
) -> float | None:
    """Return the largest mean of a consumer, else the mean of the published messages."""
    of_consumers = max((each.avg_messages_per_entry for each in stats.consumers), default=0) if stats else 0
    if of_consumers > 0:
        return float(of_consumers)
    if topic is not None and topic.msg_in_counter > 0 and internals.entries_added_counter > 0:
        return max(topic.msg_in_counter / internals.entries_added_counter, 1.0)
    return None


# Of a record in the words form: a billion entries, and 200 times the longest record that a bookie takes.
_WORDS_MAX = 1 << 24
_ROUNDS = 2


class Kind(StrEnum):
    """What a cursor is; only subscriptions have redelivery that counts."""

    SUBSCRIPTION = "subscription"
    NOT_DURABLE = "not durable"
    BROKERS_OWN = "of the broker itself"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One cursor of one topic or partition."""

    topic: str
    subscription: str
    owner: str  # The broker that has the topic; empty if unknown
    kind: Kind
    state: str  # Of the cursor, Pulsar's name
    acked: Acked  # In the broker's memory
    range_count: int  # Of these acks, as the broker counts them
    comes_back: ComesBack | None  # If the broker dies now; None if the cursor is not durable
    messages_per_entry: float | None  # The mean; None if unknown
    may_have_batches: bool  # Whether acked messages of partly acked batches may come back in addition
    cut: int  # Acked entries that a record written now would exclude
    if_unloaded: int  # Acked entries that are redelivered if the topic is closed gracefully instead
    limits: Sequence[LimitUse]  # The use of each limit, the closest first
    remarks: Sequence[str]  # Further remarks
    assumed: str  # The reason why some settings are assumed; empty if all are known

    @property
    def most(self) -> int:
        """The most acked entries of a subscription that come back."""
        return self.comes_back.high if self.comes_back is not None and self.kind is Kind.SUBSCRIPTION else 0

    def to_json(self) -> dict[str, Any]:
        """Return the judgement in the form of ``docs/json-output.md``."""
        back = self.comes_back
        return {
            "topic": self.topic,
            "subscription": self.subscription,
            "owner": self.owner or None,
            "kind": str(self.kind),
            "state": self.state,
            "mark_delete": str(self.acked.mark_delete),
            "acked_above_mark_delete": len(self.acked.deleted),
            "ranges": self.range_count,
            "comes_back": back and back.high,
            "at_least": back and back.low,
            "is_exact": back and back.is_exact,
            "why": back and back.why,
            "messages": None if back is None or self.may_have_batches else back.high,
            "messages_per_entry": self.messages_per_entry,
            "cut_if_written_now": self.cut,
            "comes_back_if_unloaded": back and self.if_unloaded,
            "limits": [use._asdict() | {"percent": round(use.percent, 2)} for use in self.limits],
            "remarks": list(self.remarks),
            "settings_assumed": self.assumed,
        }


class Looks(NamedTuple):
    """Two looks at a topic, and what is durable of its cursors."""

    internals: TopicInternals  # The later look
    before: TopicInternals  # The earlier one
    # Read between the two, or why it is unknown; by the cursors' names in the look before.
    durable: Mapping[str, DurableState | AckStateError]
    stats: TopicStats | None = None  # None if unknown


def judge_topic(topic: str, source: LiveBroker, reader: DurableReader | None, *, unread: str) -> list[Judgement]:
    """Look at a topic and return the judgement of each cursor, in the order of their names.

    What is durable is read between two looks at the broker's memory, and once more if acks came meanwhile. Without a
    reader, `unread` says why.
    """
    stats, after = source.stats(topic), source.internals(topic)
    found: list[Judgement] = []
    for _ in range(_ROUNDS if reader else 1):
        before = after
        names = {name: (topic, unquote_plus(name)) for name in before.cursors}
        durable: Mapping[str, DurableState | AckStateError] = dict.fromkeys(names, AckStateError(unread))
        if reader is not None:
            try:
                read = reader.read(names.values())
                durable = {name: read[each] for name, each in names.items()}
            except AckStateError as error:
                durable = dict.fromkeys(names, error)
            after = source.internals(topic)
        found = judge(topic, Looks(after, before, durable, stats), source.settings)
        if not any(each.comes_back and each.comes_back.is_moving for each in found):
            break
    return found


def judge(topic: str, looks: Looks, settings: BrokerSettings) -> list[Judgement]:
    """Return the judgement of each cursor of a look, in the order of their names."""
    internals = looks.internals
    if internals.cursors and not internals.ledgers:
        raise SnapshotError(f"{topic}: internalStats: no ledgers, without which acked entries cannot be counted")
    counts = internals.entry_counts()
    return [_judged(topic, name, looks, settings, counts) for name in sorted(internals.cursors)]


def most_redelivered_first(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Return judgements sorted by the most entries that may be redelivered, then by name."""
    return sorted(judgements, key=lambda each: (-each.most, by_name(each.topic), by_name(each.subscription)))


def by_name(name: str) -> list[tuple[str, int, str]]:
    """Return a natural sort key: ``partition-2`` before ``partition-10``."""
    pieces = re.split(r"([0-9]+)", name)
    return [(text, int(digits or 0), digits) for text, digits in zip(pieces[::2], [*pieces[1::2], ""], strict=True)]


def totals(judgements: Iterable[Judgement]) -> list[dict[str, Any]]:
    """Return the sums over the subscriptions of each broker, because all of its topics die with it."""
    groups: dict[str, list[tuple[ComesBack, bool]]] = defaultdict(list)
    for each in judgements:
        if each.comes_back is not None and each.kind is Kind.SUBSCRIPTION:
            groups[each.owner].append((each.comes_back, each.may_have_batches))
    return [
        {
            "owner": owner or None,
            "subscriptions": len(found),
            "comes_back": sum(back.high for back, _ in found),
            "at_least": sum(back.low for back, _ in found),
            "is_exact": all(back.is_exact for back, _ in found),
            "may_have_batches": any(may_have_batches for _, may_have_batches in found),
        }
        for owner, found in sorted(groups.items())
    ]


_COMPACTION, _BROKERS_PREFIX = "__compaction", "pulsar."  # pulsar.dedup, pulsar.repl.CLUSTER
_NOT_YET = AckStateError("the cursor was created while the topic was read")


def _judged(topic: str, name: str, looks: Looks, settings: BrokerSettings, counts: Mapping[int, int]) -> Judgement:
    subscription, what = unquote_plus(name), f"{topic}, {name}"  # Keys of cursors are encoded as in a URL.
    internals, statistics = looks.internals, looks.stats
    cursor = internals.cursors[name]
    now = acked(cursor, counts, what=what)
    words = sum((bitmap.max() >> 6) + 1 for _, bitmap in now.deleted.bitmaps())
    if settings.form is RangeForm.WORDS and words > _WORDS_MAX:
        raise SnapshotError(f"{what}: individuallyDeletedMessages: a record of {words:,} words is too long")
    stats = statistics.subscriptions.get(subscription) if statistics else None
    durable = looks.durable.get(name, _NOT_YET)
    kind = Kind.SUBSCRIPTION
    if isinstance(durable, CursorGoneError) if stats is None else stats.is_durable is False:
        kind = Kind.NOT_DURABLE
    elif (statistics and not stats) or subscription == _COMPACTION or subscription.startswith(_BROKERS_PREFIX):
        kind = Kind.BROKERS_OWN
    back = None if kind is Kind.NOT_DURABLE else _comes_back(now, name, looks, counts, what=what)
    mean = _messages_per_entry(stats, internals, statistics)
    has_batches = isinstance(durable, DurableState) and bool(durable.batch)
    may_have_batches = back is not None and (mean is None or mean > 1 or has_batches)
    if cursor.redelivery_if_crashed is not None:
        may_have_batches = bool(cursor.redelivery_if_crashed.batches)
    # Few ranges go to the metadata record, which is a list; more go to the cursor ledger. Before 5.0.1, partly acked
    # batches are redelivered in the first case: those releases write them but do not read them.
    closed_form = RangeForm.LIST if cursor.range_count <= settings.metadata_range_count_max else settings.form
    return Judgement(
        topic=topic,
        subscription=subscription,
        owner=(statistics.owner_broker if statistics else None) or "",
        kind=kind,
        state=cursor.state,
        acked=now,
        range_count=cursor.range_count,
        comes_back=back,
        messages_per_entry=mean,
        may_have_batches=may_have_batches,
        cut=_cut(now, cursor, counts, settings, settings.form),
        if_unloaded=_cut(now, cursor, counts, settings, closed_form),
        limits=() if back is None else limit_uses(now, cursor, settings),
        remarks=[*_remarks(kind, mean, may_have_batches=may_have_batches)],
        assumed=settings.assumed,
    )


def _comes_back(now: Acked, name: str, looks: Looks, counts: Mapping[int, int], *, what: str) -> ComesBack:
    internals, durable = looks.internals, looks.durable.get(name, _NOT_YET)
    cursor = internals.cursors[name]
    if cursor.redelivery_if_crashed is not None:
        count = cursor.redelivery_if_crashed.entries
        return ComesBack(count, count, "the broker counts the acks that are not durable")
    unlisted = max(internals.number_of_entries - sum(counts.values()), 0)
    if unlisted:
        return at_most(now, counts, f"{unlisted:,} are in ledgers that the answer lacks", unlisted_count=unlisted)
    if isinstance(durable, AckStateError):
        return at_most(now, counts, str(durable))
    if cursor.cursor_ledger >= 0 and durable.version[1] not in {ABSENT, cursor.cursor_ledger}:
        # The broker is about to change over, or it is a broker of another cluster.
        found = f"the record names cursor ledger {durable.version[1]}, and the broker {cursor.cursor_ledger}"
        return at_most(now, counts, found)._replace(is_moving=True)
    return exactly(acked(looks.before.cursors[name], counts, what=what), now, durable, counts)


def _cut(
    acks: Acked, cursor: CursorInternals, counts: Mapping[int, int], settings: BrokerSettings, form: RangeForm
) -> int:
    """Return the number of acked entries that a record in a form, written now, would exclude."""
    if form is RangeForm.WORDS:
        return limit_ranges(acks.deleted, form=form, limits=settings.limits).excluded_count
    if cursor.range_count <= settings.ranges_kept_max:
        return 0
    kept = acked(cursor, counts, what="acked ranges", range_count_max=settings.ranges_kept_max)
    return len(acks.deleted) - len(kept.deleted)


def _remarks(kind: Kind, mean: float | None, *, may_have_batches: bool) -> Iterator[str]:
    if kind is Kind.NOT_DURABLE:
        yield "not durable: its state does not survive the broker, and its reader decides where to continue"
    elif kind is Kind.BROKERS_OWN:
        yield "not a subscription, but a cursor of the broker itself: in no total"
    if may_have_batches:
        about = "messages per entry are unknown" if mean is None else f"about {mean:.3g} messages an entry"
        yield f"+: {about}; acked messages of partly acked batches are added: brokers do not show how many"
