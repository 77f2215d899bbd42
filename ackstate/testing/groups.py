"""The promises of `GroupStore.write_all`, which also hold for a store whose writes are executed one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.stores.base import (
    ABSENT,
    LedgerFencedError,
    LedgerNotFoundError,
    Versioned,
    VersionMismatchError,
)
from ackstate.stores.writes import (
    AppendEntry,
    CreateLedger,
    DeleteLedger,
    DeleteValue,
    FenceLedger,
    PutValue,
    write_all,
)
from ackstate.testing.expectation import expect, expect_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import Store
    from ackstate.stores.writes import Write


def _check_write_all(store: Store) -> None:
    """`write_all` executes each write as its own call would, and returns the results in order."""
    ledgers, metadata = store.ledgers, store.metadata
    open_id, fenced, deleted = (ledgers.create("group") for _ in range(3))
    ledgers.append_all([(open_id, b"zero"), (fenced, b"zero"), (deleted, b"zero")])
    version = metadata.put("/group/old", b"old", expected_version=ABSENT)
    gone = metadata.put("/group/gone", b"gone", expected_version=ABSENT)
    created, entry_id, last, nothing, replaced, removed, new = write_all(
        store,
        [
            CreateLedger("group/new"),
            AppendEntry(open_id, b"one"),
            FenceLedger(fenced),
            DeleteLedger(deleted),
            PutValue("/group/old", b"new", version),
            DeleteValue("/group/gone", gone),
            PutValue("/group/new", b"", ABSENT),
        ],
    )
    expect("write_all, which creates a ledger", ledgers.owned_by("group/new"), [created])
    expect("write_all, which appends, fences and deletes", [entry_id, last, nothing, removed], [1, 0, 0, 0])
    expect("write_all, which appends an entry", ledgers.read(open_id, 0, 2), [b"zero", b"one"])
    expect("write_all, which deletes a ledger", ledgers.owned_by("group"), [open_id, fenced])
    expect_refusal("append after write_all, which fences", LedgerFencedError, ledgers.append, fenced, b"late")
    expect("write_all, which replaces a value", metadata.get("/group/old"), Versioned(b"new", _version(replaced)))
    expect("write_all, which creates a value", metadata.get("/group/new"), Versioned(b"", _version(new)))
    expect("write_all, which deletes a value", metadata.get("/group/gone"), None)
    expect("write_all of nothing", write_all(store, []), [])


def _check_many(store: Store) -> None:
    """`write_all` takes any number of writes."""
    created = write_all(store, [CreateLedger(f"many/{number % 7}") for number in range(120)])
    ids = [_version(each) for each in created]
    expect("write_all, which creates 120 ledgers, returns different ids", len(set(ids)), 120)
    found = sorted(each for number in range(7) for each in store.ledgers.owned_by(f"many/{number}"))
    expect("write_all, which creates 120 ledgers", found, sorted(ids))
    expect("write_all of 120 appends", write_all(store, [AppendEntry(each, b"%d" % each) for each in ids]), [0] * 120)
    found_entries = [store.ledgers.read(each, 0, 1) for each in ids]
    expect("write_all of 120 appends", found_entries, [[b"%d" % each] for each in ids])
    versions = write_all(store, [PutValue(f"/many/{each}/value", b"%d" % each, ABSENT) for each in ids])
    values = [store.metadata.get(f"/many/{each}/value") for each in ids]
    wanted = [Versioned(b"%d" % each, _version(version)) for each, version in zip(ids, versions, strict=True)]
    expect("write_all of 120 values", values, wanted)


def _check_refused_writes(store: Store) -> None:
    """A write that `write_all` refuses has its own error as its outcome, and the others are executed."""
    ledgers = store.ledgers
    open_id, fenced = ledgers.create("refused"), ledgers.create("refused")
    ledgers.fence(fenced)
    version = store.metadata.put("/refused/here", b"before", expected_version=ABSENT)
    missing = open_id + 1_000
    refused: list[tuple[type[Exception], Write]] = [
        (LedgerFencedError, AppendEntry(fenced, b"x")),
        (LedgerNotFoundError, AppendEntry(missing, b"x")),
        (LedgerNotFoundError, FenceLedger(missing + 1)),
        (VersionMismatchError, PutValue("/refused/here", b"x", ABSENT)),
        (VersionMismatchError, PutValue("/refused/absent", b"x", version)),
        (VersionMismatchError, DeleteValue("/refused/gone", version)),
    ]
    good: list[Write] = [AppendEntry(open_id, b"good"), PutValue("/refused/good", b"good", ABSENT)]
    outcomes = write_all(store, [good[0], *(write for _, write in refused), good[1]])
    expect("write_all with refused writes", [type(each) for each in outcomes[1:-1]], [each for each, _ in refused])
    expect("write_all with refused writes has different errors", len({id(each) for each in outcomes[1:-1]}), 6)
    expect("write_all, which appends beside refused writes", ledgers.read(open_id, 0, 1), [b"good"])
    expect("last of a fenced ledger after write_all", ledgers.last(fenced), -1)
    values = {path: store.metadata.get(f"/refused/{path}") for path in ("good", "here", "absent")}
    wanted = {"good": Versioned(b"good", _version(outcomes[-1])), "here": Versioned(b"before", version), "absent": None}
    expect("values after write_all with refused writes", values, wanted)


def _check_invalid_writes(store: Store) -> None:
    """`write_all` with an invalid argument writes nothing."""
    ledger_id = store.ledgers.create("invalid")
    invalid_writes: tuple[Write, ...] = (
        CreateLedger("\ud800"), PutValue("no-slash", b"", ABSENT), DeleteValue("/a/", 0),
    )  # fmt: skip
    for invalid in invalid_writes:
        writes: list[Write] = [AppendEntry(ledger_id, b"x"), invalid, PutValue("/invalid", b"x", ABSENT)]
        expect_refusal("write_all with an invalid argument", ValueError, write_all, store, writes)
    expect("last after invalid writes", store.ledgers.last(ledger_id), -1)
    expect("a value after invalid writes", store.metadata.get("/invalid"), None)


def check_writes_survive(make_store: Callable[[], Store]) -> None:
    """Writes of `write_all` are there after a reopen."""
    store = make_store()
    kept, fenced = store.ledgers.create("survives"), store.ledgers.create("survives")
    version = store.metadata.put("/survives/value", b"before", expected_version=ABSENT)
    writes: list[Write] = [
        AppendEntry(kept, b"kept"),
        FenceLedger(fenced),
        CreateLedger("survives"),
        PutValue("/survives/value", b"x", version),
    ]
    outcomes = write_all(store, writes)
    store.close()
    store = make_store()
    try:
        expect("owned_by after a reopen", store.ledgers.owned_by("survives"), [kept, fenced, outcomes[2]])
        expect("an entry of write_all after a reopen", store.ledgers.read(kept, 0, 1), [b"kept"])
        expect_refusal("append after a reopen", LedgerFencedError, store.ledgers.append, fenced, b"late")
        value = store.metadata.get("/survives/value")
        expect("a value of write_all after a reopen", value, Versioned(b"x", _version(outcomes[3])))
    finally:
        store.close()


def _version(outcome: object) -> int:
    if not isinstance(outcome, int):
        raise AssertionError(f"write_all: expected a number, got {outcome!r}")
    return outcome


CHECKS_OF_GROUPS = (_check_write_all, _check_many, _check_refused_writes, _check_invalid_writes)
