"""The protocol between the harness and a subject: one JSON object per line, in both directions.

To the subject, with runs of entries from the first (included) to the end (excluded), and ledger ids as text because
JSON keys are text::

    {"op": "start", "directory": "/d", "ledgers": {"1": 100, "4": 50}}
    {"op": "ack", "number": 0, "ledger": 1, "entry": 7}
    {"op": "mark_delete", "number": 1, "ledger": 1, "entry": 9}
    {"op": "persist", "number": 2}
    {"op": "report"}
    {"op": "recover", "directory": "/d", "ledgers": {"1": 100, "4": 50}}

From the subject::

    {"ready": true}                                               after start
    {"accepted": 0} or {"accepted": 0, "redelivery_if_crashed": 1}   after an ack, a mark_delete, and a persist
    {"durable": [0, 1]}                                           at any time: from now on these survive a crash
    {"acked": [[1, 0, 10], [4, 3, 4]], "redelivery_if_crashed": null}   to report and to recover
    {"error": "..."}                                              the subject cannot continue

The subject may report operations as durable before it reports them as accepted. It may delay answers, at most until the
next persist: then it reports all operations requested so far as accepted. Each request has one answer, and each
operation becomes durable once; an answer without a request, or a repeated one, violates the protocol (`AnswersDue`).
A line counts once it was written; a line in a buffer of a killed process is lost. Standard error is not interpreted;
its last ten lines are quoted if the subject fails.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

from ackstate.analysis import wording
from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report
from ackstate.errors import AckStateError
from ackstate.position import LEDGER_ID_MAX

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENTRY_END_MAX = 2**32
_NUMBER_MAX = 2**63 - 1
_QUOTED_MAX = 200
_TOLD_MAX = 1_000


class SubjectError(AckStateError):
    """A subject violated the protocol, was silent too long, or ended by itself; the message quotes it."""

    complaint: tuple[str, ...] = ()  # The last lines that it wrote to standard error, at most ten


class OutOfTurnError(SubjectError):
    """A subject sent an answer without a request, or the same answer twice."""


class CrashedError(SubjectError):
    """A subject was killed at a system call, as planned; it is not to blame."""


class StartRequest(NamedTuple):
    """Open the state in a directory, or create one; `ledgers` are the entry counts of the log's ledgers, by id."""

    directory: Path
    ledgers: Mapping[int, int]


class Recover(NamedTuple):
    """Open the state after a crash, and report. Fields as of `StartRequest`."""

    directory: Path
    ledgers: Mapping[int, int]


class ReportRequest(NamedTuple):
    """Report the acked entries."""


class Ready(NamedTuple):
    """The subject has started."""


class Accepted(NamedTuple):
    """An operation was accepted, or a persist was tried; the gauge, if any, includes it."""

    number: int
    redelivery_if_crashed: int | None = None


class Durable(NamedTuple):
    """Operations that survive any crash from now on."""

    numbers: tuple[int, ...]


class ConversationFailure(NamedTuple):
    """The subject cannot continue."""

    text: str


Request = StartRequest | Recover | ReportRequest | Operation
Answer = Ready | Accepted | Durable | Report | ConversationFailure


@final
class AnswersDue:
    """The answers that one process still owes."""

    def __init__(self) -> None:
        self._starts = self._reports = 0
        self._unaccepted: set[int] = set()
        self._not_durable: set[int] = set()

    def note_request(self, request: Request) -> None:
        """Note a request."""
        match request:
            case StartRequest():
                self._starts += 1
            case Recover() | ReportRequest():
                self._reports += 1
            case Operation(number):
                self._unaccepted.add(number)
                self._not_durable.add(number)

    def note_answer(self, answer: Answer) -> None:
        """Note an answer."""
        if self._starts and not isinstance(answer, Ready):
            raise OutOfTurnError(f"it is not ready yet, got {quoted(answer_line(answer))}")
        match answer:
            case Ready():
                if not self._starts:
                    raise OutOfTurnError("a ready answer without a start request")
                self._starts -= 1
            case Report():
                if not self._reports:
                    raise OutOfTurnError("a report without a request")
                self._reports -= 1
            case Accepted(number):
                _take(self._unaccepted, (number,), answer)
            case Durable(numbers):
                _take(self._not_durable, numbers, answer)


def _take(due: set[int], numbers: tuple[int, ...], answer: Answer) -> None:
    if len(set(numbers)) != len(numbers) or not due.issuperset(numbers):
        raise OutOfTurnError(
            f"{quoted(answer_line(answer))}: a repeated answer, or one for an operation without a request"
        )
    due.difference_update(numbers)


