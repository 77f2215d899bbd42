"""BookKeeper's Java client in a child process, so that a dead or hanging Java never takes Python with it.

Each method sends a request and returns a `Reply` to wait for; so any number of calls can be under way at once. A call
without a reply in time ends the child. After that, or if the child dies, all calls are refused with `StoreError`, and
it is unknown whether the calls under way have happened.

The child ends when this process ends, in any way. A client is not usable across a fork.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from ackstate.stores.base import PayloadTooLargeError, StoreError
from ackstate.stores.bookkeeper_errors import BookKeeperError, error_of
from ackstate.stores.bookkeeper_frames import Failure, FrameReader, frame
from ackstate.stores.bookkeeper_ledger import LedgerMetadata, OpenLedger

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ackstate.stores.bookkeeper_ledger import Replication


CLASS_PATH_VARIABLE = "ACKSTATE_BOOKKEEPER_CLASSPATH"
_PULSAR_HOME_VARIABLE = "PULSAR_HOME"


def find_jars(class_path: str | None) -> list[str]:
    """Return the jars of a class path, or of the environment's.

    Raises:
        StoreError: There is none; the message lists the settings.
    """
    pulsar_home = os.environ.get(_PULSAR_HOME_VARIABLE)
    from_pulsar = str(Path(pulsar_home, "lib")) if pulsar_home else ""
    found = class_path or os.environ.get(CLASS_PATH_VARIABLE) or from_pulsar
    jars = [jar for part in found.split(os.pathsep) if part for jar in _jars_in(part)]
    if not jars:
        name = f"{found} has no jars" if found else "BookKeeper's Java client is missing"
        raise StoreError(
            f"{name}: name a folder with the jars of bookkeeper-server and its dependencies by class_path or"
            f" {CLASS_PATH_VARIABLE}, or a Pulsar installation by {_PULSAR_HOME_VARIABLE}"
        )
    return jars


def _jars_in(part: str) -> list[str]:
    folder = Path(part.removesuffix("*")) if part.endswith(("/*", "/")) else Path(part)
    if folder.is_dir():
        return sorted(map(str, folder.glob("*.jar")))
    return [part] if folder.exists() else []


_Result = TypeVar("_Result")

_WORKER = "ackstate.stores.bookkeeper_worker"
_STARTS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 5.0
_START = "start"
JVM_OPTIONS = ("-Xmx64m", "-XX:MaxDirectMemorySize=128m", "-XX:+UseSerialGC")
"""The least memory for a client; a process that persists megabytes at once may prefer ``("-Xmx1g",)``."""
_CLOSED = "the BookKeeper client is closed"
_OPEN_AGAIN = "close the store and open it again"

# An exhausted heap ends the child: a client that continues without it may never answer.
_QUIET_OPTIONS = ("-Dlog4j2.level=OFF", "-Dlog4j2.StatusLogger.level=OFF", "-XX:+ExitOnOutOfMemoryError")
_FRAME_SIZE_SETTING = "nettyMaxFrameSizeBytes"
# As Pulsar's broker sets them; fewer threads.
_SETTINGS = {
    "useV2WireProtocol": "true",
    "throttle": "0",
    "enableDigestTypeAutodetection": "true",
    "numIOThreads": "2",
    "numWorkerThreads": "2",
    _FRAME_SIZE_SETTING: str(5 << 20),
}
# The part of a request that is not its entry: ledger, entry id, digest, the ledger's key.
_FRAME_ROOM_BYTES = 1024


@final
class Reply(Generic[_Result]):
    """The outcome of a call that is under way."""

    def __init__(
        self, client: BookKeeperClient, what: str, convert: Callable[[Any], _Result], *, timeout_s: float
    ) -> None:
        self._client, self._what, self._convert, self._timeout_s = client, what, convert, timeout_s
        self._arrived = threading.Lock()
        self._arrived.acquire()
        self._deadline_s = time.monotonic() + timeout_s
        self._outcome: Any = None
        self._error: StoreError | None = None

    def wait(self) -> _Result:
        """Return the result.

        Raises:
            LedgerFencedError: The ledger was recovered by another client; the append did not happen.
            LedgerNotFoundError: There is no such ledger or entry.
            BookKeeperError: BookKeeper refused the call for another reason; the message names the bookies that do not
                answer.
            StoreError: The child died, or there was no reply in time; it is unknown whether the call happened.
        """
        if not self._arrived.acquire(timeout=max(0.0, self._deadline_s - time.monotonic())):
            self._client.give_up(f"no reply to {self._what} within {self._timeout_s} s")
            self._arrived.acquire()
        self._arrived.release()
        if self._error is not None:
            # A new instance for each caller, because raising an error changes it.
            raise StoreError(str(self._error))
        succeeded, content = self._outcome
        if not succeeded:
            raise error_of(Failure(*content))
        return self._convert(content)

    def _arrive(self, outcome: Any, error: StoreError | None) -> None:
        self._outcome, self._error = outcome, error
        self._arrived.release()


@final
class BookKeeperClient:
    """A client of one cluster; thread-safe.

    Args:
        metadata_uri: The cluster, such as ``zk+null://host1:2181;host2:2181/ledgers``.
        class_path: Jars, and folders of jars, separated as in Java. None takes the environment's
            ``ACKSTATE_BOOKKEEPER_CLASSPATH``, or Pulsar's ``lib`` in ``PULSAR_HOME``.
        jvm_options: The options of the virtual machine, such as its largest heap.
        settings: Properties of BookKeeper's ``ClientConfiguration`` by name, such as ``addEntryTimeoutSec``.
        call_timeout_s: How long a call waits for its reply before the child is ended. BookKeeper's own time-outs should
            be shorter. The start of Java may take longer.

    Attributes:
        entry_bytes_max: The size of the largest entry.

    Raises:
        StoreError: JPype, Java or BookKeeper's client is missing, or the cluster does not answer.
    """

    def __init__(
        self,
        metadata_uri: str,
        *,
        class_path: str | None = None,
        jvm_options: Sequence[str] = JVM_OPTIONS,
        settings: Mapping[str, str] | None = None,
        call_timeout_s: float = 30.0,
    ) -> None:
        if not call_timeout_s > 0:
            raise ValueError(f"call_timeout_s must be positive, got {call_timeout_s}")
        jars = find_jars(class_path)
        if find_spec("jpype") is None:
            raise StoreError("a BookKeeper client needs JPype: pip install 'ackstate[bookkeeper]'")
        all_settings = {**_SETTINGS, **(settings or {}), "metadataServiceUri": metadata_uri}
        self.call_timeout_s = call_timeout_s
        self.entry_bytes_max = int(all_settings[_FRAME_SIZE_SETTING]) - _FRAME_ROOM_BYTES
        self._name = metadata_uri
        self._refusal = ""  # Why every call is refused; empty while the child serves.
        self._state = threading.Lock()  # Guards the next two.
        self._number = 0
        self._waiting: dict[int, Reply[Any]] = {}
        self._outbox: deque[bytes] = deque()  # Frames of calls, in any order between threads.
        self._sending = threading.Lock()
        self._start_child()
        options = [*_QUIET_OPTIONS, *jvm_options]
        try:
            self._call(_nothing, _START, jars, options, all_settings).wait()
        except BaseException as error:
            self.close()
            if isinstance(error, BookKeeperError):
                raise StoreError(f"{metadata_uri}: {error}") from error
            raise

    @property
    def process_id(self) -> int:
        """The process id of the child."""
        return self._child.pid

    def check_usable(self) -> None:
        """Raise `StoreError` if calls are refused."""
        if self._refusal:
            raise StoreError(f"{self._name}: {self._refusal}")

    def new_ledger_id(self) -> Reply[int]:
        """Reserve a ledger id that no other client will get."""
        return self._call(int, "new_ledger_id")

    def create(
        self,
        replication: Replication,
        *,
        ledger_id: int | None = None,
        custom_metadata: Mapping[str, bytes] | None = None,
    ) -> Reply[OpenLedger]:
        """Create a ledger, open for appends.

        Args:
            replication: Its bookies, checksum and password.
            ledger_id: A reserved id; None for any.
            custom_metadata: Values of the application.
        """
        quorum = (replication.ensemble_size, replication.write_quorum, replication.ack_quorum)
        metadata = dict(custom_metadata or {})
        return self._call(
            _open_ledger, "create", ledger_id, quorum, replication.digest_type, replication.password, metadata
        )

    def open_and_fence(self, ledger_id: int, replication: Replication) -> Reply[OpenLedger]:
        """Open a ledger with recovery: its writer can no longer append, and the ledger is closed."""
        return self._call(_open_ledger, "open", ledger_id, True, replication.digest_type, replication.password)

    def open_to_read(self, ledger_id: int, replication: Replication) -> Reply[OpenLedger]:
        """Open a ledger without recovery: its writer does not notice."""
        return self._call(_open_ledger, "open", ledger_id, False, replication.digest_type, replication.password)

    def append(self, entries: Sequence[tuple[int, bytes]]) -> Reply[list[int | StoreError]]:
        """Append entries to any ledgers, each by the number of its handle.

        Each entry has its own outcome: its entry id, or an error. If an append to a ledger fails, so do all later ones.

        Raises:
            PayloadTooLargeError: An entry exceeds `entry_bytes_max`; nothing was sent. A bookie would drop it silently.
        """
        largest = max((len(entry) for _, entry in entries), default=0)
        if largest > self.entry_bytes_max:
            raise PayloadTooLargeError(
                f"{self._name}: an entry must have at most {self.entry_bytes_max} bytes ({_FRAME_SIZE_SETTING}), got"
                f" {largest}; nothing was sent"
            )
        return self._call(_append_outcomes, "append", list(entries))

    def last_confirmed(self, handle: int) -> Reply[int]:
        """Return the last entry that every reader may see, -1 if there is none.

        While its writer is open, this may be older than the last acknowledged append.
        """
        return self._call(int, "last_confirmed", handle)

    def read_unconfirmed(self, handle: int, first: int, end: int) -> Reply[list[bytes]]:
        """Return the entries from `first` (included) to `end` (excluded), which must be above `first`.

        They may be entries that are not confirmed to readers yet.
        """
        return self._call(list, "read_unconfirmed", handle, first, end - 1)

    def close_ledger(self, handle: int) -> Reply[None]:
        """Close a handle; that of the writer also closes the ledger."""
        return self._call(_nothing, "close", handle)

    def forget_ledger(self, handle: int) -> Reply[None]:
        """Release a handle and leave the ledger as it is; that of a writer then needs recovery."""
        return self._call(_nothing, "forget", handle)

    def delete(self, ledger_id: int) -> Reply[None]:
        """Delete a ledger; `LedgerNotFoundError` if there is none."""
        return self._call(_nothing, "delete", ledger_id)

    def metadata(self, ledger_id: int) -> Reply[LedgerMetadata]:
        """Return the metadata of a ledger."""
        return self._call(lambda found: LedgerMetadata(**found), "metadata", ledger_id)

    def missing_bookies(self) -> Reply[list[str]]:
        """Return the bookies that belong to the cluster and do not answer, as ``host:port``."""
        return self._call(list, "missing_bookies")

    def give_up(self, reason: str) -> None:
        """Refuse every call from now on, and end the child."""
        self._refuse(f"{reason}; {_OPEN_AGAIN}")
        self._end_child()

    def close(self) -> None:
        """End the child; no-op if closed. Handles of writers are not closed: their ledgers need recovery."""
        self._refuse(_CLOSED)
        with suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_ENDS_WITHIN_S)
        self._end_child()
        self._receiver.join()
        self._requests.close()
        self._replies.close()

    def _end_child(self) -> None:
        """Kill the child if it is running, and end its replies even if a forked process has inherited its socket."""
        self._child.kill()
        with suppress(OSError):
            self._replies.shutdown(socket.SHUT_RDWR)

    def _start_child(self) -> None:
        self._requests, requests = socket.socketpair()
        self._replies, replies = socket.socketpair()
        # A client that hangs must not block its callers.
        self._requests.settimeout(self.call_timeout_s)
        with requests, replies:
            numbers = [each.fileno() for each in (requests, replies)]
            self._child = subprocess.Popen(  # noqa: S603 - a module of ours
                # In a process group of its own it does not receive Ctrl-C.
                [sys.executable, "-P", "-m", _WORKER, *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=numbers,
                process_group=0,
            )
        self._receiver = threading.Thread(target=self._receive, name="bookkeeper-replies", daemon=True)
        self._receiver.start()

    def _call(self, convert: Callable[[Any], _Result], operation: str, *arguments: Any) -> Reply[_Result]:
        timeout_s = _STARTS_WITHIN_S if operation == _START else self.call_timeout_s
        reply = Reply(self, operation, convert, timeout_s=timeout_s)
        with self._state:
            self.check_usable()
            self._number += 1
            number = self._number
            self._waiting[number] = reply
        self._outbox.append(frame((number, operation, arguments)))
        self._send_outbox()
        return reply

    def _send_outbox(self) -> None:
        """Send all frames that are waiting, unless another thread is sending: it then sends them too."""
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                waiting = [self._outbox.popleft() for _ in range(len(self._outbox))]
                self._requests.sendall(b"".join(waiting))
            except OSError as error:
                self.give_up(f"the child accepts no request: {error}")
            finally:
                self._sending.release()

    def _receive(self) -> None:
        reader = FrameReader(self._replies)
        try:
            while (received := reader.read()) is not None:
                with self._state:
                    replies = [(self._waiting.pop(number), outcome) for number, *outcome in received]
                for reply, outcome in replies:
                    reply._arrive(outcome, None)
        finally:
            self._refuse(f"BookKeeper's Java client {self._how_ended()}; {_OPEN_AGAIN}")
            with self._state:
                waiting, self._waiting = self._waiting, {}
            for reply in waiting.values():
                reply._arrive(None, StoreError(f"{self._name}: {self._refusal}; the call may have happened"))

    def _refuse(self, refusal: str) -> None:
        with self._state:
            self._refusal = self._refusal or refusal

    def _how_ended(self) -> str:
        try:
            status = self._child.wait(_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if status >= 0:
            return f"ended with status {status}"
        with suppress(ValueError):  # Most real-time signals have no name.
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"


def _open_ledger(content: Any) -> OpenLedger:
    return OpenLedger(*content)


def _append_outcomes(content: Any) -> list[int | StoreError]:
    return [each if isinstance(each, int) else error_of(Failure(*each)) for each in content]


def _nothing(_: Any) -> None:
    return None
