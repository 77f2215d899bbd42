"""Judges each subscription from one or several looks at a broker."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_plus

from ackstate import pulsar_conf
from ackstate.analysis.pulsar import broker_settings
from ackstate.analysis.pulsar.bounds import ComesBack, comes_back, cut_now, cut_on_close
from ackstate.analysis.pulsar.cursor_look import CursorLook, look_of
from ackstate.analysis.pulsar.internal_stats import SnapshotError
from ackstate.position import Position
from ackstate.wire.pulsar import CursorInfo, PositionInfo, RangeForm, encode_cursor_info, encode_position_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.analysis.pulsar.broker_settings import BrokerSettings
    from ackstate.analysis.pulsar.internal_stats import SubscriptionStats, TopicInternals, TopicStats
    from ackstate.analysis.pulsar.sources import TopicAnswers


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


def limit_uses(look: CursorLook, stats: SubscriptionStats | None, settings: BrokerSettings) -> list[LimitUse]:
    """Return the limits that affect a cursor, the closest first; limits that are off are omitted.

    The limit of the metadata store is last, because exceeding it loses nothing: a closing cursor then keeps its ledger.

    Complexity: O(bytes of the acked ranges in either form).
    """
    found = [*_of_ranges(look, settings), *_of_bytes(look, settings), *_of_unacked(stats, settings)]
    return sorted(found, key=lambda use: (use.setting == pulsar_conf.METADATA_RANGES, -use.percent))


def _of_ranges(look: CursorLook, settings: BrokerSettings) -> Iterator[LimitUse]:
    ranges, limit = look.deleted.range_count, settings.range_count_max
    if settings.form is RangeForm.LIST:
        kept = settings.ranges_kept_max
        advice = f"raise it, or set {pulsar_conf.AS_WORDS}=true"
        yield LimitUse(pulsar_conf.RANGES, "ranges", ranges, kept, max(kept - ranges, 0), advice)
    else:
        # Whole ledgers up to the limit: acked entries use it, and holes save it.
        advice = "raise it above the acked entries: in this form it counts them"
        yield LimitUse(pulsar_conf.RANGES, "acked entries", len(look.deleted), limit, None, advice)
        if settings.is_paused_by_ranges:
            advice = f"raise {pulsar_conf.RANGES}: above it dispatch pauses"
            yield LimitUse(broker_settings.PAUSE, "ranges", ranges, limit, max(limit - ranges, 0), advice)
    metadata = settings.metadata_range_count_max
    advice = "nothing is lost: with more ranges a closing cursor writes to its ledger, not to the metadata store"
    yield LimitUse(pulsar_conf.METADATA_RANGES, "ranges", ranges, metadata, max(metadata - ranges, 0), advice)


def _of_bytes(look: CursorLook, settings: BrokerSettings) -> Iterator[LimitUse]:
    info = PositionInfo(look.mark_delete, look.deleted, properties=dict(look.properties))
    record = len(encode_position_info(info, form=settings.form, limits=settings.limits))
    limit = settings.record_bytes_max
    is_list = settings.form is RangeForm.LIST
    advice = f"raise it on brokers and bookies{f', or set {pulsar_conf.AS_WORDS}=true' if is_list else ''}"
    left = _holes_left(limit - record, look) if is_list else None
    yield LimitUse(broker_settings.MESSAGE_BYTES, "bytes of the cursor record", record, limit, left, advice)
    if settings.has_zookeeper:
        fallback = CursorInfo(-1, look.mark_delete, look.deleted, properties=dict(look.properties))
        size = len(encode_cursor_info(fallback, limits=settings.limits))
        left = _holes_left(_ZOOKEEPER_BYTES_MAX - size, look)
        advice = "raise it on ZooKeeper and brokers: above it there is no way out when the cursor ledger fails"
        yield LimitUse("jute.maxbuffer", "bytes in the metadata store", size, _ZOOKEEPER_BYTES_MAX, left, advice)
    gate = settings.unpersisted_bytes_max
    if gate is not None and gate > 0:
        left = _holes_left(gate - look.deleted.record_bytes, look)
        advice = "raise it, or write more often: at most this much is not durable"
        name = broker_settings.UNPERSISTED_BYTES
        yield LimitUse(name, "bytes of ranges, if none is durable", look.deleted.record_bytes, gate, left, advice)


def _holes_left(bytes_left: int, look: CursorLook) -> int:
    """Return the number of further ranges of the present mean size that fit."""
    ranges = look.deleted.range_count
    mean = look.deleted.record_bytes / ranges if ranges else 24.0  # for ledger ids up to 3,000,000 and 50,000 entries
    return max(int(bytes_left / mean), 0)


def _of_unacked(stats: SubscriptionStats | None, settings: BrokerSettings) -> Iterator[LimitUse]:
    if stats is None:
        return
    most = max((consumer.unacked_messages for consumer in stats.consumers), default=0)
    of_consumer, of_all = settings.consumer_unacked_max, settings.subscription_unacked_max
    advice = "ack delivered messages, or raise it"
    if of_consumer:
        yield LimitUse(broker_settings.CONSUMER_UNACKED, "unacked of a consumer", most, of_consumer, None, advice)
    if of_all:
        used = stats.unacked_messages
        yield LimitUse(broker_settings.SUBSCRIPTION_UNACKED, "unacked messages", used, of_all, None, advice)


# Brokers count unacked messages only if consumers share a subscription.
_COUNTED = frozenset({"Shared", "Key_Shared"})


# A broker counts delivered and unacked messages, and lists acks of whole entries. If its consumers acknowledge single
# messages of batches, the difference is the number of acknowledged messages of incomplete batches: a write makes them
# durable only together with entries above the mark-delete position, so all of them may be redelivered.
class PartlyAcked(NamedTuple):
    """The known bounds of the partly acked batches of a subscription."""

    messages_per_entry: float | None  # The mean; None if unknown
    messages: int | None  # An estimate of the acked messages of partly acked batches; None if it cannot be made
    may_be: bool  # Whether there may be partly acked batches, so that a number of acked entries is a lower bound


def partly_acked(
    look: CursorLook, stats: SubscriptionStats | None, internals: TopicInternals, topic: TopicStats | None
) -> PartlyAcked:
    """Return an estimate of partly acked batches from a broker's counts."""
    mean = _messages_per_entry(stats, internals, topic)
    if look.reported is not None and not look.reported.batches:
        return PartlyAcked(mean, 0, may_be=False)
    if mean is None or stats is None:
        return PartlyAcked(mean, None, may_be=mean is None or mean > 1)
    if mean <= 1:
        return PartlyAcked(mean, 0, may_be=False)
    if stats.type not in _COUNTED or look.read_position is None:
        return PartlyAcked(mean, None, may_be=True)
    waiting = stats.msg_in_replay + stats.msg_delayed
    last_read = Position(look.read_position.ledger_id, max(look.read_position.entry_id, 0) - 1)
    read = look.count_up_to(last_read) - look.count_up_to(look.mark_delete)
    delivered = max(read - len(look.deleted) - waiting, 0)
    return PartlyAcked(mean, max(round(delivered * mean) - max(stats.unacked_messages, 0), 0), may_be=True)


