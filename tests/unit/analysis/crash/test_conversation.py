from pathlib import Path

import pytest

from ackstate.analysis.crash.conversation import (
    Accepted,
    AnswersDue,
    ConversationFailure,
    Durable,
    OutOfTurnError,
    Ready,
    Recover,
    ReportRequest,
    StartRequest,
    SubjectError,
    answer_line,
    read_answer,
    read_request,
    request_line,
)
from ackstate.analysis.crash.subject import EntryRun, Operation, OperationKind, Report

REQUESTS = {
    '{"op":"start","directory":"/d","ledgers":{"1":100,"4":50}}': StartRequest(Path("/d"), {1: 100, 4: 50}),
    '{"op":"recover","directory":"/d","ledgers":{}}': Recover(Path("/d"), {}),
    '{"op":"ack","number":0,"ledger":1,"entry":7}': Operation(0, OperationKind.ACK, 1, 7),
    '{"op":"mark_delete","number":1,"ledger":1,"entry":9}': Operation(1, OperationKind.MARK_DELETE, 1, 9),
    '{"op":"persist","number":2}': Operation(2, OperationKind.PERSIST),
    '{"op":"report"}': ReportRequest(),
}
ANSWERS = {
    '{"ready":true}': Ready(),
    '{"accepted":0}': Accepted(0),
    '{"accepted":0,"redelivery_if_crashed":3}': Accepted(0, 3),
    '{"durable":[0,1]}': Durable((0, 1)),
    '{"acked":[[1,0,10],[4,3,4]],"redelivery_if_crashed":null}': Report([EntryRun(1, 0, 10), EntryRun(4, 3, 4)]),
    '{"acked":[],"redelivery_if_crashed":2}': Report([], 2),
    '{"error":"disk \\u00fc"}': ConversationFailure("disk ü"),
}


@pytest.mark.parametrize(("line", "request_"), REQUESTS.items())
def test_requests_are_written_and_read_as_the_module_shows_them(line, request_):
    assert request_line(request_) == line.encode() + b"\n"
    found = read_request(line.encode())
    assert (found, type(found)) == (request_, type(request_))


@pytest.mark.parametrize(("line", "answer"), ANSWERS.items())
def test_answers_are_written_and_read_as_the_module_shows_them(line, answer):
    assert answer_line(answer) == line.encode() + b"\n"
    found = read_answer(line.encode())
    assert (found, type(found)) == (answer, type(answer))


@pytest.mark.parametrize(
    "line",
    [
        b"", b"ready", b"true", b"[]", b"{}", b"\xff\xfe", b"{" * 100_000, b"[" * 100_000, b'{"ready":1}',
        b'{"ready":true,"accepted":0}', b'{"accepted":true}', b'{"accepted":-1}', b'{"accepted":1.0}',
        b'{"accepted":NaN}', b'{"accepted":9223372036854775808}', b'{"accepted":' + b"9" * 5_000 + b"}",
        b'{"accepted":0,"redelivery_if_crashed":-1}', b'{"accepted":0,"gauge":1}', b'{"durable":0}',
        b'{"durable":["0"]}', b'{"durable":[0],"number":1}', b'{"acked":[[1,0]]}',
        b'{"acked":[[-1,0,5]]}', b'{"acked":[[1,0,4294967297]]}', b'{"acked":{}}',
        b'{"acked":[],"more":1}', b'{"error":1}', b'{"op":"report"}',
    ],
    ids=lambda line: line[:30].decode(errors="replace"),
)  # fmt: skip
def test_a_line_that_is_no_answer_is_quoted(line):
    with pytest.raises(SubjectError, match="no answer: ") as caught:
        read_answer(line)
    assert len(str(caught.value)) < 700
    assert repr(line[:20].decode(errors="backslashreplace"))[1:-1] in str(caught.value)


PERSIST = Operation(1, OperationKind.PERSIST)


@pytest.mark.parametrize(
    ("requests", "answers"),
    [
        ((), (Ready(),)),
        ((), (Report([]),)),
        ((ReportRequest(),), (Report([]), Report([]))),
        ((StartRequest("/d", {}), PERSIST), (Accepted(1),)),
        ((StartRequest("/d", {}), PERSIST), (Ready(), Ready())),
        ((PERSIST,), (Accepted(1), Accepted(1))),
        ((PERSIST,), (Durable((1,)), Durable((1,)))),
        ((PERSIST,), (Durable((1, 1)),)),
        ((PERSIST,), (Accepted(0),)),
    ],
)
def test_an_answer_that_is_not_due_is_refused(requests, answers):
    turns = AnswersDue()
    for request in requests:
        turns.note_request(request)
    for answer in answers[:-1]:
        turns.note_answer(answer)
    for _ in range(2):
        with pytest.raises(OutOfTurnError):
            turns.note_answer(answers[-1])
