"""Numbers come back from their bytes, whatever they are; bytes that are none are refused."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ackstate.analysis.trace.chunks import pack, unpack

NUMBERS = st.one_of(
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=30),
    st.lists(st.integers(0, 3), max_size=30),
    st.builds(
        lambda first, steps: np.cumsum([first, *steps]).tolist(),
        st.integers(-(2**40), 2**40),
        st.lists(st.integers(0, 300), max_size=30),
    ),
)


@given(NUMBERS, st.binary(max_size=3), st.binary(max_size=3))
def test_numbers_come_back(numbers, before, after):
    data = before + pack(np.array(numbers, np.int64)) + after
    found, end = unpack(memoryview(data), len(numbers), len(before))
    assert (found.tolist(), end) == (numbers, len(data) - len(after))


@pytest.mark.parametrize(("numbers", "size"), [
    ([], 9), ([7], 9), ([7] * 1_000, 9), (range(1_000), 17), (range(2**40, 2**40 + 1_000), 17), ([0, 255] * 4, 9 + 8),
    ([0, 256] * 4, 9 + 2 * 8), ([0, 2**16] * 4, 9 + 4 * 8), ([0, 2**32] * 4, 9 + 8 * 8),
    ([each * 1_000 for each in range(100)] + [100_000], 17), ([-(2**63), 0, 2**63 - 1], 9 + 3 * 8),
])  # fmt: skip
def test_numbers_are_as_narrow_as_the_widest_needs(numbers, size):
    assert len(pack(np.array(numbers, np.int64))) == size


def test_the_bytes_are_those_that_are_written_down():
    assert pack(np.array([5, 4, 260])) == b"\x02" + struct.pack("<q3H", 4, 1, 0, 256)
    assert pack(np.array([1_000, 1_001, 1_257])) == b"\x11" + struct.pack("<qq2B", 1_000, 1, 0, 255)


@given(NUMBERS, st.data())
def test_bytes_that_are_cut_short_are_refused(numbers, data):
    whole = pack(np.array(numbers, np.int64))
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ValueError, match="packed numbers"):
        unpack(memoryview(whole[:cut]), len(numbers))


@given(st.binary(max_size=40), st.integers(0, 20))
def test_any_bytes_are_numbers_or_refused(data, count):
    try:
        found, end = unpack(memoryview(data), count)
    except ValueError as error:
        assert "packed numbers" in str(error)  # noqa: PT017 - both outcomes are fine
    else:
        assert (len(found), end <= len(data)) == (count, True)
