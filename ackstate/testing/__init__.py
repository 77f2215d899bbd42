"""Checks that a store keeps the contract of `ackstate.stores.base`: one suite for our stores and for yours.

Call it from a test, with a function that opens the same storage each time::

    def test_my_store_keeps_the_contract(tmp_path):
        check_store(lambda: MyStore(tmp_path / "store"))

It cannot check the behaviour that needs a second process, a full disk or a power cut: `StoreLockedError`,
`StoreFullError`, and whether a sync reached the disk. Test these by hand.

One of our stores is exempt from one promise. `ackstate.stores.pulsar` stores what Pulsar stores, and nothing there
marks the end of an append: a crash may leave a part of the entries of one append. Each entry there is a whole state, so
that any part of them is a valid outcome. Only cursors have ledgers there, and only their records are values.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from ackstate.errors import AckStateError
from ackstate.testing.checks import CHECKS, CHECKS_ACROSS_OPENINGS, check_value_limit

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import Store

__all__ = ["check_store"]
_Subject = TypeVar("_Subject")


def check_store(make_store: Callable[[], Store], *, metadata_value_bytes_max: int | None = None) -> None:
    """Raise `AssertionError` at the first promise of the contract that a store breaks.

    Args:
        make_store: Opens the store; every call opens the same storage, which is empty at the first call. The
            suite closes one store before it opens the next.
        metadata_value_bytes_max: The largest metadata value that the store accepts, in bytes; None skips this check.

    Raises:
        AssertionError: The message names the promise, the expected result and the actual one.
        ValueError: The storage was not empty.

    >>> from ackstate.stores.memory import MemoryDisk, MemoryStore
    >>> disk = MemoryDisk()
    >>> check_store(lambda: MemoryStore(disk))
    """
    with closing(make_store()) as store:
        if store.metadata.children("/"):
            raise ValueError("the suite needs an empty storage")
    for check in CHECKS:
        with closing(make_store()) as store:
            _run(check, store)
    if metadata_value_bytes_max is not None:
        with closing(make_store()) as store:
            try:
                check_value_limit(store, metadata_value_bytes_max)
            except AckStateError as error:
                raise AssertionError(f"{check_value_limit.__doc__} But: {error!r}") from error
    for check_reopened in CHECKS_ACROSS_OPENINGS:
        _run(check_reopened, make_store)


def _run(check: Callable[[_Subject], None], subject: _Subject) -> None:
    """Run one check, and report any unexpected error as a broken promise."""
    try:
        check(subject)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{check.__doc__} But: {error!r}") from error
