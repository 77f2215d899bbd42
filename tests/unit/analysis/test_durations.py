"""Durations as users write them, as text, and as options of commands."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.durations import Duration
from command_line import assert_one_line, run

TEXTS = {
    "500ms": 500, "5s": 5_000, "1m": 60_000, "1h": 3_600_000, "3d": 259_200_000, "2w": 1_209_600_000,
    "1y": 31_536_000_000, "7": 7_000, "0": 0, "1S": 1_000, " 1H ": 3_600_000, "+5s": 5_000, "1.5m": 90_000,
    ".5s": 500, "1e3ms": 1_000, "9223372036854775s": 9_223_372_036_854_775_000, "9223372036854775807ms": 2**63 - 1,
}  # fmt: skip
NONE = ("", "s", "1 s", "10x", "1h30m", "-1s", "-0", "--5s", "٣s", "0x10", "nan", "inf", "5_000", "one")
OUT_OF_RANGE = ("9223372036854776s", "300000000y", "9" * 5_000, "1e99", "0.5ms", "0.0001s")


def test_the_texts_of_durations():
    assert {text: Duration.parse(text, plain_unit="s").ms for text in TEXTS} == TEXTS


def test_a_number_without_a_unit_needs_one_unless_the_option_has_one():
    assert Duration.parse("90", plain_unit="ms") == Duration(90)
    with pytest.raises(ValueError, match="must be a duration such as 500ms, 5s, 1m or 1h, got '90'"):
        Duration.parse("90")


def test_texts_that_are_no_durations():
    for text in NONE:
        with pytest.raises(ValueError, match="must be a duration such as") as caught:
            Duration.parse(text, plain_unit="s")
        assert str(caught.value).endswith(f"got {text!r}")
    for text in OUT_OF_RANGE:
        with pytest.raises(ValueError, match="must be a whole number of milliseconds up to 9223372036854775807"):
            Duration.parse(text, plain_unit="s")


@given(st.integers(0, 2**63 - 1))
def test_the_text_of_a_duration_is_read_as_that_duration(duration_ms):
    assert Duration.parse(str(Duration(duration_ms))) == Duration(duration_ms)


def test_the_text_of_a_duration_is_as_short_as_can_be():
    texts = {0: "0s", 400: "400ms", 6_000: "6s", 90_000: "90s", 60_000: "1m", 3_600_000: "1h", 86_400_000: "1d"}
    assert {number: str(Duration(number)) for number in texts} == texts


REFUSED = {
    ("demo", "--seconds", "2h"): "must be from 1s to 1h, got '2h'",
    ("demo", "--seconds", "0.5"): "must be from 1s to 1h, got '0.5'",
    ("demo", "--flush-interval-ms", "soon"): "must be a duration such as 500ms, 5s, 1m or 1h, got 'soon'",
    ("crash", "--budget", "0s"): "must be at least 1ms, got '0s'",
    ("crash", "--budget", "5"): "must be a duration such as 500ms, 5s, 1m or 1h, got '5'",
    ("pulsar", "snapshot", "--request-timeout", "500ms"): "must be from 1s to 1h, got '500ms'",
    ("pulsar", "snapshot", "--request-timeout", "0"): "must be from 1s to 1h, got '0'",
    ("trace", "generate", "new", "--flush-interval-ms", "x"): "must be a duration such as",
}


def test_a_refused_duration_names_the_option_and_the_rule(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for words, rule in REFUSED.items():
        assert_one_line(run(capsys, *words), f"Invalid value for '{words[-2]}': {rule}")
    assert not list(tmp_path.iterdir())


def test_options_take_durations_and_the_plain_numbers_of_before(tmp_path, capsys):
    for number, words in enumerate((("--seconds", "50ms"), ("--seconds", "0.05", "--flush-interval-ms", "250"))):
        place = tmp_path / str(number)
        assert run(capsys, "broker", place, *words) == (0, "ready\n", "")
        assert json.loads(run(capsys, "recover", place, "--json").out)["subscriptions"]
