"""Run a generator in a process with private mounts: they and the loop devices end with it in any case.

The process is forked, so that it has the same patched code as this one. It has a private process namespace: every
process started in it, in any session, is killed with it, and then holds no mount and no device. ``/proc`` stays that of
all processes, so that `os.getpid` differs there from ``/proc/self``.

    this process -> the first one there, which reaps orphans and ends with the second -> the second, which does the work

A waiting process stands between, because the creator of a process namespace is not in it.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import select
import signal
import traceback
from contextlib import suppress
from typing import IO, TYPE_CHECKING, NoReturn, TypeVar

from ackstate.analysis.crash.conversation import SubjectError
from ackstate.analysis.crash.dying import die_with
from ackstate.analysis.crash.layer import LayerSkippedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")

# linux/sched.h, linux/mount.h
_CLONE_NEWNS, _CLONE_NEWPID = 0x20000, 0x20000000
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18
# The time for its run and unmount to end after the request; then it is killed, and the kernel unmounts.
_PATIENCE_S = 5.0

_MORE = b"+"


def with_private_mounts(make: Callable[[], Iterator[_T]]) -> Iterator[_T]:
    """Yield the items of `make()` in a forked process with private mounts; each item is made on request.

    Closing this iterator closes the generator and ends the process.

    Raises:
        LayerSkippedError: This process has no right to private mounts, or the generator raised it.
        SubjectError: The generator raised it.
        OSError: The generator raised it.
        RuntimeError: Another error ended the generator, or a signal the process; the message has all known details.
    """
    ask, asked = os.pipe()
    told, tell = os.pipe()
    parent_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(asked)
        os.close(told)
        _work(make, ask, tell, parent_pid=parent_pid)
    os.close(ask)
    os.close(tell)
    # Unbuffered, because each byte requests an item.
    with open(asked, "wb", buffering=0) as requests, open(told, "rb") as answers:  # noqa: PTH123 - pipes have no path
        try:
            yield from _answers(requests, answers)
        finally:
            with suppress(OSError):
                requests.close()
            _reap(pid)


def _answers(requests: IO[bytes], answers: IO[bytes]) -> Iterator[_T]:
    while True:
        # A process that has ended answers with the end of the pipe below.
        with suppress(BrokenPipeError):
            requests.write(_MORE)
        try:
            kind, content = pickle.load(answers)  # noqa: S301 - from our own child
        except EOFError:
            raise RuntimeError("the process with private mounts was killed") from None
        match kind:
            case "item":
                yield content
            case "raised":
                raise content
            case _:
                return


def _work(make: Callable[[], Iterator[object]], ask: int, tell: int, *, parent_pid: int) -> None:
    """Run the forked process. Never returns, even on errors, because two harnesses must not continue from here."""
    status = 1
    try:
        # This signal goes to the whole process group; the parent handles it and closes the pipe.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        die_with(parent_pid)
        with open(tell, "wb") as answers:
            status = _work_apart(make, ask, answers)
    finally:
        os._exit(status)


def _work_apart(make: Callable[[], Iterator[object]], ask: int, answers: IO[bytes]) -> int:
    """Do the work in private namespaces; return the exit status."""
    try:
        _leave_mounts()
    except LayerSkippedError as error:
        _send(answers, ("raised", error))
        return 0
    pid = os.fork()
    if pid == 0:
        _be_first(make, ask, answers)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _be_first(make: Callable[[], Iterator[object]], ask: int, answers: IO[bytes]) -> NoReturn:
    """Run the first process of the namespace: when it ends, all others are killed."""
    status = 1
    try:
        # The state of the parent is not visible here. If it has ended, the other end of `ask` is closed.
        die_with(os.getppid())
        first_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            die_with(first_pid)
            for answer in _made(make, ask):
                _send(answers, answer)
            os._exit(0)
        ended = ended_status = 0
        while ended != pid:
            ended, ended_status = os.wait()
        status = os.waitstatus_to_exitcode(ended_status) & 0xFF
    finally:
        os._exit(status)


def _send(answers: IO[bytes], answer: tuple[str, object]) -> None:
    pickle.dump(answer, answers)
    answers.flush()


def _made(make: Callable[[], Iterator[object]], ask: int) -> Iterator[tuple[str, object]]:
    """Make an item for each received byte; close the generator when the pipe is closed."""
    try:
        items = make()
        try:
            while os.read(ask, 1) == _MORE:
                yield "item", next(items)
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()
    except StopIteration:
        yield "ended", None
    except (LayerSkippedError, SubjectError, OSError) as error:
        yield "raised", error
    except Exception:
        yield "raised", RuntimeError(traceback.format_exc())


def _leave_mounts() -> None:
    """Make the mounts private, and start a new process namespace for the child processes.

    Raises:
        LayerSkippedError: The system does not permit it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    # Without the second, these mounts would be propagated to all other processes.
    if (
        libc.unshare(_CLONE_NEWNS | _CLONE_NEWPID) != 0
        or libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) != 0
    ):
        raise LayerSkippedError(f"private mounts need root: {os.strerror(ctypes.get_errno())}")


def _reap(pid: int) -> None:
    """End a child process and wait for it."""
    ended = os.pidfd_open(pid)
    try:
        readable, _, _ = select.select([ended], [], [], _PATIENCE_S)
        if not readable:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    finally:
        os.close(ended)
