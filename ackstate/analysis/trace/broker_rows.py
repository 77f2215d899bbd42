"""Turns the events of recorded brokers into rows of a trace; the unit is entries.

A batch counts as acked when all of its messages are. A persist begins where the recording shows that the broker began a
record of the cursor's ledger, and ends where the record is seen to be written. A broker that was killed becomes a
crash; the state with which its cursor was opened again shows the redelivery.

A kill takes the lines of the last flush with it, and files may be missing: an entry that is delivered or acked was
published, so what no file says is published where the recording first names it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.trace.broker_recording import NO_RECORD, BrokerLife, LedgerEntries, RecordId
from ackstate.analysis.trace.entry_set import EntrySet
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.rows import ROW_SCHEMA
from ackstate.cursor.config import cursor_settings
from ackstate.deleted_ranges import DeletedRanges
from ackstate.position import Position
from ackstate.pulsar_conf import BATCH_INDEX_ACKS
from ackstate.wire.pulsar import LimitRule, Limits, RangeForm
from ackstate.wire.pulsar.ranges import limit_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ackstate.analysis.trace.broker_recording import BrokerEvent
    from ackstate.analysis.trace.chunks import Int64s

_RANGES_MAX = 10_000  # the default of Pulsar
_ROWS_AT_ONCE = 50_000
_RELEASE = "pulsarVersion"  # beside the settings; missing in recordings of earlier interceptors
_WORD_BITS = 64


@final
class BrokerRows:
    """Converts events, and counts the events that a recording lacks."""

    def __init__(self, published: Mapping[str, EntrySet]) -> None:
        # The entries of each topic that were published, by the whole recording.
        self.published = defaultdict(EntrySet, published)
        self.dropped = 0  # events that the recorders dropped
        self.transactions = 0  # ACK commands of transactions, which are left out
        self._published_ms: dict[str, int] = {}
        self._topics: dict[str, dict[int, int]] = defaultdict(dict)  # ledger -> last entry known
        self._followed: dict[tuple[str, str], _FollowedCursor] = {}
        self._consumers: dict[str, int] = {}
        self._heard_ms: dict[str, int] = {}  # The time of the last line of each process.

    def tables(self, events: Iterable[BrokerEvent]) -> Iterator[tuple[Path, pa.Table, Int64s]]:
        """Yield tables with columns as `ROW_SCHEMA`, the file of their rows, and the line of each row."""
        waiting: list[tuple[tuple[Path, int], dict[str, Any]]] = []
        for event in events:
            for row in self._rows(event):
                waiting.append((event.place, row))
                if len(waiting) >= _ROWS_AT_ONCE:
                    yield from _tables(waiting)
                    waiting = []
        yield from _tables(waiting)

    def _rows(self, event: BrokerEvent) -> Iterator[dict[str, Any]]:
        subject = event.subject
        self._heard_ms[event.life.name] = event.ts_ms
        if subject is None:
            self.dropped += event.count
            for (topic, subscription), each in self._followed.items():
                if event.kind == "end":
                    each.end(event.life)
                for row in each.crash_before(event) if event.kind == "start" else ():
                    yield {"topic": topic, "subscription": subscription, **row}
            return
        ledgers = self._topics[subject.topic]
        for run in event.entries:
            ledgers[run.ledger_id] = max(run.last, ledgers.get(run.ledger_id, -1))
        if event.kind == "publish":
            yield from (self._publish(subject.topic, event.ts_ms, _named(run)) for run in event.entries)
            return
        key = subject.topic, subject.subscription
        if key not in self._followed:
            self._followed[key] = _FollowedCursor(ledgers, self._heard_ms)
        followed = self._followed[key]
        self.transactions += event.ack_type == "Transaction"
        consumer = self._consumers.setdefault(subject.consumer, len(self._consumers))
        for row in followed.follow(event, consumer):
            if "ledger_id" in row:
                yield from self._published_before(subject.topic, row)
            yield {"topic": subject.topic, "subscription": subject.subscription, **row}

    def _published_before(self, topic: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the publishing of a row's entries of which the recording says nothing."""
        named = EntrySet()
        named.add_run(row["ledger_id"], row["first_entry"], row["last_entry"] + 1)
        for run in (named - self.published[topic]).runs():
            self.published[topic].add_run(*run)
            yield self._publish(topic, row["ts_ms"], _entries(run))

    def _publish(self, topic: str, ts_ms: int, entries: dict[str, int]) -> dict[str, Any]:
        # Lines of a process that has lost the topic may come late.
        ts_ms = self._published_ms[topic] = max(ts_ms, self._published_ms.get(topic, 0))
        return {"topic": topic, "subscription": "", "ts_ms": ts_ms, "kind": "publish", **entries}


