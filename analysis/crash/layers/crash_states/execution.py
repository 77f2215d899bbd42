"""Carries a workload out, and notes at each moment what a power cut must leave."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.flaky_store import FlakyStore
from ackstate.analysis.crash.layers.crash_states.moments import Moment
from ackstate.analysis.crash.layers.crash_states.workload import (
    BATCH_SIZE,
    NUMBERING,
    TOPIC,
    message_log,
    view_of,
)
from ackstate.analysis.crash.oracle import Oracle, State
from ackstate.analysis.crash.promises import PromiseBrokenError
from ackstate.analysis.crash.simulated_disk import ProcessKilledError
from ackstate.analysis.workloads.step import StepKind
from ackstate.cursor import ManagedCursor, persist_all
from ackstate.cursor.outcome import Route
from ackstate.cursor.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ackstate.analysis.crash.acked_set import AckedSet
    from ackstate.analysis.crash.layers.crash_states.workload import Workload
    from ackstate.analysis.crash.oracle import Expected
    from ackstate.analysis.workloads.step import Step
    from ackstate.cursor.outcome import PersistResult, Receipt
    from ackstate.cursor.store import Store

_STEP_MS = 10_000
_NEVER_MADE = State(NUMBERING.nothing, NUMBERING.nothing, names={}, is_new=True)
_COUNTED = {
    Route.DELTA: "deltas",
    Route.WHOLE: "whole_states",
    Route.SNAPSHOT: "snapshots",
    Route.METADATA: "metadata_states",
}


@dataclass(slots=True)
class _Known:
    """One cursor, and what is known of it from outside."""

    cursor: ManagedCursor | None = None
    oracle: Oracle = field(default_factory=lambda: Oracle(_NEVER_MADE))
    receipts: list[tuple[Receipt, AckedSet]] = field(default_factory=list)
    has_ledger: bool = False  # that was written in this life

    def accept(self, receipt: Receipt, acked: AckedSet) -> None:
        """Note an ack."""
        completed = NUMBERING.completed(self.oracle.expected.accepted | acked)
        self.oracle.asked(completed)
        self.oracle.accepted(completed)
        self.receipts.append((receipt, acked))
        self.look()

    def look(self) -> None:
        """Ask the cursor which receipts are durable, and what its gauge says."""
        cursor = self.cursor
        assert cursor is not None
        waiting = []
        for receipt, acked in self.receipts:
            if cursor.durable(receipt):
                self.oracle.durable(acked)
            else:
                waiting.append((receipt, acked))
        self.receipts = waiting
        self.oracle.gauged(cursor.redelivery_if_crashed)
        self.oracle.marked(NUMBERING.up_to(*cursor.persisted_mark_delete_position))


@final
class Execution:
    """A workload while it is carried out.

    Args:
        workload: What to do.
        open_store: Opens the store; every call opens the same storage.
        count_calls: Returns how many calls the storage has seen.
        kill: Makes the storage forget its owner, as if the process had died.
        kill_after: Makes it die after so many more calls, with `ProcessKilledError`; where it cannot, it does nothing.

    Attributes:
        moments: What is promised when; in order.
        step: The number of the step that is being done, from 1 on; 0 before the first.
        counts: What really happened, by name.
    """

    def __init__(
        self,
        workload: Workload,
        open_store: Callable[[], Store],
        *,
        count_calls: Callable[[], int],
        kill: Callable[[], None],
        kill_after: Callable[[int], None],
    ) -> None:
        self.moments: list[Moment] = []
        self.counts: Counter[str] = Counter({f"{workload.config.format.value.lower()}_workloads": 1})
        self._workload = workload
        self._open_store, self._count_calls = open_store, count_calls
        self._kill, self._kill_after = kill, kill_after
        self._known = {subscription: _Known() for subscription in workload.subscriptions}
        self.step = 0
        self._store: FlakyStore

    def run(self) -> None:
        """Carry the workload out. Whatever the store or a cursor raises escapes."""
        with self._noted():
            self._store = FlakyStore(self._open_store())
        self._open_cursors(self._workload.subscriptions)
        for step in self._workload.steps:
            self.step += 1
            self._do(step)

    @property
    def _now_ms(self) -> int:
        return self.step * _STEP_MS

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Note what is promised while something is done, and when it is over."""
        first, before = self._count_calls(), self._expected()
        yield
        last, after = self._count_calls(), self._expected()
        if last > first:
            either = {subscription: (before[subscription], after[subscription]) for subscription in before}
            self.moments.append(Moment(first + 1, last, self.step, either))
        only = {subscription: (expected,) for subscription, expected in after.items()}
        self.moments.append(Moment(last, last, self.step, only))

    def _expected(self) -> dict[str, Expected]:
        return {subscription: known.oracle.expected for subscription, known in self._known.items()}

    def _open_cursors(self, subscriptions: Sequence[str]) -> None:
        for subscription in subscriptions:
            with self._noted():
                self._open_cursor(subscription, self._known[subscription])

    def _open_cursor(self, subscription: str, known: _Known) -> None:
        """Open a cursor: what it knows is durable then, and what it does not know will not come back.

        Raises:
            PromiseBrokenError: It does not know what it must, or more than it may.
        """
        cursor = ManagedCursor.open(
            self._store,
            topic=TOPIC,
            subscription=subscription,
            ledgers=message_log(),
            config=self._workload.config,
            now_ms=self._now_ms,
        )
        view = view_of(cursor)
        for promise, found, entry_count in known.oracle.judge(view):
            text = f"{subscription}: {found}, when it was opened"
            raise PromiseBrokenError(promise, text, entry_count=entry_count)
        known.cursor, known.receipts, known.has_ledger = cursor, [], False
        known.oracle = Oracle(view._replace(is_new=False))
        known.look()

    def _do(self, step: Step) -> None:
        subscription = self._workload.subscriptions[step.cursor]
        known = self._known[subscription]
        match step.kind:
            case StepKind.REOPEN:
                self._close_cursor(known)
                self._open_cursors([subscription])
            case StepKind.REOPEN_STORE:
                for other in self._known.values():
                    self._close_cursor(other)
                with self._noted():
                    self._store.close()
                    self._store = FlakyStore(self._open_store())
                self._open_cursors(self._workload.subscriptions)
            case StepKind.KILL:
                # All at once: what was written and not yet reported may be found durable.
                self.counts["kills"] += 1
                with self._noted():
                    self._go_on_until_killed(step.amount)
                    self._start()
            case _:
                with self._noted():
                    self._ask(step, known)

    def _go_on_until_killed(self, call_count: int) -> None:
        """Persist, close and start again, and be killed anywhere in that, or after it."""
        cursors = [known.cursor for known in self._known.values() if known.cursor is not None]
        self._kill_after(call_count)
        try:
            for cursor in cursors:
                cursor.persist(now_ms=self._now_ms)
            for cursor in cursors:
                cursor.close(now_ms=self._now_ms)
            self._store.close()
            self._start()
        except ProcessKilledError:
            self.counts["kills_in_the_middle"] += 1
        self._kill()

    def _start(self) -> None:
        self._store = FlakyStore(self._open_store())
        for subscription, known in self._known.items():
            self._open_cursor(subscription, known)

    def _close_cursor(self, known: _Known) -> None:
        assert known.cursor is not None
        with self._noted():
            self._count(known, known.cursor.close(now_ms=self._now_ms))
            known.look()

    def _ask(self, step: Step, known: _Known) -> None:
        cursor, now_ms = known.cursor, self._now_ms
        assert cursor is not None
        match step.kind:
            case StepKind.ACK:
                ledger_id, _ = step.position
                entry_ids = step.entry_ids(NUMBERING.ledgers[ledger_id])
                receipt = cursor.ack_entries(ledger_id, entry_ids, now_ms=now_ms)
                known.accept(receipt, NUMBERING.runs((ledger_id, entry_id, entry_id + 1) for entry_id in entry_ids))
            case StepKind.ACK_BATCH:
                unacked = ~step.amount & (1 << BATCH_SIZE) - 1
                receipt = cursor.ack_batch(step.position, [unacked] if unacked else [], now_ms=now_ms)
                known.accept(receipt, NUMBERING.messages(*step.position, step.amount))
                self.counts["batches"] += 1
            case StepKind.MARK_DELETE:
                # It never goes back; with other steps left out it may be there already.
                if step.position >= cursor.mark_delete_position:
                    known.accept(cursor.mark_delete(step.position, now_ms=now_ms), NUMBERING.up_to(*step.position))
            case StepKind.PERSIST:
                self._count(known, cursor.persist(now_ms=now_ms))
                known.look()
            case StepKind.FALL_BACK:
                self._fall_back(known, cursor)
            case StepKind.PERSIST_ALL:
                self._persist_all()
            case StepKind.RESET:
                self._reset(step, known, cursor)
            case StepKind.PROPERTIES:
                cursor.set_cursor_properties({"number": str(step.amount)})
                known.oracle.named({"number": str(step.amount)})
                self.counts["properties"] += 1

    def _count(self, known: _Known, result: PersistResult | None) -> None:
        """Count what a persist did."""
        route = Route.NOTHING if result is None else result.route
        if route is not Route.NOTHING:
            self.counts[_COUNTED[route]] += 1
            # A new ledger though the one before could have been gone on with.
            self.counts["journal_compactions"] += known.has_ledger and route is Route.SNAPSHOT
            known.has_ledger = route is not Route.METADATA

    def _fall_back(self, known: _Known, cursor: ManagedCursor) -> None:
        # Where less may be left in the metadata store than is durable, it is refused.
        with self._store.refusing_appends(), suppress(StoreError):
            result = cursor.persist(now_ms=self._now_ms)
            self._count(known, result)
            self.counts["fallbacks"] += result.route is Route.METADATA
        known.look()

    def _persist_all(self) -> None:
        cursors = [known.cursor for known in self._known.values() if known.cursor is not None]
        appended = 0
        for known, outcome in zip(self._known.values(), persist_all(cursors, now_ms=self._now_ms), strict=True):
            if isinstance(outcome, Exception):
                raise outcome
            appended += outcome.route in {Route.DELTA, Route.WHOLE}
            self._count(known, outcome)
            known.look()
        self.counts["group_commits"] += appended > 1

    def _reset(self, step: Step, known: _Known, cursor: ManagedCursor) -> None:
        self._count(known, cursor.reset(step.position, now_ms=self._now_ms))
        self.counts["resets"] += 1
        ledger_id, entry_id = step.position
        marked = NUMBERING.up_to(ledger_id, entry_id - 1)
        known.oracle.resetting(State(marked, marked))
        known.oracle.reset()
        known.receipts = []
        known.look()
