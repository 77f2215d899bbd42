"""The memory of an object: by the pages of a process of its own, or by what Python and CRoaring say."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING

from pyroaring import BitMap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Of CRoaring, 64 bits: `roaring_bitmap_t`; and of each container its own structure, pointer, key and type.
_BITMAP_BYTES = 40
_CONTAINER_BYTES = 16 + 8 + 2 + 1
_BITMAP_OBJECT_BYTES = object.__sizeof__(BitMap())
# Types of references from an object to the program around it.
_NOT_OWNED = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)


def growth(build: Callable[[], object]) -> int:
    """Return the growth in bytes of pages by what `build` returns; only once per process: freed memory is reused."""
    before = _resident_bytes()
    built = build()
    grown = _resident_bytes() - before
    assert built is not None  # It lives until here.
    return grown


def owned_bytes(roots: Iterable[object]) -> int:
    """Return the bytes of objects with everything that they own, according to Python and CRoaring, in this process."""
    seen: set[int] = set()
    to_visit = list(roots)
    total = 0
    while to_visit:
        each = to_visit.pop()
        if isinstance(each, _NOT_OWNED) or id(each) in seen:
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
