"""BK: a topic and a cursor on a real BookKeeper cluster, while servers and Java die or hang, and stale owners write.

The last process to open the message log and the cursor owns them; earlier owners are stale. Their receipts and
positions still count: an ack with a durable receipt must be in the new owner's cursor, a message with a position must
be in its log. Each event is followed by a recovery, which is checked.

All owners share a Java client, which is replaced when an event has ended it. One of the two bookies that store an entry
may be lost for good in a run, with its disk.

Counts: ``stale_owners``, ``stopped_owners``, ``killed_bookies``, ``lost_quorums``, ``lost_disks``,
``expired_sessions``, ``stopped_zookeepers``, ``killed_zookeepers``, ``killed_clients``, ``stopped_clients``, and
``unavailable`` for runs that ended because a client gave up.
"""

import os
import signal
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from random import Random

from ackstate.analysis.crash import oracle
from ackstate.analysis.crash.oracle import BrokenPromise, Promise, RunOutcome
from ackstate.analysis.crash.runs import LayerSkippedError, ProcessRun, RunSize, scratch_directory, shorter_run
from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.cursor import ManagedCursor
from ackstate.cursor.formats import Format
from ackstate.cursor.results import RecoverySource
from ackstate.errors import AckStateError, CursorFencedError
from ackstate.ledger_map import LedgerMap
from ackstate.message import Message
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.topic.log import MessageLog
from crash.bookkeeper_cluster import bookkeeper_options, running_cluster
from crash.quiet import quiet
from crash.stopped_publisher import StoppedPublisher, difference

LEDGERS = {1: 3_000}
_LEDGER_ID = 1
_TOPIC = "messages"  # of the message log; the cursor's topic is not stored
_ENTRIES_PER_LEDGER = 3

SIZE = RunSize(lives=4, operations=8)
"""Most events of a run, and most acks before each."""
_SHRINK_TRIES = 16
_SHRINK_S = 10.0

_RUNS_OF_A_CLUSTER = 40  # then another cluster starts with empty disks
_SESSION_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 20.0
_HANGING_CALL_TIMEOUT_S = 0.3
_HANGING_CLIENT_TIMEOUT_S = 1.0
_CONNECTS_WITHIN_S = 10.0


def bookkeeper(first_seed):
    """Yield runs of a few events each; a cluster serves many runs."""
    try:
        import jpype  # noqa: F401 - an extra

        from ackstate.stores.bookkeeper import BookKeeperStore
    except ImportError as error:
        raise LayerSkippedError(f"BookKeeper needs pip install 'ackstate[bookkeeper]' ({error})") from error
    seeds = count(first_seed)
    while True:
        on_disk = Path(tempfile.gettempdir())
        with (
            scratch_directory("bookkeeper", on_disk) as directory,
            running_cluster(directory) as cluster,
            quiet("kazoo", "ackstate"),
            SharedClient(cluster) as client,
        ):
            for _ in range(_RUNS_OF_A_CLUSTER):
                outcome = run(next(seeds), cluster, client, BookKeeperStore)
                yield shrunk(outcome, cluster, client, BookKeeperStore) if outcome.broken else outcome


class SharedClient:
    """The Java client of all owners, which is replaced when it has died."""

    def __init__(self, cluster):
        self._cluster = cluster
        self._clients = []

    def __enter__(self):
        return self

    def __exit__(self, *_failure):
        for client in self._clients:
            client.close()

    def current(self):
        if self._clients:
            try:
                self._clients[-1].check_usable()
            except StoreError:
                self._clients[-1].close()
            else:
                return self._clients[-1]
        return self.another(_CALL_TIMEOUT_S)

    def another(self, call_timeout_s):
        client = bookkeeper_options().connect(self._cluster.hosts, call_timeout_s=call_timeout_s)
        self._clients.append(client)
        return client


def shrunk(outcome, cluster, client, open_store):
    """Replace the story by that of the shortest repeat that also breaks the promise; arguments as in `run`."""
    repeats = count(1)
    broken = shorter_run(
        outcome.broken,
        SIZE,
        lambda size: run(outcome.seed, cluster, client, open_store, size=size, repeat=next(repeats)).broken,
        tries=_SHRINK_TRIES,
        seconds=_SHRINK_S,
    )
    return replace(outcome, broken=broken)


def run(seed, cluster, client, open_store, *, size=SIZE, repeat=0):
    """Run some events on one cursor."""
    root = f"/run-{seed}-{repeat}"
    with ExitStack() as stack:
        try:
            story = _Story(seed, cluster, client, open_store, stack, size=size, root=root)
        except StoreError:
            # A client may give up, as in `next_cycle`, before any promise.
            return RunOutcome(seed, 0, counts={"unavailable": 1})
        for _ in range(min(story.chance.randint(2, SIZE.lives), size.lives)):
            if story.broken or not story.next_cycle():
                break
        return RunOutcome(
            seed, story.cycles, **oracle.counts(story.judged), broken=tuple(story.broken), counts=story.counts,
        )  # fmt: skip


