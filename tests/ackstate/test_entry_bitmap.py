"""Where runs begin, taken from a bitmap's own bytes: the same as by bitmap operations."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

import ackstate.entry_bitmap
from ackstate.entry_bitmap import firsts

CONTAINER = 2**16


def begins_of(bitmap):
    return bitmap - bitmap.shift(1)


def of_runs(runs):
    bitmap = BitMap()
    for first, end in runs:
        bitmap.add_range(first, end)
    bitmap.run_optimize()
    return bitmap


def container_of_runs(count):
    """Eight full containers, then one of more runs than an array container has values."""
    runs = [(4, [(0, CONTAINER - 1)]) for _ in range(8)] + [(9, [(2 * n, 0) for n in range(count)])]
    bodies = [
        struct.pack("<H", len(pairs)) + b"".join(struct.pack("<HH", *pair) for pair in pairs) for _, pairs in runs
    ]
    header = struct.pack("<HH", 12347, len(runs) - 1) + bytes([0xFF, 1])
    sizes = [sum(further + 1 for _, further in pairs) for _, pairs in runs]
    header += b"".join(struct.pack("<HH", key, size - 1) for key, size in enumerate(sizes))
    begin = len(header) + 4 * len(runs)
    header += b"".join(struct.pack("<I", begin + sum(map(len, bodies[:n]))) for n in range(len(runs)))
    return BitMap.deserialize(header + b"".join(bodies))


# Long runs whose ends meet the borders of containers, so that a bitmap of a few has many entries, all in runs.
ends = st.builds(lambda border, offset: border * CONTAINER + offset, st.integers(0, 12), st.integers(0, 3))
runs = st.lists(st.tuples(ends, ends).map(sorted), min_size=1, max_size=8)


@given(runs.map(of_runs))
def test_runs_begin_where_bitmap_operations_say(bitmap):
    assert firsts(bitmap) == begins_of(bitmap)


SHAPES = {
    "through all containers": of_runs([(5, 9 * CONTAINER)]),
    "each its own": of_runs([(n * CONTAINER, (n + 1) * CONTAINER - 1) for n in range(9)]),
    "gaps between containers": of_runs([(2 * n * CONTAINER, (2 * n + 1) * CONTAINER) for n in range(6)]),
    "runs of 100": of_runs([(n * 101, n * 101 + 100) for n in range(3_000)]),
    "the last entry": of_runs([(2**32 - 6 * CONTAINER, 2**32)]),
    "one container of an array": of_runs([(5, 9 * CONTAINER)]) | BitMap([9 * CONTAINER, 9 * CONTAINER + 2]),
    "one container of bits": of_runs([(5, 9 * CONTAINER)]) | BitMap(range(9 * CONTAINER, 10 * CONTAINER, 2)),
    "one between": of_runs([(5, 4 * CONTAINER), (5 * CONTAINER, 12 * CONTAINER)])
    | BitMap(range(4 * CONTAINER, 5 * CONTAINER, 5))
    | BitMap([5 * CONTAINER - 1]),
    "mostly arrays": of_runs([(5, 9 * CONTAINER)]) | BitMap(range(9 * CONTAINER, 20 * CONTAINER, 2)),
    "too many runs": container_of_runs(5_000),
    "just not too many": container_of_runs(4_096),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape):
    assert len(SHAPES[shape]) >= ackstate.entry_bitmap._MANY
    assert firsts(SHAPES[shape]) == begins_of(SHAPES[shape])


@pytest.mark.parametrize(("shape", "others"), [("runs of 100", 0), ("one between", 1), ("one container of bits", 1)])
def test_runs_are_taken_from_the_bytes(shape, others):
    """Else it is slow, and no other test would say so."""
    runs = ackstate.entry_bitmap._run_containers(SHAPES[shape].serialize())
    assert runs is not None
    assert len(runs.others) == others


@pytest.mark.parametrize("shape", ["through all containers", "each its own", "one between"])
def test_the_comparison_catches_runs_that_are_not_as_they_were(monkeypatch, shape):
    taken = ackstate.entry_bitmap._firsts_of_runs
    monkeypatch.setattr(ackstate.entry_bitmap, "_firsts_of_runs", lambda runs: taken(runs._replace(keys=runs.keys + 1)))
    with pytest.raises(AssertionError):
        test_shapes(shape)


def test_the_comparison_catches_other_containers_that_are_forgotten(monkeypatch):
    found = ackstate.entry_bitmap._run_containers
    monkeypatch.setattr(ackstate.entry_bitmap, "_run_containers", lambda data: found(data)._replace(others=[]))
    with pytest.raises(AssertionError):
        test_shapes("one between")
