"""What can be wrong with a file of a store: one thing at a time, named so that it can be done again by hand."""

from __future__ import annotations

from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from random import Random

_CUTS_MIN = 30


class Reach(IntEnum):
    """How many synced units at the end of a log a damage may pass off as never written: no log can tell."""

    NONE = 0
    LAST = 1
    """It may lie in the last unit, which then looks as a crash would have left it."""
    LAST_TWO = 2
    """It may hide where the last unit began, so that two look like one."""
    LAST_THREE = 3
    """And that of the one before, because it lies in two sectors, of which a crash may leave one."""
    ANY = 1_000_000
    """It cut the log."""


class Damage(NamedTuple):
    """A damaged copy of a store.

    Attributes:
        text: What was done to which file.
        files: All files of the copy, by name.
        reach: What it may take with it unseen.
        is_flip: Whether it is one bit, and no more.
    """

    text: str
    files: dict[str, bytes]
    reach: Reach
    is_flip: bool = False


class LogFile(NamedTuple):
    """A file of a store, and what its units are.

    Attributes:
        name: Its name.
        borders: Where its units begin, and where the last one ends, in bytes.
        cut_size_min: A cut that leaves at least so many bytes may be unseen; None if none may.
        hides_last: Whether a changed byte in its last unit may look as a crash would have left it.
        straddles: Whether what says where a unit ends may lie in two sectors.
        is_laid_out: Whether what is behind its last unit are zeros for units to come.
    """

    name: str
    borders: Sequence[int]
    cut_size_min: int | None
    hides_last: bool
    straddles: bool = False
    is_laid_out: bool = False

    @property
    def reach_of_change(self) -> Reach:
        """What a changed byte in it may take with it unseen."""
        return Reach.LAST if self.hides_last else Reach.NONE

    @property
    def reach_of_loss(self) -> Reach:
        """What a unit of it that is gone may take with it unseen."""
        if not self.hides_last:
            return Reach.NONE
        return Reach.LAST_THREE if self.straddles else Reach.LAST_TWO

    def bits_of(self, content: bytes) -> range:
        """Return which bits of it, counted from 0, say something."""
        return range(8 * (self.borders[-1] if self.is_laid_out else len(content)))


def damages(
    files: Mapping[str, bytes], log: LogFile, foreign: bytes, chance: Random, *, flips: int
) -> Iterator[Damage]:
    """Yield copies of a store in which one file is damaged in one way: all ways where these are few, else a sample.

    Args:
        files: The store.
        log: Which file, and its units.
        foreign: The same file of another, also valid store.
        chance: Chooses the sample.
        flips: How many bits are flipped at most.
    """
    content = files[log.name]
    bits: Sequence[int] = log.bits_of(content)
    bits = bits if len(bits) <= flips else sorted(chance.sample(bits, flips))
    yield from flipped(files, log.name, bits, log.reach_of_change)
    for text, data, reach in (
        *_cuts(content, log, chance, max(_CUTS_MIN, flips // 10)),
        *_appended(content, chance),
        *_changes_behind(content, log, chance),
        *_moved_units(content, log.borders, chance, log.reach_of_loss),
        *_foreign_units(content, foreign, log.borders, chance, log.reach_of_loss),
    ):
        if data != content:
            yield Damage(f"{log.name}: {text}", {**files, log.name: data}, reach)
    # A directory without any file is one in which no store was ever made.
    rest = {name: data for name, data in files.items() if name != log.name}
    yield Damage(f"{log.name}: missing", rest, Reach.ANY if not rest or log.cut_size_min == 0 else Reach.NONE)


def flipped(files: Mapping[str, bytes], name: str, bits: Iterable[int], reach: Reach) -> Iterator[Damage]:
    """Yield copies of a store with one bit of a file flipped; bits are counted from 0, of each byte the lowest first.

    Raises:
        IndexError: The file has no such bit.
    """
    for bit in bits:
        data = bytearray(files[name])
        data[bit // 8] ^= 1 << bit % 8
        text = f"{name}: bit {bit % 8} of byte {bit // 8} flipped"
        yield Damage(text, {**files, name: bytes(data)}, reach, is_flip=True)


_Changed = tuple[str, bytes, Reach]


def _cuts(content: bytes, log: LogFile, chance: Random, count: int) -> Iterator[_Changed]:
    sizes = {*range(min(8, len(content))), *log.borders, *(border - 1 for border in log.borders)}
    sizes.update(chance.sample(range(len(content)), min(count, len(content))))
    possible = sorted(size for size in sizes if 0 <= size < len(content))
    # Empty is what a file is most often found to be.
    for size in sorted({0, *chance.sample(possible, min(count, len(possible)))}):
        is_unseen = log.cut_size_min is not None and size >= log.cut_size_min
        yield f"cut to {size} bytes", content[:size], Reach.ANY if is_unseen else Reach.NONE


def _appended(content: bytes, chance: Random) -> Iterator[_Changed]:
    for text, more in (
        ("a zero", b"\0"),
        ("4096 zeros", bytes(4096)),
        ("noise", chance.randbytes(700)),
        ("itself", content),
        ("its end", content[-200:]),
    ):
        yield f"{text} appended", content + more, Reach.NONE


def _changes_behind(content: bytes, log: LogFile, chance: Random) -> Iterator[_Changed]:
    """Change what is laid out behind the last unit, and let zeros take the place of that, as if it had yet to come."""
    if not log.is_laid_out:
        return
    begin, end = log.borders[-2:]
    for at in (end, *chance.sample(range(end, len(content)), min(20, len(content) - end))):
        changed = bytes([1 << chance.randrange(8)])
        yield f"byte {at} of what is laid out changed", content[:at] + changed + content[at + 1 :], Reach.NONE
    # No log can tell it from one that was not yet written to.
    yield "its last unit wiped with zeros", content[:begin] + bytes(len(content) - begin), Reach.LAST


def _moved_units(content: bytes, borders: Sequence[int], chance: Random, reach: Reach) -> Iterator[_Changed]:
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
            (f"unit {low} left out", dropped),
            (f"unit {low} doubled", doubled),
            (f"unit {low} wiped with zeros", wiped),
        ):
            yield text, content[: borders[0]] + b"".join(parts) + content[borders[-1] :], reach


def _foreign_units(
    content: bytes, foreign: bytes, borders: Sequence[int], chance: Random, reach: Reach
) -> Iterator[_Changed]:
    units = _units(content, borders)
    for index in sorted(chance.sample(range(len(units)), min(8, len(units)))):
        begin, end = borders[index], borders[index + 1]
        # Where the other store laid out zeros it has no unit.
        if len(foreign) >= end and any(foreign[begin:end]):
            yield f"unit {index} of another store", content[:begin] + foreign[begin:end] + content[end:], reach


def _units(content: bytes, borders: Sequence[int]) -> list[bytes]:
    return [content[begin:end] for begin, end in pairwise(borders)]
