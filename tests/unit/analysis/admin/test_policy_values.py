"""The values of delay policies: the same rows for the value, the REST interface and the commands."""

import pytest

from ackstate.limits import DelayedDeliveryPolicies
from command_line import run

TICK, LONGEST, FIXED = "tickTime", "maxDeliveryDelayInMillis", "fixedDeliveryDelayInMillis"
ON = {"active": True}
LEVELS = {"namespaces": "/admin/v2/namespaces/a/b", "topics": "/admin/v2/persistent/a/b/orders"}
NAMES = {"namespaces": "a/b", "topics": "a/b/orders"}
JSON = {"Content-Type": "application/json"}

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


@pytest.fixture(params=LEVELS)
def level(request):
    return request.param


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
