"""A queue of completed appends, filled by BookKeeper's client and emptied many at a time: no append calls Python.

The callback is composed of Java's own method handles, and runs in Java alone.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, final

import jpype

if TYPE_CHECKING:
    from collections.abc import Iterator

_OUTCOME = struct.Struct("=3q")


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
