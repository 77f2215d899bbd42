"""A ZooKeeper session that never sends a write twice, nor after its call has returned.

kazoo keeps the connection and reconnects to the session. It never repeats a request on its own: only its `retry` does,
which is not used here. Writes are sent once, and only while there is a connection; it is unknown whether a write
without an answer has happened. Reads are sent again after a lost connection.

An unanswered write cannot take effect after a later read of the same session: when a session reconnects, the server
drops the remaining requests of its old connection.

Each read follows a `sync` on the same connection: a follower in the cluster may lag, and a value that another process
has written must not look absent.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    BadVersionError,
    ConfigurationError,
    ConnectionLoss,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    RolledBackError,
    RuntimeInconsistency,
)
from kazoo.protocol.states import KazooState
from kazoo.security import OPEN_ACL_UNSAFE

from ackstate.stores.base import PayloadTooLargeError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

_Result = TypeVar("_Result")

# How often a call is retried because others were faster. Each lost race is the progress of another call, so the limit
# is reached only if something is wrong.
_ATTEMPTS_MAX = 200
# kazoo wakes its sender with one byte per request through a socket pair, which has room for some 270.
_REQUESTS_AT_ONCE = 64
# kazoo waits for the answer to a connection as long as the session lasts, divided by the number of servers. A server
# that loads its data may accept a connection and forget it (seen in 3.9.5); one attempt must not cost the session.
_CONNECTIONS_PER_SESSION = 3
# A larger transaction keeps the server from its other clients for too long.
_OPERATIONS_MAX = 1_000
# The overhead of a request besides its operations: its header and the end of the list.
_REQUEST_BYTES = 32
# The overhead of an operation besides its path and data: two lengths, a header, and flags or a version.
_OPERATION_BYTES = 21


class LostRaceError(Exception):
    """A transaction found a state other than the expected one; it did nothing, and may be built again and retried.

    Args:
        name_taken: Whether it would have created a node that exists.
    """

    def __init__(self, *, name_taken: bool) -> None:
        super().__init__("another was faster")
        self.name_taken = name_taken


class _ConnectionLostError(StoreError):
    """The connection was lost before the answer came."""


class Node(NamedTuple):
    """A node as read.

    Attributes:
        data: Its bytes.
        version: Counts its changes from 0; restarts at 0 if the node is deleted and created again.
        changed_zxid: The transaction that last changed its data: never the same for two changes of one path.
        child_count: The number of nodes directly below it.
    """

    data: bytes
    version: int
    changed_zxid: int
    child_count: int


@dataclass(frozen=True, slots=True)
class SessionOperation:
    """One step of a transaction, created by `check`, `create`, `set_data` or `delete`."""

    verb: Literal["check", "create", "set_data", "delete"]
    path: str
    data: bytes = b""
    version: int = -1


def check(path: str, version: int) -> SessionOperation:
    """Fail unless a node is at a version."""
    return SessionOperation("check", path, version=version)


def create(path: str, data: bytes) -> SessionOperation:
    """Create a node that must not exist, below one that does."""
    return SessionOperation("create", path, data)


def set_data(path: str, data: bytes, version: int) -> SessionOperation:
    """Replace a node's data if it is at a version."""
    return SessionOperation("set_data", path, data, version)


def delete(path: str, version: int = -1) -> SessionOperation:
    """Delete a node without children, at a version or at any."""
    return SessionOperation("delete", path, version=version)


def _repeated(hosts: str) -> str:
    count = hosts.count(",") + 1
    return ",".join([hosts] * math.ceil(_CONNECTIONS_PER_SESSION / count))


