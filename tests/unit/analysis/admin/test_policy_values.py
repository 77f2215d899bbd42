"""The values of delay policies: the same rows for the value, the REST interface and the commands."""

from __future__ import annotations

import json

import pytest

from ackstate.limits import DelayedDeliveryPolicies
from command_line import run
from pulsar_admin import serving

TICK, LONGEST, FIXED = "tickTime", "maxDeliveryDelayInMillis", "fixedDeliveryDelayInMillis"
ON = {"active": True}
LEVELS = {"namespaces": "/admin/v2/namespaces/a/b", "topics": "/admin/v2/persistent/a/b/orders"}
NAMES = {"namespaces": "a/b", "topics": "a/b/orders"}
JSON = {"Content-Type": "application/json"}

# Flags of the command, what it sends, which REST keeps and which is the JSON of the value.
VALUES = [
    ("-e", ON),
    ("--enable", ON),
    ("-d", {"active": False}),
    ("--disable", {"active": False}),
    ("-e -t 90s", ON | {TICK: 90_000}),
    ("-e -t90s", ON | {TICK: 90_000}),
    ("-e -t=90s", ON | {TICK: 90_000}),
    ("-et 90s", ON | {TICK: 90_000}),
    ("-e --time=10m", ON | {TICK: 600_000}),
    ("-e --time 1ms", ON | {TICK: 1}),
    ("-e -md 3d", ON | {LONGEST: 259_200_000}),
    ("-e --maxDelay 0", ON | {LONGEST: 0}),
    (f"-e --maxDelay {2**63 - 1}ms", ON | {LONGEST: 2**63 - 1}),
    ("-e -fd 5h", ON | {FIXED: 18_000_000}),
    ("-e --fixed-delay=0s", ON | {FIXED: 0}),
    ("-t 1s -md 1h -fd 1m -e", ON | {TICK: 1_000, LONGEST: 3_600_000, FIXED: 60_000}),
]
# The flag and its text, the field and its number for the others.
OUT_OF_RANGE = [
    ("--time", "-1s", TICK, -1),
    ("--time", "0s", TICK, 0),
    ("--time", "9e99", TICK, 2**63),
    ("--maxDelay", "-1s", LONGEST, -1),
    ("--maxDelay", "1h30m", LONGEST, 2**63),
    ("--fixed-delay", "-1s", FIXED, -1),
    ("--fixed-delay", "300000000y", FIXED, 10**1000),
]
MALFORMED = [
    *((b'{"tickTime":%s}' % value, "tickTime") for value in (b"1.5", b"true", b'"1"', b"NaN")),
    *((b'{"active":%s}' % value, "active") for value in (b"1", b'"true"')),
    (b'{"fixedDelay":1}', "fixedDelay"),
    (b'{"tick_time":1}', "tick_time"),
    *((body, "body") for body in (b'{"\\ud800":1}', b"[]", b"null", b"5", b"", b"{", b"\xff", b"[" * 60_000)),
    (b'{"tickTime":' + b"9" * 60_000 + b"}", "body"),
]


@pytest.fixture(scope="module")
def server():
    with serving() as broker:
        broker.answers, broker.otherwise = {}, (204, b"", {})
        yield broker


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


@pytest.mark.parametrize(("flags", "body"), VALUES)
def test_what_the_command_sends_rest_keeps_and_the_value_is(server, ask, capsys, level, flags, body):  # noqa: PLR0917
    server.requests.clear()
    words = [level, "set-delayed-delivery", NAMES[level], *flags.split()]
    assert run(capsys, "--admin-url", server.url, *words) == (0, "", "")
    (request,) = server.requests
    path = f"{LEVELS[level]}/delayedDelivery"
    assert (request.method, request.target, json.loads(request.body)) == ("POST", path, body)
    assert ask("POST", path, content=request.body, headers=JSON).status_code == 204
    assert ask("GET", path).json() == body == DelayedDeliveryPolicies.from_json(body).to_json()


@pytest.mark.parametrize(("flag", "text", "field", "number"), OUT_OF_RANGE)
def test_what_is_out_of_range_is_refused_by_name_and_changes_nothing(ask, capsys, level, flag, text, field, number):  # noqa: PLR0917
    words = [level, "set-delayed-delivery", NAMES[level], "-e", flag, text]
    status, out, err = run(capsys, "--admin-url", "http://127.0.0.1:1", *words)
    assert (status, out) == (1, "")
    assert err.startswith(f"Invalid value for '{flag}' / ")
    assert f"got {text!r}" in err
    path = f"{LEVELS[level]}/delayedDelivery"
    answer = ask("POST", path, json=ON | {field: number})
    assert (answer.status_code, f"({field}) must be in " in answer.json()["reason"]) == (412, True)
    assert ask("GET", path).json() is None
    with pytest.raises(ValueError, match=field):
        DelayedDeliveryPolicies.from_json({field: number})


@pytest.mark.parametrize(("body", "naming"), MALFORMED)
def test_a_malformed_body_is_refused_by_the_name_of_the_field(ask, level, body, naming):
    path = f"{LEVELS[level]}/delayedDelivery"
    answer = ask("POST", path, content=body, headers=JSON)
    assert answer.status_code == 400
    assert naming in answer.json()["reason"]
    assert len(answer.json()["reason"]) <= 500
    assert ask("GET", path).json() is None


# A number policy, a body, and what comes of it: 0 if it is kept.
NUMBERS = [
    *(("becomeOldAckRecordSeconds", number, 0) for number in (b"0", b"4096", b"2147483647")),
    *(("maxUnPersistAckRecordsBytes", number, 0) for number in (b"0", b"-5", b"1024", b"4096")),
    *(("becomeOldAckRecordSeconds", number, 412) for number in (b"-1", b"2147483648")),
    *(("maxUnPersistAckRecordsBytes", number, 412) for number in (b"1", b"1023")),
    *(
        (policy, body, status)
        for policy in ("becomeOldAckRecordSeconds", "maxUnPersistAckRecordsBytes")
        for status, bodies in {
            400: (b"1.5", b'"4096"', b"true", b"null", b"", b"{}", b"[1]", b"1 2", b"9" * 5_000),
            412: (b"%d" % (-(2**63) - 1), b"%d" % 2**63, b"%d" % 2**200),
        }.items()
        for body in bodies
    ),
]


@pytest.mark.parametrize(("policy", "body", "status"), NUMBERS)
def test_a_number_is_kept_or_refused_by_name(ask, policy, body, status):
    path = f"{LEVELS['topics']}/{policy}"
    answer = ask("POST", path, content=body, headers=JSON)
    assert answer.status_code == (status or 204), answer.text
    if status:
        assert {400: "body", 412: policy}[status] in answer.json()["reason"]
    assert ask("GET", path).json() == (None if status else int(body))
