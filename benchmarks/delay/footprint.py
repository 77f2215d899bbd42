"""The memory of an object, measured in a separate process in two ways.

*Resident* is the growth of the process in bytes of pages. *Traced* is the memory from Python (`tracemalloc`) and that
of its bitmaps, which are allocated outside Python: the bytes of each container by `BitMap.get_statistics`, and the
structures of CRoaring around them. Resident includes the waste of the C library, traced does not.
"""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import tracemalloc
from enum import Enum
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

from pyroaring import BitMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

# Of CRoaring, 64 bits: `roaring_bitmap_t`; and of each container its own structure, pointer, key and type.
_BITMAP_BYTES = 40
_CONTAINER_BYTES = 16 + 8 + 2 + 1
_BITMAP_OBJECT_BYTES = object.__sizeof__(BitMap())
# Types of references from an object to the program around it.
_NOT_OWNED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


class Ruler(Enum):
    """The kind of measurement."""

    RESIDENT = "resident"
    TRACED = "traced"


def growth(build: Callable[[], object], ruler: Ruler) -> int:
    """Return the bytes of the object that `build` returns; only once per process, because freed memory is reused."""
    if ruler is Ruler.RESIDENT:
        before = _resident_bytes()
        built = build()
        grown = _resident_bytes() - before
        assert built is not None  # It lives until here.
        return grown
    gc.collect()
    tracemalloc.start()
    built = build()
    gc.collect()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return grown + sum(map(bitmap_bytes, bitmaps_of(built)))


def owned_bytes(roots: Iterable[object], *, outside: tuple[type, ...] = ()) -> int:
    """Return the bytes of objects with everything that they own, according to Python and CRoaring, in this process.

    Args:
        roots: The things.
        outside: Types of objects that they reference and do not own.
    """
    seen: set[int] = set()
    to_visit = list(roots)
    total = 0
    while to_visit:
        each = to_visit.pop()
        if isinstance(each, (*_NOT_OWNED, *outside)) or id(each) in seen:
            continue
        seen.add(id(each))
        total += _BITMAP_OBJECT_BYTES + bitmap_bytes(each) if isinstance(each, BitMap) else sys.getsizeof(each)
        to_visit += gc.get_referents(each)
    return total


def bitmap_bytes(bitmap: BitMap) -> int:
    """Return the bytes of a bitmap outside of Python's memory."""
    sizes = bitmap.get_statistics()
    contents = sum(sizes[f"n_bytes_{kind}_containers"] for kind in ("array", "run", "bitset"))
    return _BITMAP_BYTES + _CONTAINER_BYTES * sizes["n_containers"] + contents


def bitmaps_of(root: object) -> Iterator[BitMap]:
    """Yield the bitmaps that a thing owns, each of which is owned once."""
    seen = {id(root)}
    to_visit = [root]
    while to_visit:
        for each in gc.get_referents(to_visit.pop()):
            if isinstance(each, BitMap):
                yield each
            elif _may_own(each) and id(each) not in seen:
                seen.add(id(each))
                to_visit.append(each)


def _may_own(thing: object) -> bool:
    # A dict of bitmaps is not tracked, since a bitmap refers to nothing.
    return (gc.is_tracked(thing) or isinstance(thing, dict)) and not isinstance(thing, _NOT_OWNED)


def in_new_process(module: str, *arguments: object) -> list[float]:
    """Run a module with arguments, and return the numbers that it prints."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [float(number) for number in finished.stdout.split()]


def _resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
