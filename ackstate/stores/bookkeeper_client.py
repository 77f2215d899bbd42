"""BookKeeper's Java client in a child process, so that a dead or hanging Java never takes Python with it.

Each method sends a request and returns a `Reply` to wait for; so any number of calls can be under way at once. A call
without a reply in time ends the child. After that, or if the child dies, all calls are refused with `StoreError`, and
it is unknown whether the calls under way have happened.

The child ends when this process ends, in any way. A client is not usable across a fork.
"""

from __future__ import annotations

import marshal
import math
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, final

from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, StoreError, check_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

CLASS_PATH_VARIABLE = "ACKSTATE_BOOKKEEPER_CLASSPATH"
_PULSAR_HOME_VARIABLE = "PULSAR_HOME"
JVM_OPTIONS = ("-Xmx64m", "-XX:MaxDirectMemorySize=128m", "-XX:+UseSerialGC")
"""The least memory for a client; a process that persists megabytes at once may prefer ``("-Xmx1g",)``."""
DIGEST_TYPES = ("CRC32C", "CRC32", "MAC", "DUMMY")
"""The checksums that an entry may have."""
BOOKIE_UNREACHABLE = -8
"""The code of a `BookKeeperError` if a bookie of the ensemble does not answer."""
_NO_SUCH_LEDGER = frozenset({-7, -25})
_NO_SUCH_ENTRY = -13
_LEDGER_FENCED = -101

_CHILD = Path(__file__).with_name("bookkeeper_java.py")
_STARTS_WITHIN_S = 60.0
_ENDS_WITHIN_S = 5.0
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
# The part of a request to a bookie that is not its entry: ledger, entry id, digest, the ledger's key.
_FRAME_ROOM_BYTES = 1024
# Appends under way must fit into a small Java heap; bookies are at work on one request while the child reads the next.
_APPENDED_BYTES_MAX = 4 << 20
_APPENDED_ENTRIES_MAX = 250
_APPENDS_AT_ONCE = 4

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Replication:
    """How the entries of a new ledger are replicated, and protected; the defaults are Pulsar's."""

    ensemble_size: int = 2  # the number of bookies that store a ledger
    write_quorum: int = 2  # the number of bookies that store each entry
    ack_quorum: int = 2  # the number of bookies that must have synced an entry before it is durable
    digest_type: str = "CRC32C"  # the checksum of each entry: one of `DIGEST_TYPES`
    password: bytes = b""  # needed to open the ledger

    def __post_init__(self) -> None:
        if not 1 <= self.ack_quorum <= self.write_quorum <= self.ensemble_size:
            raise ValueError(
                "replication must be 1 <= ack_quorum <= write_quorum <= ensemble_size, got"
                f" {self.ack_quorum}, {self.write_quorum} and {self.ensemble_size}"
            )
        if self.digest_type not in DIGEST_TYPES:
            raise ValueError(f"digest_type must be one of {', '.join(DIGEST_TYPES)}, got {self.digest_type!r}")


class OpenLedger(NamedTuple):
    """A handle of a ledger in the child."""

    handle: int  # its number, for the methods of the client
    ledger_id: int
    last_confirmed: int  # the last entry that was confirmed when it was opened, -1 if there is none


class LedgerMetadata(NamedTuple):
    """The metadata of a ledger."""

    ack_quorum: int  # the number of bookies that sync each entry
    last_entry_id: int | None  # the last entry of a closed ledger, -1 if it is empty; None for an open one
    ensemble: Sequence[str]  # the bookies that store its last entries
    custom_metadata: Mapping[str, bytes]  # values of the application, by name


class BookKeeperError(StoreError):
    """BookKeeper refused a call; `code` is its ``BKException.Code``."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"BookKeeper: {message} (code {code})")
        self.code = code


def error_of(code: int, message: str) -> StoreError:
    """Return the error that reports a failure in the child."""
    if code == _LEDGER_FENCED:
        return LedgerFencedError(f"BookKeeper: {message}")
    if code in _NO_SUCH_LEDGER or code == _NO_SUCH_ENTRY:
        return LedgerNotFoundError(f"BookKeeper: {message}")
    return BookKeeperError(code, message)


def find_jars(class_path: str | None) -> list[str]:
    """Return the jars of a class path, or of the environment's; `StoreError` if there is none."""
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


@final
class Reply(Future[_Result]):
    """The outcome of a call that is under way."""

    def __init__(
        self, client: BookKeeperClient, what: str, convert: Callable[[Any], _Result], timeout_s: float
    ) -> None:
        super().__init__()
        self._client, self._what, self._convert, self._timeout_s = client, what, convert, timeout_s
        self._deadline_s = time.monotonic() + timeout_s

    def wait(self) -> _Result:
        """Return the result, or raise the error; after a `StoreError` it is unknown whether the call happened."""
        try:
            return self.result(max(0.0, self._deadline_s - time.monotonic()))
        except TimeoutError:
            self._client.give_up(f"no reply to {self._what} within {self._timeout_s} s")
        return self.result()

    def _arrive(self, succeeded: bool, content: Any) -> None:
        if succeeded:
            self.set_result(self._convert(content))
        else:
            self.set_exception(error_of(*content))


