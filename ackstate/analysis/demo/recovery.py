"""Recovers the cursors of the demo's broker and compares each with its recording: sets, without counters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ackstate.analysis.trace.entry_set import EntrySet, SubscriptionHistory, histories
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.cursor.cursor import ManagedCursor
from ackstate.topic.log import MessageLog
from ackstate.topic_name import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ackstate.analysis.trace.recorder import Frame, Recorder
    from ackstate.cursor.results import RecoveryReport
    from ackstate.ledger_map import LedgerMap
    from ackstate.stores.base import Store

# After these events a subscription was recovered, or its crash is already recorded.
_ENDINGS = frozenset({EventKind.CRASH, EventKind.RECOVER, EventKind.REDELIVER})


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
    store: Store, frames: Iterable[Frame], *, recorder: Recorder | None = None, now_ms: int
) -> list[RecoveredCursor]:
    """Recover every cursor of a store and compare each with its recording."""
    recorded = histories(frames)
    if recorder is not None:
        _note_unseen_crash(recorder, recorded)
    results = []
    for topic, subscription in _cursors(store):
        ledgers = MessageLog.open(store, topic=topic).ledgers
        cursor = ManagedCursor.open(store, topic=topic, subscription=subscription, ledgers=ledgers, now_ms=now_ms)
        history = recorded.get((topic, subscription), SubscriptionHistory())
        durable = _acked(cursor, ledgers)
        again = history.accepted - durable
        results.append(
            RecoveredCursor(
                topic,
                subscription,
                cursor.recovery_report,
                mark_delete=str(cursor.mark_delete_position),
                ranges=str(cursor.deleted),
                acked=len(history.accepted),
                durable=len(durable),
                observed=len(again),
                lost=len(history.promised - durable),
                invented=len(durable - history.accepted),
            )
        )
        if recorder is not None:
            ts_ms = max(now_ms, history.last_ts_ms)
            events = [Event(ts_ms, EventKind.RECOVER)]
            events += [Event(ts_ms, EventKind.REDELIVER, ledger, first, end - 1) for ledger, first, end in again.runs()]
            recorder.record(topic, subscription, events)
        cursor.close(now_ms=now_ms)
    return results


def _note_unseen_crash(recorder: Recorder, recorded: Mapping[tuple[str, str], SubscriptionHistory]) -> None:
    """Record the crash of a broker if it was not recorded: the recording ends with acks that no persist covers."""
    open_ended = {key: history for key, history in recorded.items() if history.last_kind not in _ENDINGS}
    if any(len(history.accepted - history.promised) for history in open_ended.values()):
        for (topic, subscription), history in open_ended.items():
            recorder.record(topic, subscription, [Event(history.last_ts_ms, EventKind.CRASH)])


def _cursors(store: Store) -> Iterator[tuple[str, str]]:
    for topic in store.metadata.children(ROOT):
        for subscription in store.metadata.children(f"{ROOT}/{topic}"):
            yield unquote(topic), unquote(subscription)


def _acked(cursor: ManagedCursor, ledgers: LedgerMap) -> EntrySet:
    """Return every entry of the log that the cursor will not deliver again."""
    acked = EntrySet()
    mark_delete = cursor.mark_delete_position
    for ledger_id, count in ledgers.counts().items():
        if ledger_id < mark_delete.ledger_id:
            acked.add_run(ledger_id, 0, count)
        elif ledger_id == mark_delete.ledger_id:
            acked.add_run(ledger_id, 0, mark_delete.entry_id + 1)
    for ledger_id, first, end in cursor.deleted.runs():
        acked.add_run(ledger_id, first, end)
    return acked