class _Story:
    """One run: the owners of a cursor, and all of their requests, accepted acks and promises."""

    def __init__(self, seed, cluster, client, open_store, stack, *, size, root):
        self._cluster, self._client, self._open_store = cluster, client, open_store
        self._has_lost_a_disk = False
        self.chance = Random(seed)
        self.counts = Counter()
        self.broken = []
        self.judged = []
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
        self._published = {}
        self.steps = [f"{self._config.format.name} cursor on {self.root}"]
        self.owner = self.opened()

    def next_cycle(self):
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

    def go_on(self):
        """Make the owner work, then run one event."""
        ack_count = min(self.chance.randint(1, SIZE.operations), self._size.operations)
        self.steps.append(f"{ack_count} acks, each with a persist")
        for _ in range(ack_count):
            self.owner.work()
        happenings = {
            self._stale: 4,
            self._suspended: 1,
            self._bookie_killed: 3,
            self._quorum_lost: 2,
            self._disk_lost: 2,
            self._session_expired: 2,
            self._zookeeper_stopped: 2,
            self._zookeeper_killed: 1,
            self._client_killed: 2,
            self._client_stopped: 1,
        }
        happening = self.chance.choices(list(happenings), list(happenings.values()))[0]
        happening()

    def recover(self):
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

    def _stale(self):
        """Another owner takes over; the old one does not notice."""
        self.steps.append("another owner opens the cursor; the stale one continues")
        self.counts["stale_owners"] += 1
        stale, newer = self.owner, self.opened()
        for _ in range(self.chance.randint(1, 6)):
            self.check_stale(stale, newer)
            newer.work()
        self.owner = newer

    def _suspended(self):
        self.steps.append("another process publishes, is stopped, and continues after a takeover")
        self.counts["stopped_owners"] += 1
        publisher = StoppedPublisher(
            self._cluster.hosts, root=self.root, topic=_TOPIC, entries_per_ledger_max=_ENTRIES_PER_LEDGER
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

    def check_stale(self, stale, newer):
        """Make a stale owner write; the new owner must have everything promised to it."""
        promised_before, published_before = stale.durable_count, len(self._published)
        stale.work()
        if len(self._published) > published_before:
            self.fail(Promise.I14, "a position for a message of a stale owner")
        late = stale.durable_entries[promised_before:]
        unknown = [entry_id for entry_id in late if not newer.cursor.is_acked(Position(_LEDGER_ID, entry_id))]
        if unknown:
            self.fail(Promise.I14, f"receipts for entries {unknown}")

    def opened(self, *, call_timeout_s=None):
        """Open the message log and the cursor as their new owner; None is the usual time-out."""
        store = self._open_store(
            self._cluster.hosts,
            root=self.root,
            bookkeeper=bookkeeper_options(self._client.current()),
            session_timeout_s=_SESSION_TIMEOUT_S,
            call_timeout_s=call_timeout_s or _CALL_TIMEOUT_S,
            client_options={"connection_retry": {"max_tries": -1, "delay": 0.01, "max_delay": 0.05}},
        )
        self._stack.callback(store.close)
        return Owner(store, self._config, self._life_now, self._entry_ids, self._published)

    def _life_now(self):
        return self._life

    def pause(self, longest_s):
        threading.Event().wait(self.chance.random() * longest_s)

    def fail(self, promise, found):
        self.broken.append(BrokenPromise(promise, found, tuple(self.steps)))

    def _bookie_killed(self):
        """One bookie of three dies at work; the owner continues without it."""
        self.steps.append("a bookie is killed at work, and started again")
        self.counts["killed_bookies"] += 1
        with self.owner.at_work():
            self.pause(0.05)
            self.chance.choice(self._cluster.bookies).kill()
            self.pause(0.5)
        self._cluster.revive()
        self.check_stale(self.owner, self.opened())

    def _quorum_lost(self):
        """Two bookies of three die at work; appends fail, and the error names both."""
        self.steps.append("two bookies are killed at work, and started again")
        self.counts["lost_quorums"] += 1
        killed = self.chance.sample(self._cluster.bookies, 2)
        try:
            with self.owner.at_work():
                self.pause(0.05)
                for bookie in killed:
                    bookie.kill()
                self.pause(0.5)
            self._check_refusal([bookie.hosts for bookie in killed])
        finally:
            self._cluster.revive()
        self.check_stale(self.owner, self.opened())

    def _disk_lost(self):
        """A bookie is lost with its disk; another one takes its place. Once in a run: an entry is stored twice."""
        if self._has_lost_a_disk:
            return
        self._has_lost_a_disk = True
        self.steps.append("a bookie and its disk are lost at work, and replaced by an empty one")
        self.counts["lost_disks"] += 1
        with self.owner.at_work():
            self.pause(0.05)
            self._cluster.replace(self.chance.choice(self._cluster.bookies))
        self.check_stale(self.owner, self.opened())

    def _session_expired(self):
        self.steps.append("the session with ZooKeeper expires at work")
        self.counts["expired_sessions"] += 1
        with self.owner.at_work():
            self.pause(0.02)
            _expire(self._cluster.hosts, self.owner.store)
            self.pause(0.02)
        self.check_stale(self.owner, self.opened())

    def _zookeeper_stopped(self):
        """ZooKeeper hangs until the store gives up; then it continues, and may execute the requests that were sent."""
        self.steps.append("ZooKeeper hangs at work, and continues when the store has given up")
        self.counts["stopped_zookeepers"] += 1
        hasty = self.opened(call_timeout_s=_HANGING_CALL_TIMEOUT_S)
        try:
            with hasty.at_work():
                self.pause(0.05)
                self._cluster.zookeeper.pause()
                self.pause(_HANGING_CALL_TIMEOUT_S * self.chance.choice([0.5, 2.0]))
        finally:
            self._cluster.zookeeper.resume()
        self.check_stale(hasty, self.opened())

    def _zookeeper_killed(self):
        self.steps.append("ZooKeeper is killed at work, and started again")
        self.counts["killed_zookeepers"] += 1
        with self.owner.at_work():
            self.pause(0.1)
            self._cluster.zookeeper.kill()
            self.pause(0.3)
            self._cluster.zookeeper.start()
        self.check_stale(self.owner, self.opened())

    def _client_killed(self):
        self.steps.append("the Java client is killed at work")
        self.counts["killed_clients"] += 1
        with self.owner.at_work():
            self.pause(0.1)
            os.kill(self._client.current().process_id, signal.SIGKILL)
            self.pause(0.1)
        self.check_stale(self.owner, self.opened())

    def _client_stopped(self):
        """The Java client hangs during work, until its owner gives up."""
        self.steps.append("the Java client hangs at work")
        self.counts["stopped_clients"] += 1
        client = self._client.another(_HANGING_CLIENT_TIMEOUT_S)
        hanging = self.opened()
        with hanging.at_work():
            self.pause(0.1)
            os.kill(client.process_id, signal.SIGSTOP)
            self.pause(0.1)
        # The calls that follow must return: nothing may wait for the stopped process for ever.
        hanging.work()
        client.give_up("the client hangs")
        self.check_stale(hanging, self.opened())

    def _check_refusal(self, names):
        """Append without a quorum; the error must name the missing bookies."""
        ledgers = self.owner.store.ledgers
        try:
            ledger_id = ledgers.create("probe")
            ledgers.append(ledger_id, [b""])
        except StoreError as error:
            if not all(name in str(error) for name in names):
                self.fail(Promise.ERRORS, f"without {' and '.join(names)}: {error}")
        else:
            self.fail(Promise.ERRORS, f"an append without {' and '.join(names)} succeeded")


class Owner:
    """A process that opened the cursor and a message log as their owner."""

    def __init__(self, store, config, life, entry_ids, published):
        self.store = store
        self.log = MessageLog.open(store, topic=_TOPIC, entries_per_ledger_max=_ENTRIES_PER_LEDGER)
        self.cursor = ManagedCursor.open(
            store, topic="orders", subscription="billing", ledgers=LedgerMap.from_counts(LEDGERS), config=config,
            now_ms=0,
        )  # fmt: skip
        self.durable_entries = []
        self._life, self._entry_ids, self._published = life, entry_ids, published
        self._waiting = []

    @property
    def durable_count(self):
        return len(self.durable_entries)

    def work(self):
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
    def at_work(self):
        """Work in a separate thread meanwhile; its error is raised here at the end."""
        stopping, errors = threading.Event(), []

        def work_on():
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

    def report(self):
        ledger_id, entry_id = self.cursor.mark_delete_position
        acked = [EntryRun(ledger_id, 0, entry_id + 1)] if ledger_id in LEDGERS else []
        return Report([*acked, *(EntryRun(*run) for run in self.cursor.deleted.runs())])


def _expire(hosts, store):
    """Close a store's session as if it had timed out on the server: another client takes it over."""
    from kazoo.client import KazooClient
    from kazoo.handlers.threading import KazooTimeoutError

    thief = KazooClient(hosts, client_id=store._session._client.client_id)
    try:
        # On a busy machine, the client may get no connection: then nothing happens to the session here.
        with suppress(KazooTimeoutError):
            thief.start(timeout=_CONNECTS_WITHIN_S)
    finally:
        thief.stop()
        thief.close()