class _Contents(NamedTuple):
    """The contents of a record."""

    mark_delete: Position
    ranges: DeletedRanges


@final
class _FollowedCursor:
    """One subscription."""

    def __init__(self, ledgers: dict[int, int], heard_ms: dict[str, int]) -> None:
        self._ledgers = ledgers
        self._heard_ms = heard_ms
        self._acked = EntrySet()
        self._partly: dict[Position, int] = {}
        self._mark_delete = Position(0, -1)
        self._deleted = DeletedRanges()  # acked above the mark-delete position
        # The contents of the latest record, and those of the latest one that is written.
        self._latest = self._durable = _Contents(self._mark_delete, DeletedRanges())
        self._life: BrokerLife | None = None
        self._last_ms = 0
        self._record = NO_RECORD  # the latest
        self._seen: tuple[RecordId, Position | None] = NO_RECORD, None  # the latest written one, its position if known
        self._persist: tuple[int, RecordId] | None = None  # under way: its number, and the record
        self._persist_count = 0
        self._is_dirty = self._has_crashed = self._is_reset = False

    def follow(self, event: BrokerEvent, consumer: int) -> Iterator[dict[str, Any]]:
        """Yield the rows of an event, without topic and subscription."""
        for row in self._of_kind(event, consumer):
            self._last_ms = max(self._last_ms, event.ts_ms)
            yield {"ts_ms": self._last_ms, **row}

    def end(self, life: BrokerLife) -> None:
        """A process has closed its cursors in order."""
        if self._life == life:
            self._is_dirty = False

    def crash_before(self, start: BrokerEvent) -> Iterator[dict[str, Any]]:
        """Yield a crash if the process that had the cursor was replaced without an end."""
        life = self._life
        is_replaced = life is not None and life.broker == start.life.broker and life.name != start.life.name
        if is_replaced and self._is_dirty and not self._has_crashed:
            self._has_crashed, self._persist = True, None
            self._last_ms = self._died_ms()
            yield {"ts_ms": self._last_ms, "kind": "crash"}

    def _died_ms(self) -> int:
        """Return the time of the last line of the process that had the cursor: it writes one at each flush."""
        assert self._life is not None
        return max(self._last_ms, self._heard_ms[self._life.name])

    def _of_kind(self, event: BrokerEvent, consumer: int) -> Iterator[dict[str, Any]]:
        is_opened = event.kind == "consumer" and event.mark_delete is not None
        if self._has_crashed and not is_opened and event.kind in {"deliver", "ack", "look"}:
            # The line of the opening was dropped.
            self._has_crashed = False
            yield {"kind": "recover"}
        match event.kind:
            case "consumer" if is_opened and event.life != self._life:
                yield from self._opened(event)
            case "consumer" if is_opened and self._is_reset:
                yield from self._reset(event)
            case "seek":
                self._is_reset = True
            case "deliver":
                for run in event.entries:
                    # The broker may know acks of a batch from before the recording, or from before its restart.
                    if any(run.unacked_words):
                        self._partly[Position(run.ledger_id, run.first)] = _mask(run.unacked_words)
                    yield {"kind": "deliver", "number": consumer, **_named(run)}
            case "ack" if event.ack_type != "Transaction":
                # A look may have seen the record that this command began, before the command's line was written.
                if event.before < self._record <= event.after:
                    self._record = event.before
                yield from self._begun(event.before, event.life)
                yield from self._acks(event, consumer)
                yield from self._begun(event.after, event.life)
                yield from self._written(*self._seen)
            case "look":
                self._seen = event.written, event.mark_delete if event.written == event.after else None
                yield from self._begun(event.after, event.life)
                yield from self._written(*self._seen)
        self._life = event.life

    def _acks(self, event: BrokerEvent, consumer: int) -> Iterator[dict[str, Any]]:
        self._is_dirty = True
        if event.ack_type == "Cumulative":
            runs, kind = list(self._up_to(event)), "mark_delete"
        else:
            index_acks = event.life.config.get(BATCH_INDEX_ACKS, "true").lower() == "true"
            runs = [run for run in event.entries if self._is_whole(run, index_acks=index_acks)]
            kind = "ack"
        for run in runs:
            self._acked.add_run(run.ledger_id, run.first, run.last + 1)
            if kind == "ack":
                self._deleted.add_run(run.ledger_id, run.first, run.last + 1)
            yield {"kind": kind, "number": consumer, **_named(run)}
        self._advance(self._mark_delete)

    def _advance(self, mark_delete: Position) -> None:
        """Move the mark-delete position to an entry, and over the acked entries behind it."""
        while (run := self._deleted.run_containing(self._after(mark_delete))) is not None:
            mark_delete = Position(run.ledger_id, run.end - 1)
        self._mark_delete = mark_delete
        self._deleted.remove_at_most(mark_delete)

    def _after(self, position: Position) -> Position:
        """Return the position of the next entry."""
        if position.entry_id < self._ledgers.get(position.ledger_id, -1):
            return position._replace(entry_id=position.entry_id + 1)
        later = [ledger_id for ledger_id in self._ledgers if ledger_id > position.ledger_id]
        return Position(min(later), 0) if later else position._replace(entry_id=position.entry_id + 1)

    def _is_whole(self, run: LedgerEntries, *, index_acks: bool) -> bool:
        """Return whether an individual ack leaves no message of its entries."""
        position = Position(run.ledger_id, run.first)
        left = _mask(run.unacked_words)
        if left and index_acks:
            left &= self._partly.get(position, left)
            self._partly[position] = left
        if not left:
            self._partly.pop(position, None)
        return not left

    def _up_to(self, event: BrokerEvent) -> Iterator[LedgerEntries]:
        """Yield the entries of a cumulative ack, those of each ledger."""
        if not event.entries:
            return
        *_, run = event.entries
        last = Position(run.ledger_id, run.last - any(run.unacked_words))
        if last <= self._mark_delete:
            return
        for ledger_id in sorted(self._ledgers):
            if self._mark_delete.ledger_id <= ledger_id <= last.ledger_id:
                first = self._mark_delete.entry_id + 1 if ledger_id == self._mark_delete.ledger_id else 0
                end = last.entry_id if ledger_id == last.ledger_id else self._ledgers[ledger_id]
                if first <= end:
                    yield LedgerEntries(ledger_id, first, end)
        self._mark_delete = last

    def _begun(self, record: RecordId, life: BrokerLife) -> Iterator[dict[str, Any]]:
        """Yield the begin of a persist if a record was begun; it replaces one that was not seen to be written."""
        if record <= self._record:
            return
        self._record = record
        if self._persist is not None:
            yield {"kind": "persist_failed", "number": self._persist[0]}
        self._persist_count += 1
        self._persist = self._persist_count, record
        yield {"kind": "persist_begun", "number": self._persist_count}
        yield from self._excluded(life)

    def _excluded(self, life: BrokerLife) -> Iterator[dict[str, Any]]:
        """Yield the acked entries that the limit on ranges excludes from the record just begun."""
        form, most = _range_limit(life)
        kept = self._deleted
        if most is not None and (kept.range_count > most or (form is RangeForm.WORDS and len(kept) > most)):
            kept = limit_ranges(
                kept, form=form, limits=Limits(most, None, LimitRule.of_release(life.config.get(_RELEASE, "")))
            ).kept
        self._latest = _Contents(self._mark_delete, kept.copy())
        if kept is not self._deleted:
            cut = self._deleted.copy()
            cut.difference_update(kept)
            displaced = cut.copy()
            cut.difference_update(self._durable.ranges)
            displaced.difference_update(cut)
            for kind, ranges in (("cut_off", cut), ("displaced", displaced)):
                yield from ({"kind": kind, **_entries(run)} for run in ranges.runs())

    def _written(self, record: RecordId, mark_delete: Position | None = None) -> Iterator[dict[str, Any]]:
        """Yield the end of a persist if its record was written, with this mark-delete position if that is known."""
        if self._persist is None or record < self._persist[1]:
            return
        if mark_delete is not None and mark_delete < self._latest.mark_delete:
            yield from self._corrected(max(mark_delete, self._durable.mark_delete))
        yield {"kind": "persist_ended", "number": self._persist_count}
        self._persist, self._durable = None, self._latest

    def _corrected(self, mark_delete: Position) -> Iterator[dict[str, Any]]:
        """Yield that the persist under way has an older mark-delete position than the cursor had at its start.

        The first record of a ledger has the position before the ledger was created, and the ranges after that.
        """
        self._latest = self._latest._replace(mark_delete=mark_delete)
        left = self._acked - self._entries_up_to(mark_delete) - EntrySet.of(self._latest.ranges.runs())
        new = left - EntrySet.of(self._durable.ranges.runs())
        yield {"kind": "persist_failed", "number": self._persist_count}
        self._persist_count += 1
        yield {"kind": "persist_begun", "number": self._persist_count}
        for kind, entries in (("held_back", new), ("displaced", left - new)):
            yield from ({"kind": kind, **_entries(run)} for run in entries.runs())

    def _opened(self, event: BrokerEvent) -> Iterator[dict[str, Any]]:
        """Yield the events that the opening of the cursor by another process shows."""
        assert event.mark_delete is not None
        found = self._state(event)
        lost = len(self._acked - found)
        if self._life is not None and not self._has_crashed:
            if lost:
                yield {"ts_ms": self._died_ms(), "kind": "crash"}
            else:
                # Closed in order: everything was written.
                yield from self._written(self._record)
                self._persist_count += 1
                yield {"kind": "persist_begun", "number": self._persist_count}
                yield {"kind": "persist_ended", "number": self._persist_count}
        if self._life is not None or len(found):
            yield from self._moved("recover", found)
        self._take(found, event.mark_delete)

    def _reset(self, event: BrokerEvent) -> Iterator[dict[str, Any]]:
        """Yield the events that the state after a seek shows; the seek has made it durable."""
        assert event.mark_delete is not None
        found = self._state(event)
        yield from self._written(self._record)
        yield from self._moved("reset", found)
        self._take(found, event.mark_delete)

    def _moved(self, kind: str, found: EntrySet) -> Iterator[dict[str, Any]]:
        known = [{"kind": kind, **_entries(each)} for each in (found - self._acked).runs()]
        yield from known or [{"kind": kind}]
        yield from ({"kind": "redeliver", **_entries(each)} for each in (self._acked - found).runs())

    def _take(self, found: EntrySet, mark_delete: Position) -> None:
        self._acked, self._persist = found, None
        self._record, self._seen = NO_RECORD, (NO_RECORD, None)
        self._deleted = DeletedRanges()
        for ledger_id, first, end in found.runs():
            self._deleted.add_run(ledger_id, first, end)
        self._advance(mark_delete)
        self._latest = self._durable = _Contents(self._mark_delete, self._deleted.copy())
        self._is_dirty = self._has_crashed = self._is_reset = False
        self._partly.clear()

    def _state(self, event: BrokerEvent) -> EntrySet:
        assert event.mark_delete is not None
        found = self._entries_up_to(event.mark_delete)
        for lower, upper in event.deleted or ():
            for ledger_id in {lower.ledger_id, upper.ledger_id}:
                first = lower.entry_id + 1 if ledger_id == lower.ledger_id else 0
                end = upper.entry_id if ledger_id == upper.ledger_id else self._ledgers.get(ledger_id, -1)
                found.add_run(ledger_id, first, end + 1)
        return found

    def _entries_up_to(self, mark_delete: Position) -> EntrySet:
        """Return the known entries up to a mark-delete position, included."""
        found = EntrySet()
        for ledger_id, last in self._ledgers.items():
            if ledger_id <= mark_delete.ledger_id:
                end = mark_delete.entry_id if ledger_id == mark_delete.ledger_id else last
                found.add_run(ledger_id, 0, end + 1)
        return found


