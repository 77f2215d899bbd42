"""A file store dies or is refused at its n-th call on the directory, and is opened again, for every n."""

import itertools
from contextlib import suppress

import pytest

from ackstate.cursor import FileStore
from ackstate.cursor.store import ABSENT, StoreError
from ackstate.errors import CorruptStateError
from ackstate.stores import file_generation
from fake_directory import (
    LOG,
    DiedError,
    FakeDirectory,
    broken,
    copied,
    full,
    state_in,
    state_of,
)

SCRIPT = [
    lambda store: store.ledgers.create("billing"),
    lambda store: store.metadata.put("/a", b"value", expected_version=ABSENT),
    *[lambda store: store.ledgers.append(1, b"x" * 300)] * 4,
    lambda store: store.ledgers.create("shipping"),
    lambda store: store.ledgers.delete(1),
    lambda store: store.ledgers.append_all([(2, b"y" * 700), (2, b"z")]),
    lambda store: store.ledgers.fence(2),
]


def run_script(files, **faults):
    """Run the script until it ends or dies; return the states that a reopening may show and the calls made."""
    possible = [({}, {})]
    directory = FakeDirectory(files, **faults)
    memory_files = {}
    shadow = FileStore.over(FakeDirectory(memory_files))
    try:
        store = FileStore.over(directory, compaction_size_min=1_000)
        for call in SCRIPT:
            call(shadow)
            possible = [possible[-1], state_of(shadow)]
            call(store)
            possible = possible[-1:]
        store.close()
    except (DiedError, StoreError):
        pass
    return possible, directory.steps


def check_every_call(error):
    """Fail at the first, second, third call, and so on, then open again, failing there too."""
    _, steps = run_script({})
    assert {("rename", "log-0000000000000002"), ("remove", LOG), ("rename", "MADE")} <= set(steps)
    for number in range(len(steps)):
        files = {}
        possible, _ = run_script(files, fails_at=number, error=error)
        for second in itertools.count():
            again = copied(files)
            directory = FakeDirectory(again, fails_at=second, error=error)
            with suppress(DiedError, StoreError):
                FileStore.over(directory).close()
            assert state_in(again) in possible
            assert set(again) == {"MADE", max(again.keys() - {"MADE"})}
            if len(directory.steps) <= second:
                break


@pytest.mark.slow
@pytest.mark.parametrize("error", [DiedError, broken, full])
def test_a_crash_or_failure_at_any_call_loses_nothing_and_leaves_nothing(error):
    check_every_call(error)


def test_the_check_catches_a_log_that_counts_before_it_is_written(monkeypatch):
    monkeypatch.setattr(file_generation, "_NEW", "")
    with pytest.raises((AssertionError, CorruptStateError)):
        check_every_call(DiedError)


def test_the_check_catches_leftovers(monkeypatch):
    monkeypatch.setattr(file_generation, "_remove", lambda *_: None)
    with pytest.raises(AssertionError):
        check_every_call(DiedError)
