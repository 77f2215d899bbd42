"""Serve a Python subject: requests come as lines on one descriptor, answers go out on another.

A subject has a name: ``ours``, ``ours-limited``, ``naive``, or ``module:Class`` for a `CrashSubject` of your own.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import traceback
from contextlib import redirect_stdout
from dataclasses import replace
from operator import index
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, final

from ackstate.analysis.crash.conversation import (
    Accepted,
    ConversationFailure,
    Durable,
    Ready,
    Recover,
    ReportRequest,
    StartRequest,
    answer_line,
    printable,
    read_request,
)
from ackstate.analysis.crash.subject import Operation, OperationKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ackstate.analysis.crash.conversation import Answer, Request
    from ackstate.analysis.crash.subject import CrashSubject, Report

SUBJECTS = {
    "ours": "ackstate.analysis.crash.subjects.ours:Ours",
    "ours-limited": "ackstate.analysis.crash.subjects.ours:OursLimited",
    "naive": "ackstate.analysis.crash.subjects.naive:NaiveSubject",
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
