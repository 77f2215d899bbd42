"""Durations as users write them, as text, and as options of commands."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.durations import Duration
from command_line import run

NONE = ("", "s", "1 s", "10x", "1h30m", "-1s", "-0", "--5s", "٣s", "0x10", "nan", "inf", "5_000", "one")
OUT_OF_RANGE = ("9223372036854776s", "300000000y", "9" * 5_000, "1e99", "0.5ms", "0.0001s")


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


def test_options_take_durations_and_the_plain_numbers_of_before(tmp_path, capsys):
    for number, words in enumerate((("--seconds", "50ms"), ("--seconds", "0.05", "--flush-interval-ms", "250"))):
        place = tmp_path / str(number)
        assert run(capsys, "broker", place, *words) == (0, "ready\n", "")
        assert json.loads(run(capsys, "recover", place, "--json").out)["subscriptions"]
