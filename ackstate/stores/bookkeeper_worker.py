"""Hosts the Java virtual machine with BookKeeper's client: the child process of `BookKeeperClient`.

python -P -m ackstate.stores.bookkeeper_worker REQUESTS REPLIES, two numbers of open sockets. The process ends
when the requests end, which they do when the parent closes them or dies.

The main thread reads requests and calls only asynchronous methods of BookKeeper's client, so that one slow ledger does
not delay the others. Java completes appends into a queue of its own, which a thread here drains: a call from Java into
Python for each append would cost more than the append.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

from ackstate.stores.bookkeeper_bookies import unavailable_bookies
from ackstate.stores.bookkeeper_frames import Failure, FrameReader, frame
from ackstate.stores.bookkeeper_java import JavaClasses, failure_of, start_java

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

_PARENT_CHECKED_EVERY_S = 1.0
_SLOW_REPLIES_AT_ONCE = 4
# ReadException, NoBookieAvailable, NotEnoughBookies, BookieHandleNotAvailable, LedgerRecovery, WriteException,
# AddEntryQuorumTimeout, Timeout
QUORUM_CODES = frozenset({-1, -3, -6, -8, -10, -12, -21, -23})
"""BookKeeper's errors that missing bookies may have caused."""


@final
class _Ledger:
    """An open handle, and the entry id of the next append if the ids are ours to choose."""

    __slots__ = ("handle", "next_entry_id")

    def __init__(self, handle: Any, next_entry_id: int | None) -> None:
        self.handle = handle
        self.next_entry_id = next_entry_id


@final
class _Batch:
    """Appends of one request, and their outcomes so far."""

    __slots__ = ("has_failures", "missing_count", "number", "outcomes")

    def __init__(self, number: int, entry_count: int) -> None:
        self.number = number
        self.outcomes: list[int | Failure] = [0] * entry_count
        self.missing_count = entry_count
        self.has_failures = False


