"""The promises of `LedgerStore` that a single opening can check."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, cast

from ackstate.stores.base import ABSENT, LedgerFencedError, LedgerNotFoundError
from ackstate.testing.expectation import expect, expect_fenced, expect_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import Store

_MIB = 1 << 20


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


CHECKS_OF_LEDGERS = (
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
)
"""Each receives an open store."""