def _messages_per_entry(
    stats: SubscriptionStats | None, internals: TopicInternals, topic: TopicStats | None
) -> float | None:
    """Return the mean of the consumers, weighted by their messages, else the mean of the published messages."""
    consumers = [each for each in stats.consumers if each.avg_messages_per_entry > 0] if stats else []
    if consumers:
        weights = [max(each.unacked_messages, 1) for each in consumers]
        total = sum(weight * each.avg_messages_per_entry for weight, each in zip(weights, consumers, strict=True))
        return total / sum(weights)
    if topic is not None and topic.msg_in_counter > 0 and internals.entries_added_counter > 0:
        return max(topic.msg_in_counter / internals.entries_added_counter, 1.0)
    return None


# Of a record in the words form: a billion entries, and 200 times the longest record that a bookie takes.
_WORDS_MAX = 1 << 24


class Looks(NamedTuple):
    """Answers about one topic: the judged ones, and optionally earlier ones and some soon after."""

    now: TopicAnswers
    earlier: TopicAnswers | None = None
    later: TopicAnswers | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """One subscription of one topic or partition."""

    topic: str
    subscription: str
    owner: str  # The broker that has the topic; empty if unknown
    look: CursorLook  # The cursor in memory
    stats: SubscriptionStats | None  # Stats of the subscription; None if unknown
    # Acked entries that are redelivered if the broker dies now; None if the cursor is not durable.
    comes_back: ComesBack | None
    partly_acked: PartlyAcked  # Additional messages from partly acked batches
    cut: int  # Acked entries that a record written now would exclude
    if_unloaded: int  # Acked entries that are redelivered if the topic is closed gracefully instead
    limits: Sequence[LimitUse]  # The use of each limit, the closest first
    remarks: Sequence[str]  # Further remarks
    assumed: str  # The reason why some settings are assumed; empty if all are known

    @property
    def is_lower_bound(self) -> bool:
        """Whether acked messages of partly acked batches may be redelivered besides the entries of `comes_back`."""
        return self.comes_back is not None and self.partly_acked.may_be

    @property
    def messages(self) -> tuple[int, int]:
        """The approximate number of redelivered acked messages, least and most, including partly acked batches."""
        if self.comes_back is None:
            return 0, 0
        mean = self.partly_acked.messages_per_entry or 1
        low, high = (round(bound.entries * mean) for bound in self.comes_back)
        return low, high + (self.partly_acked.messages or 0)

    def to_json(self) -> dict[str, Any]:
        """Return the judgement in the form of ``docs/json-output.md``."""
        back = self.comes_back
        return {
            "topic": self.topic,
            "subscription": self.subscription,
            "owner": self.owner or None,
            "state": self.look.state,
            "mark_delete": str(self.look.mark_delete),
            "acked_above_mark_delete": len(self.look.deleted),
            "ranges": self.look.deleted.range_count,
            "comes_back": back and {"low": back.low._asdict(), "high": back.high._asdict()},
            "is_lower_bound": self.is_lower_bound,
            "partly_acked_messages": self.partly_acked.messages if back else None,
            "messages_estimate": back and dict(zip(("low", "high"), self.messages, strict=True)),
            "cut_if_written_now": self.cut,
            "comes_back_if_unloaded": back and self.if_unloaded,
            "messages_per_entry": self.partly_acked.messages_per_entry,
            "limits": [use._asdict() | {"percent": round(use.percent, 2)} for use in self.limits],
            "remarks": list(self.remarks),
            "settings_assumed": self.assumed,
        }


