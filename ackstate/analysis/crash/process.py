"""A subject in a separate process, which can be stopped and killed at any moment.

One in Python is served in a fork: requests come as lines on one descriptor, answers go out on another. A subject has a
name: ``ours``, ``ours-limited``, ``naive``, or ``module:Class`` for a `CrashSubject` of your own.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import selectors
import shlex
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from operator import index
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeAlias, TypeVar, final

from ackstate.analysis.crash.conversation import (
    Accepted,
    AnswersDue,
    ConversationFailure,
    CrashedError,
    Durable,
    Ready,
    Recover,
    ReportRequest,
    StartRequest,
    SubjectError,
    answer_line,
    printable,
    quoted,
    read_answer,
    read_request,
    request_line,
)
from ackstate.analysis.crash.dying import die_with, how_ended
from ackstate.analysis.crash.subject import Operation, OperationKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ackstate.analysis.crash.conversation import Answer, Request
    from ackstate.analysis.crash.kills import CallTracer
    from ackstate.analysis.crash.subject import CrashSubject, Report


SUBJECTS = {
    "ours": "ackstate.analysis.crash.subjects:Ours",
    "ours-limited": "ackstate.analysis.crash.subjects:OursLimited",
    "naive": "ackstate.analysis.crash.subjects:NaiveSubject",
}
_WANTED = ("persists_in_background", "start", "apply", "receipts", "recover", "report")
_CLASS_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_class_name(name: str) -> bool:
    """Return whether a name is one of `SUBJECTS` or written ``module:Class``."""
    return name in SUBJECTS or _CLASS_NAME.fullmatch(name) is not None


def subject_class(name: str) -> Callable[[], CrashSubject]:
    """Return the factory of a subject by its name as above.

    Modules are searched for in the current directory, too, after all other places.
    """
    if not is_class_name(name):
        raise ValueError(f"subject {name!r}: not one of {', '.join(SUBJECTS)}, nor module:Class")
    module_name, _, class_name = SUBJECTS.get(name, name).partition(":")
    if (here := str(os.getcwd())) not in sys.path:  # noqa: PTH109 - as text, as the path has it
        sys.path.append(here)
    try:
        # Its output must not mix with the answers.
        with redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"subject {name!r}: {printable(str(error)) or 'ImportError'}") from error
    except (Exception, SystemExit) as error:
        complaint = printable(f"to import {module_name} raises {_described(error)}")
        raise ValueError(f"subject {name!r}: {complaint}") from error
    found: Any = getattr(module, class_name, None)
    if found is None:
        raise ValueError(f"subject {name!r}: module {module_name} has no {class_name}")
    if not callable(found):
        raise ValueError(f"subject {name!r}: {class_name} is not callable, so it makes no subject")
    made: Callable[[], CrashSubject] = found
    return made


def serve(subject: CrashSubject, requests: Iterable[bytes], answers: int) -> None:
    """Answer requests until they end."""
    _Service(subject, answers).run(requests)


@final
class _Service:
    """Applies requests in this thread and, if the subject can, persists in a second one."""

    def __init__(self, subject: CrashSubject, answers: int) -> None:
        self._subject = subject
        self._answers = answers
        # Also makes reading and reporting the gauge atomic, so that a later answer never has an earlier state.
        self._sending = threading.Lock()
        self._persists: SimpleQueue[Operation | None] = SimpleQueue()
        self._persister: threading.Thread | None = None

    def run(self, requests: Iterable[bytes]) -> None:
        """Answer requests until their end, or until the subject cannot continue."""
        try:
            _check_complete(self._subject)
            for line in requests:
                self._serve(read_request(line))
            if self._persister is not None:
                self._persists.put(None)
                self._persister.join()
        except Exception as error:
            self._send(ConversationFailure(_described(error)))
            raise

    def _serve(self, request: Request) -> None:
        match request:
            case StartRequest(directory, ledgers):
                self._subject.start(directory, ledgers)
                self._send(Ready())
            case Recover(directory, ledgers):
                self._send_report(self._subject.recover(directory, ledgers))
            case ReportRequest():
                self._send_report(self._subject.report())
            case Operation(kind=OperationKind.PERSIST) if self._subject.persists_in_background:
                self._persist_in_background(request)
            case Operation():
                self._apply(request)

    def _apply(self, operation: Operation) -> None:
        self._subject.apply(operation)
        self._send_accepted(operation)
        if not self._subject.persists_in_background:
            self._send_durable()

    def _persist_in_background(self, operation: Operation) -> None:
        if self._persister is None:
            self._persister = threading.Thread(target=self._persist_all, name="persister", daemon=True)
            self._persister.start()
        self._persists.put(operation)

    def _persist_all(self) -> None:
        try:
            while (operation := self._persists.get()) is not None:
                self._subject.apply(operation)
                self._send_durable()
                self._send_accepted(operation)
        except BaseException as error:
            self._send(ConversationFailure(_described(error)))
            end_with_traceback()

    def _send_accepted(self, operation: Operation) -> None:
        with self._sending:
            self._write(answer_line(Accepted(operation.number, self._gauge())))

    def _send_report(self, report: Report) -> None:
        """Send a report, with the gauge of the subject if the report has none."""
        with self._sending:
            if report.redelivery_if_crashed is None:
                report = replace(report, redelivery_if_crashed=self._gauge())
            self._write(answer_line(report))

    def _gauge(self) -> int | None:
        gauge = getattr(self._subject, "redelivery_if_crashed", None)
        # Rejects numbers with a fraction.
        return None if gauge is None else index(gauge)

    def _send_durable(self) -> None:
        numbers = self._subject.receipts()
        if numbers is not None and len(numbers):
            self._send(Durable(tuple(map(index, numbers))))

    def _send(self, answer: Answer) -> None:
        with self._sending:
            self._write(answer_line(answer))

    def _write(self, line: bytes) -> None:
        written = os.write(self._answers, line)
        while written < len(line):
            written += os.write(self._answers, line[written:])


def end_with_traceback() -> None:
    """End this process without cleanup, like a crash, and write the reason to standard error."""
    os.write(2, traceback.format_exc().encode(errors="backslashreplace"))
    os._exit(1)


def _check_complete(subject: CrashSubject) -> None:
    missing = [name for name in _WANTED if not hasattr(subject, name)]
    if missing:
        raise TypeError(f"the subject has no {', '.join(missing)}")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


PATIENCE_S = 60.0
"""The maximum time for an answer that is due; a busy machine needs seconds."""
LINE_BYTES_MAX = 64 * 1024 * 1024
_COMPLAINT_BYTES_MAX = 1 << 14
_COMPLAINT_LINES = 10
_CHUNK_BYTES = 1 << 16
_POLL_S = 0.0002
# The time for the rest of its process group to end.
_DYING_S = 5.0
# The time for a process that has closed its answers to end by itself.
_ENDING_S = 1.0

_A = TypeVar("_A")


@final
class SubjectProcess:
    """A running subject and the conversation with it. Made by `fork` or `spawn`; used by one thread.

    It leads its own process group, so that the children of a command are stopped and killed with it. The kernel kills
    it when the thread that made it ends.
    """

    def __init__(
        self, pid: int, requests: int, answers: int, complaints: int, *, tracer: CallTracer | None = None
    ) -> None:
        self.pid = pid
        self._tracer = tracer
        self._requests, self._answers, self._complaints = requests, answers, complaints
        self._turns = AnswersDue()
        self._unsent = bytearray()
        self._unread = bytearray()
        self._lines: deque[bytes] = deque()
        self._complaint = b""
        self._status: int | None = None
        self._is_killed = self._is_survived = False
        self._selector = selectors.PollSelector()
        for descriptor in (requests, answers, complaints):
            os.set_blocking(descriptor, False)
        for descriptor in (answers, complaints):
            self._selector.register(descriptor, selectors.EVENT_READ)

    @classmethod
    def fork(cls, make_subject: Callable[[], CrashSubject], *, tracer: CallTracer | None = None) -> SubjectProcess:
        """Serve a Python subject in a copy of this process, with the same patched code."""

        def child(requests: int, answers: int) -> None:
            # The output of a subject must not mix with the answers.
            os.dup2(2, 1)
            with os.fdopen(requests, "rb") as lines:
                serve(make_subject(), lines, answers)

        return cls._begin(child, tracer)

    @classmethod
    def spawn(cls, command: Sequence[str], *, tracer: CallTracer | None = None) -> SubjectProcess:
        """Run any program that speaks `ackstate.analysis.crash.conversation` on standard input and output."""

        def child(requests: int, answers: int) -> None:
            """Become the program; if it is missing, end as a shell does."""
            os.dup2(requests, 0)
            os.dup2(answers, 1)
            try:
                os.execvp(command[0], list(command))  # noqa: S606
            except OSError as error:
                os.write(2, f"{command[0]}: {error.strerror}\n".encode(errors="backslashreplace"))
                os._exit(127)

        return cls._begin(child, tracer)

    @classmethod
    def _begin(cls, child: Callable[[int, int], None], tracer: CallTracer | None) -> SubjectProcess:
        request_end, requests = os.pipe()
        answers, answer_end = os.pipe()
        complaints, complaint_end = os.pipe()
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            for descriptor in (requests, answers, complaints):
                os.close(descriptor)
            ends = (request_end, answer_end, complaint_end)
            if tracer is None:
                _run_child(lambda: child(request_end, answer_end), complaint_end, parent_pid=parent_pid)
            traced = partial(tracer.run, lambda: child(request_end, answer_end), unneeded=ends)
            _run_child(traced, complaint_end, parent_pid=parent_pid)
        for descriptor in (request_end, answer_end, complaint_end):
            os.close(descriptor)
        return cls(pid, requests, answers, complaints, tracer=tracer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: object, error: object, _traceback: object) -> None:
        self._end()
        if isinstance(error, SubjectError):
            error.complaint = self._complaint_lines()

    def send(self, *requests: Request) -> None:
        """Send requests. Never waits: requests beyond the capacity of the pipe are sent while other methods wait."""
        for request in requests:
            self._turns.note_request(request)
        self._unsent += b"".join(map(request_line, requests))
        self._write()

    def events(self, timeout_s: float) -> list[Answer]:
        """Return the new answers in order; empty if there are none within `timeout_s`.

        Returns as soon as there is an answer. An incomplete line is not an answer.
        """
        answers: list[Answer] = []
        if self._await_line(timeout_s):
            while self._lines:
                try:
                    answers.append(self._next_answer())
                except SubjectError:
                    if answers:
                        break
                    raise
        return answers

    def wait_for(self, kind: type[_A], *, patience_s: float = PATIENCE_S) -> tuple[list[Answer], _A]:
        """Return the answers up to an answer of some kind, and that answer."""
        before: list[Answer] = []
        until = time.monotonic() + patience_s
        while self._await_line(until - time.monotonic()):
            answer = self._next_answer()
            if isinstance(answer, kind):
                return before, answer
            before.append(answer)
            if time.monotonic() > until:
                break
        raise self.silence(patience_s)

    def silence(self, patience_s: float) -> SubjectError:
        """Return the error for a subject without an answer that was due."""
        return SubjectError(f"the subject was silent for {patience_s:g} s{self._quoted_complaint()}")

    def stop(self) -> None:
        """Stop it at once; return when the kernel reports that all its threads are stopped.

        Its answers until then can be read afterwards; there are no more.
        """
        self._signal(signal.SIGSTOP)
        while self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if pid and os.WIFSTOPPED(status):
                return
            if pid:
                self._status = status
            else:
                time.sleep(_POLL_S)
        raise self._ended()

    def kill(self) -> list[Answer]:
        """Kill it with SIGKILL, wait for its end, and return its unread answers."""
        answers, error = self.last_words()
        if error is not None:
            raise error
        return answers

    def last_words(self) -> tuple[list[Answer], SubjectError | None]:
        """Kill it as `kill` does; return its unread answers and, instead of raising, the error after them."""
        self._end()
        answers: list[Answer] = []
        try:
            while self._lines:
                answers.append(self._next_answer())
        except SubjectError as error:
            return answers, error
        if self._is_survived:
            return answers, SubjectError("a child process of the subject still runs in its own session")
        return answers, None if self._is_killed else self._ended()

    def _end(self) -> None:
        """Kill, reap, read to the end and close, once."""
        if self._requests < 0:
            return
        self._signal(signal.SIGKILL)
        if self._status is None:
            _, self._status = os.waitpid(self.pid, 0)
        self._is_killed = os.WIFSIGNALED(self._status) and os.WTERMSIG(self._status) == signal.SIGKILL
        # Its children may need a moment to end; until then they hold the pipe.
        until = time.monotonic() + _DYING_S
        while self._pump(0.05):
            if time.monotonic() > until:
                self._is_survived = True
                break
        # Then they may still hold what they opened after the pipe, such as a lock.
        while _has_living(self.pid) and time.monotonic() < until:
            time.sleep(_POLL_S)
        self._selector.close()
        for descriptor in (self._requests, self._answers, self._complaints):
            os.close(descriptor)
        self._requests = -1

    def _signal(self, number: signal.Signals) -> None:
        """Signal it and its children, unless it was reaped: then its pid may belong to another process."""
        if self._status is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                # It does not lead a process group yet.
                os.kill(self.pid, number)

    def _pump(self, timeout_s: float) -> bool:
        """Send and read without waiting, or wait once; return whether it can still answer."""
        if self._requests < 0:
            return False
        self._write()
        is_open = True
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._answers:
                is_open = self._read()
            elif key.fd == self._complaints:
                self._read_complaint()
        self._write()
        return is_open

    def _write(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: os.write(self._requests, self._unsent)]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            # The end of its answers reports it.
            self._unsent.clear()
        self._watch_requests()

    def _watch_requests(self) -> None:
        is_watched = self._requests in self._selector.get_map()
        if self._unsent and not is_watched:
            self._selector.register(self._requests, selectors.EVENT_WRITE)
        elif is_watched and not self._unsent:
            self._selector.unregister(self._requests)

    def _read(self) -> bool:
        """Read the available data, up to a chunk, so that a fast writer does not block this method."""
        try:
            chunk = os.read(self._answers, _CHUNK_BYTES)
        except BlockingIOError:
            return True
        if not chunk:
            return False
        first, *others = chunk.split(b"\n")
        # Appended in place, so that a long line is not copied with each chunk.
        self._unread += first
        for line in others:
            self._lines.append(bytes(self._unread))
            self._unread = bytearray(line)
        if len(self._unread) > LINE_BYTES_MAX:
            self._lines.append(bytes(self._unread))
            self._unread.clear()
        return True

    def _read_complaint(self) -> None:
        chunk = os.read(self._complaints, _CHUNK_BYTES)
        if chunk:
            self._complaint = (self._complaint + chunk)[-_COMPLAINT_BYTES_MAX:]
        else:
            self._selector.unregister(self._complaints)

    def _await_line(self, timeout_s: float) -> bool:
        """Wait for a line; return whether there is one."""
        until = time.monotonic() + timeout_s
        wait_s = 0.0
        while not self._lines:
            is_open = self._pump(wait_s)
            wait_s = until - time.monotonic()
            if not is_open and not self._lines:
                raise self._ended()
            if wait_s <= 0:
                break
        return bool(self._lines)

    def _next_answer(self) -> Answer:
        """Take the next answer; an invalid line, or one that is not due, stays and is refused again."""
        answer = read_answer(self._lines[0])
        if isinstance(answer, ConversationFailure):
            raise SubjectError(f"the subject cannot continue: {printable(answer.text)}")
        self._turns.note_answer(answer)
        self._lines.popleft()
        return answer

    def _ended(self) -> SubjectError:
        """Return the error that describes its end."""
        # Its answers end a moment before the process or its tracer.
        until = time.monotonic() + _ENDING_S
        while self._status is None and time.monotonic() < until:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = status
            else:
                time.sleep(_POLL_S)
        self._end()
        assert self._status is not None
        if self._is_killed and self._tracer is not None and self._tracer.met:
            return CrashedError(f"the subject was killed at its call {self._tracer.kill_at}, {self._tracer.met}")
        if self._is_killed:
            return SubjectError(f"the subject closed its answers, or was killed{self._quoted_complaint()}")
        return SubjectError(f"the subject {how_ended(self._status)}{self._quoted_complaint()}")

    def _quoted_complaint(self) -> str:
        lines = self._complaint.strip().splitlines()
        return f": {quoted(lines[-1])}" if lines else ""

    def _complaint_lines(self) -> tuple[str, ...]:
        """Return the last lines that it wrote to standard error, as a terminal shows them."""
        lines = self._complaint.decode(errors="backslashreplace").rstrip().splitlines()
        return tuple(printable(line.expandtabs(4)) for line in lines[-_COMPLAINT_LINES:])


Launch: TypeAlias = "Callable[[], SubjectProcess]"
"""Starts a subject in a new process."""


Subject: TypeAlias = "str | Callable[[], CrashSubject]"
"""The name of a subject, the command line of one, or what makes one in Python."""


def subject_launch(subject: Subject, *, tracer: CallTracer | None = None) -> Launch:
    """Return the launcher of a subject."""
    if callable(subject) or is_class_name(subject):
        make_subject = subject if callable(subject) else subject_class(subject)
        return lambda: SubjectProcess.fork(make_subject, tracer=tracer)
    try:
        command = shlex.split(subject)
    except ValueError as error:
        raise ValueError(f"subject {subject!r}: {error}") from None
    if not command or shutil.which(command[0]) is None:
        raise ValueError(
            f"subject {subject!r}: neither one of {', '.join(SUBJECTS)}, nor module:Class, nor the command of a program"
        )
    return lambda: SubjectProcess.spawn(command, tracer=tracer)


def _run_child(child: Callable[[], object], complaints: int, *, parent_pid: int) -> NoReturn:
    """Run the subject's process until it ends, without the parent's cleanup."""
    try:
        os.setsid()
        die_with(parent_pid)
        # The harness handles Ctrl-C and termination; a subject does not.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(complaints, 2)
        # Its garbage collector would touch, and so copy, every page of the parent's objects.
        gc.freeze()
        child()
        os._exit(0)
    except BaseException:
        end_with_traceback()
    os._exit(1)


def _has_living(group: int) -> bool:
    """Return whether a process of a group has a thread that has not ended; a zombie may never be reaped."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group, *others = path.read_text().rpartition(")")[2].split()
            is_over = state in "ZX" and int(others[14]) <= 1  # its threads
            if int(its_group) == group and not is_over:
                return True
    return False
