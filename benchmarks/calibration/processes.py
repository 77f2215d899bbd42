"""Processes that are forked to do one thing: to play until they are killed, or to find one answer."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import threading
import time
import traceback
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Self, TypeVar, final

from ackstate.analysis.crash.dying import die_with
from benchmarks.calibration.workload import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")

PATIENCE_S = 60.0
_CHUNK_BYTES = 65_536
_FAILED = b"!"
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class WorkerProcess:
    """A process that does some work, reports its progress as bytes, and then waits until it is killed.

    Args:
        work: Called with a function that sends a byte; ``!`` is reserved for a failure.

    Raises:
        OSError: There is no room for another process.
    """

    def __init__(self, work: Callable[[Callable[[bytes], None]], None]) -> None:
        self._answers, said = os.pipe()
        parent_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _live(work, said, parent_pid=parent_pid)
        os.close(said)
        self._said = b""
        self._is_dead = False

    def wait_for(self, word: bytes) -> None:
        """Wait until it sends a byte.

        Raises:
            CalibrationError: It failed, ended, or was silent for a minute.
        """
        until = time.monotonic() + PATIENCE_S
        while word not in self._said:
            readable, _, _ = select.select([self._answers], [], [], max(0.0, until - time.monotonic()))
            if not readable:
                raise CalibrationError(f"a process that was to be killed said nothing for {PATIENCE_S:g} s")
            chunk = os.read(self._answers, _CHUNK_BYTES)
            self._said += chunk
            if not chunk or _FAILED in self._said:
                _, _, why = self._said.partition(_FAILED)
                raise CalibrationError(f"a process ended before it was killed: {why.decode(errors='replace')}")

    def said(self) -> bytes:
        """Return the bytes sent so far, without waiting."""
        while select.select([self._answers], [], [], 0)[0] and (chunk := os.read(self._answers, _CHUNK_BYTES)):
            self._said += chunk
        return self._said

    def kill(self) -> bytes:
        """Kill it with SIGKILL, wait for its end, and return all its bytes. Idempotent."""
        if not self._is_dead:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._is_dead = True
            while chunk := os.read(self._answers, _CHUNK_BYTES):
                self._said += chunk
            os.close(self._answers)
        return self._said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C, and SIGTERM likewise, until the end of the block, which must be short.

    In its middle they would leave processes that are not in any list, or would be lost in Python's own code for a fork.
    To block the signals is not enough: another thread, such as one of a library, would take them.

    Raises:
        KeyboardInterrupt: At the end, if there was one.
    """
    asked: list[int] = []
    signals = _SIGNALS if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt


def apart(find: Callable[[], _T]) -> _T:
    """Return the result of a function that runs in a separate process.

    Raises:
        CalibrationError: It failed there.
        OSError: There is no room for another process.
    """
    answers, answer = os.pipe()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _answer(find, answer, parent_pid=parent_pid)
    os.close(answer)
    try:
        with open(answers, "rb") as file:  # noqa: PTH123 - a pipe has no path
            data = file.read()
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        raise
    finally:
        os.waitpid(pid, 0)
    if not data or data.startswith(_FAILED):
        raise CalibrationError(f"a process that was to recover failed: {data[1:].decode(errors='replace')}")
    found: _T = pickle.loads(data)
    return found


def _live(work: Callable[[Callable[[bytes], None]], None], said: int, *, parent_pid: int) -> None:
    """Run the process. Never returns, so that the parent's cleanup does not run twice."""
    try:
        _begin(parent_pid)
        work(lambda word: _write(said, word))
        while True:
            signal.pause()
    except BaseException:
        _write(said, _FAILED + _last_line())
    finally:
        os._exit(1)


def _answer(find: Callable[[], object], answer: int, *, parent_pid: int) -> None:
    try:
        _begin(parent_pid)
        with open(answer, "wb", closefd=False) as file:
            file.write(pickle.dumps(find()))
    except BaseException:
        _write(answer, _FAILED + _last_line())
    finally:
        os._exit(0)


def _begin(parent_pid: int) -> None:
    die_with(parent_pid)
    # Ctrl-C is for the parent, which kills us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The collector would touch, and so copy, every page of the parent's objects.
    gc.freeze()


def _write(descriptor: int, data: bytes) -> None:
    with suppress(OSError):
        os.write(descriptor, data)


def _last_line() -> bytes:
    return traceback.format_exc().strip().splitlines()[-1].encode(errors="replace")