@final
class BookKeeperClient:
    """A client of one cluster, such as ``zk+null://host1:2181;host2:2181/ledgers``; thread-safe."""

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
        # How long a call waits for its reply before the child is ended. BookKeeper's own time-outs should be shorter.
        # The start of Java may take longer.
        self.call_timeout_s = call_timeout_s
        self.entry_bytes_max = int(all_settings[_FRAME_SIZE_SETTING]) - _FRAME_ROOM_BYTES
        self._name = metadata_uri
        self._refusal = ""  # Why every call is refused; empty while the child serves.
        self._state = threading.Lock()  # Guards the next two.
        self._number = 0
        self._waiting: dict[int, Reply[Any]] = {}
        self._outbox: deque[tuple[int, str, tuple[Any, ...]]] = deque()  # Calls, in any order between threads.
        self._sending = threading.Lock()
        self._start_child()
        try:
            arguments = (jars, [*_QUIET_OPTIONS, *jvm_options], all_settings)
            self._call(_nothing, "start", *arguments, timeout_s=_STARTS_WITHIN_S).wait()
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
        """Reserve a ledger id above every one before; no other client will get it."""
        return self._call(int, "new_ledger_id")

    def create(
        self, replication: Replication, *, ledger_id: int | None, custom_metadata: Mapping[str, bytes]
    ) -> Reply[OpenLedger]:
        """Create a ledger, open for appends; `ledger_id` is a reserved id, or None for any."""
        quorum = (replication.ensemble_size, replication.write_quorum, replication.ack_quorum)
        secrets = (replication.digest_type, replication.password)
        return self._call(_open_ledger, "create", ledger_id, quorum, *secrets, dict(custom_metadata))

    def open_and_fence(self, ledger_id: int, replication: Replication) -> Reply[OpenLedger]:
        """Open a ledger with recovery: its writer can no longer append, and the ledger is closed."""
        return self._call(_open_ledger, "open", ledger_id, True, replication.digest_type, replication.password)

    def open_to_read(self, ledger_id: int, replication: Replication) -> Reply[OpenLedger]:
        """Open a ledger without recovery: its writer does not notice."""
        return self._call(_open_ledger, "open", ledger_id, False, replication.digest_type, replication.password)

    def append(self, entries: Sequence[tuple[int, bytes]]) -> Reply[list[int | StoreError]]:
        """Append entries to any ledgers, by handle, in one request; the outcome of each is its entry id or an error."""
        # If an append to a ledger fails, so do all later ones. The caller refuses an entry above `entry_bytes_max`,
        # because a bookie would drop it silently.
        return self._call(_append_outcomes, "append", list(entries))

    def append_all(self, entries: Sequence[tuple[int, bytes]]) -> list[int | StoreError]:
        """Append any number of entries, a few requests at once, and return their outcomes; `StoreError` if unknown."""
        outcomes: list[int | StoreError] = []
        under_way: deque[Reply[list[int | StoreError]]] = deque()
        for request in _requests(entries):
            if len(under_way) == _APPENDS_AT_ONCE:
                outcomes += under_way.popleft().wait()
            under_way.append(self.append(request))
        for reply in under_way:
            outcomes += reply.wait()
        return outcomes

    def last_confirmed(self, handle: int) -> Reply[int]:
        """Return the last entry that every reader may see, -1 if there is none."""
        # While its writer is open, this may be older than the last acknowledged append.
        return self._call(int, "last_confirmed", handle)

    def read_unconfirmed(self, handle: int, first: int, end: int) -> Reply[list[bytes]]:
        """Return entries from `first` (included) to `end` (excluded), above `first`, perhaps unconfirmed ones."""
        return self._call(list, "read_unconfirmed", handle, first, end - 1)

    def close_ledger(self, handle: int) -> Reply[None]:
        """Close a handle; that of the writer also closes the ledger."""
        return self._call(_nothing, "close", handle)

    def delete(self, ledger_id: int) -> Reply[None]:
        """Delete a ledger; `LedgerNotFoundError` if there is none."""
        return self._call(_nothing, "delete", ledger_id)

    def destroy(self, ledger_id: int, replication: Replication) -> None:
        """Delete a ledger so that no process can append to it afterwards; no-op if there is none."""
        with suppress(LedgerNotFoundError):
            if self.metadata(ledger_id).wait().last_entry_id is None:
                # The writer would not notice the deletion.
                self.close_ledger(self.open_and_fence(ledger_id, replication).wait().handle)
            self.delete(ledger_id).wait()

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
            self._socket.shutdown(socket.SHUT_WR)
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(_ENDS_WITHIN_S)
        self._end_child()
        self._receiver.join()
        self._connection.close()
        self._socket.close()

    def _end_child(self) -> None:
        """Kill the child if it is running, and end its replies even if a forked process has inherited its socket."""
        self._child.kill()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _start_child(self) -> None:
        self._socket, childs = socket.socketpair()
        # A client that hangs must not block its callers. A time-out of the socket in Python would not concern the
        # connection, which writes to the descriptor.
        fraction, seconds = math.modf(self.call_timeout_s)
        self._socket.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(seconds), int(fraction * 1e6))
        )
        self._connection = Connection(os.dup(self._socket.fileno()))
        with childs:
            self._child = subprocess.Popen(  # noqa: S603 - a module of ours
                # In a process group of its own it does not receive Ctrl-C.
                [sys.executable, "-P", str(_CHILD), str(childs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[childs.fileno()],
                process_group=0,
            )
        self._receiver = threading.Thread(target=self._receive, name="bookkeeper-replies", daemon=True)
        self._receiver.start()

    def _call(
        self, convert: Callable[[Any], _Result], operation: str, *arguments: Any, timeout_s: float | None = None
    ) -> Reply[_Result]:
        reply = Reply(self, operation, convert, timeout_s or self.call_timeout_s)
        with self._state:
            self.check_usable()
            self._number += 1
            number = self._number
            self._waiting[number] = reply
        self._outbox.append((number, operation, arguments))
        # Send all calls that are waiting, unless another thread is sending: it then sends them too.
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                waiting = [self._outbox.popleft() for _ in range(len(self._outbox))]
                self._connection.send_bytes(marshal.dumps(waiting))
            except OSError as error:
                self.give_up(f"the child accepts no request: {error}")
            finally:
                self._sending.release()
        return reply

    def _receive(self) -> None:
        try:
            with suppress(EOFError, OSError):
                while True:
                    # The other process is our own child.
                    received = marshal.loads(self._connection.recv_bytes())  # noqa: S302
                    with self._state:
                        replies = [(self._waiting.pop(number), outcome) for number, *outcome in received]
                    for reply, outcome in replies:
                        reply._arrive(*outcome)
        finally:
            self._refuse(f"BookKeeper's Java client {self._how_ended()}; {_OPEN_AGAIN}")
            with self._state:
                waiting, self._waiting = self._waiting, {}
            for reply in waiting.values():
                reply.set_exception(StoreError(f"{self._name}: {self._refusal}; the call may have happened"))

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


@dataclass(frozen=True, slots=True)
class BookKeeperOptions:
    """How a store uses BookKeeper."""

    replication: Replication = field(default_factory=Replication)  # of new ledgers; the password of all
    ledgers_root: str = "/ledgers"  # BookKeeper's own node in the same ZooKeeper cluster
    # Jars, and folders of jars, separated as in Java. None takes the environment's ``ACKSTATE_BOOKKEEPER_CLASSPATH``,
    # or Pulsar's ``lib`` in ``PULSAR_HOME``.
    class_path: str | None = None
    jvm_options: Sequence[str] = JVM_OPTIONS  # of the virtual machine, such as its largest heap
    settings: Mapping[str, str] = field(default_factory=dict)  # of BookKeeper's ``ClientConfiguration``, by name
    # A client of the same cluster that several stores share, which a store does not close; the fields above except
    # `replication` are then ignored. None starts one for this store.
    client: BookKeeperClient | None = None

    def __post_init__(self) -> None:
        check_path(self.ledgers_root)

    def connect(self, hosts: str, *, call_timeout_s: float) -> BookKeeperClient:
        """Start a client of a cluster with these ZooKeeper servers; `StoreError` if that fails."""
        return BookKeeperClient(
            f"zk+null://{hosts.replace(',', ';')}{self.ledgers_root}",
            class_path=self.class_path,
            jvm_options=self.jvm_options,
            settings=self.settings,
            call_timeout_s=call_timeout_s,
        )


def _requests(entries: Sequence[tuple[int, bytes]]) -> Iterator[list[tuple[int, bytes]]]:
    """Yield entries in order, in requests that are not too large."""
    request: list[tuple[int, bytes]] = []
    size_bytes = 0
    for handle, entry in entries:
        if request and (size_bytes + len(entry) > _APPENDED_BYTES_MAX or len(request) == _APPENDED_ENTRIES_MAX):
            yield request
            request, size_bytes = [], 0
        request.append((handle, entry))
        size_bytes += len(entry)
    if request:
        yield request


def _open_ledger(content: Any) -> OpenLedger:
    return OpenLedger(*content)


def _append_outcomes(content: Any) -> list[int | StoreError]:
    return [each if isinstance(each, int) else error_of(*each) for each in content]


def _nothing(_: Any) -> None:
    return None
