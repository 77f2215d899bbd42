"""One thread stands still before or after each call that its write makes to the store, and the others go on.

Every boundary of every route is tried, one by one and without a clock. Acks are accepted there, a second write waits,
nothing that is being written counts as durable, and a crash at that very instant finds the state before the write or
after it, according to whether the one call that decides has been made.
"""

import threading

import pytest

from ackstate import CursorClosedError, CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import PersistTarget, persist_all
from wrapped_store import WrappedStore, copied

PATIENCE_S = 30
ENTRIES = 40
RESET_TO = 12
MUTATIONS = {"create", "append", "append_many", "put", "delete"}
NATIVE = CursorConfig()
PULSAR = CursorConfig(format=Format.PULSAR)


def P(entry):  # noqa: N802
    return Position(3, entry)


class Boundaries:
    """Where the thread that writes may be held up: before and after each of its mutations of the store."""

    def __init__(self):
        self.passed = []
        self.writer = None
        self.stop_at = None
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def reach(self, when, name):
        if threading.current_thread() is not self.writer:
            return
        self.passed.append(f"{when} {name}")
        if len(self.passed) - 1 == self.stop_at:
            self.stopped.set()
            assert self.go_on.wait(PATIENCE_S)


def held_up(store, boundaries):
    """Return a store whose mutations have boundaries."""

    def look_up(name, method):
        if name not in MUTATIONS:
            return method

        def call(*args, **named):
            boundaries.reach("before", name)
            result = method(*args, **named)
            boundaries.reach("after", name)
            return result

        return call

    return WrappedStore(store, look_up)


