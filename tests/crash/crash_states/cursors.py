"""Executes a workload of cursors that share a store, and records what each of them promises at each moment."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from ackstate import CursorConfig
from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.oracle import Oracle, Promise
from ackstate.cursor.formats import Format
from ackstate.cursor.journal import cursor_owner, cursor_path, delete_subscription
from ackstate.cursor.recovery import decode_record
from ackstate.errors import CursorFencedError
from ackstate.stores.base import StoreError
from crash.crash_states.examination import WorkloadRun
from crash.crash_states.sqlite import ProcessKilledError
from crash.observed_cursor import (
    NEVER_OPENED,
    SUBSCRIPTIONS,
    TOPIC,
    ObservedCursor,
    open_cursor,
    open_together,
    persist_together,
    state_of,
)
from crash.promises import PromiseBrokenError, hold
from crash.steps import Step, StepKind, steps
from wrapped_store import FlakyStore

_STEP_MS = 10_000
_LATER_MS = 10_000_000
_WEIGHTS = {
    StepKind.ACK: 10,
    StepKind.ACK_BATCH: 2,
    StepKind.MARK_DELETE: 1.5,
    StepKind.PERSIST: 8,
    StepKind.PERSIST_ALL: 1.5,
    StepKind.FALL_BACK: 0.5,
    StepKind.RESET: 0.7,
    StepKind.PROPERTIES: 0.7,
    StepKind.REOPEN: 0.6,
    StepKind.REOPEN_STORE: 0.6,
    StepKind.KILL: 1.2,
}
_DELETE_SHARE = 0.25
_STEPS = 12


@dataclass(frozen=True, slots=True)
class Workload:
    """The workload of one run."""

    subscriptions: tuple[str, ...]  # Each has a cursor; all share a store
    config: CursorConfig  # Configuration of the cursors
    steps: tuple[Step, ...]  # In order

    def on(self, storage):
        return Execution(self, storage)

    def story(self):
        config = self.config
        yield (
            f"cursors {', '.join(self.subscriptions)} in the {config.format.value} format, compacted from"
            f" {config.compaction_bytes_min} bytes on, {config.ledger_entry_count_max} entries a ledger"
        )
        for number, step in enumerate(self.steps, start=1):
            yield f"{number}. {step}"


def draw_workload(random):
    subscriptions = SUBSCRIPTIONS if random.random() < 0.3 else SUBSCRIPTIONS[:1]
    format_ = Format.NATIVE if random.random() < 0.7 else Format.PULSAR
    config = CursorConfig(
        format=format_,
        compaction_bytes_min=random.choice((40, 90, 200)),
        ledger_entry_count_max=random.choice((3, 5, 50)),
        ledger_rollover_ms=0,
        range_count_max=random.choice((4, 8)) if format_ is Format.NATIVE and random.random() < 0.15 else None,
    )
    kinds = random.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=_STEPS)
    drawn = steps(random, kinds, cursor_count=len(subscriptions))
    if random.random() < _DELETE_SHARE:
        deletion = Step(StepKind.DELETE, random.randrange(len(subscriptions)))
        drawn.insert(random.randrange(len(drawn) // 2, len(drawn) + 1), deletion)
    return Workload(subscriptions, config, tuple(drawn))


@dataclass(slots=True)
class _Known:
    """The state of one cursor as known from outside, and the cursor while it is open."""

    oracle: Oracle = field(default_factory=lambda: Oracle(NEVER_OPENED, knows_states=True))
    opened: ObservedCursor | None = None

    @property
    def observed(self):
        assert self.opened is not None
        return self.opened


class Execution(WorkloadRun):
    """A workload of cursors during its execution."""

    def __init__(self, workload, storage):
        super().__init__(workload, storage)
        self.counts[f"{workload.config.format.value.lower()}_workloads"] = 1
        self._known = {subscription: _Known() for subscription in workload.subscriptions}

    def begin(self):
        with self.noted():
            self._store = FlakyStore(self.storage.open())
        self._open_cursors(self.workload.subscriptions)

    def recover(self, store):
        """Open the cursors and return their states; each has exactly the ledger that its record names."""
        views = {}
        for subscription in self.workload.subscriptions:
            cursor = open_cursor(store, subscription, config=self.workload.config, now_ms=_LATER_MS)
            views[subscription] = state_of(cursor)
        for subscription in self.workload.subscriptions:
            value, owned = _parts_of(store, subscription)
            named = None if value is None else decode_record(value.data).record.cursor_ledger_id
            found = f"{subscription}: ledgers {owned}, but the record names {named}"
            hold(Promise.I11, owned == ([] if named is None else [named]), found)
        return views

    @staticmethod
    def judge(views, promised, *, is_worst):
        """Return the first promise that a recovery broke, None if it kept all."""
        for subscription, view in views.items():
            alternatives = [each[subscription] for each in promised]
            for broken in oracle.judge(view, alternatives, is_worst=is_worst):
                return broken._replace(found=f"{subscription}: {broken.found}")
        return None

    @staticmethod
    def differing(first, again):
        """Return the broken promise if two successive recoveries differ."""
        for subscription, view in first.items():
            for broken in oracle.differing(view, again[subscription]):
                return broken._replace(found=f"{subscription}: {broken.found}")
        return None

    @property
    def _now_ms(self):
        return self.step * _STEP_MS

    def promised(self):
        return {subscription: known.oracle.expected for subscription, known in self._known.items()}

    def _open_cursors(self, subscriptions):
        with self.noted():
            self._open_together(subscriptions)

    def _open_together(self, subscriptions):
        config = self.workload.config
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
        known.opened = ObservedCursor(cursor, self.workload.config, known.oracle, self._count)
        known.observed.look()

    def do(self, step):
        subscription = self.workload.subscriptions[step.cursor]
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
                with self.noted():
                    self._store.close()
                    self._store = FlakyStore(self.storage.open())
                self._open_cursors(self.workload.subscriptions)
            case StepKind.KILL:
                # All at once: writes that were not reported yet may turn out durable.
                self._count("kills")
                with self.noted():
                    self._continue_until_killed(step.amount)
                    self._start()
            case StepKind.FALL_BACK:
                # A fallback is refused if the metadata store would have fewer acks than are durable.
                with self.noted():
                    with self._store.refusing_appends(), suppress(StoreError):
                        known.observed.persist(now_ms=self._now_ms)
                    known.observed.look()
            case StepKind.PERSIST_ALL:
                with self.noted():
                    persist_together(self._observed(), self._count, now_ms=self._now_ms)
            case _:
                with self.noted():
                    known.observed.do(step, now_ms=self._now_ms)

    def _delete(self, subscription, known):
        """Delete a subscription that is open; its owner must not bring anything back."""
        owner = known.observed.cursor
        with self.noted():
            delete_subscription(self._store, topic=TOPIC, subscription=subscription)
            known.oracle = Oracle(NEVER_OPENED, knows_states=True)
            known.oracle.deleted()
        with self.noted():
            _check_fenced(owner, now_ms=self._now_ms)
        value, owned = _parts_of(self._store, subscription)
        hold(Promise.I17, value is None and not owned, f"{subscription}: {value} and ledgers {owned} are left")

    def _continue_until_killed(self, call_count):
        self.storage.kill_after(call_count)
        try:
            for each in self._observed():
                each.persist(now_ms=self._now_ms)
            for each in self._observed():
                each.close(now_ms=self._now_ms)
            self._store.close()
            self._start()
        except ProcessKilledError:
            self._count("kills_in_the_middle")
        self.storage.kill()

    def _observed(self):
        return [known.observed for known in self._known.values()]

    def _start(self):
        self._store = FlakyStore(self.storage.open())
        self._open_together(self.workload.subscriptions)

    def _close_cursor(self, known):
        with self.noted():
            known.observed.close(now_ms=self._now_ms)

    def _count(self, name):
        self.counts[name] += 1


def _parts_of(store, subscription):
    """Return the record of a subscription, and its ledgers."""
    path = cursor_path(TOPIC, subscription)
    return store.metadata.get(path), store.ledgers.owned_by(cursor_owner(path))


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
