"""What is to be said of each subscription, from one look at a broker or from several."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_plus

from analysis.pulsar.snapshot.bounds import ComesBack, CursorLook, comes_back, cut_now, cut_on_close
from analysis.pulsar.snapshot.internal_stats import acked
from analysis.pulsar.snapshot.limit_use import LimitUse, limit_uses

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from analysis.pulsar.snapshot.broker_settings import BrokerSettings
    from analysis.pulsar.snapshot.internal_stats import CursorInternals, SubscriptionStats
    from analysis.pulsar.snapshot.sources import TopicAnswers


class Looks(NamedTuple):
    """Answers about one topic: those that are judged, and maybe some of before and of soon after."""

    now: TopicAnswers
    earlier: TopicAnswers | None = None
    later: TopicAnswers | None = None


@dataclass(frozen=True, slots=True)
class Judgement:
    """One subscription of one topic or partition.

    Attributes:
        topic: Its name.
        subscription: Its name.
        owner: The broker that has the topic; empty if unknown.
        look: The cursor in memory.
        stats: Of the subscription; None if unknown.
        comes_back: Acked entries that come back if the broker dies now; None if the cursor is not durable.
        cut: Acked entries that a record written now would not hold.
        if_unloaded: Acked entries that come back if the topic is closed in good order instead.
        limits: The closest first.
        remarks: What else is to be known.
        assumed: Why some settings are not what the broker said; empty if all are known.
    """

    topic: str
    subscription: str
    owner: str
    look: CursorLook
    stats: SubscriptionStats | None
    comes_back: ComesBack | None
    cut: int
    if_unloaded: int
    limits: Sequence[LimitUse]
    remarks: Sequence[str]
    assumed: str

    def to_json(self) -> dict[str, Any]:
        """Return it as ``docs/operations.md`` describes it."""
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
            "cut_if_written_now": self.cut,
            "comes_back_if_unloaded": back and self.if_unloaded,
            "messages_per_entry": _messages_per_entry(self.stats),
            "limits": [use._asdict() | {"percent": round(use.percent, 2)} for use in self.limits],
            "remarks": list(self.remarks),
            "settings_assumed": self.assumed,
        }


def judge(topic: str, looks: Looks, settings: BrokerSettings) -> list[Judgement]:
    """Return what is to be said of each cursor of a topic, in the order of their names.

    Raises:
        SnapshotError: A cursor's position or ranges are not as Pulsar writes them.
    """
    return [_judged(topic, name, looks, settings) for name in sorted(looks.now.internals.cursors)]


def totals(judgements: Iterable[Judgement]) -> list[dict[str, Any]]:
    """Return the sums for each broker, which takes all of its topics with it when it dies."""
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for each in judgements:
        if each.comes_back is not None:
            numbers = (1, each.comes_back.low.entries, each.comes_back.high.entries)
            sums[each.owner] = [total + number for total, number in zip(sums[each.owner], numbers, strict=True)]
    return [
        {"owner": owner or None, "subscriptions": count, "low": low, "high": high}
        for owner, (count, low, high) in sorted(sums.items())
    ]


def _judged(topic: str, name: str, looks: Looks, settings: BrokerSettings) -> Judgement:
    # Keys of cursors are as in the query of a URL, those of subscriptions are not.
    subscription = unquote_plus(name)
    now, earlier, later = (_look(topic, name, answers) for answers in looks)
    assert now is not None
    statistics = looks.now.stats
    stats = statistics.subscriptions.get(subscription) if statistics else None
    is_durable = stats is None or stats.is_durable is not False
    return Judgement(
        topic=topic,
        subscription=subscription,
        owner=(statistics.owner_broker if statistics else None) or "",
        look=now,
        stats=stats,
        comes_back=comes_back(now, settings, earlier=earlier, later=later) if is_durable else None,
        cut=cut_now(now, settings),
        if_unloaded=cut_on_close(now, settings),
        limits=limit_uses(now, stats, settings) if is_durable else (),
        remarks=list(_remarks(now, stats, is_system=statistics is not None and stats is None)),
        assumed=settings.assumed,
    )


def _look(topic: str, name: str, answers: TopicAnswers | None) -> CursorLook | None:
    cursor = answers.internals.cursors.get(name) if answers else None
    if answers is None or cursor is None:
        return None
    counts = answers.internals.entry_counts()
    stats = answers.stats.subscriptions.get(unquote_plus(name)) if answers.stats else None
    return _cursor_look(cursor, counts, stats, answers, what=f"{topic}, {name}")


def _cursor_look(
    cursor: CursorInternals,
    counts: Mapping[int, int],
    stats: SubscriptionStats | None,
    answers: TopicAnswers,
    *,
    what: str,
) -> CursorLook:
    mark_delete, deleted = acked(cursor, counts, what=what)
    return CursorLook(
        counts,
        mark_delete,
        deleted,
        state=cursor.state,
        cursor_ledger=cursor.cursor_ledger,
        last_entry=cursor.cursor_ledger_last_entry,
        laid_out_bytes=stats.non_contiguous_deleted_messages_ranges_serialized_size if stats else None,
        is_mark_delete_loaded=stats is not None and stats.last_mark_delete_advanced_timestamp == 0,
        properties=cursor.properties,
        asked_s=answers.asked_s,
        answered_s=answers.answered_s,
    )


def _remarks(look: CursorLook, stats: SubscriptionStats | None, *, is_system: bool) -> Iterator[str]:
    if stats is not None and stats.is_durable is False:
        yield "not durable: nothing of it outlives its broker, and its reader says where to go on"
        return
    if is_system:
        yield "no subscription, but a cursor of the broker itself"
    if not look.has_written:
        yield f"state {look.state}: nothing is known to be written since the topic was loaded, or a write failed"
    if (batch := _messages_per_entry(stats)) is not None and batch > 1:
        yield f"about {batch} messages an entry; what is acked of partly acked batches is not told and comes on top"


def _messages_per_entry(stats: SubscriptionStats | None) -> int | None:
    """Return the largest mean of a consumer, None if no consumer says one."""
    return max((each.avg_messages_per_entry for each in stats.consumers), default=0) or None if stats else None