@final
class ZooKeeperSession:
    """One session with a cluster, which refuses calls once it is closed or lost; thread-safe.

    Args:
        hosts: ``host:port`` pairs separated by commas.
        root: The prefix of every path.
        session_timeout_s: How long the servers keep the session without a message from it. The servers may bound it.
        call_timeout_s: How long a call waits for a connection, and again for an answer.
        request_bytes_max: The largest request that the servers accept, their ``jute.maxbuffer``, less some reserve.
        client_options: More arguments for `KazooClient`.

    Raises:
        StoreError: No server answered in time.
    """

    def __init__(  # noqa: PLR0913 - the store's own arguments, passed on by name
        self,
        hosts: str,
        *,
        root: str,
        session_timeout_s: float,
        call_timeout_s: float,
        request_bytes_max: int,
        client_options: Mapping[str, Any],
    ) -> None:
        self._name = f"{hosts}{root}"
        self._root = root
        self._root_bytes = len(root.encode())
        self._call_timeout_s = call_timeout_s
        self._request_bytes_max = request_bytes_max
        self._refusal = ""  # Why every call is refused; empty while the session is usable.
        self._only_reads = False
        self._usable = threading.Event()  # Set while there is a connection, and permanently after a refusal.
        self._stopping = threading.Lock()
        reconnect = {"max_tries": -1, "delay": 0.05, "max_delay": 1.0}
        options = {"connection_retry": reconnect, **client_options}
        try:
            self._client = KazooClient(_repeated(hosts), timeout=session_timeout_s, **options)
        except ConfigurationError as error:
            # Only the names of the options: their values may include passwords.
            raise ValueError(f"client_options {sorted(client_options)}: {error}") from error
        acl = self._client.default_acl or OPEN_ACL_UNSAFE
        self._acl_bytes = 4 + sum(12 + len(entry.id.scheme.encode()) + len(entry.id.id.encode()) for entry in acl)
        self._client.add_listener(self._on_state)
        try:
            self._client.start(timeout=call_timeout_s)
        except Exception as error:
            self.close()
            raise StoreError(f"{self._name}: no server answered within {call_timeout_s} s") from error

    def refuse_changes(self) -> None:
        """Refuse every mutating call from now on."""
        self._only_reads = True

    def make_root(self) -> None:
        """Create the root's node, without data, and its missing parents."""
        names = self._root.split("/")
        for end in range(2, len(names) + 1):
            self._exchange([partial(self._client.create_async, "/".join(names[:end]), b"")])

    def read(self, *paths: str) -> list[Node | None]:
        """Return the current nodes, read in this order but not at one instant; None for a missing node."""
        requests = [partial(self._client.get_async, self._root + path) for path in paths]
        answers = self._read(requests)
        return [answer and Node(answer[0], answer[1].version, answer[1].mzxid, answer[1].numChildren)
                for answer in answers]  # fmt: skip

    def children(self, path: str) -> list[str] | None:
        """Return the names of the nodes below a node, unordered; None if the node does not exist."""
        (names,) = self._read([partial(self._client.get_children_async, self._root + path)])
        return names if names is None else list(names)

    def commit(self, operations: Sequence[SessionOperation]) -> list[Any]:
        """Execute operations, all or none, durably, and return kazoo's result of each.

        Raises:
            PayloadTooLargeError: They are too large for one request.
            LostRaceError: A node was not in the state that an operation expects.
            StoreError: There is no connection, or it was lost and it is unknown whether the operations were executed.
        """
        size_bytes = _REQUEST_BYTES + sum(map(self._operation_bytes, operations))
        if size_bytes > self._request_bytes_max:
            raise PayloadTooLargeError(
                f"{self._name}: a request must have at most {self._request_bytes_max} bytes, got {size_bytes};"
                " nothing was sent"
            )
        transaction = self._client.transaction()
        for operation in operations:
            path = self._root + operation.path
            if operation.verb == "create":
                transaction.create(path, operation.data)
            elif operation.verb == "set_data":
                transaction.set_data(path, operation.data, operation.version)
            else:
                getattr(transaction, operation.verb)(path, operation.version)
        (results,) = self._exchange([transaction.commit_async])
        if results is None:
            raise StoreError(f"{self._name}: the servers refuse to carry out a transaction")
        return self._without_errors(results)

    def create_ephemeral(self, path: str, data: bytes) -> bool:
        """Create a node that disappears with the session, and its missing parents; return False if it exists.

        Raises:
            StoreError: There is no connection, or it was lost and it is unknown whether the node was created.
        """
        self.check_writable()
        request = partial(self._client.create_async, self._root + path, data, ephemeral=True, makepath=True)
        (created,) = self._exchange([request])
        return created is not None

    def delete_ephemeral(self, path: str) -> None:
        """Delete a node of `create_ephemeral`; no-op if it is gone, as it is after a lost session."""
        with suppress(StoreError):
            self._exchange([partial(self._client.delete_async, self._root + path)])

    def packs(self, operations: Iterable[SessionOperation]) -> Iterator[list[SessionOperation]]:
        """Yield operations in order, as many in each list as fit into a request."""
        pack: list[SessionOperation] = []
        size_bytes = _REQUEST_BYTES
        for operation in operations:
            operation_bytes = self._operation_bytes(operation)
            full = size_bytes + operation_bytes > self._request_bytes_max or len(pack) == _OPERATIONS_MAX
            if pack and full:
                yield pack
                pack, size_bytes = [], _REQUEST_BYTES
            pack.append(operation)
            size_bytes += operation_bytes
        if pack:
            yield pack

    def settle(self, attempt: Callable[[], _Result]) -> _Result:
        """Call a mutating function until it loses no race, and return its result.

        Raises:
            StoreError: Changes are refused, or too many races were lost; nothing was written.
        """
        self.check_writable()
        for _ in range(_ATTEMPTS_MAX):
            with suppress(LostRaceError):
                return attempt()
        raise StoreError(f"{self._name}: others were faster {_ATTEMPTS_MAX} times; nothing was written")

    def check_usable(self) -> None:
        """Raise `StoreError` if the session was closed or lost."""
        if self._refusal:
            raise StoreError(f"{self._name}: {self._refusal}")

    def check_connected(self) -> None:
        """Raise `StoreError` if there is no connection at present, or the session was closed or lost."""
        self.check_usable()
        if not self._usable.is_set():
            raise StoreError(f"{self._name}: there is no connection")

    def check_writable(self) -> None:
        """Raise `StoreError` if changes are refused, or the session was closed or lost."""
        self.check_usable()
        if self._only_reads:
            raise StoreError(f"{self._name}: the store was opened to read; nothing was written")

    def close(self) -> None:
        """End the session; no-op if closed."""
        self._refuse("the store is closed")
        with self._stopping:
            # If this fails, the session still ends after its timeout.
            with suppress(Exception):
                self._client.stop()
            with suppress(Exception):
                self._client.close()

    def _on_state(self, state: str) -> None:
        # kazoo calls this from its connection's thread, which must not wait.
        if state == KazooState.CONNECTED:
            self._usable.set()
        elif state == KazooState.SUSPENDED:
            if not self._refusal:
                self._usable.clear()
        else:
            self._refuse("the session was lost; close the store and open it again")

    def _refuse(self, refusal: str) -> None:
        self._refusal = self._refusal or refusal
        self._usable.set()

    def _read(self, requests: Sequence[Callable[[], Any]]) -> list[Any]:
        deadline_s = time.monotonic() + self._call_timeout_s
        sync = partial(self._client.sync_async, self._root)
        while True:
            try:
                return self._exchange([sync, *requests])[1:]
            except _ConnectionLostError:
                if time.monotonic() >= deadline_s:
                    raise

    def _exchange(self, requests: Sequence[Callable[[], Any]]) -> list[Any]:
        """Send requests in order, several at once, and return the answers.

        The answer is None if a node to read is missing, or a node to create exists.
        """
        answers: list[Any] = []
        for begin in range(0, len(requests), _REQUESTS_AT_ONCE):
            self._wait_until_usable()
            sent = [request() for request in requests[begin : begin + _REQUESTS_AT_ONCE]]
            deadline_s = time.monotonic() + self._call_timeout_s
            answers += [self._answer(result, deadline_s) for result in sent]
        return answers

    def _wait_until_usable(self) -> None:
        connected = self._usable.wait(self._call_timeout_s)
        self.check_usable()
        if not connected:
            raise StoreError(f"{self._name}: no connection for {self._call_timeout_s} s; nothing was sent")

    def _answer(self, result: Any, deadline_s: float) -> Any:
        try:
            return result.get(timeout=max(0.0, deadline_s - time.monotonic()))
        except (NoNodeError, NodeExistsError):
            return None
        except self._client.handler.timeout_exception as error:
            # No later request is sent: the caller may soon check whether this call happened.
            self._refuse("a call was not answered; close the store and open it again")
            self.close()
            raise StoreError(f"{self._name}: no answer within {self._call_timeout_s} s") from error
        except ConnectionLoss as error:
            raise _ConnectionLostError(f"{self._name}: the connection was lost before the answer came") from error
        except Exception as error:
            self.check_usable()
            raise StoreError(f"{self._name}: {error!r}") from error

    def _operation_bytes(self, operation: SessionOperation) -> int:
        """Return the size of an operation in a request, at most a few bytes too high."""
        acl_bytes = self._acl_bytes if operation.verb == "create" else 0
        # Paths below the root are percent-encoded, hence ASCII.
        return _OPERATION_BYTES + self._root_bytes + len(operation.path) + len(operation.data) + acl_bytes

    def _without_errors(self, results: list[Any]) -> list[Any]:
        """Return the results of an executed transaction; any error means that no operation was executed."""
        for result in results:
            # These two are the errors of the operations before and after the one that failed.
            if not isinstance(result, Exception) or isinstance(result, (RolledBackError, RuntimeInconsistency)):
                continue
            if isinstance(result, (BadVersionError, NoNodeError, NodeExistsError, NotEmptyError)):
                raise LostRaceError(name_taken=isinstance(result, NodeExistsError)) from result
            raise StoreError(f"{self._name}: {result!r}; nothing was written") from result
        return results
