"""Kinds of damage to a file of a store: one at a time, named so that they can be repeated by hand."""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

_CUTS_MIN = 30


class Reach(IntEnum):
    """The number of synced units at the end of a log that damage may make look unwritten, undetectably."""

    NONE = 0
    LAST = 1
    """It may be in the last unit, which then looks as if a crash had left it."""
    LAST_TWO = 2
    """It may hide the start of the last unit, so that two units look like one."""
    LAST_THREE = 3
    """It may also hide the start of the unit before, which spans two sectors, of which a crash may leave one."""
    ANY = 1_000_000
    """It cut the log."""


class Damage(NamedTuple):
    """A damaged copy of a store."""

    text: str  # A description of the damage and the file
    files: dict[str, bytes]  # All files of the copy, by name
    reach: Reach  # The units that may be lost undetected
    is_flip: bool = False  # Whether it is a single bit


class LogFile(NamedTuple):
    """A file of a store, and its units."""

    name: str  # Its name
    borders: Sequence[int]  # The starts of its units, and the end of the last one, in bytes
    cut_size_min: int | None  # A cut that leaves at least this many bytes may be undetectable; None if none may
    hides_last: bool  # Whether a changed byte in its last unit may look as if a crash had left it
    straddles: bool = False  # Whether the field with a unit's end may span two sectors

    @property
    def reach_of_change(self):
        return Reach.LAST if self.hides_last else Reach.NONE

    @property
    def reach_of_loss(self):
        if not self.hides_last:
            return Reach.NONE
        return Reach.LAST_THREE if self.straddles else Reach.LAST_TWO


def damages(files, log, foreign, chance, *, flips):
    """Yield copies of a store with one file damaged in one way: all ways if they are few, else a sample."""
    content = files[log.name]
    bits = range(8 * len(content))
    bits = bits if len(bits) <= flips else sorted(chance.sample(bits, flips))
    yield from flipped(files, log.name, bits, log.reach_of_change)
    for text, data, reach in (
        *_cuts(content, log, chance, max(_CUTS_MIN, flips // 10)),
        *_appended(content, chance),
        *_moved_units(content, log.borders, chance, log.reach_of_loss),
        *_foreign_units(content, foreign, log.borders, chance, log.reach_of_loss),
    ):
        if data != content:
            yield Damage(f"{log.name}: {text}", {**files, log.name: data}, reach)
    # In a directory without any file, no store was ever created.
    rest = {name: data for name, data in files.items() if name != log.name}
    yield Damage(f"{log.name}: missing", rest, Reach.ANY if not rest or log.cut_size_min == 0 else Reach.NONE)


def flipped(files, name, bits, reach):
    """Yield copies of a store with one bit of a file flipped; bits count from 0, the lowest bit of each byte first."""
    for bit in bits:
        data = bytearray(files[name])
        data[bit // 8] ^= 1 << bit % 8
        text = f"{name}: bit {bit % 8} of byte {bit // 8} flipped"
        yield Damage(text, {**files, name: bytes(data)}, reach, is_flip=True)


_Changed = tuple[str, bytes, Reach]


def _cuts(content, log, chance, count):
    sizes = {*range(min(8, len(content))), *log.borders, *(border - 1 for border in log.borders)}
    sizes.update(chance.sample(range(len(content)), min(count, len(content))))
    possible = sorted(size for size in sizes if 0 <= size < len(content))
    # An empty file is the most common damage.
    for size in sorted({0, *chance.sample(possible, min(count, len(possible)))}):
        is_unseen = log.cut_size_min is not None and size >= log.cut_size_min
        yield f"cut to {size} bytes", content[:size], Reach.ANY if is_unseen else Reach.NONE


def _appended(content, chance):
    for text, more in (
        ("a zero", b"\0"),
        ("4096 zeros", bytes(4096)),
        ("noise", chance.randbytes(700)),
        ("itself", content),
        ("its end", content[-200:]),
    ):
        yield f"{text} appended", content + more, Reach.NONE


def _moved_units(content, borders, chance, reach):
    units = _units(content, borders)
    if len(units) < 2:
        return
    for _ in range(12):
        low, high = sorted(chance.sample(range(len(units)), 2))
        swapped = list(units)
        swapped[low], swapped[high] = swapped[high], swapped[low]
        copied = [*units[:high], units[low], *units[high + 1 :]]
        dropped = [*units[:low], *units[low + 1 :]]
        doubled = [*units[:low], units[low], *units[low:]]
        wiped = [*units[:low], bytes(len(units[low])), *units[low + 1 :]]
        for text, parts in (
            (f"units {low} and {high} swapped", swapped),
            (f"unit {low} written over unit {high}", copied),
            (f"unit {low} removed", dropped),
            (f"unit {low} doubled", doubled),
            (f"unit {low} wiped with zeros", wiped),
        ):
            yield text, content[: borders[0]] + b"".join(parts) + content[borders[-1] :], reach


def _foreign_units(content, foreign, borders, chance, reach):
    units = _units(content, borders)
    for index in sorted(chance.sample(range(len(units)), min(8, len(units)))):
        begin, end = borders[index], borders[index + 1]
        if len(foreign) >= end:
            yield f"unit {index} of another store", content[:begin] + foreign[begin:end] + content[end:], reach


def _units(content, borders):
    return [content[begin:end] for begin, end in pairwise(borders)]