def judge(topic: str, looks: Looks, settings: BrokerSettings) -> list[Judgement]:
    """Return the judgement of each cursor of a topic, in the order of their names."""
    return [_judged(topic, name, looks, settings) for name in sorted(looks.now.internals.cursors)]


def most_redelivered_first(judgements: Iterable[Judgement]) -> list[Judgement]:
    """Return judgements sorted by the most messages that may be redelivered, then by name."""
    return sorted(judgements, key=lambda each: (-each.messages[1], by_name(each.topic), by_name(each.subscription)))


def by_name(name: str) -> list[tuple[str, int, str]]:
    """Return a natural sort key: ``partition-2`` before ``partition-10``."""
    pieces = re.split(r"([0-9]+)", name)
    return [(text, int(digits or 0), digits) for text, digits in zip(pieces[::2], [*pieces[1::2], ""], strict=True)]


def totals(judgements: Iterable[Judgement]) -> list[dict[str, Any]]:
    """Return the sums for each broker, because all of its topics die with it."""
    groups: dict[str, list[Judgement]] = defaultdict(list)
    for each in judgements:
        if each.comes_back is not None:
            groups[each.owner].append(each)
    return [_total(owner, groups[owner]) for owner in sorted(groups)]


def _total(owner: str, durable: Sequence[Judgement]) -> dict[str, Any]:
    bounds = [each.comes_back for each in durable if each.comes_back is not None]
    return {
        "owner": owner or None,
        "subscriptions": len(durable),
        "low": sum(bound.low.entries for bound in bounds),
        "high": sum(bound.high.entries for bound in bounds),
        "is_lower_bound": any(each.is_lower_bound for each in durable),
        "partly_acked_messages": sum(each.partly_acked.messages or 0 for each in durable),
    }


def _judged(topic: str, name: str, looks: Looks, settings: BrokerSettings) -> Judgement:
    # Keys of cursors are URL-encoded, those of subscriptions are not.
    subscription = unquote_plus(name)
    now, earlier, later = (_look(topic, name, answers) for answers in looks)
    assert now is not None
    words = sum((bitmap.max() >> 6) + 1 for _, bitmap in now.deleted.bitmaps())
    if settings.form is RangeForm.WORDS and words > _WORDS_MAX:
        raise SnapshotError(f"{topic}, {name}: individuallyDeletedMessages: a record of {words:,} words is too long")
    statistics = looks.now.stats
    stats = statistics.subscriptions.get(subscription) if statistics else None
    is_durable = stats is None or stats.is_durable is not False
    partly = partly_acked(now, stats, looks.now.internals, statistics)
    return Judgement(
        topic=topic,
        subscription=subscription,
        owner=(statistics.owner_broker if statistics else None) or "",
        look=now,
        stats=stats,
        comes_back=comes_back(now, settings, earlier=earlier, later=later) if is_durable else None,
        partly_acked=partly,
        cut=cut_now(now, settings),
        if_unloaded=cut_on_close(now, settings),
        limits=limit_uses(now, stats, settings) if is_durable else (),
        remarks=list(_remarks(now, stats, partly, is_system=statistics is not None and stats is None)),
        assumed=settings.assumed,
    )


def _look(topic: str, name: str, answers: TopicAnswers | None) -> CursorLook | None:
    cursor = answers.internals.cursors.get(name) if answers else None
    if answers is None or cursor is None:
        return None
    counts = answers.internals.entry_counts()
    stats = answers.stats.subscriptions.get(unquote_plus(name)) if answers.stats else None
    what = f"{topic}, {name}"
    return look_of(cursor, counts, stats, what=what, asked_ms=answers.asked_ms, answered_ms=answers.answered_ms)


def _remarks(
    look: CursorLook, stats: SubscriptionStats | None, partly: PartlyAcked, *, is_system: bool
) -> Iterator[str]:
    if stats is not None and stats.is_durable is False:
        yield "not durable: its state does not survive the broker, and its reader decides where to continue"
        return
    if is_system:
        yield "not a subscription, but a cursor of the broker itself"
    if not look.has_written:
        yield f"state {look.state}: no write since the topic was loaded is known, or a write failed"
    if partly.may_be and partly.messages_per_entry is None:
        yield "+: messages per entry are unknown; if entries are batches, acked messages of partly acked ones are added"
    elif partly.may_be:
        mean = f"+: about {partly.messages_per_entry:.3g} messages an entry"
        if partly.messages is None:
            yield f"{mean}; acked messages of partly acked batches are added; the broker does not report their number"
        else:
            yield f"{mean}; up to about {partly.messages:,} acked messages of partly acked batches are added"
