import pytest

from ackstate import Position


@pytest.mark.parametrize("text", ["3:7", "0:-1", "9223372036854775807:4294967295"])
def test_text_goes_there_and_back(text):
    assert str(Position.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "3", "3:", ":7", "3:-2", "-1:0", "3:7:1", " 3:7", "3:7\n", "٣:7", "9223372036854775808:0", "3:4294967296"],
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError):
        Position.parse(text)


def test_order_is_by_ledger_then_entry():
    assert Position(3, 9) < Position(4, -1) < Position(4, 0)
