"""Does a store keep the contract of `cursor.store`? The same suite for our backends and for yours.

Call it from a test, with something that opens the same storage each time::

    def test_my_store_keeps_the_contract(tmp_path):
        check_store(lambda: MyStore(tmp_path / "store"))

It cannot see what only a second process, a full disk or a power cut shows: `StoreLockedError`,
`StoreFullError`, and whether a sync reached the disk. Test these by hand.
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, TypeVar, TypeVarTuple, cast

from cursor.store import (
    ABSENT,
    LedgerFencedError,
    LedgerNotFoundError,
    Store,
    StoreError,
    Versioned,
    VersionMismatchError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_MIB = 1 << 20
_Subject = TypeVar("_Subject")
_Args = TypeVarTuple("_Args")


def check_store(make_store: Callable[[], Store]) -> None:
    """Raise `AssertionError` at the first promise of the contract that a store does not keep.

    Args:
        make_store: Opens the store; every call opens the same storage, which is empty at the first call. The
            suite closes one store before it opens the next.

    Raises:
        AssertionError: The message names the promise, what should have been and what was.
        ValueError: The storage was not empty.

    >>> from cursor.stores.memory import MemoryDisk, MemoryStore
    >>> disk = MemoryDisk()
    >>> check_store(lambda: MemoryStore(disk))
    """
    with closing(make_store()) as store:
        if store.metadata.children("/"):
            raise ValueError("the suite needs an empty storage")
    for check in _CHECKS_OF_AN_OPEN_STORE:
        with closing(make_store()) as store:
            _run(check, store)
    for check_reopened in _CHECKS_ACROSS_OPENINGS:
        _run(check_reopened, make_store)


def _run(check: Callable[[_Subject], None], subject: _Subject) -> None:
    """Run one check, and call any surprise a broken promise."""
    try:
        check(subject)
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{check.__doc__} But: {error!r}") from error


def _expect(promise: str, found: object, wanted: object) -> None:
    # No assert statement: the suite must work under -O too.
    if found != wanted:
        raise AssertionError(f"{promise}: expected {_short(wanted)}, found {_short(found)}")


def _expect_refusal(promise: str, error: type[Exception], call: Callable[[*_Args], object], *args: *_Args) -> None:
    try:
        result = call(*args)
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{promise}: expected {error.__name__}, found {other!r}") from other
    raise AssertionError(f"{promise}: expected {error.__name__}, found the answer {_short(result)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _check_ledger_ids_rise(store: Store) -> None:
    """Ids of ledgers rise."""
    owners = ["rise-a", "rise-b"] * 6
    ids = [store.ledgers.create(owner) for owner in owners]
    _expect("create returns ids that rise, whoever the owner is", ids, sorted(set(ids)))
    # Where ids begin at 0 or 1 they have one digit first and then two: as texts they would not be sorted.
    _expect("owned_by, lowest number first", store.ledgers.owned_by("rise-a"), ids[::2])


def _check_entry_ids_count_from_zero(store: Store) -> None:
    """Entry ids of a ledger are 0, 1, 2, ..., and `last` is the last one."""
    ledgers = store.ledgers
    one, other = ledgers.create("count"), ledgers.create("count")
    _expect("last of an empty ledger", ledgers.last(one), -1)
    ids = [ledgers.append(ledger_id, b"x") for ledger_id in (one, other, one, one)]
    _expect("append returns 0, 1, 2, ... of its own ledger", ids, [0, 0, 1, 2])
    _expect("last is the id of the last entry", [ledgers.last(one), ledgers.last(other)], [2, 0])


def _check_read_bounds(store: Store) -> None:
    """`read` returns the entries from first, included, to end, excluded."""
    ledgers = store.ledgers
    ledger_id = ledgers.create("read")
    _expect("an empty range of an empty ledger", ledgers.read(ledger_id, 0, 0), [])
    entries = [b"zero", b"one", b"two"]
    for entry in entries:
        ledgers.append(ledger_id, entry)
    for first in range(4):
        for end in range(first, 4):
            found = ledgers.read(ledger_id, first, end)
            _expect(f"read from {first} to {end} of three entries", found, entries[first:end])
    for error, first, end in (
        *((LedgerNotFoundError, first, end) for first, end in ((0, 4), (3, 4), (7, 9))),
        *((ValueError, first, end) for first, end in ((-1, 1), (-2, -1), (2, 1))),
    ):
        promise = f"read from {first} to {end} of three entries"
        _expect_refusal(promise, error, ledgers.read, ledger_id, first, end)
    _expect("an empty range beyond the end", ledgers.read(ledger_id, 7, 7), [])


def _check_entries_come_back(store: Store) -> None:
    """Entries are opaque: what comes back is what was appended."""
    ledgers = store.ledgers
    ledger_id = ledgers.create("bytes")
    entries = [b"", bytes(range(256)), bytes(range(256)) * (_MIB // 256), b"\0", b"text \xff"]
    _expect("ids of odd entries", [ledgers.append(ledger_id, entry) for entry in entries], [0, 1, 2, 3, 4])
    found = ledgers.read(ledger_id, 0, 5)
    for entry, back in zip(entries, found, strict=True):
        _expect(f"an entry of {len(entry)} bytes", back, entry)
        _expect("the type of an entry", type(back), bytes)
    found.clear()
    _expect("a list that was returned is the caller's own", len(ledgers.read(ledger_id, 0, 5)), 5)


def _check_buffers_are_copied(store: Store) -> None:
    """What is stored does not change with the buffer that it was stored from."""
    buffer = bytearray(b"before")
    # A caller may hand in any buffer where the type says bytes.
    data = cast("bytes", buffer)
    ledger_id = store.ledgers.create("buffers")
    store.ledgers.append(ledger_id, data)
    store.ledgers.append_all([(ledger_id, data)])
    store.metadata.put("/buffers", data, expected_version=ABSENT)
    buffer[:] = b"after!"
    found = store.ledgers.read(ledger_id, 0, 2)
    _expect("entries after the caller's buffer changed", found, [b"before", b"before"])
    value = store.metadata.get("/buffers")
    _expect("a value after the caller's buffer changed", value and value.data, b"before")


def _check_missing_ledgers(store: Store) -> None:
    """A ledger that does not exist is refused with `LedgerNotFoundError`."""
    ledgers = store.ledgers
    deleted = ledgers.create("missing")
    ledgers.append(deleted, b"x")
    ledgers.delete(deleted)
    for kind, ledger_id in (("a deleted", deleted), ("no such", deleted + 1000), ("no such", 2**70)):
        calls: dict[str, Callable[[], object]] = {
            "append": partial(ledgers.append, ledger_id, b"x"),
            "append_all": partial(ledgers.append_all, [(ledger_id, b"x")]),
            "read": partial(ledgers.read, ledger_id, 0, 1),
            "last": partial(ledgers.last, ledger_id),
            "fence": partial(ledgers.fence, ledger_id),
        }
        for name, call in calls.items():
            _expect_refusal(f"{name} with {kind} ledger", LedgerNotFoundError, call)


def _check_append_all(store: Store) -> None:
    """`append_all` appends to any ledgers and returns the entry ids in order."""
    ledgers = store.ledgers
    one, other = ledgers.create("all"), ledgers.create("all")
    ledgers.append(one, b"first")
    ids = ledgers.append_all([(other, b"a"), (one, b"b"), (other, b"c"), (one, b"d"), (one, b"")])
    _expect("ids of append_all stand in the order of its entries", ids, [0, 1, 1, 2, 3])
    _expect("append_all appends in order", ledgers.read(one, 0, 4), [b"first", b"b", b"d", b""])
    _expect("append_all appends in order", ledgers.read(other, 0, 2), [b"a", b"c"])
    _expect("append_all of nothing", ledgers.append_all([]), [])
    many = [(one, b"")] * 1_500 + [(other, b"last")]
    _expect("ids of append_all of 1,501 entries", ledgers.append_all(many), [*range(4, 1_504), 2])
    _expect("last after append_all of 1,501 entries", [ledgers.last(one), ledgers.last(other)], [1_503, 2])


def _check_append_all_or_nothing(store: Store) -> None:
    """`append_all` is all or nothing."""
    ledgers = store.ledgers
    good, fenced, deleted = (ledgers.create("atomic") for _ in range(3))
    ledgers.fence(fenced)
    ledgers.delete(deleted)
    for bad, error in ((fenced, LedgerFencedError), (deleted, LedgerNotFoundError)):
        for batch in ([(good, b"x"), (bad, b"x")], [(bad, b"x"), (good, b"x")]):
            kind = "fenced" if bad == fenced else "missing"
            _expect_refusal(f"append_all with a {kind} ledger", error, ledgers.append_all, batch)
            _expect("last after a refused append_all", ledgers.last(good), -1)
    _expect("the next id after refused ones", ledgers.append(good, b"kept"), 0)
    _expect("entries after a refused append_all", ledgers.read(good, 0, 1), [b"kept"])


def _check_fence(store: Store) -> None:
    """`fence` refuses every append from now on and returns the id of the last entry."""
    ledgers = store.ledgers
    full, empty, free = (ledgers.create("fence") for _ in range(3))
    ledgers.append_all([(full, b"a"), (full, b"b")])
    _expect("fence returns the last id", [ledgers.fence(full), ledgers.fence(empty)], [1, -1])
    _expect("fencing again returns the last id again", ledgers.fence(full), 1)
    for ledger_id in (full, empty):
        _check_is_fenced(store, ledger_id)
    _expect("a fenced ledger can be read", ledgers.read(full, 0, 2), [b"a", b"b"])
    _expect("a fence binds its own ledger only", ledgers.append(free, b"x"), 0)
    _expect("owned_by with fenced ledgers", ledgers.owned_by("fence"), [full, empty, free])


def _check_is_fenced(store: Store, ledger_id: int) -> None:
    last = store.ledgers.last(ledger_id)
    ledgers, batch = store.ledgers, [(ledger_id, b"late")]
    _expect_refusal("append to a fenced ledger", LedgerFencedError, ledgers.append, ledger_id, b"late")
    _expect_refusal("append_all to a fenced ledger", LedgerFencedError, ledgers.append_all, batch)
    _expect("last of a fenced ledger after refused appends", store.ledgers.last(ledger_id), last)


def _check_delete(store: Store) -> None:
    """`delete` deletes a ledger and its entries; one that does not exist is deleted already."""
    ledgers = store.ledgers
    gone, kept = ledgers.create("delete"), ledgers.create("delete")
    ledgers.append_all([(gone, b"gone"), (kept, b"kept")])
    for ledger_id in (gone, gone, kept + 1000, 2**70):
        ledgers.delete(ledger_id)
    _expect("owned_by after a delete", ledgers.owned_by("delete"), [kept])
    _expect("entries of another ledger after a delete", ledgers.read(kept, 0, 1), [b"kept"])
    ledgers.fence(kept)
    ledgers.delete(kept)
    _expect("a fenced ledger can be deleted", ledgers.owned_by("delete"), [])


def _check_owned_by(store: Store) -> None:
    """`owned_by` returns the ids of an owner's ledgers, lowest first."""
    owners = ["own", "own/ä", "own", "OWN", "own"]
    ids = [store.ledgers.create(owner) for owner in owners]
    _expect("owned_by", store.ledgers.owned_by("own"), [ids[0], ids[2], ids[4]])
    _expect("owned_by another", store.ledgers.owned_by("own/ä"), [ids[1]])
    _expect("owned_by nobody", store.ledgers.owned_by("ow"), [])
    alike = ["own" * 100, "own" * 100 + "!", " own", "own ", "\town\n"]
    ids = [store.ledgers.create(owner) for owner in alike]
    found = [store.ledgers.owned_by(owner) for owner in alike]
    _expect("owned_by of owners that differ late, or by blanks", found, [[ledger_id] for ledger_id in ids])
    for call in (store.ledgers.create, store.ledgers.owned_by):
        _expect_refusal("an owner with a lone surrogate", ValueError, call, "own \ud800")