def request_line(request: Request) -> bytes:
    """Return a request as a line, with its end."""
    match request:
        case Operation(number, OperationKind.PERSIST):
            return b'{"op":"persist","number":%d}\n' % number
        case Operation(number, kind, ledger_id, entry_id):
            values = (kind.value.encode(), number, ledger_id, entry_id)
            return b'{"op":"%s","number":%d,"ledger":%d,"entry":%d}\n' % values
        case ReportRequest():
            return b'{"op":"report"}\n'
        case StartRequest(directory, ledgers) | Recover(directory, ledgers):
            counts = {str(ledger_id): count for ledger_id, count in ledgers.items()}
            op = "start" if isinstance(request, StartRequest) else "recover"
            return _line({"op": op, "directory": str(directory), "ledgers": counts})


def answer_line(answer: Answer) -> bytes:
    """Return an answer as a line, with its end."""
    match answer:
        case Ready():
            return b'{"ready":true}\n'
        case Accepted(number, gauge):
            if gauge is None:
                return b'{"accepted":%d}\n' % number
            return b'{"accepted":%d,"redelivery_if_crashed":%d}\n' % (number, gauge)
        case Durable(numbers):
            return _line({"durable": list(numbers)})
        case Report():
            return _line({"acked": list(answer.acked), "redelivery_if_crashed": answer.redelivery_if_crashed})
        case ConversationFailure(text):
            return _line({"error": text})


def read_request(line: bytes) -> Request:
    """Parse a line of the harness."""
    fields = _fields(line, "request")
    try:
        match fields:
            case {"op": "start" | "recover" as op, "directory": str(directory), "ledgers": dict(counts), **rest} if (
                not rest
            ):
                ledgers = {int(ledger_id): _count(count) for ledger_id, count in counts.items()}
                return (StartRequest if op == "start" else Recover)(Path(directory), ledgers)
            case {"op": "ack" | "mark_delete" as op, "number": n, "ledger": ledger_id, "entry": entry_id, **rest} if (
                not rest
            ):
                return Operation(_count(n), OperationKind(op), _count(ledger_id), _count(entry_id))
            case {"op": "persist", "number": n, **rest} if not rest:
                return Operation(_count(n), OperationKind.PERSIST)
            case {"op": "report", **rest} if not rest:
                return ReportRequest()
    except ValueError:
        pass
    raise SubjectError(f"no request: {quoted(line)}")


def read_answer(line: bytes) -> Answer:
    """Parse a line of a subject."""
    fields = _fields(line, "answer")
    try:
        match fields:
            case {"accepted": number, "redelivery_if_crashed": gauge, **rest} if not rest:
                return Accepted(_count(number), _gauge(gauge))
            case {"accepted": number, **rest} if not rest:
                return Accepted(_count(number))
            case {"durable": list(numbers), **rest} if not rest:
                return Durable(tuple(map(_count, numbers)))
            case {"acked": list(runs), **rest} if not rest or set(rest) == {"redelivery_if_crashed"}:
                return Report(list(map(_run, runs)), _gauge(rest.get("redelivery_if_crashed")))
            case {"ready": True, **rest} if not rest:
                return Ready()
            case {"error": str(text), **rest} if not rest:
                return ConversationFailure(text)
    except ValueError as error:
        raise SubjectError(f"no answer: {quoted(line)}: {error}") from None
    raise SubjectError(f"no answer: {quoted(line)}")


def quoted(line: bytes) -> str:
    """Return any line as short, printable text."""
    # Only the first bytes: a line may have millions.
    text = repr(line[: 4 * _QUOTED_MAX].rstrip(b"\r\n").decode(errors="backslashreplace"))
    return text if len(text) <= _QUOTED_MAX else f"{text[:_QUOTED_MAX]}... ({len(line)} bytes)"


def printable(text: str) -> str:
    """Return text of a subject as one printable line, escaped and truncated."""
    shown = wording.printable(text[:_TOLD_MAX])
    return shown if len(text) <= _TOLD_MAX else f"{shown}... ({len(text)} characters)"


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _fields(line: bytes, what: str) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    # Deep nesting raises RecursionError.
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise SubjectError(f"no {what}: {quoted(line)} is no JSON object")
    return fields


def _count(number: object) -> int:
    # isinstance accepts `True` as an int.
    if type(number) is not int or not 0 <= number <= _NUMBER_MAX:
        raise ValueError(f"{str(number)[:_QUOTED_MAX]} is not a number from 0 on")
    return number


def _gauge(number: object) -> int | None:
    return None if number is None else _count(number)


def _run(run: object) -> EntryRun:
    # Optimized, because a report may have hundreds of thousands of runs. `True` is not a number here.
    if type(run) is list and len(run) == 3:
        ledger_id, first, end = run
        if type(ledger_id) is type(first) is type(end) is int and (
            0 <= ledger_id <= LEDGER_ID_MAX and 0 <= first <= end <= _ENTRY_END_MAX
        ):
            return EntryRun(ledger_id, first, end)
    text = printable(str(run))[:_QUOTED_MAX]
    raise ValueError(f"{text} is not a run [ledger, first, end] with 0 <= first <= end <= {_ENTRY_END_MAX}")
