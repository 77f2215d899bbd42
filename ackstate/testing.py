"""Checks that a store keeps the contract of `ackstate.stores.base`: one suite for our stores and for yours.

Call it from a test, with a function that opens the same storage each time::

    def test_my_store_keeps_the_contract(tmp_path):
        check_store(lambda: MyStore(tmp_path / "store"))

It cannot check the behaviour that needs a second process, a full disk or a power cut: `StoreLockedError`,
`StoreFullError`, and whether a sync reached the disk. Test these by hand.

One of our stores is exempt from one promise. `ackstate.stores.pulsar` stores what Pulsar stores, and nothing there
marks the end of an append: a crash may leave a part of the entries of one append. Each entry there is a whole state, so
that any part of them is a valid outcome. Only cursors have ledgers there, and only their records are values.

Each check of `CHECKS` takes an open store, each of `CHECKS_ACROSS_OPENINGS` a function that opens one; its docstring is
the promise that its failure names.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, cast

from ackstate.errors import AckStateError
from ackstate.stores.base import (
    ABSENT,
    LedgerFencedError,
    LedgerNotFoundError,
    PayloadTooLargeError,
    StoreError,
    Versioned,
    VersionMismatchError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import Store

__all__ = ["check_store"]

_Subject = TypeVar("_Subject")
_Args = TypeVarTuple("_Args")
_MIB = 1 << 20


def expect(promise: str, found: object, wanted: object) -> None:
    """Raise `AssertionError` unless two values are equal."""
    # No assert statement: the suite must work under -O too.
    if found != wanted:
        raise AssertionError(f"{promise}: expected {_short(wanted)}, got {_short(found)}")


def expect_refusal(promise: str, error: type[Exception], call: Callable[[*_Args], object], *args: *_Args) -> None:
    """Raise `AssertionError` unless a call raises this error."""
    try:
        result = call(*args)
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{promise}: expected {error.__name__}, got {other!r}") from other
    raise AssertionError(f"{promise}: expected {error.__name__}, got the result {_short(result)}")


def expect_fenced(store: Store, ledger_id: int) -> None:
    """Raise `AssertionError` unless a ledger refuses appends and stays unchanged."""
    last = store.ledgers.last(ledger_id)
    ledgers = store.ledgers
    for entries in ([b"late"], []):
        expect_refusal("append to a fenced ledger", LedgerFencedError, ledgers.append, ledger_id, entries)
    outcomes = ledgers.append_many([(ledger_id, [b"late"])])
    expect("append_many to a fenced ledger", [type(each) for each in outcomes], [LedgerFencedError])
    expect("last of a fenced ledger after refused appends", store.ledgers.last(ledger_id), last)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _check_ledger_ids_rise(store: Store) -> None:
    """Ids of ledgers rise."""
    owners = ["rise-a", "rise-b"] * 6
    ids = [store.ledgers.create(owner) for owner in owners]
    expect("create returns ids that rise, for any owner", ids, sorted(set(ids)))
    # If ids begin at 0 or 1, their length changes from one digit to two: sorted as text, they would be out of order.
    expect("owned_by, lowest number first", store.ledgers.owned_by("rise-a"), ids[::2])


def _check_entry_ids_count_from_zero(store: Store) -> None:
    """Entry ids of a ledger are 0, 1, 2, ..., and `last` is the last one."""
    ledgers = store.ledgers
    one, other = ledgers.create("count"), ledgers.create("count")
    expect("last of an empty ledger", ledgers.last(one), -1)
    ids = [ledgers.append(ledger_id, [b"x"]) for ledger_id in (one, other, one, one)]
    expect("append returns 0, 1, 2, ... of its own ledger", ids, [0, 0, 1, 2])
    expect("last is the id of the last entry", [ledgers.last(one), ledgers.last(other)], [2, 0])


def _check_read_bounds(store: Store) -> None:
    """`read` returns the entries from first, included, to end, excluded."""
    ledgers = store.ledgers
    ledger_id = ledgers.create("read")
    expect("an empty range of an empty ledger", ledgers.read(ledger_id, 0, 0), [])
    entries = [b"zero", b"one", b"two"]
    for entry in entries:
        ledgers.append(ledger_id, [entry])
    for first in range(4):
        for end in range(first, 4):
            found = ledgers.read(ledger_id, first, end)
            expect(f"read from {first} to {end} of three entries", found, entries[first:end])
    for error, first, end in (
        *((LedgerNotFoundError, first, end) for first, end in ((0, 4), (3, 4), (7, 9))),
        *((ValueError, first, end) for first, end in ((-1, 1), (-2, -1), (2, 1))),
    ):
        promise = f"read from {first} to {end} of three entries"
        expect_refusal(promise, error, ledgers.read, ledger_id, first, end)
    expect("an empty range beyond the end", ledgers.read(ledger_id, 7, 7), [])


def _check_entries_come_back(store: Store) -> None:
    """Entries are opaque: a read returns exactly the appended bytes."""
    ledgers = store.ledgers
    ledger_id = ledgers.create("bytes")
    entries = [b"", bytes(range(256)), bytes(range(256)) * (_MIB // 256), b"\0", b"text \xff"]
    expect("ids of odd entries", [ledgers.append(ledger_id, [entry]) for entry in entries], [0, 1, 2, 3, 4])
    found = ledgers.read(ledger_id, 0, 5)
    for entry, back in zip(entries, found, strict=True):
        expect(f"an entry of {len(entry)} bytes", back, entry)
        expect("the type of an entry", type(back), bytes)
    found.clear()
    expect("a list that was returned is the caller's own", len(ledgers.read(ledger_id, 0, 5)), 5)


def _check_buffers_are_copied(store: Store) -> None:
    """Stored bytes do not change with the buffer that they were copied from."""
    buffer = bytearray(b"before")
    # A caller may pass any buffer where the type is bytes.
    data = cast("bytes", buffer)
    ledger_id = store.ledgers.create("buffers")
    store.ledgers.append(ledger_id, [data])
    store.ledgers.append_many([(ledger_id, [data])])
    store.metadata.put("/buffers", data, expected_version=ABSENT)
    buffer[:] = b"after!"
    found = store.ledgers.read(ledger_id, 0, 2)
    expect("entries after the caller's buffer changed", found, [b"before", b"before"])
    value = store.metadata.get("/buffers")
    expect("a value after the caller's buffer changed", value and value.data, b"before")


def _check_missing_ledgers(store: Store) -> None:
    """A ledger that does not exist is refused with `LedgerNotFoundError`."""
    ledgers = store.ledgers
    deleted = ledgers.create("missing")
    ledgers.append(deleted, [b"x"])
    ledgers.delete(deleted)
    for kind, ledger_id in (("a deleted", deleted), ("no such", deleted + 1000), ("no such", 2**70)):
        calls: dict[str, Callable[[], object]] = {
            "append": partial(ledgers.append, ledger_id, [b"x"]),
            "append of nothing": partial(ledgers.append, ledger_id, []),
            "read": partial(ledgers.read, ledger_id, 0, 1),
            "last": partial(ledgers.last, ledger_id),
            "fence": partial(ledgers.fence, ledger_id),
        }
        for name, call in calls.items():
            expect_refusal(f"{name} with {kind} ledger", LedgerNotFoundError, call)


def _check_append(store: Store) -> None:
    """`append` appends any number of entries in order and returns the id of the last entry."""
    ledgers = store.ledgers
    one, other = ledgers.create("several"), ledgers.create("several")
    expect("append of three", ledgers.append(one, [b"a", b"b", b""]), 2)
    expect("append of nothing", [ledgers.append(one, []), ledgers.append(other, [])], [2, -1])
    expect("append after an append of nothing", ledgers.append(one, (b"c",)), 3)
    expect("append appends in order", ledgers.read(one, 0, 4), [b"a", b"b", b"", b"c"])
    expect("append of 1,500", ledgers.append(other, [b"%d" % each for each in range(1_500)]), 1_499)
    expect("an entry of 1,500", ledgers.read(other, 1_498, 1_500), [b"1498", b"1499"])


def _check_append_many(store: Store) -> None:
    """`append_many` appends to many ledgers, and each append succeeds or fails by itself."""
    ledgers = store.ledgers
    good, fenced, deleted, other, idle = (ledgers.create("many") for _ in range(5))
    ledgers.append(good, [b"first"])
    ledgers.fence(fenced)
    ledgers.delete(deleted)
    appends = [(fenced, [b"x"]), (good, [b"a", b"b"]), (deleted, [b"x"]), (deleted + 1_000, [b"x"]), (other, [b"c"])]
    outcomes = ledgers.append_many([*appends, (idle, [])])
    found = [each if isinstance(each, int) else type(each) for each in outcomes]
    wanted = [LedgerFencedError, 2, LedgerNotFoundError, LedgerNotFoundError, 0, -1]
    expect("append_many with refused appends", found, wanted)
    expect("append_many has different errors", len({id(each) for each in outcomes if isinstance(each, Exception)}), 3)
    expect("append_many appends in order", ledgers.read(good, 0, 3), [b"first", b"a", b"b"])
    expect("append_many appends to each", [ledgers.read(other, 0, 1), ledgers.last(fenced)], [[b"c"], -1])
    expect("append_many of nothing", ledgers.append_many([]), [])
    ids = [ledgers.create(f"many/{number % 7}") for number in range(120)]
    expect("append_many of 120", ledgers.append_many([(each, [b"%d" % each]) for each in ids]), [0] * 120)
    expect("entries of 120", [ledgers.read(each, 0, 1) for each in ids], [[b"%d" % each] for each in ids])
    twice = [(other, [b"d"]), (good, [b"d"]), (other, [b"e"])]
    expect_refusal("append_many with a ledger twice", ValueError, ledgers.append_many, twice)
    expect("last after a refused append_many", [ledgers.last(good), ledgers.last(other)], [2, 0])


def _check_fence(store: Store) -> None:
    """`fence` refuses every append from now on and returns the id of the last entry."""
    ledgers = store.ledgers
    full, empty, free = (ledgers.create("fence") for _ in range(3))
    ledgers.append(full, [b"a", b"b"])
    expect("fence returns the last id", [ledgers.fence(full), ledgers.fence(empty)], [1, -1])
    expect("fencing again returns the last id again", ledgers.fence(full), 1)
    for ledger_id in (full, empty):
        expect_fenced(store, ledger_id)
    expect("a fenced ledger can be read", ledgers.read(full, 0, 2), [b"a", b"b"])
    expect("a fence binds its own ledger only", ledgers.append(free, [b"x"]), 0)
    expect("owned_by with fenced ledgers", ledgers.owned_by("fence"), [full, empty, free])


def _check_delete(store: Store) -> None:
    """`delete` deletes a ledger and its entries, and does nothing if the ledger does not exist."""
    ledgers = store.ledgers
    gone, kept = ledgers.create("delete"), ledgers.create("delete")
    ledgers.append_many([(gone, [b"gone"]), (kept, [b"kept"])])
    for ledger_id in (gone, gone, kept + 1000, 2**70):
        ledgers.delete(ledger_id)
    expect("owned_by after a delete", ledgers.owned_by("delete"), [kept])
    expect("entries of another ledger after a delete", ledgers.read(kept, 0, 1), [b"kept"])
    ledgers.fence(kept)
    ledgers.delete(kept)
    expect("a fenced ledger can be deleted", ledgers.owned_by("delete"), [])


def _check_owned_by(store: Store) -> None:
    """`owned_by` returns the ids of an owner's ledgers, lowest first."""
    owners = ["own", "own/ä", "own", "OWN", "own"]
    ids = [store.ledgers.create(owner) for owner in owners]
    expect("owned_by", store.ledgers.owned_by("own"), [ids[0], ids[2], ids[4]])
    expect("owned_by another", store.ledgers.owned_by("own/ä"), [ids[1]])
    expect("owned_by an owner without ledgers", store.ledgers.owned_by("ow"), [])
    alike = ["own" * 100, "own" * 100 + "!", " own", "own ", "\town\n"]
    ids = [store.ledgers.create(owner) for owner in alike]
    found = [store.ledgers.owned_by(owner) for owner in alike]
    expect("owned_by of owners that differ late, or by blanks", found, [[ledger_id] for ledger_id in ids])
    odd = ["", "%", ".", "..", "/", "a/b", "A", "\uffff"]
    ids = [store.ledgers.create(owner) for owner in odd]
    expect("owners with any names", [store.ledgers.owned_by(owner) for owner in odd], [[each] for each in ids])
    expect("owners with any names, or none", sorted(_owners_in(store.ledgers.owners(), odd)), sorted(odd))
    for call in (store.ledgers.create, store.ledgers.owned_by):
        expect_refusal("an owner with a lone surrogate", ValueError, call, "own \ud800")