def _check_owners(store: Store) -> None:
    """`owners` returns every owner that has a ledger, once, sorted."""
    ledgers = store.ledgers
    # By UTF-16, the last two would change places.
    names = ["owners/b", "owners/a", "owners/ä", "owners/b", "owners/B", "owners", "owners/\U0001f40d", "owners/\uffee"]
    ids = [ledgers.create(name) for name in names]
    _expect("owners, sorted", ledgers.owners(), sorted(set(ledgers.owners())))
    _expect("owners", _owners_in(ledgers.owners(), names), sorted(set(names)))
    ledgers.fence(ids[1])
    ledgers.delete(ids[0])
    _expect("owners after one ledger of two was deleted", _owners_in(ledgers.owners(), names), sorted(set(names)))
    ledgers.delete(ids[3])
    _expect("owners after the last ledger was deleted", "owners/b" in ledgers.owners(), False)


def _owners_in(owners: list[str], names: list[str]) -> list[str]:
    # Other checks have left theirs.
    return [owner for owner in owners if owner in names]


def _check_values(store: Store) -> None:
    """`put` replaces a value and returns the version that `get` returns with it."""
    metadata = store.metadata
    _expect("get where there is no value", metadata.get("/values/ä b"), None)
    version = ABSENT
    for data in (b"", bytes(range(256)), b"x" * (_MIB // 8), b""):
        previous, version = version, metadata.put("/values/ä b", data, expected_version=version)
        _expect("a put makes a new version", version == previous, False)
        _expect("get after put", metadata.get("/values/ä b"), Versioned(data, version))
    value = metadata.get("/values/ä b")
    _expect("the type of a value", type(value and value.data), bytes)
    _expect("get on the way to a value", metadata.get("/values"), None)
    metadata.put(f"/values/{'long/' * 60}a", b"a", expected_version=ABSENT)
    _expect("get of a path that differs late", metadata.get(f"/values/{'long/' * 60}b"), None)
    metadata.delete("/values/ä b", expected_version=version)
    _expect("get after delete", metadata.get("/values/ä b"), None)


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
        _expect_refusal(f"put of {path} expecting version {version}", VersionMismatchError, put)
    for path, version in (("/cas", ABSENT), ("/cas", -2), ("/cas", first), ("/nothing", 0), ("/nothing", ABSENT)):
        delete = partial(metadata.delete, path, expected_version=version)
        _expect_refusal(f"delete of {path} expecting version {version}", VersionMismatchError, delete)
    _expect("a value after refused calls", metadata.get("/cas"), Versioned(b"new", second))
    _expect("no value after refused calls", metadata.get("/nothing"), None)


def _check_children(store: Store) -> None:
    """`children` returns the names one level below that hold a value or lead to one, sorted."""
    metadata = store.metadata
    version = ABSENT
    for path in ("/tree/b", "/tree/a/deep/er", "/tree/a0", "/tree/a-", "/tree/a/x", "/treeless", "/tree/b/c"):
        version = metadata.put(path, b"", expected_version=ABSENT)
    _expect("children", metadata.children("/tree"), ["a", "a-", "a0", "b"])
    _expect("children of a path without a value", metadata.children("/tree/a"), ["deep", "x"])
    _expect("children of a path with a value", metadata.children("/tree/b"), ["c"])
    _expect("children of a leaf", metadata.children("/tree/a0"), [])
    _expect("children of nothing", metadata.children("/tr"), [])
    for name in ("\U0001f40d", "\uffee"):
        metadata.put(f"/tree/code/{name}", b"", expected_version=ABSENT)
    _expect("children, sorted by code points", metadata.children("/tree/code"), ["\uffee", "\U0001f40d"])
    top = [name for name in metadata.children("/") if name.startswith("tree")]
    _expect("children of the top", top, ["tree", "treeless"])
    metadata.delete("/tree/b/c", expected_version=version)
    _expect("children after a delete", metadata.children("/tree/b"), [])


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
            _expect_refusal(f"{name} of {path!r}", ValueError, call)


def _check_a_reopen_keeps_all(make_store: Callable[[], Store]) -> None:
    """What a mutating call has done is there after a reopen."""
    with closing(make_store()) as store:
        one, other, deleted = (store.ledgers.create("keep") for _ in range(3))
        store.ledgers.delete(deleted)
        store.ledgers.append(one, b"a")
        store.ledgers.append_all([(one, b"b"), (other, b"c")])
        first = store.metadata.put("/keep/one", b"old", expected_version=ABSENT)
        second = store.metadata.put("/keep/one", b"new", expected_version=first)
        gone = store.metadata.put("/keep/gone", b"x", expected_version=ABSENT)
        store.metadata.delete("/keep/gone", expected_version=gone)
    with closing(make_store()) as store:
        _expect("owned_by after a reopen", store.ledgers.owned_by("keep"), [one, other])
        _expect_refusal("last of a ledger deleted before", LedgerNotFoundError, store.ledgers.last, deleted)
        _expect("owners after a reopen", "keep" in store.ledgers.owners(), True)
        _expect("entries after a reopen", store.ledgers.read(one, 0, 2), [b"a", b"b"])
        _expect("entries after a reopen", store.ledgers.read(other, 0, 1), [b"c"])
        _expect("last after a reopen", [store.ledgers.last(one), store.ledgers.last(other)], [1, 0])
        _expect("the next entry id after a reopen", store.ledgers.append(one, b"d"), 2)
        _expect("a value after a reopen", store.metadata.get("/keep/one"), Versioned(b"new", second))
        _expect("a deleted value after a reopen", store.metadata.get("/keep/gone"), None)
        _expect("children after a reopen", store.metadata.children("/keep"), ["one"])


def _check_refused_calls_leave_nothing(make_store: Callable[[], Store]) -> None:
    """A refused call has left nothing behind, as a reopen shows."""
    with closing(make_store()) as store:
        good, fenced = store.ledgers.create("refused"), store.ledgers.create("refused")
        store.ledgers.fence(fenced)
        batch = [(good, b"x"), (fenced, b"x")]
        _expect_refusal("append_all with a fenced ledger", LedgerFencedError, store.ledgers.append_all, batch)
        put = partial(store.metadata.put, expected_version=0)
        _expect_refusal("put of a missing value", VersionMismatchError, put, "/refused", b"x")
    with closing(make_store()) as store:
        last = [store.ledgers.last(good), store.ledgers.last(fenced)]
        _expect("last after a refused append_all and a reopen", last, [-1, -1])
        _expect("no value after a refused put and a reopen", store.metadata.get("/refused"), None)


def _check_fence_survives(make_store: Callable[[], Store]) -> None:
    """A fence holds after a reopen too."""
    with closing(make_store()) as store:
        ledger_id, empty = store.ledgers.create("fence-reopen"), store.ledgers.create("fence-reopen")
        store.ledgers.append(ledger_id, b"x")
        store.ledgers.fence(ledger_id)
        store.ledgers.fence(empty)
    with closing(make_store()) as store:
        _check_is_fenced(store, ledger_id)
        _check_is_fenced(store, empty)
        _expect("fence after a reopen returns the last id", store.ledgers.fence(ledger_id), 0)


def _check_ledger_ids_never_return(make_store: Callable[[], Store]) -> None:
    """The id of a ledger is never used again, also when it was deleted and the store reopened."""
    highest = -1
    for _ in range(3):
        with closing(make_store()) as store:
            ids = [store.ledgers.create("ids"), store.ledgers.create("ids")]
            _expect(f"ids {ids} are above every earlier one, {highest}", min(ids) > highest, True)
            highest = max(ids)
            store.ledgers.delete(highest)
            after_delete = store.ledgers.create("ids")
            _expect(f"id {after_delete} is above a deleted one, {highest}", after_delete > highest, True)
            highest = after_delete
            for ledger_id in store.ledgers.owned_by("ids"):
                store.ledgers.delete(ledger_id)


def _check_versions_never_return(make_store: Callable[[], Store]) -> None:
    """A path's versions never repeat, also when its value was deleted and the store reopened."""
    stale: list[int] = []
    for _ in range(3):
        with closing(make_store()) as store:
            for _ in range(2):
                version = store.metadata.put("/aba", b"made", expected_version=ABSENT)
                for old in stale:
                    promise = f"put expecting version {old} of a deleted value, now {version}"
                    put = partial(store.metadata.put, expected_version=old)
                    _expect_refusal(promise, VersionMismatchError, put, "/aba", b"lost")
                    delete = partial(store.metadata.delete, expected_version=old)
                    _expect_refusal(f"delete instead of {promise}", VersionMismatchError, delete, "/aba")
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
        "append": partial(ledgers.append, ledger_id, b"x"),
        "append_all": partial(ledgers.append_all, [(ledger_id, b"x")]),
        "append_all of nothing": partial(ledgers.append_all, []),
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
        _expect_refusal(f"{name} after close", StoreError, call)
    with closing(make_store()) as reopened:
        _expect("a ledger after calls to a closed store", reopened.ledgers.last(ledger_id), -1)
        _expect("a value after calls to a closed store", reopened.metadata.get("/close"), Versioned(b"x", version))


_CHECKS_OF_AN_OPEN_STORE = (
    _check_ledger_ids_rise,
    _check_entry_ids_count_from_zero,
    _check_read_bounds,
    _check_entries_come_back,
    _check_buffers_are_copied,
    _check_missing_ledgers,
    _check_append_all,
    _check_append_all_or_nothing,
    _check_fence,
    _check_delete,
    _check_owned_by,
    _check_owners,
    _check_values,
    _check_expected_versions,
    _check_children,
    _check_paths,
)
_CHECKS_ACROSS_OPENINGS = (
    _check_a_reopen_keeps_all,
    _check_refused_calls_leave_nothing,
    _check_fence_survives,
    _check_ledger_ids_never_return,
    _check_versions_never_return,
    _check_close,
)
