"""BookKeeper's Java client as a worker process uses it: JPype, no Java code of ours.

Every call returns a ``CompletableFuture`` or takes a callback.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, final

import jpype

from ackstate.stores.bookkeeper_frames import UNKNOWN_CODE, Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence


_OUTCOME = struct.Struct("=3q")


# Completed appends are queued and emptied many at a time, and no append calls Python: the callback is composed of
# Java's own method handles, and runs in Java alone.
@final
class CompletedAppends:
    """The outcomes of appends that have completed.

    Attributes:
        callback: BookKeeper's ``AddCallback``; an append's context is its number.
    """

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
        self.callback = as_interface(
            jpype.JClass("org.apache.bookkeeper.client.AsyncCallback$AddCallback").class_,
            completed.asType(method_type(void, parameters)),
        )
        # The overload that accepts an array is one with a variable number of arguments.
        stream_of = handles.publicLookup().findStatic(long_stream, "of", method_type(long_stream.class_, longs))
        self._stream_of = as_interface(jpype.JClass("java.util.function.Function").class_, stream_of.asFixedArity())

    def take(self) -> Iterator[tuple[int, int, int]]:
        """Wait for outcomes and yield each: BookKeeper's code, the entry id, the number of the append.

        Complexity: a few calls of Java, however many outcomes there are.
        """
        outcomes = self._array_list()
        outcomes.add(self._queue.take())
        self._queue.drainTo(outcomes)
        return _OUTCOME.iter_unpack(outcomes.stream().flatMapToLong(self._stream_of).toArray())


_CLIENT = "org.apache.bookkeeper.client"


class JavaUnavailableError(Exception):
    """There is no usable Java, or no BookKeeper client in its class path; the message names the missing software."""


def start_java(class_path: Sequence[str], options: Sequence[str]) -> None:
    """Start the virtual machine of this process.

    Raises:
        JavaUnavailableError: There is none.
    """
    try:
        jpype.startJVM(*options, classpath=list(class_path), convertStrings=True)
    except (jpype.JVMNotFoundException, jpype.JVMNotSupportedException, OSError, RuntimeError) as error:
        raise JavaUnavailableError(
            f"BookKeeper's client needs Java 11 or newer: install a JRE, or set JAVA_HOME ({_one_line(error)})"
        ) from error


@final
class JavaClasses:
    """The classes of the client that a worker uses.

    Attributes:
        completed_appends: Where the outcomes of appends arrive.

    Raises:
        JavaUnavailableError: One of them is not in the class path.
    """

    def __init__(self) -> None:
        try:
            self._client = jpype.JClass(f"{_CLIENT}.BookKeeper")
            self._digest_types = jpype.JClass(f"{_CLIENT}.api.DigestType")
            self._exception = jpype.JClass(f"{_CLIENT}.BKException")
            self.completed_appends = CompletedAppends()
            self._admin = jpype.JClass(f"{_CLIENT}.BookKeeperAdmin")
            self._configuration = jpype.JClass("org.apache.bookkeeper.conf.ClientConfiguration")
            self._id_callback = jpype.JClass("org.apache.bookkeeper.proto.BookkeeperInternalCallbacks$GenericCallback")
        except (TypeError, jpype.JException) as error:
            raise JavaUnavailableError(
                f"the class path has no complete BookKeeper client ({_one_line(error)}): name a folder with the jars of"
                " bookkeeper-server and its dependencies, such as Pulsar's lib"
            ) from error
        self._bytes = jpype.JArray(jpype.JByte)
        self._on_done = jpype.JClass("java.util.function.BiConsumer")

    def connect(self, settings: Mapping[str, str]) -> Any:
        """Return a client.

        Args:
            settings: Properties of ``ClientConfiguration`` by name; `metadataServiceUri` is among them.
        """
        configuration = self._configuration()
        for name, value in settings.items():
            configuration.setProperty(name, value)
        self._configuration_used = configuration
        client = self._client(configuration)
        self._ledger_ids = client.getLedgerManagerFactory().newLedgerIdGenerator()
        return client

    def when_done(self, future: Any, callback: Callable[[Any, Any], None]) -> None:
        """Call a function with a future's result and error, one of which is None, in a thread of Java."""
        future.whenComplete(jpype.JProxy(self._on_done, dict={"accept": callback}))

    def generate_ledger_id(self, callback: Callable[[Any, Any], None]) -> None:
        """Reserve a ledger id, and call a function with it or an error, in a thread of Java."""

        def generated(code: int, ledger_id: Any) -> None:
            """Receive BookKeeper's code and the id."""
            if code:
                callback(None, self._exception.create(code))
            else:
                callback(ledger_id, None)

        self._ledger_ids.generateLedgerId(jpype.JProxy(self._id_callback, dict={"operationComplete": generated}))

    def create_ledger(  # noqa: PLR0913 - named
        self,
        client: Any,
        ledger_id: int | None,
        *,
        quorum: tuple[int, int, int],
        digest_type: str,
        password: bytes,
        custom_metadata: Mapping[str, bytes],
    ) -> Any:
        """Begin to create a ledger; None for the id is any."""
        metadata = jpype.JClass("java.util.HashMap")()
        for name, value in custom_metadata.items():
            metadata.put(name, self._bytes(value))
        ensemble, write, ack = quorum
        builder = client.newCreateLedgerOp().withEnsembleSize(ensemble).withWriteQuorumSize(write)
        builder = builder.withAckQuorumSize(ack).withDigestType(self._digest_type(digest_type))
        builder = builder.withPassword(self._bytes(password)).withCustomMetadata(metadata)
        return (builder if ledger_id is None else builder.makeAdv().withLedgerId(ledger_id)).execute()

    def open_ledger(self, client: Any, ledger_id: int, *, recover: bool, digest_type: str, password: bytes) -> Any:
        """Begin to open a ledger to read."""
        builder = client.newOpenLedgerOp().withLedgerId(ledger_id).withRecovery(recover)
        return builder.withDigestType(self._digest_type(digest_type)).withPassword(self._bytes(password)).execute()

    def delete_ledger(self, client: Any, ledger_id: int) -> Any:
        """Begin to delete a ledger."""
        return client.newDeleteLedgerOp().withLedgerId(ledger_id).execute()

    def entries(self, read: Any) -> list[bytes]:
        """Return the contents of entries that were read, and release them."""
        try:
            return [bytes(memoryview(entry.getEntryBytes())) for entry in read]
        finally:
            read.close()

    def metadata(self, found: Any) -> dict[str, Any]:
        """Return a ledger's metadata as plain values."""
        is_closed = bool(found.isClosed())
        return {
            "ledger_id": int(found.getLedgerId()),
            "state": str(found.getState()),
            "ensemble_size": int(found.getEnsembleSize()),
            "write_quorum": int(found.getWriteQuorumSize()),
            "ack_quorum": int(found.getAckQuorumSize()),
            "last_entry_id": int(found.getLastEntryId()) if is_closed else None,
            "length_bytes": int(found.getLength()) if is_closed else None,
            "ensembles": {
                int(each.getKey()): [str(bookie) for bookie in each.getValue()]
                for each in found.getAllEnsembles().entrySet()
            },
            "custom_metadata": {
                str(each.getKey()): bytes(memoryview(each.getValue())) for each in found.getCustomMetadata().entrySet()
            },
        }

    def bookies(self, client: Any) -> tuple[list[str], set[str]]:
        """Return the addresses of all registered bookies, sorted, and of those that accept writes; blocking."""
        admin = self._admin(client, self._configuration_used)
        resolve = client.getBookieAddressResolver().resolve
        addresses: dict[str, str] = {}
        available = {str(each) for each in admin.getAvailableBookies()}
        for bookie in admin.getAllBookies():
            with suppress(jpype.JException):  # An unknown address; the id is good enough.
                found = resolve(bookie)
                addresses[str(bookie)] = f"{found.getHostName()}:{found.getPort()}"
            addresses.setdefault(str(bookie), str(bookie))
        return sorted(addresses.values()), {addresses.get(each, each) for each in available}

    def failure(self, code: int) -> Failure:
        """Return the failure of one of BookKeeper's codes."""
        return Failure(code, str(self._exception.getMessage(code)))

    def _digest_type(self, name: str) -> Any:
        return self._digest_types.valueOf(name)


def failure_of(error: Any) -> Failure:
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
