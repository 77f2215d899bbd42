"""ZK: a topic on a real ZooKeeper server, while the server dies or hangs, sessions expire, and stale owners write.

The last process to open the message log and the cursor owns them; earlier owners are stale. Their receipts and
positions still count: an ack with a durable receipt must be in the new owner's cursor, a message with a position must
be in its log. Each event is followed by a recovery, which is checked.

Counts: ``stale_owners``, ``stopped_owners``, ``expired_sessions``, ``stopped_servers``, ``killed_servers``, and
``unavailable`` for runs that ended because a client gave up.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.layer import BrokenPromise, LayerSkippedError, RunOutcome, quiet
from ackstate.analysis.crash.process_layer import RunSize, shorter_run
from ackstate.analysis.crash.process_run import ProcessRun
from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.crash.scratch import scratch_directory
from ackstate.analysis.crash.stopped_publisher import StoppedPublisher, difference
from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report
from ackstate.analysis.crash.zookeeper_server import running_server
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.journal.format import Format
from ackstate.cursor.managed import ManagedCursor
from ackstate.cursor.results import RecoverySource
from ackstate.cursor.store import StoreError
from ackstate.cursor.topic.message_log import Message, MessageLog
from ackstate.errors import AckStateError, CursorFencedError
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ackstate.analysis.crash.zookeeper_server import ZooKeeperServer
    from ackstate.cursor.results import Receipt
    from ackstate.cursor.store import Store

LEDGERS = {1: 3_000}
_LEDGER_ID = 1
_TOPIC = "messages"  # of the message log; the cursor's topic is not stored
_ENTRIES_PER_LEDGER = 3
_RUNS_OF_A_SERVER = 300  # then another server starts with an empty disk
_SESSION_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 5.0
_HANGING_CALL_TIMEOUT_S = 0.2

SIZE = RunSize(lives=4, operations=8)
"""Most events of a run, and most acks before each."""
_SHRINK_TRIES = 16
_SHRINK_S = 10.0


def zookeeper(first_seed: int) -> Iterator[RunOutcome]:
    """Yield runs of a few events each; a server serves many runs.

    Raises:
        LayerSkippedError: There is no Java, no pyspark or no kazoo.
    """
    try:
        from ackstate.cursor.stores.zookeeper import ZooKeeperStore  # noqa: PLC0415 - kazoo is an extra
    except ImportError as error:
        raise LayerSkippedError(f"ZooKeeper needs kazoo: pip install 'ackstate[zookeeper]' ({error})") from error
    seeds = count(first_seed)
    while True:
        # On a disk: the logs that a server preallocates could fill a scarce memory.
        on_disk = Path(tempfile.gettempdir())
        with (
            scratch_directory("zookeeper", on_disk) as directory,
            running_server(directory) as server,
            quiet("kazoo", "ackstate.cursor"),
        ):
            for _ in range(_RUNS_OF_A_SERVER):
                outcome = run(next(seeds), server, ZooKeeperStore)
                yield shrunk(outcome, server, ZooKeeperStore) if outcome.broken else outcome


def shrunk(outcome: RunOutcome, server: ZooKeeperServer, open_store: Callable[..., Store]) -> RunOutcome:
    """Replace the story by that of the shortest repeat that also breaks the promise; arguments as in `run`."""
    numbers = count(1)
    broken = shorter_run(
        outcome.broken,
        SIZE,
        lambda size: run(outcome.seed, server, open_store, size=size, repeat=next(numbers)).broken,
        tries=_SHRINK_TRIES,
        seconds=_SHRINK_S,
    )
    return replace(outcome, broken=broken)


def run(
    seed: int, server: ZooKeeperServer, open_store: Callable[..., Store], *, size: RunSize = SIZE, repeat: int = 0
) -> RunOutcome:
    """Run some events on one cursor.

    Args:
        seed: Decides the events.
        server: The server; it is running again at the end.
        open_store: `ZooKeeperStore`, or a test's replacement.
        size: Most events, and most acks before each.
        repeat: A new number for each run of a seed on the same server, for a separate cursor path.
    """
    with ExitStack() as stack:
        try:
            story = _Story(seed, server, open_store, stack, size=size, root=f"/run-{seed}-{repeat}")
        except StoreError:
            # A client may give up, as in `next_cycle`, before any promise.
            return RunOutcome(seed, 0, counts={"unavailable": 1})
        for _ in range(min(story.chance.randint(2, SIZE.lives), size.lives)):
            if story.broken or not story.next_cycle():
                break
        return RunOutcome(
            seed, story.cycles, **oracle.counts(story.judged), broken=tuple(story.broken), counts=story.counts,
        )  # fmt: skip


@final
class _Story:
    """One run: the owners of a cursor, and all of their requests, accepted acks and promises."""

    def __init__(  # noqa: PLR0913 - the last two are named
        self,
        seed: int,
        server: ZooKeeperServer,
        open_store: Callable[..., Store],
        stack: ExitStack,
        *,
        size: RunSize,
        root: str,
    ) -> None:
        self.chance = Random(seed)  # noqa: S311 - to be repeated, not to be secret
        self.counts: Counter[str] = Counter()
        self.broken: list[BrokenPromise] = []
        self.judged: list[oracle.Broken] = []
        self.cycles = 0
        self._server, self._open_store, self._stack = server, open_store, stack
        self._root, self._size = root, size
        self._config = CursorConfig(
            format=self.chance.choice(list(Format)),
            compaction_bytes_min=self.chance.choice([100, 1_000]),
            ledger_entry_count_max=self.chance.choice([4, 1_000]),
            ledger_retry_ms=1,
        )
        self._entry_ids = (entry_id for entry_id in range(LEDGERS[_LEDGER_ID]) if self.chance.random() < 0.8)
        self._life = ProcessRun(LEDGERS)
        self._published: dict[Position, bytes] = {}
        self._steps = [f"{self._config.format.name} cursor on {self._root}"]
        self._owner = self._open()

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
            self._break(Promise.ERRORS, repr(error))
        return True

    def go_on(self) -> None:
        """Make the owner work, then run one event."""
        ack_count = min(self.chance.randint(1, SIZE.operations), self._size.operations)
        self._steps.append(f"{ack_count} acks, each with a persist")
        for _ in range(ack_count):
            self._owner.work()
        happenings = {self._stale: 6, self._expired: 4, self._stopped: 2, self._killed: 1, self._suspended: 1}
        happening = self.chance.choices(list(happenings), list(happenings.values()))[0]
        happening()

    def recover(self) -> None:
        """Open the cursor twice, as its new owner, and check its state."""
        before = self._owner.durable_count
        self._steps.append("recover")
        recovered, again = self._open(), self._open()
        report, report_again = recovered.report(), again.report()
        known = self._life.state(report_again)
        self.cycles += 1
        for broken in (*self._life.judge(report_again), *oracle.differing(self._life.state(report), known)):
            self.judged.append(broken)
            self._break(broken.promise, broken.found)
        if lacking := difference(again.log, self._published):
            self._break(Promise.I12, lacking)
        if before and again.cursor.recovery_report.source is RecoverySource.NEW:
            self._break(Promise.I10, "a new cursor, although its receipts were durable")
        self._owner = again
        # The recovered state must survive from here on; requests without effect may be repeated.
        self._life = ProcessRun(LEDGERS, known.acked)

    def _stale(self) -> None:
        """Another owner takes over; the old one does not notice."""
        self._steps.append("another owner opens the cursor; the stale one continues")
        self.counts["stale_owners"] += 1
        stale, newer = self._owner, self._open()
        for _ in range(self.chance.randint(1, 6)):
            self._check_stale(stale, newer)
            newer.work()
        self._owner = newer

    def _expired(self) -> None:
        """The server expires the session during work."""
        self._steps.append("the session expires at work")
        self.counts["expired_sessions"] += 1
        with self._owner.at_work():
            self._pause(0.02)
            _expire(self._server.hosts, self._owner.store)
            self._pause(0.02)
        self._check_stale(self._owner, self._open())

    def _stopped(self) -> None:
        """The server hangs during a write, until the client gives up; then it continues, and may execute the write."""
        self._steps.append("the server hangs at work, and continues when the client has given up")
        self.counts["stopped_servers"] += 1
        hasty = self._open(call_timeout_s=_HANGING_CALL_TIMEOUT_S)
        try:
            with hasty.at_work():
                self._pause(0.02)
                self._server.pause()
                self._pause(_HANGING_CALL_TIMEOUT_S * self.chance.choice([0.2, 1.5]))
        finally:
            self._server.resume()
        self._check_stale(hasty, self._open())

    def _killed(self) -> None:
        """The server is killed during work, and restarted."""
        self._steps.append("the server is killed at work, and started again")
        self.counts["killed_servers"] += 1
        with self._owner.at_work():
            self._pause(0.05)
            self._server.kill()
            self._server.start()
        self._check_stale(self._owner, self._open())

    def _suspended(self) -> None:
        """The process of an owner of the log is stopped at work, and continues when it has lost the log."""
        self._steps.append("another process publishes, is stopped, and continues after a takeover")
        self.counts["stopped_owners"] += 1
        root, limit = self._root, _ENTRIES_PER_LEDGER
        publisher = StoppedPublisher(self._server.hosts, root=root, topic=_TOPIC, entries_per_ledger_max=limit)
        with closing(publisher):
            if not publisher.wait_until_it_publishes():
                raise StoreError("the other process has published nothing")
            self._pause(0.05)
            publisher.stop()
            self._owner = self._open()
            for _ in range(self.chance.randint(1, 6)):
                self._owner.work()
            publisher.resume()
        # The recovery notes messages missing from the log.
        self._published |= publisher.published
        if not publisher.is_fenced:
            self._break(Promise.I14, "a process that has lost the log continues to publish")

    def _check_stale(self, stale: _Owner, newer: _Owner) -> None:
        """Make a stale owner write; the new owner must have everything promised to it."""
        promised_before, published_before = stale.durable_count, len(self._published)
        stale.work()
        if len(self._published) > published_before:
            self._break(Promise.I14, "a position for a message of a stale owner")
        late = stale.durable_entries[promised_before:]
        unknown = [entry_id for entry_id in late if not newer.cursor.is_acked(Position(_LEDGER_ID, entry_id))]
        if unknown:
            self._break(Promise.I14, f"receipts for entries {unknown}")

    def _open(self, *, call_timeout_s: float = _CALL_TIMEOUT_S) -> _Owner:
        retry = {"max_tries": -1, "delay": 0.01, "max_delay": 0.05}
        store = self._open_store(
            self._server.hosts,
            root=self._root,
            session_timeout_s=_SESSION_TIMEOUT_S,
            call_timeout_s=call_timeout_s,
            client_options={"connection_retry": retry},
        )
        self._stack.callback(store.close)
        return _Owner(store, self._config, self._life_now, self._entry_ids, self._published)

    def _life_now(self) -> ProcessRun:
        return self._life

    def _pause(self, longest_s: float) -> None:
        threading.Event().wait(self.chance.random() * longest_s)

    def _break(self, promise: Promise, found: str) -> None:
        self.broken.append(BrokenPromise(promise, found, tuple(self._steps)))


@final
class _Owner:
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
        life.asked(Operation(number, OperationKind.ACK, _LEDGER_ID, entry_id))
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


def _expire(hosts: str, store: Any) -> None:
    """Close a store's session as if it had timed out on the server: another client takes it over."""
    from kazoo.client import KazooClient  # noqa: PLC0415 - an extra

    thief = KazooClient(hosts, client_id=store._session._client.client_id)
    thief.start()
    thief.stop()
    thief.close()
