"""Executes a workload, and records the promised state of a power cut at each moment."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ackstate.analysis.crash.oracle import Oracle, Promise
from ackstate.cursor.journal import delete_subscription
from ackstate.errors import CursorFencedError
from ackstate.stores.base import StoreError
from crash.crash_states.recovery import left_of
from crash.crash_states.workload import Moment, ProcessKilledError
from crash.flaky_store import FlakyStore
from crash.observed_cursor import NEVER_OPENED, TOPIC, ObservedCursor, open_together, persist_together, state_of
from crash.promises import PromiseBrokenError
from crash.steps import StepKind

_STEP_MS = 10_000


@dataclass(slots=True)
class _Known:
    """The state of one cursor as known from outside, and the cursor while it is open."""

    oracle: Oracle = field(default_factory=lambda: Oracle(NEVER_OPENED, knows_states=True))
    opened: ObservedCursor | None = None

    @property
    def observed(self):
        assert self.opened is not None
        return self.opened


class Execution:
    """A workload during its execution.

    Attributes:
        moments: The promises at each moment; in order.
        step: The number of the current step, from 1; 0 before the first.
        counts: The actual events, by name.
    """

    def __init__(self, workload, open_store, *, count_calls, kill, kill_after):
        self.moments = []
        self.counts = Counter({f"{workload.config.format.value.lower()}_workloads": 1})
        self._workload = workload
        self._open_store, self._count_calls = open_store, count_calls
        self._kill, self._kill_after = kill, kill_after
        self._known = {subscription: _Known() for subscription in workload.subscriptions}
        self.step = 0

    def run(self):
        with self._noted():
            self._store = FlakyStore(self._open_store())
        self._open_cursors(self._workload.subscriptions)
        for step in self._workload.steps:
            self.step += 1
            self._do(step)

    @property
    def _now_ms(self):
        return self.step * _STEP_MS

    @contextmanager
    def _noted(self):
        first, before = self._count_calls(), self._expected()
        yield
        last, after = self._count_calls(), self._expected()
        if last > first:
            either = {subscription: (before[subscription], after[subscription]) for subscription in before}
            self.moments.append(Moment(first + 1, last, self.step, either))
        only = {subscription: (expected,) for subscription, expected in after.items()}
        self.moments.append(Moment(last, last, self.step, only))

    def _expected(self):
        return {subscription: known.oracle.expected for subscription, known in self._known.items()}

    def _open_cursors(self, subscriptions):
        with self._noted():
            self._open_together(subscriptions)

    def _open_together(self, subscriptions):
        config = self._workload.config
        cursors = open_together(self._store, subscriptions, config=config, now_ms=self._now_ms)
        for subscription, cursor in zip(subscriptions, cursors, strict=True):
            self._opened(subscription, cursor)

    def _opened(self, subscription, cursor):
        """Follow a cursor that was opened: its acks are durable, and acks that it lacks must not reappear."""
        known, state = self._known[subscription], state_of(cursor)
        for promise, found, entry_count in known.oracle.judge(state):
            text = f"{subscription}: {found}, when it was opened"
            raise PromiseBrokenError(promise, text, entry_count=entry_count)
        known.oracle = Oracle(state._replace(is_new=False), knows_states=True)
        known.opened = ObservedCursor(cursor, self._workload.config, known.oracle, self._count)
        known.observed.look()

    def _do(self, step):
        subscription = self._workload.subscriptions[step.cursor]
        known = self._known[subscription]
        match step.kind:
            case StepKind.REOPEN:
                self._close_cursor(known)
                self._open_cursors([subscription])
            case StepKind.DELETE:
                self._delete(subscription, known)
                self._open_cursors([subscription])
                self._count("deletions")
            case StepKind.REOPEN_STORE:
                for other in self._known.values():
                    self._close_cursor(other)
                with self._noted():
                    self._store.close()
                    self._store = FlakyStore(self._open_store())
                self._open_cursors(self._workload.subscriptions)
            case StepKind.KILL:
                # All at once: writes that were not reported yet may turn out durable.
                self._count("kills")
                with self._noted():
                    self._continue_until_killed(step.amount)
                    self._start()
            case StepKind.FALL_BACK:
                # A fallback is refused if the metadata store would have fewer acks than are durable.
                with self._noted():
                    with self._store.refusing_appends(), suppress(StoreError):
                        known.observed.persist(now_ms=self._now_ms)
                    known.observed.look()
            case StepKind.PERSIST_ALL:
                with self._noted():
                    persist_together(self._observed(), self._count, now_ms=self._now_ms)
            case _:
                with self._noted():
                    known.observed.do(step, now_ms=self._now_ms)

    def _delete(self, subscription, known):
        """Delete a subscription that is open; its owner must not bring anything back."""
        owner = known.observed.cursor
        with self._noted():
            delete_subscription(self._store, topic=TOPIC, subscription=subscription)
            known.oracle = Oracle(NEVER_OPENED, knows_states=True)
            known.oracle.deleted()
        with self._noted():
            _check_fenced(owner, now_ms=self._now_ms)
        if (left := left_of(self._store, subscription)) is not None:
            raise PromiseBrokenError(Promise.I17, f"{subscription}: {left} is left")

    def _continue_until_killed(self, call_count):
        self._kill_after(call_count)
        try:
            for each in self._observed():
                each.persist(now_ms=self._now_ms)
            for each in self._observed():
                each.close(now_ms=self._now_ms)
            self._store.close()
            self._start()
        except ProcessKilledError:
            self._count("kills_in_the_middle")
        self._kill()

    def _observed(self):
        return [known.observed for known in self._known.values()]

    def _start(self):
        self._store = FlakyStore(self._open_store())
        self._open_together(self._workload.subscriptions)

    def _close_cursor(self, known):
        with self._noted():
            known.observed.close(now_ms=self._now_ms)

    def _count(self, name):
        self.counts[name] += 1


def _check_fenced(owner, *, now_ms):
    for position in owner.view.lowest_unacked(1):
        owner.ack(position, now_ms=now_ms)
    writes = [lambda: owner.set_cursor_properties({"owner": "before"})]
    if owner.view.is_dirty:
        writes.append(lambda: owner.persist(now_ms=now_ms))
    for write in writes:
        try:
            write()
        except CursorFencedError:
            continue
        raise PromiseBrokenError(Promise.I14, "the owner of a deleted subscription could write")
