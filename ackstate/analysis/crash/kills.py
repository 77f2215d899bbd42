"""L3: SIGKILL of a live process, at random moments; L2: before its n-th system call, for every n.

Receipts are reported over a pipe before they count. The kernel keeps the writes of a killed process, so neither can
detect a missing sync; they detect errors of threads, buffers and the order of writes. A run is one directory and the
processes of one subscription in it, each ended by a kill. Each is checked by the recovery of the next process, which is
either the next one that works, or one that only recovers and may be killed meanwhile; if there was no request in
between, the next must recover the same state.

In L3 the moment of a kill is drawn from the seed: while a process starts, after a number of answers, or a little later,
in the middle of any work. That rarely hits between two consecutive system calls; in L2 each such gap is tried. The
first process of a run completes and its calls are counted; each other process is killed before one of that many calls,
in an order drawn from the seed, while it starts, works or persists, or right after one of its answers. Calls are those
that can store or send data, of a program in any language.

A filter of the kernel stops the program, its threads and its children only at the calls below, so that all others run
at full speed. They are all the calls that can affect files, pipes and sockets; a kill before any other call leaves the
same state as a kill before the next of these. Not seen: stores into mapped memory (only that shared memory is
mapped), other architectures.

The tracer is a process between the harness and the program, and ends as the program ended. No well-maintained library
does this: python-ptrace is under the GPL and has no support for seccomp.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import signal
import stat
import struct
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn, final

from ackstate.analysis.crash.dying import die_with
from ackstate.analysis.crash.process import PATIENCE_S, subject_launch
from ackstate.analysis.crash.runs import (
    Crash,
    CrashTiming,
    LayerSkippedError,
    ProcessLayer,
    RunSize,
    Sigkill,
    scratch_directory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
    from pathlib import Path
    from random import Random

    from ackstate.analysis.crash.conversation import Answer
    from ackstate.analysis.crash.oracle import RunOutcome
    from ackstate.analysis.crash.process import Subject, SubjectProcess
    from ackstate.analysis.crash.traced_disk import DiskRecorder


NEVER = 1 << 62
"""A call that no program reaches."""

# The number on x86_64 and on aarch64; None where there is none.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "write": (1, 64), "pwrite64": (18, 68), "writev": (20, 66), "pwritev": (296, 70), "pwritev2": (328, 287),
    "open": (2, None), "openat": (257, 56), "openat2": (437, 437), "creat": (85, None),
    "fsync": (74, 82), "fdatasync": (75, 83), "sync": (162, 81), "syncfs": (306, 267), "sync_file_range": (277, 84),
    "msync": (26, 227), "truncate": (76, 45), "ftruncate": (77, 46), "fallocate": (285, 47),
    "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276),
    "link": (86, None), "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
    "unlink": (87, None), "unlinkat": (263, 35), "rmdir": (84, None), "mkdir": (83, None), "mkdirat": (258, 34),
    "setxattr": (188, 5), "fsetxattr": (190, 7),
    "copy_file_range": (326, 285), "sendfile": (40, 71), "splice": (275, 76), "vmsplice": (278, 75),
    "sendto": (44, 206), "sendmsg": (46, 211), "sendmmsg": (307, 269),
    "io_submit": (209, 2), "io_uring_enter": (426, 426), "mmap": (9, 222),
}  # fmt: skip
_NAMES = tuple(_CALLS)
_WRITES = frozenset({"write", "writev"})
_CREATES = 0o100 | 0o1000 | 0o20000000  # O_CREAT, O_TRUNC, __O_TMPFILE
_MAP_SHARED = 1
# The index of the argument with the flags of a call, and those of which one is needed to change something.
_FLAGS_OF = {"open": (1, _CREATES), "openat": (2, _CREATES), "mmap": (3, _MAP_SHARED)}
# The column of `_CALLS`, and the kernel's number of the architecture.
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}

_PTRACE_CONT, _PTRACE_SEIZE, _PTRACE_LISTEN = 7, 0x4206, 0x4208
_PTRACE_SYSCALL, _PTRACE_GET_SYSCALL_INFO = 24, 0x420E
_EVENT_SECCOMP, _EVENT_STOP = 7, 128
_SYSCALL_STOP = signal.SIGTRAP | 0x80
# PTRACE_O_TRACESYSGOOD, TRACEFORK, VFORK, CLONE, SECCOMP and EXITKILL.
_OPTIONS = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << _EVENT_SECCOMP | 1 << 20
_WALL = 0x40000000
_JOB_CONTROL = frozenset({signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU})
_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER_AT, _MACHINE_AT, _ARGUMENTS_AT = 0, 4, 16
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000

_libc = ctypes.CDLL(None, use_errno=True)


class _Shared(ctypes.Structure):
    """The state of a tracer, in memory that the harness shares with its processes."""

    _fields_ = (
        ("kill_at", ctypes.c_int64),
        ("count", ctypes.c_int64),  # calls that the program has begun
        ("kill_at_turn", ctypes.c_int64),
        ("turns", ctypes.c_int64),  # those of them that are no answer and follow one
        ("met", ctypes.c_int64),  # index of the call that it was killed before; -1 for none
        ("failed", ctypes.c_int64),  # errno of a failed request to the kernel
    )


@final
class CallTracer:
    """Runs one program after the other, each in a process that was forked for it."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux") or platform.machine() not in _MACHINES:
            raise LayerSkippedError(f"kills at a system call need Linux on {' or '.join(_MACHINES)}")
        self._column, self._machine = _MACHINES[platform.machine()]
        self._shared = _Shared.from_buffer(mmap.mmap(-1, ctypes.sizeof(_Shared)))
        self.make_recorder: Callable[[], DiskRecorder] | None = None
        self.begin(NEVER)
        self._probe()
        self.begin(NEVER)

    def begin(self, kill_at: int, *, kill_at_turn: int = NEVER) -> None:
        """Prepare the run of a program: which call it is killed before, 1 for the first or `NEVER`.

        Turns are the calls that follow the output of an answer, without those that output another one.
        """
        shared = self._shared
        shared.kill_at_turn, shared.turns, self._was_answer = kill_at_turn, 0, False
        shared.kill_at, shared.count, shared.met, shared.failed = kill_at, 0, -1, 0

    @property
    def kill_at(self) -> int:
        """The call that the program is to be killed before."""
        return int(self._shared.kill_at)

    @property
    def count(self) -> int:
        """How many calls the program has begun."""
        return int(self._shared.count)

    @property
    def turn_count(self) -> int:
        """How many of them were turns."""
        return int(self._shared.turns)

    @property
    def met(self) -> str | None:
        """The name of the call that the program was killed before; None if it did not come to that."""
        index = self._shared.met
        return None if index < 0 else _NAMES[index]

    def run(self, program: Callable[[], object], *, unneeded: Iterable[int] = ()) -> NoReturn:
        """Trace a program in a child of this process until it ends or is killed, and end in the same way."""
        is_seized, tell = os.pipe()
        tracer_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.close(tell)
            die_with(tracer_pid)
            if os.read(is_seized, 1) and self._filter_calls():
                os.close(is_seized)
                program()
            os._exit(0)
        for descriptor in unneeded:
            os.close(descriptor)
        if _ptrace(_PTRACE_SEIZE, pid, _OPTIONS):
            os.write(tell, b"+")
        else:
            self._shared.failed = ctypes.get_errno()
        os.close(tell)
        _end_as(self._follow(pid))

    def _follow(self, pid: int) -> int:
        """Run a program from stop to stop; return its wait status when it has ended."""
        threads = {pid}
        recorder = self.make_recorder() if self.make_recorder is not None else None
        while True:
            thread, status = os.waitpid(-1, _WALL)
            threads.add(thread)
            event, number = status >> 16, os.WSTOPSIG(status)
            if not os.WIFSTOPPED(status):
                threads.discard(thread)
                if thread == pid:
                    return status
            elif event == _EVENT_STOP and number in _JOB_CONTROL:
                _ptrace(_PTRACE_LISTEN, thread, 0)
            elif event == _EVENT_SECCOMP and self._is_met(thread):
                _kill(threads)
                return signal.SIGKILL
            elif event == _EVENT_SECCOMP and recorder is not None:
                index, arguments = _call_of(thread)
                is_followed = recorder.entered(thread, _NAMES[index], arguments)
                _ptrace(_PTRACE_SYSCALL if is_followed else _PTRACE_CONT, thread, 0)
            elif number == _SYSCALL_STOP and recorder is not None:
                recorder.left(thread, _result_of(thread))
                _ptrace(_PTRACE_CONT, thread, 0)
            else:
                _ptrace(_PTRACE_CONT, thread, 0 if event else number)

    def _is_met(self, thread: int) -> bool:
        """Count a call that a thread begins, and return whether the program is killed before it."""
        shared, (index, arguments) = self._shared, _call_of(thread)
        if _NAMES[index] == "mmap":  # stores nothing yet
            return False
        shared.count += 1
        is_answer = _NAMES[index] in _WRITES and _is_pipe(thread, arguments[0])
        is_turn, self._was_answer = self._was_answer and not is_answer, is_answer
        shared.turns += is_turn
        if shared.count < shared.kill_at and not (is_turn and shared.turns >= shared.kill_at_turn):
            return False
        shared.met = index
        return True

    def _filter_calls(self) -> bool:
        """Make the kernel stop this process and its children at the counted calls; return whether that worked."""
        instructions = b"".join(struct.pack("HBBI", *each) for each in self._instructions())
        code = ctypes.create_string_buffer(instructions, len(instructions))
        program = struct.pack("HP", len(instructions) // 8, ctypes.addressof(code))
        if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and (
            _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(program), 0, 0) == 0
        ):
            return True
        self._shared.failed = ctypes.get_errno()
        return False

    def _instructions(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield the filter: code, how many to skip if it holds and if it does not, and a value."""
        yield _LOAD, 0, 0, _MACHINE_AT
        yield _IF_EQUAL, 1, 0, self._machine
        yield _RETURN, 0, 0, _ALLOW
        yield _LOAD, 0, 0, _NUMBER_AT
        for index, name in enumerate(_NAMES):
            if (number := _CALLS[name][self._column]) is None:
                continue
            if name in _FLAGS_OF:
                argument, flags = _FLAGS_OF[name]
                yield _IF_EQUAL, 0, 4, number
                yield _LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument
                yield _IF_ANY_BIT, 1, 0, flags
                yield _RETURN, 0, 0, _ALLOW
            else:
                yield _IF_EQUAL, 0, 1, number
            yield _RETURN, 0, 0, _TRACE | index
        yield _RETURN, 0, 0, _ALLOW

    def _probe(self) -> None:
        """Trace a call."""
        pid = os.fork()
        if pid == 0:
            try:
                self.run(lambda: os.truncate(b"", 0))
            finally:
                os._exit(1)
        os.waitpid(pid, 0)
        if failed := self._shared.failed:
            raise LayerSkippedError(f"programs cannot be traced here (ptrace or seccomp): {os.strerror(failed)}")
        if self.count != 1:
            raise LayerSkippedError("programs cannot be traced here: a system call was not seen")


def _ptrace(request: int, thread: int, data: int, address: int = 0) -> bool:
    """Send one request; return whether it succeeded. A thread that was killed meanwhile is no error."""
    values = (ctypes.c_long(request), ctypes.c_long(thread), ctypes.c_void_p(address), ctypes.c_void_p(data))
    return int(_libc.ptrace(*values)) >= 0


def _call_information(thread: int) -> bytes:
    """Return the ``ptrace_syscall_info`` of a stopped thread."""
    buffer = ctypes.create_string_buffer(88)
    _ptrace(_PTRACE_GET_SYSCALL_INFO, thread, ctypes.addressof(buffer), len(buffer))
    return buffer.raw


def _call_of(thread: int) -> tuple[int, tuple[int, ...]]:
    """Return the index and the arguments of the call that a thread begins."""
    _, *arguments, index = struct.unpack_from("=Q6QI", _call_information(thread), 24)
    return min(index, len(_NAMES) - 1), tuple(arguments)


def _is_pipe(thread: int, descriptor: int) -> bool:
    with suppress(OSError):
        return stat.S_ISFIFO(os.stat(f"/proc/{thread}/fd/{ctypes.c_int(descriptor).value}").st_mode)  # noqa: PTH116
    return False


def _result_of(thread: int) -> int:
    return int(struct.unpack_from("=q", _call_information(thread), 24)[0])


def _kill(threads: Iterable[int]) -> None:
    """Kill the processes of some threads and those that they start meanwhile, and wait until all are dead."""
    remaining: Sequence[int] = list(threads)
    while True:
        for thread in remaining:
            with suppress(ProcessLookupError):
                os.kill(thread, signal.SIGKILL)
        try:
            remaining = [os.waitpid(-1, _WALL)[0]]
        except ChildProcessError:
            return


def _end_as(status: int) -> NoReturn:
    """End this process as another one ended, by its wait status."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        signal.pause()
    os._exit(os.WEXITSTATUS(status))


_SIZE = RunSize(lives=10, operations=120)
# Processes are short, so that a few of them cover every call.
_CALLS_SIZE = RunSize(lives=16, operations=24)
_SHRINK_TRIES = 24
_AT_A_TURN_SHARE = 0.5


def kills(
    first_seed: int,
    *,
    subject: Subject = "ours",
    size: RunSize = _SIZE,
    patience_s: float = PATIENCE_S,
    shrink_tries: int = _SHRINK_TRIES,
) -> Generator[RunOutcome]:
    """Run L3 in memory, because SIGKILL needs no disk; ``ours`` is both in turn, without and under a rate limit."""

    @contextmanager
    def stage(_: Random) -> Iterator[tuple[Path, Crash]]:
        with scratch_directory("kills") as directory:
            yield directory, Sigkill()

    subjects = ("ours", "ours-limited") if subject == "ours" else (subject,)
    layer = ProcessLayer(
        name="run",
        launches=[*map(subject_launch, subjects)],
        stage=stage,
        size=size,
        shares=(1, 2, 4, 8),  # Short processes give many kills, long ones a large state.
        timing=CrashTiming(patience_s=patience_s),
        shrink_tries=shrink_tries,
    )
    return layer(first_seed)


def call_kills(first_seed: int, *, subject: Subject, shrink_tries: int = _SHRINK_TRIES) -> Generator[RunOutcome]:
    """Run L2."""
    tracer = CallTracer()

    @contextmanager
    def stage(chance: Random) -> Iterator[tuple[Path, Crash]]:
        with scratch_directory("call-kills") as directory:
            yield directory, CallKill(tracer, chance)

    layer = ProcessLayer(
        name="run",
        launches=[subject_launch(subject, tracer=tracer)],
        stage=stage,
        size=_CALLS_SIZE,
        shares=(1,),
        timing=CrashTiming(early_s=None),
        shrink_tries=shrink_tries,
    )
    return layer(first_seed)


@final
class CallKill(Crash):
    """SIGKILL before each system call of a traced subject in turn, in random order."""

    def __init__(self, tracer: CallTracer, chance: Random) -> None:
        self._tracer = tracer
        self._chance = chance
        self._call_count = self._turn_count = 0
        self._left: list[int] = []
        self._how = ""

    def prepare(self) -> None:
        # A receipt that came too early is followed by its write. Most processes have the early turns.
        if self._turn_count and self._chance.random() < _AT_A_TURN_SHARE:
            turn = self._chance.randint(1, self._chance.randint(1, self._turn_count))
            self._tracer.begin(NEVER, kill_at_turn=turn)
            return
        if not self._left:
            self._left = list(range(1, self._call_count + 1))
            self._chance.shuffle(self._left)
        self._tracer.begin(self._left.pop() if self._left else NEVER)

    def __call__(self, process: SubjectProcess) -> Sequence[Answer]:
        """See `Crash`; also kills a process that never reached its call. All of its output counts."""
        try:
            return process.kill()
        finally:
            met, count = self._tracer.met, self._tracer.count
            self._how = f"SIGKILL before its call {count}, {met}" if met else f"SIGKILL after its call {count}"
            self._call_count = max(self._call_count, count)
            self._turn_count = max(self._turn_count, self._tracer.turn_count)
            # The processes that check the recovery must not be killed.
            self._tracer.begin(NEVER)

    def __str__(self) -> str:
        return self._how
