"""ZK: a topic on a real ZooKeeper server, while the server dies or hangs, sessions expire, and stale owners write.

Counts: ``stale_owners``, ``stopped_owners``, ``expired_sessions``, ``stopped_servers``, ``killed_servers``, and
``unavailable`` for runs that ended because a client gave up.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash.layer import LayerSkippedError, RunOutcome, quiet
from ackstate.analysis.crash.scratch import scratch_directory
from crash import takeovers
from crash.takeovers import SIZE, TakeoverStory, run_story
from crash.zookeeper_server import running_server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import ExitStack

    from ackstate.analysis.crash.process_layer import RunSize
    from ackstate.cursor.store import Store
    from crash.zookeeper_server import ZooKeeperServer

_RUNS_OF_A_SERVER = 300  # then another server starts with an empty disk
_SESSION_TIMEOUT_S = 2.0
_CALL_TIMEOUT_S = 5.0
_HANGING_CALL_TIMEOUT_S = 0.2
_CONNECTS_WITHIN_S = 10.0


def zookeeper(first_seed: int) -> Iterator[RunOutcome]:
    """Yield runs of a few events each; a server serves many runs.

    Raises:
        LayerSkippedError: There is no Java, no pyspark or no kazoo.
    """
    try:
        from ackstate.stores.zookeeper import ZooKeeperStore
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
    return takeovers.shrunk(
        outcome, lambda size, repeat: run(outcome.seed, server, open_store, size=size, repeat=repeat)
    )


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
    root = f"/run-{seed}-{repeat}"
    return run_story(seed, size, lambda stack: _ZooKeeperStory(seed, server, open_store, stack, size=size, root=root))


@final
class _ZooKeeperStory(TakeoverStory):
    """One run: the owners of a cursor, and all of their requests, accepted acks and promises."""

    def __init__(
        self,
        seed: int,
        server: ZooKeeperServer,
        open_store: Callable[..., Store],
        stack: ExitStack,
        *,
        size: RunSize,
        root: str,
    ) -> None:
        self._server, self._open_store = server, open_store
        super().__init__(seed, stack, size=size, root=root)

    def happenings(self) -> Mapping[Callable[[], None], int]:
        """See `TakeoverStory.happenings`."""
        return {self._stale: 6, self._expired: 4, self._stopped: 2, self._killed: 1, self._suspended: 1}

    def open_store(self, call_timeout_s: float | None) -> Store:
        """See `TakeoverStory.open_store`."""
        return self._open_store(
            self._server.hosts,
            root=self.root,
            session_timeout_s=_SESSION_TIMEOUT_S,
            call_timeout_s=call_timeout_s or _CALL_TIMEOUT_S,
            client_options={"connection_retry": {"max_tries": -1, "delay": 0.01, "max_delay": 0.05}},
        )

    def publisher_store(self) -> tuple[str, str]:
        """See `TakeoverStory.publisher_store`."""
        return "zookeeper", self._server.hosts

    def _expired(self) -> None:
        """The server expires the session during work."""
        self.steps.append("the session expires at work")
        self.counts["expired_sessions"] += 1
        with self.owner.at_work():
            self.pause(0.02)
            _expire(self._server.hosts, self.owner.store)
            self.pause(0.02)
        self.check_stale(self.owner, self.opened())

    def _stopped(self) -> None:
        """The server hangs during a write, until the client gives up; then it continues, and may execute the write."""
        self.steps.append("the server hangs at work, and continues when the client has given up")
        self.counts["stopped_servers"] += 1
        hasty = self.opened(call_timeout_s=_HANGING_CALL_TIMEOUT_S)
        try:
            with hasty.at_work():
                self.pause(0.02)
                self._server.pause()
                self.pause(_HANGING_CALL_TIMEOUT_S * self.chance.choice([0.2, 1.5]))
        finally:
            self._server.resume()
        self.check_stale(hasty, self.opened())

    def _killed(self) -> None:
        """The server is killed during work, and restarted."""
        self.steps.append("the server is killed at work, and started again")
        self.counts["killed_servers"] += 1
        with self.owner.at_work():
            self.pause(0.05)
            self._server.kill()
            self._server.start()
        self.check_stale(self.owner, self.opened())


def _expire(hosts: str, store: Any) -> None:
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
