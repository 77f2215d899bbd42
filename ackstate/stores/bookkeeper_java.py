"""Runs BookKeeper's Java client: the child process of `BookKeeperClient`. It imports nothing else of this library.

python -P bookkeeper_java.py NUMBER, that of an open socket. A request is ``(number, operation, arguments)``, a reply
``(number, True, result)`` or ``(number, False, (code, message))``; both travel in lists, marshalled, in the frames of
`multiprocessing.connection`: both processes run the same Python, and marshal is faster than pickle, without classes.
The process ends when the requests end, as the parent closes the socket or dies.

The main thread calls only asynchronous methods, so that one slow ledger does not delay the others. Java completes
appends into a queue of its own, which a thread drains: a call from Java into Python for each would cost more than it.
"""

from __future__ import annotations

import marshal
import os
import socket
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple, final

import jpype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

UNKNOWN_CODE = -1_000
"""The code of an error that is not BookKeeper's own."""
# ReadException, NoBookieAvailable, NotEnoughBookies, BookieHandleNotAvailable, LedgerRecovery, WriteException,
# AddEntryQuorumTimeout, Timeout
QUORUM_CODES = frozenset({-1, -3, -6, -8, -10, -12, -21, -23})
"""BookKeeper's errors that missing bookies may have caused."""
_PARENT_CHECKED_EVERY_S = 1.0
_SLOW_REPLIES_AT_ONCE = 4
_OUTCOME = struct.Struct("=3q")
_CLIENT = "org.apache.bookkeeper.client"

# Bookies: a read of an entry that does not exist, in version 2 of the protocol: length, version and operation, ledger,
# entry.
_BOOKIE_REQUEST = struct.pack(">iiqq", 20, 2 << 24 | 2 << 16, 2**62, 0)
_BOOKIE_ANSWERS_WITHIN_S = 1.0
_BOOKIES_AT_ONCE = 16
_BOOKIES_KNOWN_S = 1.0


class Failure(NamedTuple):
    """Why BookKeeper refused a call: its number of the error (``BKException.Code``) and one line."""

    code: int
    message: str


class JavaUnavailableError(Exception):
    """There is no usable Java, or no BookKeeper client in its class path; the message names the missing software."""


def start_java(class_path: Sequence[str], options: Sequence[str]) -> None:
    """Start the virtual machine of this process."""
    try:
        jpype.startJVM(*options, classpath=list(class_path), convertStrings=True)
    except (jpype.JVMNotFoundException, jpype.JVMNotSupportedException, OSError, RuntimeError) as error:
        raise JavaUnavailableError(
            f"BookKeeper's client needs Java 11 or newer: install a JRE, or set JAVA_HOME ({_one_line(error)})"
        ) from error


