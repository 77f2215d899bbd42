"""BK: a topic on a real BookKeeper cluster, while bookies die, ZooKeeper hangs, Java dies, and stale owners write.

All owners share a Java client, which is replaced when an event has ended it. One of the two bookies that store an entry
may be lost for good in a run, with its disk.

Counts: ``stale_owners``, ``stopped_owners``, ``killed_bookies``, ``lost_quorums``, ``lost_disks``,
``stopped_zookeepers``, ``killed_zookeepers``, ``killed_clients``, ``stopped_clients``, and ``unavailable`` for runs
that ended because a client gave up.
"""

from __future__ import annotations

import os
import signal
import tempfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.layer import LayerSkippedError, RunOutcome, quiet
from ackstate.analysis.crash.promises import Promise
from ackstate.analysis.crash.scratch import scratch_directory
from ackstate.cursor.store import StoreError
from crash import takeovers
from crash.bookkeeper_cluster import bookkeeper_options, running_cluster
from crash.takeovers import SIZE, TakeoverStory, run_story

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import ExitStack

    from ackstate.analysis.crash.process_layer import RunSize
    from ackstate.cursor.store import Store
    from ackstate.stores.bookkeeper_client import BookKeeperClient
    from crash.bookkeeper_cluster import BookKeeperCluster

_RUNS_OF_A_CLUSTER = 40  # then another cluster starts with empty disks
_SESSION_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 20.0
_HANGING_CALL_TIMEOUT_S = 0.3
_HANGING_CLIENT_TIMEOUT_S = 1.0


def bookkeeper(first_seed: int) -> Iterator[RunOutcome]:
    """Yield runs of a few events each; a cluster serves many runs.

    Raises:
        LayerSkippedError: Java, BookKeeper's jars, kazoo, JPype or pyspark are missing.
    """
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
            quiet("kazoo", "ackstate.cursor"),
            SharedClient(cluster) as client,
        ):
            for _ in range(_RUNS_OF_A_CLUSTER):
                outcome = run(next(seeds), cluster, client, BookKeeperStore)
                yield shrunk(outcome, cluster, client, BookKeeperStore) if outcome.broken else outcome


@final
class SharedClient:
    """The Java client of all owners, which is replaced when it has died.

    Args:
        cluster: The cluster that the client connects to.
    """

    def __init__(self, cluster: BookKeeperCluster) -> None:
        self._cluster = cluster
        self._clients: list[BookKeeperClient] = []

    def __enter__(self) -> SharedClient:
        """Return this."""
        return self

    def __exit__(self, *_failure: object) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()

    def current(self) -> BookKeeperClient:
        """Return a client that serves."""
        if self._clients:
            try:
                self._clients[-1].check_usable()
            except StoreError:
                self._clients[-1].close()
            else:
                return self._clients[-1]
        return self.another(_CALL_TIMEOUT_S)

    def another(self, call_timeout_s: float) -> BookKeeperClient:
        """Start another client, which becomes the current one."""
        client = bookkeeper_options().connect(self._cluster.hosts, call_timeout_s=call_timeout_s)
        self._clients.append(client)
        return client


def shrunk(
    outcome: RunOutcome, cluster: BookKeeperCluster, client: SharedClient, open_store: Callable[..., Store]
) -> RunOutcome:
    """Replace the story by that of the shortest repeat that also breaks the promise; arguments as in `run`."""
    return takeovers.shrunk(
        outcome, lambda size, repeat: run(outcome.seed, cluster, client, open_store, size=size, repeat=repeat)
    )


def run(
    seed: int,
    cluster: BookKeeperCluster,
    client: SharedClient,
    open_store: Callable[..., Store],
    *,
    size: RunSize = SIZE,
    repeat: int = 0,
) -> RunOutcome:
    """Run some events on one cursor.

    Args:
        seed: Decides the events.
        cluster: The cluster; all of it is running again at the end.
        client: The client of the owners.
        open_store: `BookKeeperStore`, or a test's replacement.
        size: Most events, and most acks before each.
        repeat: A new number for each run of a seed on the same cluster, for a separate cursor path.
    """
    root = f"/run-{seed}-{repeat}"
    return run_story(
        seed, size, lambda stack: _BookKeeperStory(seed, cluster, client, open_store, stack, size=size, root=root)
    )