class WatchedLock:
    """A lock that tells when a thread has to wait for it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.waited_for = threading.Event()

    def acquire(self):
        if not self._lock.acquire(blocking=False):
            self.waited_for.set()
            assert self._lock.acquire(timeout=PATIENCE_S)

    def release(self):
        self._lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *_):
        self.release()


class CallInThread(threading.Thread):
    """A call in a thread of its own, and its outcome."""

    def __init__(self, call):
        super().__init__(daemon=True)
        self._call, self.result, self.error = call, None, None

    def run(self):
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error

    def ended(self):
        self.join(PATIENCE_S)
        assert not self.is_alive(), "the threads wait for each other"
        return self


def opened(store, config, *, name="s"):
    log = LedgerMap.from_counts({3: ENTRIES})
    return ManagedCursor.open(store, topic="t", subscription=name, ledgers=log, config=config, now_ms=0)


def acked(cursor):
    return {entry for entry in range(ENTRIES) if cursor.is_acked(P(entry))}


def found_by_a_crash(disk):
    """The result of a recovery now. It is of a copy, because a recovery takes the cursor over."""
    return acked(opened(MemoryStore(copied(disk)), NATIVE))


def persist(cursor):
    return cursor.persist(now_ms=1).route


def persist_together(cursor, *others):
    result, *_ = persist_all([cursor, *others], now_ms=1)
    if isinstance(result, Exception):
        raise result
    return result.route


def reset(cursor):
    return cursor.reset(P(RESET_TO), now_ms=1).route


def close(cursor):
    result = cursor.close(now_ms=1)
    return result and result.route


def around(*names):
    return [f"{when} {name}" for name in names for when in ("before", "after")]


WHOLE_LEDGER = around("create", "append", "put", "delete")
ROUTES = {  # name -> settings, the call, its route, the boundaries that it passes, the call that decides
    "delta": (NATIVE, persist, PersistTarget.DELTA, around("append"), "append"),
    "deltas of many": (NATIVE, persist_together, PersistTarget.DELTA, around("append_many"), "append_many"),
    "snapshot": (CursorConfig(ledger_entry_count_max=2), persist, PersistTarget.SNAPSHOT, WHOLE_LEDGER, "put"),
    "whole": (PULSAR, persist, PersistTarget.WHOLE, around("append"), "append"),
    "metadata": (NATIVE, persist, PersistTarget.METADATA, ["before append", *around("put", "delete")], "put"),
    "reset": (NATIVE, reset, PersistTarget.SNAPSHOT, WHOLE_LEDGER, "put"),
    "reset in metadata": (NATIVE, reset, PersistTarget.METADATA, ["before create", *around("put", "delete")], "put"),
    "close": (NATIVE, close, PersistTarget.DELTA, around("append"), "append"),
    "close in metadata": (PULSAR, close, PersistTarget.METADATA, around("put", "delete"), "put"),
}


class Scene:
    """A cursor with acks that are durable and others that are being written, by a thread that stands at a boundary."""

    def __init__(self, name, stop_at):
        config, self.call, self.route, self.expected, self.decisive = ROUTES[name]
        self.boundaries = Boundaries()
        self.memory = MemoryStore()
        self.store = held_up(self.memory, self.boundaries)
        self.cursor = opened(self.store, config)
        self.durable_before = self.cursor.ack(P(30), now_ms=0)
        self.cursor.persist(now_ms=0)
        self.before = {30}
        self.early = self.cursor.ack_entries(3, [0, 5, 7], now_ms=0)
        self.early_batch = self.cursor.ack_batch(P(9), [0b10], now_ms=0)
        self.after = set(range(RESET_TO)) if self.is_reset else {0, 5, 7, 30}
        if name.endswith("metadata") and config is NATIVE:
            self.memory.break_ledgers()
        self.lock = self.cursor._persister.writing = WatchedLock()
        self.boundaries.stop_at = stop_at
        others = [opened(self.store, config, name="idle")] if self.call is persist_together else []
        self.writer = self.boundaries.writer = CallInThread(lambda: self.call(self.cursor, *others))

    @property
    def is_reset(self):
        return self.call is reset

    def begin(self):
        """Let the writer go as far as its boundary."""
        self.writer.start()
        assert self.boundaries.stopped.wait(PATIENCE_S), "there is no such boundary"

    def go_on(self):
        self.boundaries.go_on.set()
        self.writer.ended()
        assert self.writer.error is None
        # Acks that came in while it closed want a record of their own.
        assert self.writer.result is self.route or self.call is close
        assert self.boundaries.passed[: len(self.expected)] == self.expected

    @property
    def is_decided(self):
        return f"after {self.decisive}" in self.boundaries.passed

    def check_crash(self):
        found, cursor = found_by_a_crash(self.memory.disk), self.cursor
        assert found == (self.after if self.is_decided else self.before)
        assert self.before <= found or not cursor.durable(self.durable_before), "a receipt outlived its ack"
        assert len(acked(cursor) - found) <= cursor.redelivery_if_crashed, "more comes back than was said"

    def ack_meanwhile(self):
        """Make every kind of ack, and return the receipts."""
        cursor = self.cursor
        cursor.delivered(P(20), now_ms=1)
        return [
            cursor.ack(P(20), now_ms=1),
            cursor.ack_many([P(22), P(6)], now_ms=1),
            cursor.mark_delete(P(2), now_ms=1),
            cursor.ack_batch(P(24), [0b100], now_ms=1),
            cursor.ack_batch(P(9), [0], now_ms=1),
        ]

    def check_numbers(self, late):
        cursor, accepted = self.cursor, {0, 1, 2, 5, 6, 7, 9, 20, 22, 30}
        assert acked(cursor) == accepted
        assert not any(map(cursor.durable, [self.early, self.early_batch, *late])), "a receipt came before its write"
        stats = cursor.stats()
        assert cursor.redelivery_if_crashed == stats.redelivery_if_crashed == len(accepted - self.before)
        assert (stats.backlog, cursor.mark_delete_position) == (ENTRIES - len(accepted), P(2))
        assert cursor.persisted_mark_delete_position == P(-1)
        cursor._check()


def boundaries_of(name):
    return range(len(ROUTES[name][3]))


@pytest.mark.parametrize("name", ROUTES)
def test_the_boundaries_are_all_there_are(name):
    scene = Scene(name, stop_at=None)
    scene.writer.start()
    scene.writer.ended()
    assert (scene.writer.error, scene.writer.result) == (None, scene.route)
    assert scene.boundaries.passed == scene.expected
    assert found_by_a_crash(scene.memory.disk) == scene.after


@pytest.mark.parametrize("name", ROUTES)
def test_acks_go_on_while_one_writes_and_nothing_is_durable_too_early(name):
    for boundary in boundaries_of(name):
        scene = Scene(name, boundary)
        scene.begin()
        scene.check_crash()
        late = scene.ack_meanwhile()
        scene.check_numbers(late)
        scene.check_crash()
        scene.go_on()
        cursor, early = scene.cursor, [scene.early, scene.early_batch]
        # The acks that are left when a ledger has failed are planned again, with all that has come in by then.
        has_all = scene.call is close or (name == "metadata" and boundary == 0)
        assert [cursor.durable(receipt) for receipt in early] == [not scene.is_reset] * 2
        assert [cursor.durable(receipt) for receipt in late] == [has_all] * 5
        everything = {0, 1, 2, 5, 6, 7, 9, 20, 22, 30}
        found = found_by_a_crash(scene.memory.disk)
        assert found == (everything if has_all else scene.after)
        assert cursor.redelivery_if_crashed == len(acked(cursor) - found)
        assert acked(cursor) == (scene.after if scene.is_reset else everything)
        cursor._check()


@pytest.mark.parametrize("second", [persist, persist_together, reset, close])
@pytest.mark.parametrize("name", ROUTES)
def test_a_second_write_waits_for_the_first_and_has_what_came_in_meanwhile(name, second):
    for boundary in boundaries_of(name):
        scene = Scene(name, boundary)
        scene.begin()
        scene.check_crash()
        late = scene.ack_meanwhile() if boundary % 2 else []
        waiting = CallInThread(lambda cursor=scene.cursor: second(cursor))
        waiting.start()
        assert scene.lock.waited_for.wait(PATIENCE_S), "a second write did not wait"
        assert not scene.cursor.durable(scene.early)
        scene.go_on()
        waiting.ended()
        # Acks that came in while it closed keep it open for a moment.
        is_refused = isinstance(waiting.error, CursorClosedError)
        assert bool(late) or is_refused == (scene.call is close and second is not close)
        is_reset = scene.is_reset or (second is reset and not is_refused)
        assert is_refused or waiting.error is None
        assert scene.cursor.durable(scene.early) == (not is_reset)
        assert all(scene.cursor.durable(each) != is_reset for each in late)
        after = acked(scene.cursor) if late else set(range(RESET_TO)) if is_reset else scene.after
        assert found_by_a_crash(scene.memory.disk) == after
        assert scene.cursor.redelivery_if_crashed == 0
