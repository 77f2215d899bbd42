"""Packs whole numbers into bytes, as narrow as the widest number requires: fast to move, to compress and to unpack.

==========  =====================  ==================================================================================
size        type                   meaning
==========  =====================  ==================================================================================
1           u8                     width of the numbers: 0, 1, 2, 4 or 8; plus 16 if it has steps
8           i64                    only with steps: the first number
8           i64                    the least of all numbers, or of all steps
width each  unsigned               each number, or each step from one number to the next, minus the least
==========  =====================  ==================================================================================

All is little-endian, and sums are taken modulo 2^64. The count of numbers is stored elsewhere; with steps there is
one number more than there are steps.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

_STEPS = 16
_WIDTHS = (0, 1, 2, 4, 8)
_NUMBER = struct.Struct("<q")


def pack(numbers: Int64s, *, has_steps: bool | None = None) -> bytes:
    """Return numbers as bytes.

    Complexity: O(numbers).
    """
    numbers = numbers.astype(np.int64, copy=False)
    if len(numbers) < 2:
        return _packed(0, numbers)
    steps = np.diff(numbers)
    if has_steps or (has_steps is None and _width(steps) < _width(numbers)):
        return _packed(_STEPS, steps, _NUMBER.pack(int(numbers[0])))
    return _packed(0, numbers)


def unpack(data: memoryview, count: int, at: int = 0, out: Int64s | None = None) -> tuple[Int64s, int]:
    """Return `count` numbers that start at a byte, and the byte after them.

    Args:
        data: Bytes with the numbers.
        count: Number of numbers.
        at: First byte of the numbers.
        out: Destination, of this length; None for a new array.

    Raises:
        ValueError: The bytes do not hold such numbers.
    """
    if at >= len(data):
        raise ValueError("no packed numbers")
    form = data[at]
    has_steps, width = bool(form & _STEPS), form & ~_STEPS
    if width not in _WIDTHS:
        raise ValueError(f"the form of packed numbers must be known, got {form}")
    begin = at + 1 + _NUMBER.size * (1 + has_steps)
    left = max(count - has_steps, 0)
    end = begin + width * left
    if end > len(data):
        raise ValueError(f"packed numbers are cut short, {len(data) - at} bytes of {end - at}")
    (least,) = _NUMBER.unpack_from(data, begin - _NUMBER.size)
    numbers = np.empty(count, np.int64) if out is None else out
    above = numbers[int(has_steps) :]
    above[:] = np.frombuffer(data, f"<u{width}", left, begin) if width else 0
    above += least
    if has_steps:
        numbers[:1] = _NUMBER.unpack_from(data, at + 1)
        np.cumsum(numbers, out=numbers)
    return numbers, end


def _packed(form: int, numbers: Int64s, first: bytes = b"") -> bytes:
    width = _width(numbers)
    least = int(numbers.min()) if len(numbers) else 0
    above = (numbers - least).view(np.uint64).astype(f"<u{width}").tobytes() if width else b""
    return b"".join((bytes((form + width,)), first, _NUMBER.pack(least), above))


def _width(numbers: Int64s) -> int:
    """Return the bytes needed for the distance from the least to the highest number."""
    span = int(numbers.max()) - int(numbers.min()) if len(numbers) else 0
    return next(width for width in _WIDTHS if span < 1 << 8 * width)
