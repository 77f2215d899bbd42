"""Recovers the cursors of the demo's broker and compares each with its recording: sets, without counters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ackstate.analysis.trace.entry_set import EntrySet, SubscriptionHistory, histories
from ackstate.cursor.cursor import ManagedCursor
from ackstate.topic.log import MessageLog
from ackstate.topic_name import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate.analysis.trace.recorder import Frame
    from ackstate.analysis.trace.recording import Recording
    from ackstate.cursor.results import RecoveryReport
    from ackstate.stores.base import Store


@dataclass(frozen=True, slots=True)
class RecoveredCursor:
    """One recovered cursor, compared with its recording."""

    topic: str
    subscription: str
    report: RecoveryReport  # The recovery report
    mark_delete: str
    ranges: str  # Its individually deleted ranges, as Pulsar writes them
    acked: int  # Acks that had been accepted
    durable: int  # Entries that are acked in the recovered cursor
    observed: int  # Accepted acks that it lacks: these messages are redelivered
    lost: int  # Acks that it lacks although their persist had completed. Must be 0
    invented: int  # Entries that are acked in it, but were never acked. Must be 0

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        plain = asdict(self)
        plain["report"] |= {
            "source": self.report.source.value,
            "mark_delete": str(self.report.mark_delete),
            "repair": self.report.repair.value,
        }
        return plain


def recover(
    store: Store, frames: Iterable[Frame], *, recording: Recording | None = None, now_ms: int
) -> list[RecoveredCursor]:
    """Recover every cursor of a store and compare each with its recording, to which the recovery may be added."""
    recorded = histories(frames)
    results = []
    for topic, subscription in _cursors(store):
        ledgers = MessageLog.open(store, topic=topic).ledgers
        cursor = ManagedCursor.open(store, topic=topic, subscription=subscription, ledgers=ledgers, now_ms=now_ms)
        history = recorded.get((topic, subscription), SubscriptionHistory())
        durable = EntrySet.of((ledger_id, first, last + 1) for ledger_id, first, last in cursor.view.acked_runs())
        results.append(
            RecoveredCursor(
                topic,
                subscription,
                cursor.recovery_report,
                mark_delete=str(cursor.mark_delete_position),
                ranges=str(cursor.deleted),
                acked=len(history.accepted),
                durable=len(durable),
                observed=len(history.accepted - durable),
                lost=len(history.promised - durable),
                invented=len(durable - history.accepted),
            )
        )
        if recording is not None:
            recording.follow(cursor, topic=topic, subscription=subscription, now_ms=now_ms)
        cursor.close(now_ms=now_ms)
    return results


def _cursors(store: Store) -> Iterator[tuple[str, str]]:
    for topic in store.metadata.children(ROOT):
        for subscription in store.metadata.children(f"{ROOT}/{topic}"):
            yield unquote(topic), unquote(subscription)
