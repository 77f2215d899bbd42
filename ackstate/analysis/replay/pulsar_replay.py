"""A replay with the timing of an Apache Pulsar broker, which the policies with `Timing.PULSAR` have.

Each ACK command asks the limiter of its cursor. If that refuses, the cursor is dirty, and asks again at the next tick
of one timer for all cursors, which ticks at a fixed rate.

The first write of an opened cursor waits for a new ledger. It then has the ranges and batches of that moment, but the
mark-delete position of the last command that was granted a write: entries that the position has passed since are in
neither, and not durable.

Three things decide on batches, if the trace names them (`EventKind.BATCH`): individual acks of only some messages of
batches ask for nothing as long as no entry is acked above the mark-delete position, a record holds a limited number of
partly acked batches, and the mark-delete position stays before such a batch.

The model does not cover two things: commands that ack nothing new also ask the limiter; and one of 70 recorded cursors
began a second ledger, because its first write was done before its first ledger was registered.

Source: ``ManagedCursorImpl`` (``asyncDelete``, ``flush``, ``createNewMetadataLedger``) and
``ManagedLedgerFactoryImpl.flushCursors`` of Apache Pulsar 4.2, and ``SmoothBursty`` of Guava.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, final

import numpy as np
from pyroaring import BitMap

from ackstate.analysis.replay.cursor_replay import acks_of, cut_by_cause, empty_store, forget_old_records
from ackstate.analysis.replay.curves import Epochs
from ackstate.analysis.trace.events import EventKind
from ackstate.cursor import ManagedCursor
from ackstate.cursor.persist import MarkDeleteRateLimiter
from ackstate.cursor.results import PersistTarget
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore
from ackstate.wire.pulsar import decode_position_info, encode_position_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ackstate.analysis.replay.acked import EventChunk, Int64s, NewlyAckedRuns
    from ackstate.analysis.replay.curves import Piece
    from ackstate.analysis.replay.policy import Policy
    from ackstate.cursor.results import PersistResult

_NAME = "replayed"
_WORD = 2**64 - 1


class _Command(NamedTuple):
    """An ACK command that acks something new."""

    ts_ms: int  # Its time
    number: int  # Its number, from 0
    end: int  # The end of its events in their piece, not included; 0 if that was an earlier piece
    is_parts: bool  # Whether it acks nothing but parts of batches, one by one
    is_cumulative: bool  # Whether it is a cumulative ack


class _Due(NamedTuple):
    """What a broker has to do next: decide on a command, or flush, or, without either, write to its new ledger."""

    ts_ms: int
    command: _Command | None = None
    is_flush: bool = False


@final
class BrokerPace:
    """When a broker writes one open cursor. Times never fall; several commands may have the same."""

    def __init__(self, policy: Policy, *, opened_ms: int) -> None:
        rate = policy.cursor.mark_delete_rate_limit
        self._flush_ms = max(policy.cursor.flush_interval_ms, 1)
        self._phase_ms = policy.flush_phase_ms
        self._creation_ms = policy.ledger_creation_ms
        self._limiter = MarkDeleteRateLimiter(rate, now_ms=opened_ms) if rate > 0 else None
        self._permit_ms = opened_ms
        self._asked: list[_Command] = []  # The limiter has not decided on them, or refuses them.
        self._dirty_ms: int | None = None  # The first refusal that no flush has followed.
        self._has_ledger = False
        self.ready_ms: int | None = None
        """When the ledger is there, for which the first write waits."""

    def ask(self, commands: Iterable[_Command]) -> None:
        """Add commands, in the order of their times; the events of those before them are given."""
        self._asked = [each._replace(end=0) for each in self._asked]
        self._asked += commands

    def next_due(self) -> _Due | None:
        """Return what is to be done next, given the commands so far."""
        refused = self._refused_count
        found = [_Due(self._asked[refused].ts_ms, self._asked[refused])] if refused < len(self._asked) else []
        dirty_ms = self._asked[0].ts_ms if self._dirty_ms is None and refused else self._dirty_ms
        if dirty_ms is not None:
            since_ms = max(dirty_ms, self._permit_ms) - self._phase_ms
            tick_ms = -(-since_ms // self._flush_ms) * self._flush_ms + self._phase_ms
            found.append(_Due(tick_ms, is_flush=True))
        if self.ready_ms is not None:
            found.append(_Due(self.ready_ms))
        return min(found, key=lambda due: due.ts_ms, default=None)

    def decide(self, due: _Due, *, is_needed: bool) -> bool:
        """Do what is due, and return whether a write is granted: at once or, if `ready_ms` is set, then."""
        if due.command is None and not due.is_flush:
            self.ready_ms = None
            return True
        refused = self._refused_count
        if due.is_flush:
            self._dirty_ms = None
        elif self._dirty_ms is None and refused:
            self._dirty_ms = self._asked[0].ts_ms
        del self._asked[: refused + (not due.is_flush)]
        if not is_needed:
            return False
        if self._limiter is not None:
            self._limiter.try_acquire(due.ts_ms)
            self._permit_ms = self._limiter.next_permit_ms
        if not self._has_ledger:
            self._has_ledger = True
            self.ready_ms = due.ts_ms + self._creation_ms if self._creation_ms else None
        return True

    def failed(self, at_ms: int) -> None:
        """Note that the write could not be done: the next flush tries again."""
        self._dirty_ms = at_ms + 1

    def reset(self) -> None:
        """Note that the cursor was reset: nothing is asked or dirty."""
        self._asked.clear()
        self._dirty_ms = None

    @property
    def _refused_count(self) -> int:
        return bisect_left(self._asked, self._permit_ms, key=lambda command: command.ts_ms)


@final
class PulsarReplay:
    """Replays a subscription under a policy with the timing of Pulsar; methods as in `CursorReplay`."""

    kind: ClassVar[Literal["with a cursor"]] = "with a cursor"

    def __init__(self, policy: Policy, log: Mapping[int, int], *, opened_ms: int) -> None:
        self._policy = policy
        self._config = config = policy.cursor
        if not config.batch_index_acks:
            # Followed, so that the last ack of a batch acks its entry, and never written.
            self._config = replace(config, batch_index_acks=True, batch_count_max=0)
        self._store = empty_store(policy)
        self._ledgers = LedgerMap.from_counts(log or {0: 0})
        # Of the batches that the trace has named so far: ledger id -> first messages, rising, and position -> end.
        self._firsts: dict[int, list[int]] = {}
        self._ends: dict[Position, int] = {}
        self._numbered = 0  # commands so far
        self._open(opened_ms)

    def _open(self, now_ms: int) -> None:
        self._cursor = ManagedCursor.open(
            self._store, topic=_NAME, subscription=_NAME, ledgers=self._ledgers,
            config=self._config, now_ms=now_ms,
        )  # fmt: skip
        self._pace = BrokerPace(self._policy, opened_ms=now_ms)
        self._granted = self._cursor.mark_delete_position
        # Commands of the last millisecond of a piece, with their acks: not given to the cursor yet.
        self._held: deque[tuple[_Command, Mapping[int, BitMap]]] = deque()
        # While the first write waits: the batch at the mark-delete position, with the words that it had.
        self._passed: dict[Position, tuple[int, ...]] = {}
        # The messages of partly acked batches that are left after all events so far, which the cursor may not have yet.
        self._left = {position: self._unacked(position) for position in self._cursor.view.batch}

    def take(self, piece: Piece, *, until_ms: int) -> Epochs:
        events, news = piece.events, piece.news
        self._learn_batches(events)
        commands = self._commands(events, news)
        self._pace.ask(commands)
        rows: list[tuple[int, ...]] = []
        given = 0

        def give(end: int, now_ms: int) -> None:
            """Give the cursor the acks before an event: command by command while the first write waits."""
            nonlocal given
            for each in commands if self._pace.ready_ms is not None else ():
                if given < each.end <= end:
                    self._give(news.part(given, each.end).bitmaps(), now_ms, is_cumulative=each.is_cumulative)
                    given = each.end
            if end > given:
                self._give(news.part(given, end).bitmaps(), now_ms, is_cumulative=False)
                given = end

        while (due := self._pace.next_due()) is not None and due.ts_ms < until_ms:
            ended = int(np.searchsorted(events.ts_ms, due.ts_ms, "right"))
            self._give_held(due.ts_ms, until=self._numbered if due.command is None else due.command.number + 1)
            give(ended if due.command is None else due.command.end, due.ts_ms)
            # A row holds for the end of its millisecond.
            later = sum(sum(map(len, each.values())) for _, each in self._held)
            rows += self._step(due, int(piece.acked[ended] - piece.acked[given]) + later)
        # What is due in the last millisecond is not decided yet: its commands stay apart.
        last = int(np.searchsorted(events.ts_ms, until_ms, "left"))
        waiting = (each.number for each, _ in self._held if each.ts_ms >= until_ms)
        self._give_held(until_ms, until=next(waiting, self._numbered))
        give(last, until_ms)
        for each in commands:
            if each.end > last:
                self._held.append((each, news.part(given, each.end).bitmaps()))
                given = each.end
        return Epochs.of(rows)

    def _give_held(self, now_ms: int, *, until: int) -> None:
        """Give the cursor the acks of commands of earlier pieces, up to a number, not included."""
        while self._held and self._held[0][0].number < until:
            command, acked = self._held.popleft()
            self._give(acked, now_ms, is_cumulative=command.is_cumulative)

    def _give(self, acked: Mapping[int, BitMap], now_ms: int, *, is_cumulative: bool) -> None:
        before = dict(self._cursor.view.batch) if self._pace.ready_ms is not None else {}
        self._ack(acked, now_ms=now_ms)
        if before and is_cumulative:
            self._keep_passed(before)

    def reset(self, acked: Mapping[int, BitMap], mark_delete: Position, *, now_ms: int) -> Epochs:
        self._held.clear()
        result = self._cursor.reset(self._ledgers.next_valid(mark_delete), now_ms=now_ms)
        self._ack(acked, now_ms=now_ms)
        if self._cursor.view.is_dirty:
            with suppress(StoreError):
                result = self._cursor.persist(now_ms=now_ms)
        self._pace.reset()
        return Epochs.of([self._row(now_ms, result)])

    def restart(self, *, now_ms: int) -> dict[int, BitMap]:
        self._open(now_ms)
        acked = acks_of(self._cursor)
        for position, left in self._left.items():
            messages = BitMap(range(position.entry_id, self._ends[position]))
            acked[position.ledger_id] = acked.get(position.ledger_id, BitMap()) | (messages - left)
        return acked

    def _step(self, due: _Due, later: int) -> Iterator[tuple[int, ...]]:
        """Do what is due, and yield a row if something is written; later acks of the millisecond are not in it."""
        if not self._pace.decide(due, is_needed=self._is_needed(due)):
            return
        passed = 0
        if due.command is not None or due.is_flush:
            self._granted = self._cursor.mark_delete_position
            if self._pace.ready_ms is not None:
                return
        else:
            passed = self._ledgers.count_between(self._granted, self._cursor.mark_delete_position)
        try:
            result = self._cursor.persist(now_ms=due.ts_ms)
        except StoreError:
            self._pace.failed(due.ts_ms)
            return
        if result.route is PersistTarget.NOTHING:
            return
        written = self._cursor.view.last_journal_entry
        if passed and written is not None and isinstance(self._store, MemoryStore):
            (record,) = self._store.ledgers.read(*written, written.entry_id + 1)
            info = replace(decode_position_info(record), position=self._granted)
            for position, words in self._passed.items():
                info.batch.ack(position, words)
                left = sum((word & _WORD).bit_count() for word in words)
                passed -= self._ends[position] - position.entry_id - left
            # The broker has written another record than the cursor.
            entries = self._store.disk.ledger(written.ledger_id).entries
            entries[-1] = encode_position_info(info, form=self._config.range_form)
            later += passed
        yield self._row(due.ts_ms, result, later)

    def _keep_passed(self, before: Mapping[Position, tuple[int, ...]]) -> None:
        """Note, after a cumulative ack, the batch before it: a broker removes only the words of those below that."""
        ledger_id, entry_id = self._cursor.mark_delete_position
        self._passed = {
            position: words
            for position, words in {**self._passed, **before}.items()
            if (position.ledger_id, self._ends[position]) == (ledger_id, entry_id + 1)
        }

    def _is_needed(self, due: _Due) -> bool:
        """Return whether the broker asks its limiter: not for lone parts of batches (Apache Pulsar, issue 26498)."""
        if not self._ends or self._cursor.deleted:
            return True
        if due.command is not None:
            return not due.command.is_parts
        return self._cursor.mark_delete_position != self._cursor.persisted_mark_delete_position

    def _row(self, at_ms: int, result: PersistResult, later: int = 0) -> tuple[int, ...]:
        forget_old_records(self._store, self._cursor)
        stats = self._cursor.stats()
        cut_by_ranges, *others = cut_by_cause(self._cursor, result, self._policy)
        limit = self._config.batch_count_max
        excluded = [] if limit is None or not self._ends else list(self._cursor.view.batch)[limit:]
        in_batches = sum(self._ends[each] - each.entry_id - len(self._unacked(each)) for each in excluded)
        return (
            at_ms, stats.redelivery_if_crashed + in_batches + later, 0, cut_by_ranges + in_batches, *others,
            result.bytes_written, stats.journal_bytes,
        )  # fmt: skip

    def _commands(self, events: EventChunk, news: NewlyAckedRuns) -> list[_Command]:
        """Return the commands among some events that ack something new."""
        begins_command = np.append(True, events.ts_ms[1:] != events.ts_ms[:-1]) | (events.kind == EventKind.COMMAND)
        begins = np.flatnonzero(begins_command[: len(events.ts_ms)])
        numbers = np.searchsorted(begins, news.event, "right") - 1
        parts = self._parts_alone(events, news, numbers) if self._ends else set()
        cumulative = set(numbers[events.kind[news.event] == EventKind.MARK_DELETE].tolist())
        ends = np.append(begins[1:], len(events.ts_ms))
        distinct = np.unique(numbers)
        columns = (events.ts_ms[begins[distinct]].tolist(), ends[distinct].tolist(), distinct.tolist())
        found = [
            _Command(ts_ms, self._numbered + at, end, number in parts, number in cumulative)
            for at, (ts_ms, end, number) in enumerate(zip(*columns, strict=True))
        ]
        self._numbered += len(found)
        return found

    def _learn_batches(self, events: EventChunk) -> None:
        for index in np.flatnonzero(events.kind == EventKind.BATCH).tolist():
            position = Position(int(events.ledger_id[index]), int(events.first_entry[index]))
            if position not in self._ends:
                insort(self._firsts.setdefault(position.ledger_id, []), position.entry_id)
                self._ends[position] = int(events.last_entry[index]) + 1

    def _batches_in(self, ledger_id: int, messages: BitMap) -> Iterator[tuple[Position, BitMap]]:
        """Yield the named batches of which there are some messages, and these."""
        firsts = self._firsts.get(ledger_id)
        if not firsts or not messages:
            return
        begin = max(bisect_right(firsts, messages.min()) - 1, 0)
        for first in firsts[begin : bisect_right(firsts, messages.max())]:
            position = Position(ledger_id, first)
            if part := messages & BitMap(range(first, self._ends[position])):
                yield position, part

    def _parts_alone(self, events: EventChunk, news: NewlyAckedRuns, numbers: Int64s) -> set[int]:
        """Return the commands, by number, that ack nothing but parts of batches, one by one."""
        others = set()
        for number, event, *run in zip(numbers.tolist(), *(column.tolist() for column in news), strict=True):
            others_count = run[2] - run[1]
            for position, part in self._batches_in(run[0], BitMap(range(*run[1:]))):
                left = self._left.get(position) or BitMap(range(position.entry_id, self._ends[position]))
                self._left[position] = left = left - part
                others_count -= len(part) if left else 0
                if not left:
                    del self._left[position]
            if others_count or events.kind[event] == EventKind.MARK_DELETE:
                others.add(number)
        return set(numbers.tolist()) - others

    def _ack(self, acked: Mapping[int, BitMap], *, now_ms: int) -> None:
        """Give acks to the cursor: parts of batches as such, and all else as entries."""
        whole, parts = dict(acked), []
        for ledger_id, messages in acked.items():
            for position, part in self._batches_in(ledger_id, messages):
                left = self._unacked(position) - part
                if left and not self._cursor.is_acked(position):
                    whole[ledger_id] = whole[ledger_id] - part
                    parts.append((position, left))
                elif not left:
                    whole[ledger_id] = whole[ledger_id] | BitMap(range(position.entry_id, self._ends[position]))
        self._cursor.ack_bitmaps(whole, now_ms=now_ms)
        for position, left in parts:
            mask = sum(1 << (message - position.entry_id) for message in left)
            words = [mask >> shift & _WORD for shift in range(0, mask.bit_length(), 64)]
            self._cursor.ack_batch(position, [word - (word >> 63 << 64) for word in words], now_ms=now_ms)

    def _unacked(self, position: Position) -> BitMap:
        """Return the messages of a batch that the cursor has not acked, unless it has acked the whole entry."""
        words = self._cursor.view.batch.get(position)
        messages = range(position.entry_id, self._ends[position])
        if words is None:
            return BitMap(messages)
        mask = sum((word & _WORD) << (64 * number) for number, word in enumerate(words))
        return BitMap([message for message in messages if mask >> (message - position.entry_id) & 1])