def _tables(waiting: list[tuple[tuple[Path, int], dict[str, Any]]]) -> Iterator[tuple[Path, pa.Table, Int64s]]:
    for path, rows in groupby(waiting, key=lambda each: each[0][0]):
        found = list(rows)
        numbers = np.array([line for (_, line), _ in found], np.int64)
        yield path, pa.Table.from_pylist([row for _, row in found], ROW_SCHEMA), numbers


@lru_cache(64)
def _limit_of(config: tuple[tuple[str, str], ...]) -> tuple[RangeForm, int | None]:
    settings = cursor_settings({key: value for key, value in config if key != _RELEASE})
    most = settings.get("range_count_max", _RANGES_MAX)
    return settings.get("range_form", RangeForm.WORDS), most


def _range_limit(life: BrokerLife) -> tuple[RangeForm, int | None]:
    """Return the form of ranges in a broker's records, and how many it writes."""
    try:
        return _limit_of(tuple(life.config.items()))
    except ValueError as error:
        raise TraceError(f"process {life.name} of {life.broker}: config: {error}") from None


def _mask(words: Iterable[int]) -> int:
    return sum((word % 2**_WORD_BITS) << (_WORD_BITS * number) for number, word in enumerate(words))


def _named(run: LedgerEntries) -> dict[str, int]:
    return {"ledger_id": run.ledger_id, "first_entry": run.first, "last_entry": run.last}


def _entries(run: tuple[int, int, int]) -> dict[str, int]:
    ledger_id, first, end = run
    return {"ledger_id": ledger_id, "first_entry": first, "last_entry": end - 1}