@final
class Worker:
    """The operations that the parent may request; each is a method without an underscore.

    Args:
        replies: The socket for replies.
    """

    def __init__(self, replies: socket.socket) -> None:
        self._replies = replies
        self._sending = threading.Lock()
        self._ledgers: dict[int, _Ledger] = {}
        self._appends: dict[int, tuple[_Batch, int]] = {}
        self._append_number = 0
        self._handle_number = 0
        # Replies that take time to prepare: a conversion, or the search for missing bookies.
        self._slow = ThreadPoolExecutor(_SLOW_REPLIES_AT_ONCE)
        self._completing = threading.Lock()

    def serve(self, requests: socket.socket) -> None:
        """Execute requests until they end."""
        reader = FrameReader(requests)
        while (request := reader.read()) is not None:
            number, operation, arguments = request
            try:
                getattr(self, operation)(number, *arguments)
            except Exception as error:
                self._fail(number, failure_of(error))

    def start(
        self, number: int, class_path: Sequence[str], jvm_options: Sequence[str], settings: Mapping[str, str]
    ) -> None:
        """Start Java and BookKeeper's client."""
        start_java(class_path, jvm_options)
        self._java = JavaClasses()
        self._client = self._java.connect(settings)
        threading.Thread(target=self._complete_appends, daemon=True).start()
        self._reply(number, None)

    def new_ledger_id(self, number: int) -> None:
        """Reserve a ledger id; no ledger will ever have it but one created with it."""
        self._java.generate_ledger_id(lambda *outcome: self._later(number, int, *outcome))

    def create(  # noqa: PLR0913, PLR0917 - in the order of the frame
        self,
        number: int,
        ledger_id: int | None,
        quorum: tuple[int, int, int],
        digest_type: str,
        password: bytes,
        custom_metadata: Mapping[str, bytes],
    ) -> None:
        """Create a ledger, open for appends."""
        future = self._java.create_ledger(
            self._client, ledger_id, quorum=quorum, digest_type=digest_type, password=password,
            custom_metadata=custom_metadata,
        )  # fmt: skip
        first = None if ledger_id is None else 0
        self._when_done(number, future, lambda handle: self._keep(handle, first))

    def open(self, number: int, ledger_id: int, recover: bool, digest_type: str, password: bytes) -> None:
        """Open a ledger to read, with or without recovery."""
        future = self._java.open_ledger(
            self._client, ledger_id, recover=recover, digest_type=digest_type, password=password
        )
        self._when_done(number, future, lambda handle: self._keep(handle, None))

    def append(self, number: int, entries: Sequence[tuple[int, bytes]]) -> None:
        """Append entries to any open ledgers; each has its own outcome."""
        batch = _Batch(number, len(entries))
        if not entries:
            self._reply(number, [])
        for index, (handle, entry) in enumerate(entries):
            self._append_number += 1
            self._appends[self._append_number] = (batch, index)
            try:
                self._append(handle, entry)
            except Exception as error:
                self._complete([(failure_of(error), self._append_number)])

    def last_confirmed(self, number: int, handle: int) -> None:
        """Return the last entry that every reader may see, -1 if there is none."""
        self._when_done(number, self._ledgers[handle].handle.readLastAddConfirmedAsync(), int)

    def read_unconfirmed(self, number: int, handle: int, first: int, last: int) -> None:
        """Return entries, also those that only some bookies have, both ends included."""
        self._when_done(number, self._ledgers[handle].handle.readUnconfirmedAsync(first, last), self._java.entries)

    def close(self, number: int, handle: int) -> None:
        """Close a handle; that of a writer seals its ledger."""
        self._when_done(number, self._ledgers.pop(handle).handle.closeAsync(), lambda _: None)

    def forget(self, number: int, handle: int) -> None:
        """Release a handle without closing it."""
        self._ledgers.pop(handle, None)
        self._reply(number, None)

    def delete(self, number: int, ledger_id: int) -> None:
        """Delete a ledger."""
        self._when_done(number, self._java.delete_ledger(self._client, ledger_id), lambda _: None)

    def metadata(self, number: int, ledger_id: int) -> None:
        """Return the metadata of a ledger."""
        self._when_done(number, self._client.getLedgerMetadata(ledger_id), self._java.metadata)

    def missing_bookies(self, number: int) -> None:
        """Return the names of bookies that belong to the cluster and cannot be reached."""
        self._later(number, lambda _: unavailable_bookies(*self._java.bookies(self._client)), None, None)

    def _keep(self, handle: Any, next_entry_id: int | None) -> tuple[int, int, int, int]:
        """Give a handle a number, and return it with the handle's ledger, last confirmed entry and size in bytes."""
        self._handle_number += 1
        self._ledgers[self._handle_number] = _Ledger(handle, next_entry_id)
        return self._handle_number, int(handle.getId()), int(handle.getLastAddConfirmed()), int(handle.getLength())

    def _append(self, handle: int, entry: bytes) -> None:
        ledger = self._ledgers[handle]
        if ledger.next_entry_id is None:
            ledger.handle.asyncAddEntry(entry, self._java.completed_appends.callback, self._append_number)
        else:
            entry_id, ledger.next_entry_id = ledger.next_entry_id, ledger.next_entry_id + 1
            ledger.handle.asyncAddEntry(entry_id, entry, self._java.completed_appends.callback, self._append_number)

    def _complete_appends(self) -> None:
        """Reply to appends as Java completes them. A failure ends the process: no append would get a reply any more."""
        java, completed = self._java, self._java.completed_appends
        try:
            while True:
                self._complete(
                    (java.failure(code) if code else entry_id, append) for code, entry_id, append in completed.take()
                )
        finally:
            os._exit(1)

    def _complete(self, outcomes: Iterable[tuple[int | Failure, int]]) -> None:
        """Record the outcomes of appends by their numbers, and reply to the requests of which none is missing."""
        completed: list[_Batch] = []
        with self._completing:
            for outcome, append in outcomes:
                batch, index = self._appends.pop(append)
                batch.outcomes[index] = outcome
                batch.has_failures |= isinstance(outcome, Failure)
                batch.missing_count -= 1
                if not batch.missing_count:
                    completed.append(batch)
        for batch in completed:
            if batch.has_failures:
                self._later(batch.number, self._explained, batch.outcomes, None)
        self._send([(batch.number, True, batch.outcomes) for batch in completed if not batch.has_failures])

    def _when_done(self, number: int, future: Any, convert: Callable[[Any], Any]) -> None:
        self._java.when_done(future, lambda result, error: self._later(number, convert, result, error))

    def _later(self, number: int, convert: Callable[[Any], Any], result: Any, error: Any) -> None:
        """Reply from another thread: Java's own threads must not wait."""
        self._slow.submit(self._convert, number, convert, result, error)

    def _convert(self, number: int, convert: Callable[[Any], Any], result: Any, error: Any) -> None:
        try:
            if error is not None:
                self._fail(number, failure_of(error))
                return
            self._reply(number, convert(result))
        except Exception as failure:
            self._fail(number, failure_of(failure))

    def _fail(self, number: int, failure: Failure) -> None:
        (explained,) = self._explained([failure])
        self._send([(number, False, explained)])

    def _explained(self, outcomes: Sequence[int | Failure]) -> list[Any]:
        """Add the missing bookies to the messages of failures that they may have caused."""
        codes = {each.code for each in outcomes if isinstance(each, Failure)}
        names = [] if codes.isdisjoint(QUORUM_CODES) else self._unavailable_bookies()
        reason = f"; bookies that do not answer: {', '.join(names)}" if names else ""
        return [
            (each.code, each.message + (reason if each.code in QUORUM_CODES else ""))
            if isinstance(each, Failure)
            else each
            for each in outcomes
        ]

    def _unavailable_bookies(self) -> list[str]:
        with suppress(Exception):  # The metadata servers may be missing too; the failure itself is reported.
            return unavailable_bookies(*self._java.bookies(self._client))
        return []

    def _reply(self, number: int, result: Any) -> None:
        self._send([(number, True, result)])

    def _send(self, replies: list[tuple[int, bool, Any]]) -> None:
        if replies:
            data = frame(replies)
            with self._sending:
                self._replies.sendall(data)


def _end_with_parent(parent_pid: int) -> None:
    """End this process soon after its parent, even if another process has inherited the other end of the requests."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECKED_EVERY_S)
    os._exit(0)


def main(requests: socket.socket, replies: socket.socket) -> None:
    """Serve until the requests end, then end this process without waiting for Java."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        Worker(replies).serve(requests)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(*(socket.socket(fileno=int(number)) for number in sys.argv[1:3]))
