"""The promises of a store across a close and the next opening."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from ackstate.stores.base import (
    ABSENT,
    LedgerFencedError,
    LedgerNotFoundError,
    StoreError,
    Versioned,
    VersionMismatchError,
)
from ackstate.testing.expectation import expect, expect_fenced, expect_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import Store


def _check_a_reopen_keeps_all(make_store: Callable[[], Store]) -> None:
    """The changes of a mutating call are there after a reopen."""
    with closing(make_store()) as store:
        one, other, deleted = (store.ledgers.create("keep") for _ in range(3))
        store.ledgers.delete(deleted)
        store.ledgers.append(one, [b"a"])
        store.ledgers.append_many([(one, [b"b"]), (other, [b"c"])])
        first = store.metadata.put("/keep/one", b"old", expected_version=ABSENT)
        second = store.metadata.put("/keep/one", b"new", expected_version=first)
        gone = store.metadata.put("/keep/gone", b"x", expected_version=ABSENT)
        store.metadata.delete("/keep/gone", expected_version=gone)
    with closing(make_store()) as store:
        expect("owned_by after a reopen", store.ledgers.owned_by("keep"), [one, other])
        expect_refusal("last of a ledger deleted before", LedgerNotFoundError, store.ledgers.last, deleted)
        expect("owners after a reopen", "keep" in store.ledgers.owners(), True)
        expect("entries after a reopen", store.ledgers.read(one, 0, 2), [b"a", b"b"])
        expect("entries after a reopen", store.ledgers.read(other, 0, 1), [b"c"])
        expect("last after a reopen", [store.ledgers.last(one), store.ledgers.last(other)], [1, 0])
        for ledger_id in (one, other):
            expect_fenced(store, ledger_id)
        expect("fence of a ledger of an earlier opening", store.ledgers.fence(one), 1)
        expect("a value after a reopen", store.metadata.get("/keep/one"), Versioned(b"new", second))
        expect("a deleted value after a reopen", store.metadata.get("/keep/gone"), None)
        expect("children after a reopen", store.metadata.children("/keep"), ["one"])


def _check_refused_calls_leave_nothing(make_store: Callable[[], Store]) -> None:
    """A refused call leaves no trace, as a reopen shows."""
    with closing(make_store()) as store:
        good, fenced = store.ledgers.create("refused"), store.ledgers.create("refused")
        store.ledgers.fence(fenced)
        expect_refusal("append to a fenced ledger", LedgerFencedError, store.ledgers.append, fenced, [b"x"])
        twice = [(good, [b"x"]), (good, [b"y"])]
        expect_refusal("append_many with a ledger twice", ValueError, store.ledgers.append_many, twice)
        put = partial(store.metadata.put, expected_version=0)
        expect_refusal("put of a missing value", VersionMismatchError, put, "/refused", b"x")
    with closing(make_store()) as store:
        last = [store.ledgers.last(good), store.ledgers.last(fenced)]
        expect("last after a refused append and a reopen", last, [-1, -1])
        expect("no value after a refused put and a reopen", store.metadata.get("/refused"), None)


def _check_fence_survives(make_store: Callable[[], Store]) -> None:
    """A fence holds after a reopen too."""
    with closing(make_store()) as store:
        ledger_id, empty = store.ledgers.create("fence-reopen"), store.ledgers.create("fence-reopen")
        store.ledgers.append(ledger_id, [b"x"])
        store.ledgers.fence(ledger_id)
        store.ledgers.fence(empty)
    with closing(make_store()) as store:
        expect_fenced(store, ledger_id)
        expect_fenced(store, empty)
        expect("fence after a reopen returns the last id", store.ledgers.fence(ledger_id), 0)


def _check_ledger_ids_never_return(make_store: Callable[[], Store]) -> None:
    """The id of a ledger is never used again, even if it was deleted and the store reopened."""
    highest = -1
    for _ in range(3):
        with closing(make_store()) as store:
            ids = [store.ledgers.create("ids"), store.ledgers.create("ids")]
            expect(f"ids {ids} are above every earlier one, {highest}", min(ids) > highest, True)
            highest = max(ids)
            store.ledgers.delete(highest)
            after_delete = store.ledgers.create("ids")
            expect(f"id {after_delete} is above a deleted one, {highest}", after_delete > highest, True)
            highest = after_delete
            for ledger_id in store.ledgers.owned_by("ids"):
                store.ledgers.delete(ledger_id)


def _check_versions_never_return(make_store: Callable[[], Store]) -> None:
    """A path's versions never repeat, even if its value was deleted and the store reopened."""
    stale: list[int] = []
    for _ in range(3):
        with closing(make_store()) as store:
            for _ in range(2):
                version = store.metadata.put("/aba", b"made", expected_version=ABSENT)
                for old in stale:
                    promise = f"put expecting version {old} of a deleted value, now {version}"
                    put = partial(store.metadata.put, expected_version=old)
                    expect_refusal(promise, VersionMismatchError, put, "/aba", b"lost")
                    delete = partial(store.metadata.delete, expected_version=old)
                    expect_refusal(f"delete instead of {promise}", VersionMismatchError, delete, "/aba")
                stale += [version, store.metadata.put("/aba", b"changed", expected_version=version)]
                store.metadata.delete("/aba", expected_version=stale[-1])


def _check_close(make_store: Callable[[], Store]) -> None:
    """A closed store refuses every call; closing it twice does nothing."""
    store = make_store()
    ledgers, metadata = store.ledgers, store.metadata
    ledger_id = ledgers.create("close")
    version = metadata.put("/close", b"x", expected_version=ABSENT)
    store.close()
    store.close()
    calls: dict[str, Callable[[], object]] = {
        "create": partial(ledgers.create, "close"),
        "append": partial(ledgers.append, ledger_id, [b"x"]),
        "append of nothing": partial(ledgers.append, ledger_id, []),
        "append_many": partial(ledgers.append_many, [(ledger_id, [b"x"])]),
        "append_many of nothing": partial(ledgers.append_many, []),
        "read": partial(ledgers.read, ledger_id, 0, 0),
        "last": partial(ledgers.last, ledger_id),
        "delete of a ledger": partial(ledgers.delete, ledger_id),
        "fence": partial(ledgers.fence, ledger_id),
        "owned_by": partial(ledgers.owned_by, "close"),
        "owners": ledgers.owners,
        "get": partial(metadata.get, "/close"),
        "put": partial(metadata.put, "/close", b"y", expected_version=version),
        "delete of a value": partial(metadata.delete, "/close", expected_version=version),
        "children": partial(metadata.children, "/"),
    }
    for name, call in calls.items():
        expect_refusal(f"{name} after close", StoreError, call)
    with closing(make_store()) as reopened:
        expect("a ledger after calls to a closed store", reopened.ledgers.last(ledger_id), -1)
        expect("a value after calls to a closed store", reopened.metadata.get("/close"), Versioned(b"x", version))


CHECKS_ACROSS_OPENINGS = (
    _check_a_reopen_keeps_all,
    _check_refused_calls_leave_nothing,
    _check_fence_survives,
    _check_ledger_ids_never_return,
    _check_versions_never_return,
    _check_close,
)
"""Each receives a function that opens the store."""
