"""A topic and a cursor in a shared store, whose owners come and go: the common part of the layers ZK and BK.

The last process to open the message log and the cursor owns them; earlier owners are stale. Their receipts and
positions still count: an ack with a durable receipt must be in the new owner's cursor, a message with a position must
be in its log. Each event is followed by a recovery, which is checked.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import count
from random import Random
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.layer import BrokenPromise, LayerSkippedError, RunOutcome
from ackstate.analysis.crash.process_layer import RunSize, shorter_run
from ackstate.analysis.crash.process_run import ProcessRun
from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal.format import Format
from ackstate.cursor.managed import ManagedCursor
from ackstate.cursor.results import RecoverySource
from ackstate.cursor.store import StoreError
from ackstate.errors import AckStateError, CursorFencedError
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.topic.message_log import Message, MessageLog
from crash.stopped_publisher import StoppedPublisher, difference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ackstate.cursor.results import Receipt
    from ackstate.cursor.store import Store

LEDGERS = {1: 3_000}
_LEDGER_ID = 1
_TOPIC = "messages"  # of the message log; the cursor's topic is not stored
_ENTRIES_PER_LEDGER = 3

SIZE = RunSize(lives=4, operations=8)
"""Most events of a run, and most acks before each."""
_SHRINK_TRIES = 16
_SHRINK_S = 10.0


def shrunk(outcome: RunOutcome, again: Callable[[RunSize, int], RunOutcome]) -> RunOutcome:
    """Replace the story by that of the shortest repeat that also breaks the promise.

    Args:
        outcome: The outcome of a run that broke a promise.
        again: Repeats the run with a size, and with a number that no other repeat has.
    """
    numbers = count(1)
    broken = shorter_run(
        outcome.broken,
        SIZE,
        lambda size: again(size, next(numbers)).broken,
        tries=_SHRINK_TRIES,
        seconds=_SHRINK_S,
    )
    return replace(outcome, broken=broken)


def run_story(seed: int, size: RunSize, begin: Callable[[ExitStack], TakeoverStory]) -> RunOutcome:
    """Run some events on one cursor.

    Args:
        seed: Decides the events.
        size: Most events, and most acks before each.
        begin: Returns the story; the stores that it opens are closed at the end.
    """
    with ExitStack() as stack:
        try:
            story = begin(stack)
        except StoreError:
            # A client may give up, as in `next_cycle`, before any promise.
            return RunOutcome(seed, 0, counts={"unavailable": 1})
        for _ in range(min(story.chance.randint(2, SIZE.lives), size.lives)):
            if story.broken or not story.next_cycle():
                break
        return RunOutcome(
            seed, story.cycles, **oracle.counts(story.judged), broken=tuple(story.broken), counts=story.counts,
        )  # fmt: skip


class TakeoverStory(ABC):
    """One run: the owners of a cursor, and all of their requests, accepted acks and promises."""

    def __init__(
        self,
        seed: int,
        stack: ExitStack,
        *,
        size: RunSize,
        root: str,
    ) -> None:
        self.chance = Random(seed)
        self.counts: Counter[str] = Counter()
        self.broken: list[BrokenPromise] = []
        self.judged: list[oracle.Broken] = []
        self.cycles = 0
        self._stack = stack
        self.root, self._size = root, size
        self._config = CursorConfig(
            format=self.chance.choice(list(Format)),
            compaction_bytes_min=self.chance.choice([100, 1_000]),
            ledger_entry_count_max=self.chance.choice([4, 1_000]),
            ledger_retry_ms=1,
        )
        self._entry_ids = (entry_id for entry_id in range(LEDGERS[_LEDGER_ID]) if self.chance.random() < 0.8)
        self._life = ProcessRun(LEDGERS)
        self._published: dict[Position, bytes] = {}
        self.steps = [f"{self._config.format.name} cursor on {self.root}"]
        self.owner = self.opened()

    @abstractmethod
    def happenings(self) -> Mapping[Callable[[], None], int]:
        """Return the possible events, each with its relative frequency."""

    @abstractmethod
    def open_store(self, call_timeout_s: float | None) -> Store:
        """Open the store; None is the usual time-out."""

    @abstractmethod
    def publisher_store(self) -> tuple[str, str]:
        """Return the kind of store and the servers, for another process that publishes."""

    def next_cycle(self) -> bool:
        """Run one event, recover and check; False if the servers did not answer in time."""
        try:
            self.go_on()
            self.recover()
        except StoreError:
            # A client may give up; this is counted.
            self.counts["unavailable"] += 1
            return False
        except LayerSkippedError:
            raise
        except Exception as error:
            self.fail(Promise.ERRORS, repr(error))
        return True

    def go_on(self) -> None:
        """Make the owner work, then run one event."""
        ack_count = min(self.chance.randint(1, SIZE.operations), self._size.operations)
        self.steps.append(f"{ack_count} acks, each with a persist")
        for _ in range(ack_count):
            self.owner.work()
        happenings = self.happenings()
        happening = self.chance.choices(list(happenings), list(happenings.values()))[0]
        happening()

    def recover(self) -> None:
        """Open the cursor twice, as its new owner, and check its state."""
        before = self.owner.durable_count
        self.steps.append("recover")
        recovered, again = self.opened(), self.opened()
        report, report_again = recovered.report(), again.report()
        known = self._life.state(report_again)
        self.cycles += 1
        for broken in (*self._life.judge(report_again), *oracle.differing(self._life.state(report), known)):
            self.judged.append(broken)
            self.fail(broken.promise, broken.found)
        if lacking := difference(again.log, self._published):
            self.fail(Promise.I12, lacking)
        if before and again.cursor.recovery_report.source is RecoverySource.NEW:
            self.fail(Promise.I10, "a new cursor, although its receipts were durable")
        self.owner = again
        # The recovered state must survive from here on; requests without effect may be repeated.
        self._life = ProcessRun(LEDGERS, known.acked)

    def _stale(self) -> None:
        """Another owner takes over; the old one does not notice."""
        self.steps.append("another owner opens the cursor; the stale one continues")
        self.counts["stale_owners"] += 1
        stale, newer = self.owner, self.opened()
        for _ in range(self.chance.randint(1, 6)):
            self.check_stale(stale, newer)
            newer.work()
        self.owner = newer

    def _suspended(self) -> None:
        """The process of an owner of the log is stopped at work, and continues when it has lost the log."""
        self.steps.append("another process publishes, is stopped, and continues after a takeover")
        self.counts["stopped_owners"] += 1
        publisher = StoppedPublisher(
            *self.publisher_store(), root=self.root, topic=_TOPIC, entries_per_ledger_max=_ENTRIES_PER_LEDGER
        )
        with closing(publisher):
            if not publisher.wait_until_it_publishes():
                raise StoreError("the other process has published nothing")
            self.pause(0.05)
            publisher.stop()
            self.owner = self.opened()
            for _ in range(self.chance.randint(1, 6)):
                self.owner.work()
            publisher.resume()
        # The recovery notes messages missing from the log.
        self._published |= publisher.published
        if not publisher.is_fenced:
            self.fail(Promise.I14, "a process that has lost the log continues to publish")

    def check_stale(self, stale: Owner, newer: Owner) -> None:
        """Make a stale owner write; the new owner must have everything promised to it."""
        promised_before, published_before = stale.durable_count, len(self._published)
        stale.work()
        if len(self._published) > published_before:
            self.fail(Promise.I14, "a position for a message of a stale owner")
        late = stale.durable_entries[promised_before:]
        unknown = [entry_id for entry_id in late if not newer.cursor.is_acked(Position(_LEDGER_ID, entry_id))]
        if unknown:
            self.fail(Promise.I14, f"receipts for entries {unknown}")

    def opened(self, *, call_timeout_s: float | None = None) -> Owner:
        """Open the message log and the cursor as their new owner; None is the usual time-out."""
        store = self.open_store(call_timeout_s)
        self._stack.callback(store.close)
        return Owner(store, self._config, self._life_now, self._entry_ids, self._published)

    def _life_now(self) -> ProcessRun:
        return self._life

    def pause(self, longest_s: float) -> None:
        """Wait for a random time."""
        threading.Event().wait(self.chance.random() * longest_s)

    def fail(self, promise: Promise, found: str) -> None:
        """Record a broken promise."""
        self.broken.append(BrokenPromise(promise, found, tuple(self.steps)))


@final
class Owner:
    """A process that opened the cursor and a message log as their owner."""

    def __init__(
        self,
        store: Store,
        config: CursorConfig,
        life: Callable[[], ProcessRun],
        entry_ids: Iterator[int],
        published: dict[Position, bytes],
    ) -> None:
        self.store = store
        self.log = MessageLog.open(store, topic=_TOPIC, entries_per_ledger_max=_ENTRIES_PER_LEDGER)
        self.cursor = ManagedCursor.open(
            store, topic="orders", subscription="billing", ledgers=LedgerMap.from_counts(LEDGERS), config=config,
            now_ms=0,
        )  # fmt: skip
        self.durable_entries: list[int] = []
        self._life, self._entry_ids, self._published = life, entry_ids, published
        self._waiting: list[tuple[int, int, Receipt]] = []

    @property
    def durable_count(self) -> int:
        """The number of durable receipts."""
        return len(self.durable_entries)

    def work(self) -> None:
        """Publish a message, ack an entry and persist; after a refusal of the store the next call retries."""
        entry_id = next(self._entry_ids, None)
        if entry_id is None:
            return
        payload = b"%d" % entry_id
        with suppress(StoreError, CursorFencedError):
            (position,) = self.log.publish([Message(payload, publish_time_ms=entry_id)])
            self._published[position] = payload
        life = self._life()
        number = len(life.operations)
        life.requested(Operation(number, OperationKind.ACK, _LEDGER_ID, entry_id))
        with suppress(AckStateError):
            receipt = self.cursor.ack(Position(_LEDGER_ID, entry_id), now_ms=entry_id)
            life.accepted(number)
            self._waiting.append((number, entry_id, receipt))
        with suppress(StoreError, CursorFencedError):
            self.cursor.persist(now_ms=1_000 * entry_id)
        durable = [each for each in self._waiting if self.cursor.durable(each[2])]
        self._waiting = [each for each in self._waiting if each not in durable]
        life.durable([number for number, _, _ in durable])
        self.durable_entries += [entry_id for _, entry_id, _ in durable]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Work in a separate thread meanwhile; its error is raised here at the end."""
        stopping, errors = threading.Event(), []

        def work_on() -> None:
            """Work once a millisecond until the block ends."""
            try:
                while not stopping.is_set():
                    self.work()
                    stopping.wait(0.001)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work_on)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
        if errors:
            raise errors[0]

    def report(self) -> Report:
        """Return the state of the cursor."""
        ledger_id, entry_id = self.cursor.mark_delete_position
        acked = [EntryRun(ledger_id, 0, entry_id + 1)] if ledger_id in LEDGERS else []
        return Report([*acked, *(EntryRun(*run) for run in self.cursor.deleted.runs())])