def _check_owners(store: Store) -> None:
    """`owners` returns every owner that has a ledger, once, sorted."""
    ledgers = store.ledgers
    # Sorted by UTF-16, the last two would change places.
    names = ["owners/b", "owners/a", "owners/ä", "owners/b", "owners/B", "owners", "owners/\U0001f40d", "owners/\uffee"]
    ids = [ledgers.create(name) for name in names]
    expect("owners, sorted", ledgers.owners(), sorted(set(ledgers.owners())))
    expect("owners", _owners_in(ledgers.owners(), names), sorted(set(names)))
    ledgers.fence(ids[1])
    ledgers.delete(ids[0])
    expect("owners after one ledger of two was deleted", _owners_in(ledgers.owners(), names), sorted(set(names)))
    ledgers.delete(ids[3])
    expect("owners after the last ledger was deleted", "owners/b" in ledgers.owners(), False)


def _owners_in(owners: list[str], names: list[str]) -> list[str]:
    # Other checks have left their own owners.
    return [owner for owner in owners if owner in names]


def _check_values(store: Store) -> None:
    """`put` replaces a value and returns the version that `get` returns with it."""
    metadata = store.metadata
    expect("get where there is no value", metadata.get("/values/ä b"), None)
    version = ABSENT
    for data in (b"", bytes(range(256)), b"x" * (_MIB // 8), b""):
        previous, version = version, metadata.put("/values/ä b", data, expected_version=version)
        expect("a put makes a new version", version == previous, False)
        expect("get after put", metadata.get("/values/ä b"), Versioned(data, version))
    value = metadata.get("/values/ä b")
    expect("the type of a value", type(value and value.data), bytes)
    expect("get on the way to a value", metadata.get("/values"), None)
    metadata.put(f"/values/{'long/' * 60}a", b"a", expected_version=ABSENT)
    expect("get of a path that differs late", metadata.get(f"/values/{'long/' * 60}b"), None)
    metadata.delete("/values/ä b", expected_version=version)
    expect("get after delete", metadata.get("/values/ä b"), None)


def _check_expected_versions(store: Store) -> None:
    """`put` and `delete` touch nothing unless the value is at the expected version."""
    metadata = store.metadata
    first = metadata.put("/cas", b"old", expected_version=ABSENT)
    second = metadata.put("/cas", b"new", expected_version=first)
    for path, version in (
        *(("/cas", version) for version in (ABSENT, ABSENT - 1, first, second + 1)),
        *(("/nothing", version) for version in (ABSENT - 1, 0, first, second)),
    ):
        put = partial(metadata.put, path, b"lost", expected_version=version)
        expect_refusal(f"put of {path} expecting version {version}", VersionMismatchError, put)
    for path, version in (("/cas", ABSENT), ("/cas", -2), ("/cas", first), ("/nothing", 0), ("/nothing", ABSENT)):
        delete = partial(metadata.delete, path, expected_version=version)
        expect_refusal(f"delete of {path} expecting version {version}", VersionMismatchError, delete)
    expect("a value after refused calls", metadata.get("/cas"), Versioned(b"new", second))
    expect("no value after refused calls", metadata.get("/nothing"), None)


def _check_children(store: Store) -> None:
    """`children` returns the names one level below that hold a value or lead to one, sorted."""
    metadata = store.metadata
    version = ABSENT
    for path in ("/tree/b", "/tree/a/deep/er", "/tree/a0", "/tree/a-", "/tree/a/x", "/treeless", "/tree/b/c"):
        version = metadata.put(path, b"", expected_version=ABSENT)
    expect("children", metadata.children("/tree"), ["a", "a-", "a0", "b"])
    expect("children of a path without a value", metadata.children("/tree/a"), ["deep", "x"])
    expect("children of a path with a value", metadata.children("/tree/b"), ["c"])
    expect("children of a leaf", metadata.children("/tree/a0"), [])
    expect("children of nothing", metadata.children("/tr"), [])
    for name in ("\U0001f40d", "\uffee"):
        metadata.put(f"/tree/code/{name}", b"", expected_version=ABSENT)
    expect("children, sorted by code points", metadata.children("/tree/code"), ["\uffee", "\U0001f40d"])
    top = [name for name in metadata.children("/") if name.startswith("tree")]
    expect("children of the top", top, ["tree", "treeless"])
    metadata.delete("/tree/b/c", expected_version=version)
    expect("children after a delete", metadata.children("/tree/b"), [])


def _check_paths(store: Store) -> None:
    """A path begins with a slash, ends without one, and has no empty name in it and no lone surrogate."""
    metadata = store.metadata
    for path in ("", "/", "plain", "no/slash", "/slash/", "//two", "/two//slashes", "/lone/\udfff"):
        calls: dict[str, Callable[[], object]] = {
            "get": partial(metadata.get, path),
            "put": partial(metadata.put, path, b"", expected_version=ABSENT),
            "delete": partial(metadata.delete, path, expected_version=0),
        }
        if path != "/":
            calls["children"] = partial(metadata.children, path)
        for name, call in calls.items():
            expect_refusal(f"{name} of {path!r}", ValueError, call)


def check_value_limit(store: Store, bytes_max: int) -> None:
    """`put` accepts a value of `bytes_max` bytes, and refuses a larger one without changing anything."""
    metadata = store.metadata
    largest, too_large = bytes(bytes_max), bytes(bytes_max + 1)
    version = metadata.put("/largest", largest, expected_version=ABSENT)
    expect("get of the largest value", metadata.get("/largest"), Versioned(largest, version))
    replace = partial(metadata.put, "/largest", too_large, expected_version=version)
    expect_refusal("put of too large a value over another", PayloadTooLargeError, replace)
    make = partial(metadata.put, "/too-large", too_large, expected_version=ABSENT)
    expect_refusal("put of too large a value", PayloadTooLargeError, make)
    expect("a value after too large a one was refused", metadata.get("/largest"), Versioned(largest, version))
    expect("no value after too large a one was refused", metadata.get("/too-large"), None)


CHECKS = (
    _check_ledger_ids_rise,
    _check_entry_ids_count_from_zero,
    _check_read_bounds,
    _check_entries_come_back,
    _check_buffers_are_copied,
    _check_missing_ledgers,
    _check_append,
    _check_append_many,
    _check_fence,
    _check_delete,
    _check_owned_by,
    _check_owners,
    _check_values,
    _check_expected_versions,
    _check_children,
    _check_paths,
)


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