# Completed appends are queued and emptied many at a time, and no append calls Python: the callback is composed of
# Java's own method handles, and runs in Java alone.
@final
class CompletedAppends:
    """The outcomes of appends that have completed."""

    def __init__(self) -> None:
        self._queue = jpype.JClass("java.util.concurrent.LinkedBlockingQueue")()
        self._array_list = jpype.JClass("java.util.ArrayList")
        handles = jpype.JClass("java.lang.invoke.MethodHandles")
        method_type = jpype.JClass("java.lang.invoke.MethodType").methodType
        as_interface = jpype.JClass("java.lang.invoke.MethodHandleProxies").asInterfaceInstance
        classes = jpype.JArray(jpype.JClass("java.lang.Class"))
        long_stream = jpype.JClass("java.util.stream.LongStream")
        ledger = jpype.JClass("org.apache.bookkeeper.client.LedgerHandle").class_
        java_object = jpype.JClass("java.lang.Object").class_
        longs = jpype.JArray(jpype.JLong).class_
        boolean, integer, long, void = (
            jpype.JClass(f"java.lang.{name}").TYPE for name in ("Boolean", "Integer", "Long", "Void")
        )
        add = handles.publicLookup().findVirtual(self._queue.getClass(), "add", method_type(boolean, java_object))
        add_longs = add.bindTo(self._queue).asType(method_type(boolean, longs)).asCollector(longs, 3)
        completed = handles.dropArguments(add_longs, 1, classes([ledger]))
        parameters = classes([integer, ledger, long, java_object])
        # BookKeeper's ``AddCallback``; an append's context is its number.
        self.callback = as_interface(
            jpype.JClass("org.apache.bookkeeper.client.AsyncCallback$AddCallback").class_,
            completed.asType(method_type(void, parameters)),
        )
        # The overload that accepts an array is one with a variable number of arguments.
        stream_of = handles.publicLookup().findStatic(long_stream, "of", method_type(long_stream.class_, longs))
        self._stream_of = as_interface(jpype.JClass("java.util.function.Function").class_, stream_of.asFixedArity())

    def take(self) -> Iterator[tuple[int, int, int]]:
        """Wait for outcomes and yield each: BookKeeper's code, the entry id, the number of the append."""
        # A few calls of Java, however many outcomes there are.
        outcomes = self._array_list()
        outcomes.add(self._queue.take())
        self._queue.drainTo(outcomes)
        return _OUTCOME.iter_unpack(outcomes.stream().flatMapToLong(self._stream_of).toArray())


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
    """The operations that the parent may request: the methods without an underscore, but `serve`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        # A handle, and the entry id of its next append if the ids are ours to choose.
        self._ledgers: dict[int, tuple[Any, Iterator[int] | None]] = {}
        self._handles = count(1)
        self._appends: dict[int, tuple[_Batch, int]] = {}
        self._append_numbers = count(1)
        self._completing = threading.Lock()
        # Replies that take time to prepare: a conversion, or the search for missing bookies.
        self._slow = ThreadPoolExecutor(_SLOW_REPLIES_AT_ONCE)
        # The bookies that did not answer, and when: a dead one fails a thousand reads at once.
        self._missing: tuple[list[str], float] = ([], -_BOOKIES_KNOWN_S)
        self._searching = threading.Lock()

    def serve(self) -> None:
        """Execute requests until they end."""
        with suppress(EOFError, OSError):
            while True:
                # The other process is our own parent.
                for number, operation, arguments in marshal.loads(self._connection.recv_bytes()):  # noqa: S302
                    try:
                        getattr(self, operation)(number, *arguments)
                    except Exception as error:
                        self._fail(number, _failure_of(error))

    def start(
        self, number: int, class_path: Sequence[str], jvm_options: Sequence[str], settings: Mapping[str, str]
    ) -> None:
        """Start Java and BookKeeper's client; the settings are properties of ``ClientConfiguration``."""
        start_java(class_path, jvm_options)
        try:
            client_class = jpype.JClass(f"{_CLIENT}.BookKeeper")
            self._digest_types = jpype.JClass(f"{_CLIENT}.api.DigestType")
            self._exception = jpype.JClass(f"{_CLIENT}.BKException")
            self._completed = CompletedAppends()
            self._admin = jpype.JClass(f"{_CLIENT}.BookKeeperAdmin")
            self._configuration = jpype.JClass("org.apache.bookkeeper.conf.ClientConfiguration")()
            self._id_callback = jpype.JClass("org.apache.bookkeeper.proto.BookkeeperInternalCallbacks$GenericCallback")
        except (TypeError, jpype.JException) as error:
            raise JavaUnavailableError(
                f"the class path has no complete BookKeeper client ({_one_line(error)}): name a folder with the jars of"
                " bookkeeper-server and its dependencies, such as Pulsar's lib"
            ) from error
        self._bytes = jpype.JArray(jpype.JByte)
        self._on_done = jpype.JClass("java.util.function.BiConsumer")
        for name, value in settings.items():
            self._configuration.setProperty(name, value)
        self._client = client_class(self._configuration)
        self._ledger_ids = self._client.getLedgerManagerFactory().newLedgerIdGenerator()
        threading.Thread(target=self._complete_appends, daemon=True).start()
        self._send([(number, True, None)])

    def new_ledger_id(self, number: int) -> None:
        """Reserve a ledger id; no ledger will ever have it but one created with it."""

        def generated(code: int, ledger_id: Any) -> None:
            """Receive BookKeeper's code and the id."""
            self._later(number, int, ledger_id, self._exception.create(code) if code else None)

        self._ledger_ids.generateLedgerId(jpype.JProxy(self._id_callback, dict={"operationComplete": generated}))

    def create(  # noqa: PLR0913, PLR0917 - in the order of the request
        self,
        number: int,
        ledger_id: int | None,
        quorum: tuple[int, int, int],
        digest_type: str,
        password: bytes,
        custom_metadata: Mapping[str, bytes],
    ) -> None:
        """Create a ledger with a reserved id or, for None, any, open for appends."""
        metadata = jpype.JClass("java.util.HashMap")()
        for name, value in custom_metadata.items():
            metadata.put(name, self._bytes(value))
        ensemble, write, ack = quorum
        builder = self._client.newCreateLedgerOp().withEnsembleSize(ensemble).withWriteQuorumSize(write)
        builder = builder.withAckQuorumSize(ack).withDigestType(self._digest_types.valueOf(digest_type))
        builder = builder.withPassword(self._bytes(password)).withCustomMetadata(metadata)
        if ledger_id is not None:
            builder = builder.makeAdv().withLedgerId(ledger_id)
        entry_ids = None if ledger_id is None else count(0)
        self._when_done(number, builder.execute(), lambda handle: self._keep(handle, entry_ids))

    def open(self, number: int, ledger_id: int, recover: bool, digest_type: str, password: bytes) -> None:
        """Open a ledger to read, with or without recovery."""
        builder = self._client.newOpenLedgerOp().withLedgerId(ledger_id).withRecovery(recover)
        builder = builder.withDigestType(self._digest_types.valueOf(digest_type)).withPassword(self._bytes(password))
        self._when_done(number, builder.execute(), lambda handle: self._keep(handle, None))

    def append(self, number: int, entries: Sequence[tuple[int, bytes]]) -> None:
        """Append entries to any open ledgers; each has its own outcome."""
        batch = _Batch(number, len(entries))
        if not entries:
            self._send([(number, True, [])])
        callback = self._completed.callback
        for index, (handle_number, entry) in enumerate(entries):
            append = next(self._append_numbers)
            self._appends[append] = (batch, index)
            try:
                handle, entry_ids = self._ledgers[handle_number]
                if entry_ids is None:
                    handle.asyncAddEntry(entry, callback, append)
                else:
                    handle.asyncAddEntry(next(entry_ids), entry, callback, append)
            except Exception as error:
                self._complete([(_failure_of(error), append)])

    def last_confirmed(self, number: int, handle: int) -> None:
        """Return the last entry that every reader may see, -1 if there is none."""
        self._when_done(number, self._ledgers[handle][0].readLastAddConfirmedAsync(), int)

    def read_unconfirmed(self, number: int, handle: int, first: int, last: int) -> None:
        """Return entries, also those that only some bookies have, both ends included."""
        self._when_done(number, self._ledgers[handle][0].readUnconfirmedAsync(first, last), _contents)

    def close(self, number: int, handle: int) -> None:
        """Close a handle; that of a writer seals its ledger."""
        self._when_done(number, self._ledgers.pop(handle)[0].closeAsync(), lambda _: None)

    def delete(self, number: int, ledger_id: int) -> None:
        """Delete a ledger."""
        self._when_done(number, self._client.newDeleteLedgerOp().withLedgerId(ledger_id).execute(), lambda _: None)

    def metadata(self, number: int, ledger_id: int) -> None:
        """Return the metadata of a ledger."""
        self._when_done(number, self._client.getLedgerMetadata(ledger_id), _metadata)

    def missing_bookies(self, number: int) -> None:
        """Return the names of bookies that belong to the cluster and cannot be reached."""
        self._later(number, lambda _: self._unavailable(), None, None)

    def _keep(self, handle: Any, entry_ids: Iterator[int] | None) -> tuple[int, int, int]:
        """Give a handle a number, and return it with the handle's ledger and last confirmed entry."""
        number = next(self._handles)
        self._ledgers[number] = (handle, entry_ids)
        return number, int(handle.getId()), int(handle.getLastAddConfirmed())

    def _complete_appends(self) -> None:
        """Reply to appends as Java completes them. A failure ends the process: no append would get a reply any more."""
        try:
            while True:
                self._complete(
                    (Failure(code, str(self._exception.getMessage(code))) if code else entry_id, append)
                    for code, entry_id, append in self._completed.take()
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
        """Reply with a future's result or error, of which Java passes one and None."""
        reply = {"accept": lambda result, error: self._later(number, convert, result, error)}
        future.whenComplete(jpype.JProxy(self._on_done, dict=reply))

    def _later(self, number: int, convert: Callable[[Any], Any], result: Any, error: Any) -> None:
        """Reply from another thread: Java's own threads must not wait."""
        self._slow.submit(self._convert, number, convert, result, error)

    def _convert(self, number: int, convert: Callable[[Any], Any], result: Any, error: Any) -> None:
        try:
            if error is not None:
                self._fail(number, _failure_of(error))
                return
            self._send([(number, True, convert(result))])
        except Exception as failure:
            self._fail(number, _failure_of(failure))

    def _fail(self, number: int, failure: Failure) -> None:
        (explained,) = self._explained([failure])
        self._send([(number, False, explained)])

    def _explained(self, outcomes: Sequence[int | Failure]) -> list[Any]:
        """Add the missing bookies to the messages of failures that they may have caused."""
        codes = {each.code for each in outcomes if isinstance(each, Failure)}
        names: list[str] = []
        with suppress(Exception):  # The metadata servers may be missing too; the failure itself is reported.
            names = [] if codes.isdisjoint(QUORUM_CODES) else self._unavailable()
        reason = f"; bookies that do not answer: {', '.join(names)}" if names else ""
        return [
            (each.code, each.message + (reason if each.code in QUORUM_CODES else ""))
            if isinstance(each, Failure)
            else each
            for each in outcomes
        ]

    def _unavailable(self) -> list[str]:
        """Return the bookies that do not accept writes or did not answer a moment ago; blocking."""
        with self._searching:
            names, found_s = self._missing
            if time.monotonic() - found_s >= _BOOKIES_KNOWN_S:
                names = unavailable_bookies(*self._bookies())
                self._missing = (names, time.monotonic())
            return names

    def _bookies(self) -> tuple[list[str], set[str]]:
        """Return the addresses of all registered bookies, sorted, and of those that accept writes; blocking."""
        admin = self._admin(self._client, self._configuration)
        resolve = self._client.getBookieAddressResolver().resolve
        addresses: dict[str, str] = {}
        available = {str(each) for each in admin.getAvailableBookies()}
        for bookie in admin.getAllBookies():
            with suppress(jpype.JException):  # An unknown address; the id is good enough.
                found = resolve(bookie)
                addresses[str(bookie)] = f"{found.getHostName()}:{found.getPort()}"
            addresses.setdefault(str(bookie), str(bookie))
        return sorted(addresses.values()), {addresses.get(each, each) for each in available}

    def _send(self, replies: list[tuple[int, bool, Any]]) -> None:
        if replies:
            data = marshal.dumps(replies)
            with self._sending:
                self._connection.send_bytes(data)


def _contents(read: Any) -> list[bytes]:
    """Return the contents of entries that were read, and release them."""
    try:
        return [bytes(memoryview(entry.getEntryBytes())) for entry in read]
    finally:
        read.close()


def _metadata(found: Any) -> dict[str, Any]:
    """Return a ledger's metadata as plain values."""
    ensembles = found.getAllEnsembles()
    return {
        "ack_quorum": int(found.getAckQuorumSize()),
        "last_entry_id": int(found.getLastEntryId()) if found.isClosed() else None,
        "ensemble": [str(bookie) for bookie in ensembles.lastEntry().getValue()],
        "custom_metadata": {
            str(each.getKey()): bytes(memoryview(each.getValue())) for each in found.getCustomMetadata().entrySet()
        },
    }


def _failure_of(error: Any) -> Failure:
    """Return the failure of an exception of Java or Python."""
    while isinstance(error, jpype.JException) and error.getCause() is not None and _is_wrapper(error):
        error = error.getCause()
    if isinstance(error, jpype.JException) and "BKException" in str(error.getClass().getName()):
        return Failure(int(error.getCode()), str(error.getMessage()))
    return Failure(UNKNOWN_CODE, _one_line(error))


def _is_wrapper(error: Any) -> bool:
    return str(error.getClass().getSimpleName()) in {"CompletionException", "ExecutionException"}


def _one_line(error: Any) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def unavailable_bookies(addresses: Sequence[str], available: set[str]) -> list[str]:
    """Return the bookies that do not accept writes or do not answer, in order."""
    # A killed or hanging bookie stays registered until its session ends, and the system accepts connections to a
    # hanging one. Hence the request, which a bookie that works answers or refuses.
    with ThreadPoolExecutor(_BOOKIES_AT_ONCE) as threads:
        answered = list(threads.map(_answers, addresses))
    return [
        address for address, answers in zip(addresses, answered, strict=True) if not answers or address not in available
    ]


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return True
    try:
        with socket.create_connection((host, int(port)), timeout=_BOOKIE_ANSWERS_WITHIN_S) as connection:
            connection.sendall(_BOOKIE_REQUEST)
            connection.recv(1)
    except ConnectionResetError:
        return True
    except OSError:
        return False
    return True


def _end_with_parent(parent_pid: int) -> None:
    """End this process soon after its parent, even if another process has inherited the parent's end of the socket."""
    while os.getppid() == parent_pid:
        time.sleep(_PARENT_CHECKED_EVERY_S)
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        Worker(Connection(int(sys.argv[1]))).serve()
    finally:
        os._exit(0)  # Without waiting for Java.