@final
class _BookKeeperStory(TakeoverStory):
    """One run: the owners of a cursor, and all of their requests, accepted acks and promises."""

    def __init__(
        self,
        seed: int,
        cluster: BookKeeperCluster,
        client: SharedClient,
        open_store: Callable[..., Store],
        stack: ExitStack,
        *,
        size: RunSize,
        root: str,
    ) -> None:
        self._cluster, self._client, self._open_store = cluster, client, open_store
        self._has_lost_a_disk = False
        super().__init__(seed, stack, size=size, root=root)

    def happenings(self) -> Mapping[Callable[[], None], int]:
        """See `TakeoverStory.happenings`."""
        return {
            self._stale: 4,
            self._suspended: 1,
            self._bookie_killed: 3,
            self._quorum_lost: 2,
            self._disk_lost: 2,
            self._zookeeper_stopped: 2,
            self._zookeeper_killed: 1,
            self._client_killed: 2,
            self._client_stopped: 1,
        }

    def open_store(self, call_timeout_s: float | None) -> Store:
        """See `TakeoverStory.open_store`."""
        return self._open_store(
            self._cluster.hosts,
            root=self.root,
            bookkeeper=bookkeeper_options(self._client.current()),
            session_timeout_s=_SESSION_TIMEOUT_S,
            call_timeout_s=call_timeout_s or _CALL_TIMEOUT_S,
            client_options={"connection_retry": {"max_tries": -1, "delay": 0.01, "max_delay": 0.05}},
        )

    def publisher_store(self) -> tuple[str, str]:
        """See `TakeoverStory.publisher_store`."""
        return "bookkeeper", self._cluster.hosts

    def _bookie_killed(self) -> None:
        """One bookie of three dies at work; the owner continues without it."""
        self.steps.append("a bookie is killed at work, and started again")
        self.counts["killed_bookies"] += 1
        with self.owner.at_work():
            self.pause(0.05)
            self.chance.choice(self._cluster.bookies).kill()
            self.pause(0.5)
        self._cluster.revive()
        self.check_stale(self.owner, self.opened())

    def _quorum_lost(self) -> None:
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
            self._check_refusal([bookie.name for bookie in killed])
        finally:
            self._cluster.revive()
        self.check_stale(self.owner, self.opened())

    def _disk_lost(self) -> None:
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

    def _zookeeper_stopped(self) -> None:
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

    def _zookeeper_killed(self) -> None:
        """ZooKeeper is killed during work, and restarted."""
        self.steps.append("ZooKeeper is killed at work, and started again")
        self.counts["killed_zookeepers"] += 1
        with self.owner.at_work():
            self.pause(0.1)
            self._cluster.zookeeper.kill()
            self.pause(0.3)
            self._cluster.zookeeper.start()
        self.check_stale(self.owner, self.opened())

    def _client_killed(self) -> None:
        """The Java client is killed during work."""
        self.steps.append("the Java client is killed at work")
        self.counts["killed_clients"] += 1
        with self.owner.at_work():
            self.pause(0.1)
            os.kill(self._client.current().process_id, signal.SIGKILL)
            self.pause(0.1)
        self.check_stale(self.owner, self.opened())

    def _client_stopped(self) -> None:
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

    def _check_refusal(self, names: list[str]) -> None:
        """Append without a quorum; the error must name the missing bookies."""
        ledgers = self.owner.store.ledgers
        try:
            ledger_id = ledgers.create("probe")
            ledgers.append(ledger_id, b"")
        except StoreError as error:
            if not all(name in str(error) for name in names):
                self.fail(Promise.ERRORS, f"without {' and '.join(names)}: {error}")
        else:
            self.fail(Promise.ERRORS, f"an append without {' and '.join(names)} succeeded")
