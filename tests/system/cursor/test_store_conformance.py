"""All backends keep the contract of `ackstate.stores.base`, and `check_store` sees when a store does not."""

from contextlib import closing

import pytest

from ackstate.stores.base import (
    ABSENT,
    METADATA_VALUE_BYTES_MAX,
    LedgerNotFoundError,
    PayloadTooLargeError,
    StoreError,
    check_path,
)
from ackstate.stores.memory import MemoryDisk, MemoryStore
from ackstate.stores.sqlite import SqliteStore
from ackstate.testing import check_store

LIMIT = 200_000


def test_memory_store_keeps_the_contract():
    disk = MemoryDisk()
    check_store(lambda: MemoryStore(disk, metadata_value_bytes_max=LIMIT), metadata_value_bytes_max=LIMIT)
    disk._check()


def test_the_default_limit_of_a_value_is_what_the_suite_sees(tmp_path):
    disk = MemoryDisk()
    for kind, make_store in {
        "memory": lambda: MemoryStore(disk),
        "sqlite": lambda: SqliteStore(tmp_path / "sqlite"),
    }.items():
        with closing(make_store()) as store:
            with pytest.raises(PayloadTooLargeError, match="67108865"):
                store.metadata.put("/a", bytes(METADATA_VALUE_BYTES_MAX + 1), expected_version=ABSENT)
            assert store.metadata.get("/a") is None, kind


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_a_value_above_the_limit_of_a_later_opening_is_refused_and_can_be_replaced(tmp_path, kind):
    disk = MemoryDisk()

    def opened(**limit):
        return MemoryStore(disk, **limit) if kind == "memory" else SqliteStore(tmp_path, **limit)

    with closing(opened()) as store:
        version = store.metadata.put("/a", bytes(1_001), expected_version=ABSENT)
    with closing(opened(metadata_value_bytes_max=1_000)) as store:
        with pytest.raises(PayloadTooLargeError, match=r"/a: .* at most 1000 bytes .*, got 1001"):
            store.metadata.get("/a")
        assert store.metadata.children("/") == ["a"]
        store.metadata.put("/a", bytes(1_000), expected_version=version)
        assert store.metadata.get("/a").data == bytes(1_000)


def test_a_store_without_the_limit_is_caught():
    disk = MemoryDisk()
    with pytest.raises(AssertionError, match="put of too large a value over another: expected PayloadTooLargeError"):
        check_store(lambda: MemoryStore(disk), metadata_value_bytes_max=LIMIT)


def test_a_store_with_a_smaller_limit_is_caught():
    disk = MemoryDisk()
    with pytest.raises(AssertionError, match="accepts a value of `bytes_max` bytes"):
        check_store(lambda: MemoryStore(disk, metadata_value_bytes_max=LIMIT - 1), metadata_value_bytes_max=LIMIT)


def test_sqlite_store_keeps_the_contract(tmp_path):
    check_store(lambda: SqliteStore(tmp_path, metadata_value_bytes_max=LIMIT), metadata_value_bytes_max=LIMIT)


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    store = {"memory": MemoryStore, "sqlite": SqliteStore}[request.param]
    store = store() if request.param == "memory" else store(tmp_path)
    yield store
    store.close()


def test_an_owner_may_have_any_name_or_none(store):
    names = ["", "%", ".", "..", "/", "a/b", "ä", "\U0001f40d", "\uffff", "A"]
    for name in names:
        store.ledgers.create(name)
    assert store.ledgers.owners() == sorted(names)


def test_a_text_that_is_no_utf_8_is_refused_in_one_way_everywhere(store):
    for call in (store.ledgers.create, store.ledgers.owned_by):
        with pytest.raises(ValueError, match=r"^owner must be text that can be encoded in UTF-8, got 'a\\ud800'$"):
            call("a\ud800")
    for call in (store.metadata.get, store.metadata.children):
        with pytest.raises(ValueError, match=r"^path must be a metadata path such as /a/b, got '/a\\ud800'$"):
            call("/a\ud800")
    assert store.ledgers.owners() == []


def test_our_versions_begin_at_0_and_rise_by_1(store):
    assert store.metadata.put("/a", b"", expected_version=ABSENT) == 0
    assert store.metadata.put("/a", b"", expected_version=0) == 1
    store.metadata.delete("/a", expected_version=1)
    assert store.metadata.put("/a", b"", expected_version=ABSENT) == 2


@pytest.mark.parametrize("not_bytes", ["text", 5, None])
def test_what_is_no_buffer_is_refused_and_leaves_the_store_usable(store, not_bytes):
    ledger_id = store.ledgers.create("billing")
    with pytest.raises(TypeError):
        store.ledgers.append(ledger_id, [b"good", not_bytes])
    with pytest.raises(TypeError):
        store.metadata.put("/a", not_bytes, expected_version=ABSENT)
    assert store.ledgers.append(ledger_id, [b"first"]) == 0
    assert store.metadata.get("/a") is None


def test_the_suite_refuses_a_used_storage():
    store = MemoryStore()
    store.metadata.put("/a", b"", expected_version=ABSENT)
    with pytest.raises(ValueError, match="empty storage"):
        check_store(lambda: MemoryStore(store.disk))


class Forwarding:
    """Ledgers or metadata that keep every promise; a subclass breaks one."""

    def __init__(self, inner, disk):
        self.inner = inner
        self.disk = disk

    def __getattr__(self, name):
        return getattr(self.inner, name)


class AppendStopsHalfway(Forwarding):
    def append(self, ledger_id, entries):
        return self.inner.append(ledger_id, entries[:1])


class AppendReturnsTheFirst(Forwarding):
    def append(self, ledger_id, entries):
        return self.inner.append(ledger_id, entries) + 1 - len(entries)


class AppendOfNothingIsNotChecked(Forwarding):
    def append(self, ledger_id, entries):
        return self.inner.append(ledger_id, entries) if entries else -1


class AppendManyStopsAtARefusal(Forwarding):
    def append_many(self, appends):
        outcomes = []
        for each in appends:
            refused = outcomes and isinstance(outcomes[-1], Exception)
            outcomes.append(StoreError("stopped") if refused else self.inner.append_many([each])[0])
        return outcomes or self.inner.append_many([])


class AppendManySharesOneError(Forwarding):
    def append_many(self, appends):
        outcomes = self.inner.append_many(appends)
        errors = {type(each): each for each in outcomes if isinstance(each, Exception)}
        return [errors.get(type(each), each) for each in outcomes]


class AppendManyTakesALedgerTwice(Forwarding):
    def append_many(self, appends):
        return [self.inner.append_many([each])[0] for each in appends] or self.inner.append_many([])


class LaterOpeningsAppend(Forwarding):
    def __init__(self, inner, disk):
        super().__init__(inner, disk)
        for ledger in disk.ledgers.values():
            if ledger.writer:
                ledger.writer = disk.openings


class FenceIsIgnored(Forwarding):
    def fence(self, ledger_id):
        return self.last(ledger_id)


class FenceIsForgottenAtReopen(Forwarding):
    def __init__(self, inner, disk):
        super().__init__(inner, disk)
        for ledger in disk.ledgers.values():
            ledger.writer = disk.openings


class FenceReturnsTheCount(Forwarding):
    def fence(self, ledger_id):
        return self.inner.fence(ledger_id) + 1


class LedgerIdsReturn(Forwarding):
    def create(self, owner):
        self.disk.next_ledger_id = max(self.disk.ledgers, default=0) + 1
        return self.inner.create(owner)


class LedgerIdsReturnAfterReopen(Forwarding):
    def __init__(self, inner, disk):
        super().__init__(inner, disk)
        disk.next_ledger_id = max(disk.ledgers, default=0) + 1


class LastEntryIsLostAtReopen(Forwarding):
    def __init__(self, inner, disk):
        super().__init__(inner, disk)
        for ledger in disk.ledgers.values():
            del ledger.entries[-1:]


class ReadStopsAtTheEnd(Forwarding):
    def read(self, ledger_id, first, end):
        return self.inner.read(ledger_id, first, min(end, self.last(ledger_id) + 1))


class ReadIncludesTheEnd(Forwarding):
    def read(self, ledger_id, first, end):
        return self.inner.read(ledger_id, first, min(end + 1, self.last(ledger_id) + 1))


class EmptyEntryBecomesZero(Forwarding):
    def append(self, ledger_id, entries):
        return self.inner.append(ledger_id, [entry or b"\0" for entry in entries])


class EntriesAreBuffers(Forwarding):
    def append(self, ledger_id, entries):
        last = self.inner.append(ledger_id, entries)
        self.disk.ledgers[ledger_id].entries[last + 1 - len(entries) :] = entries
        return last


class DeleteMissesTheMissing(Forwarding):
    def delete(self, ledger_id):
        if self.last(ledger_id) < -1:
            raise LedgerNotFoundError
        self.inner.delete(ledger_id)


class DeleteKeepsTheLedger(Forwarding):
    def delete(self, ledger_id):
        if ledger_id in self.disk.ledgers:
            self.disk.ledgers[ledger_id].entries.clear()


class OwnedByPrefix(Forwarding):
    def owned_by(self, owner):
        ledgers = self.disk.ledgers
        return sorted(ledger_id for ledger_id in ledgers if ledgers[ledger_id].owner.startswith(owner))


class OwnedByHighestFirst(Forwarding):
    def owned_by(self, owner):
        return self.inner.owned_by(owner)[::-1]


class OwnersAreRepeated(Forwarding):
    def owners(self):
        return sorted(ledger.owner for ledger in self.disk.ledgers.values())


class OwnersAreUnsorted(Forwarding):
    def owners(self):
        return list(dict.fromkeys(ledger.owner for ledger in self.disk.ledgers.values()))


class OwnersOfNothing(Forwarding):
    def __init__(self, inner, disk):
        super().__init__(inner, disk)
        self.created = set(inner.owners())

    def create(self, owner):
        self.created.add(owner)
        return self.inner.create(owner)

    def owners(self):
        return sorted(self.created)


class OwnersOfTheFencedAreForgotten(Forwarding):
    def owners(self):
        return sorted({ledger.owner for ledger in self.disk.ledgers.values() if ledger.writer})


class DeletedLedgersReturnAtReopen(Forwarding):
    def delete(self, ledger_id):
        if ledger_id in self.disk.ledgers:
            GRAVES.setdefault(self.disk, {})[ledger_id] = self.disk.ledgers[ledger_id]
        self.inner.delete(ledger_id)

    def __init__(self, inner, disk):
        super().__init__(inner, disk)
        disk.ledgers |= GRAVES.pop(disk, {})


GRAVES = {}


class FenceOfTheEmptyIsForgottenAtReopen(Forwarding):
    def __init__(self, inner, disk):
        super().__init__(inner, disk)
        for ledger in disk.ledgers.values():
            if not ledger.entries:
                ledger.writer = disk.openings


class OwnedByForgetsTheFenced(Forwarding):
    def owned_by(self, owner):
        return [ledger_id for ledger_id in self.inner.owned_by(owner) if self.disk.ledgers[ledger_id].writer]


class OwnedByIsSortedAsText(Forwarding):
    def owned_by(self, owner):
        return sorted(self.inner.owned_by(owner), key=str)


class EmptyRangeMustExist(Forwarding):
    def read(self, ledger_id, first, end):
        if first == end > self.last(ledger_id) + 1:
            raise LedgerNotFoundError
        return self.inner.read(ledger_id, first, end)


class OwnersAreSortedAsUtf16(Forwarding):
    def owners(self):
        return sorted(self.inner.owners(), key=lambda owner: owner.encode("utf-16-be"))


class AppendStopsAtAThousand(Forwarding):
    def append(self, ledger_id, entries):
        return self.inner.append(ledger_id, entries[:1000])


class OwnersAreCut(Forwarding):
    def create(self, owner):
        return self.inner.create(owner[:100])

    def owned_by(self, owner):
        return self.inner.owned_by(owner[:100])


class OwnersAreStripped(Forwarding):
    def create(self, owner):
        return self.inner.create(owner.strip())

    def owned_by(self, owner):
        return self.inner.owned_by(owner.strip())


class OwnersAreNotChecked(Forwarding):
    def create(self, owner):
        return self.inner._create(owner)


class VersionIsNotChecked(Forwarding):
    def put(self, path, data, *, expected_version):
        value = self.get(path)
        return self.inner.put(path, data, expected_version=value.version if value else ABSENT)


class CreateOverwrites(Forwarding):
    def put(self, path, data, *, expected_version):
        if expected_version == ABSENT and (value := self.get(path)):
            expected_version = value.version
        return self.inner.put(path, data, expected_version=expected_version)


class DeleteIsNotChecked(Forwarding):
    def delete(self, path, *, expected_version):
        if value := self.get(path):
            self.inner.delete(path, expected_version=value.version)


class VersionsReturn(Forwarding):
    def delete(self, path, *, expected_version):
        self.inner.delete(path, expected_version=expected_version)
        self.disk.first_version = 0


class VersionsReturnAfterReopen(Forwarding):
    def __init__(self, inner, disk):
        super().__init__(inner, disk)
        disk.first_version = 0


class DeleteAcceptsAnEarlierLife(Forwarding):
    def delete(self, path, *, expected_version):
        value = self.get(path)
        if value and 0 <= expected_version < self.disk.first_version:
            expected_version = value.version
        self.inner.delete(path, expected_version=expected_version)


class AnyNegativeVersionIsAbsent(Forwarding):
    def put(self, path, data, *, expected_version):
        return self.inner.put(path, data, expected_version=max(ABSENT, expected_version))


class PathsAreCut(Forwarding):
    def get(self, path):
        return self.inner.get(path[:200])

    def put(self, path, data, *, expected_version):
        return self.inner.put(path[:200], data, expected_version=expected_version)


class ChildrenAreSortedAsUtf16(Forwarding):
    def children(self, path):
        return sorted(self.inner.children(path), key=lambda name: name.encode("utf-16-be"))


class LoneSurrogatesAreReplaced(Forwarding):
    def get(self, path):
        return self.inner.get(path.encode(errors="replace").decode())


class ChildrenAreLeaves(Forwarding):
    def children(self, path):
        prefix = path if path == "/" else f"{path}/"
        below = (value_path[len(prefix) :] for value_path in self.disk.values if value_path.startswith(prefix))
        return sorted(name for name in below if "/" not in name)


class ChildrenOfNamesakes(Forwarding):
    def children(self, path):
        check_path(path if path != "/" else "/top")
        below = [value_path[len(path) :] for value_path in self.disk.values if value_path.startswith(path)]
        return sorted({name.strip("/").partition("/")[0] for name in below if name})


class PathsAreCleanedUp(Forwarding):
    def get(self, path):
        return self.inner.get("/" + "/".join(filter(None, path.split("/"))))


class BrokenStore:
    """A memory store with ledgers or metadata that break a promise."""

    def __init__(self, disk, *, ledgers=Forwarding, metadata=Forwarding):
        self.inner = MemoryStore(disk)
        self.ledgers = ledgers(self.inner.ledgers, disk)
        self.metadata = metadata(self.inner.metadata, disk)

    def close(self):
        self.inner.close()


class CloseDoesNothing(BrokenStore):
    def close(self):
        pass


class CloseOnlyOnce(BrokenStore):
    closed = False

    def close(self):
        if self.closed:
            raise RuntimeError("closed already")
        self.closed = True
        self.inner.close()


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (AppendStopsHalfway, "append of three"),
        (AppendReturnsTheFirst, "append of three"),
        (AppendOfNothingIsNotChecked, "append of nothing"),
        (AppendManyStopsAtARefusal, "append_many with refused appends"),
        (AppendManySharesOneError, "has different errors"),
        (AppendManyTakesALedgerTwice, "append_many with a ledger twice"),
        (LaterOpeningsAppend, "append to a fenced ledger"),
        (FenceIsIgnored, "append_many with refused appends"),
        (FenceIsForgottenAtReopen, "append to a fenced ledger"),
        (FenceReturnsTheCount, "fence returns the last id"),
        (LedgerIdsReturn, "is above a deleted one"),
        (LedgerIdsReturnAfterReopen, "are above every earlier one"),
        (LastEntryIsLostAtReopen, "are there after a reopen"),
        (ReadStopsAtTheEnd, "read from 0 to 4 of three entries"),
        (ReadIncludesTheEnd, "read from 0 to 0 of three entries"),
        (EmptyEntryBecomesZero, "an entry of 0 bytes"),
        (EntriesAreBuffers, "after the caller's buffer changed"),
        (DeleteMissesTheMissing, "does nothing if the ledger does not exist"),
        (DeleteKeepsTheLedger, "append with a deleted ledger"),
        (OwnedByPrefix, "owned_by"),
        (OwnedByHighestFirst, "owned_by"),
        (OwnersAreRepeated, "owners, sorted"),
        (OwnersAreUnsorted, "owners, sorted"),
        (OwnersOfNothing, "owners after the last ledger was deleted"),
        (OwnersOfTheFencedAreForgotten, "owners after one ledger of two"),
        (DeletedLedgersReturnAtReopen, "owned_by after a reopen"),
        (FenceOfTheEmptyIsForgottenAtReopen, "append to a fenced ledger"),
        (OwnedByForgetsTheFenced, "owned_by with fenced ledgers"),
        (OwnedByIsSortedAsText, "lowest number first"),
        (EmptyRangeMustExist, "returns the entries from first"),
        (OwnersAreSortedAsUtf16, "owners, sorted"),
        (AppendStopsAtAThousand, "append of 1,500"),
        (OwnersAreCut, "owners that differ late, or by blanks"),
        (OwnersAreStripped, "owners that differ late, or by blanks"),
        (OwnersAreNotChecked, "an owner with a lone surrogate"),
    ],
)
def test_broken_ledgers_are_caught(broken, promise):
    disk = MemoryDisk()
    with pytest.raises(AssertionError, match=promise):
        check_store(lambda: BrokenStore(disk, ledgers=broken))


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (VersionIsNotChecked, "put of /cas expecting version -1"),
        (CreateOverwrites, "put of /cas expecting version -1"),
        (DeleteIsNotChecked, "delete of /cas expecting version -1"),
        (VersionsReturn, "of a deleted value"),
        (VersionsReturnAfterReopen, "of a deleted value"),
        (ChildrenAreLeaves, "children"),
        (ChildrenOfNamesakes, "children"),
        (PathsAreCleanedUp, "get of 'plain'"),
        (DeleteAcceptsAnEarlierLife, "delete instead of put expecting version"),
        (AnyNegativeVersionIsAbsent, "put of /nothing expecting version -2"),
        (PathsAreCut, "path that differs late"),
        (ChildrenAreSortedAsUtf16, "children, sorted by code points"),
        (LoneSurrogatesAreReplaced, "get of '/lone"),
    ],
)
def test_broken_metadata_is_caught(broken, promise):
    disk = MemoryDisk()
    with pytest.raises(AssertionError, match=promise):
        check_store(lambda: BrokenStore(disk, metadata=broken))


@pytest.mark.parametrize(
    ("broken", "promise"), [(CloseDoesNothing, "create after close"), (CloseOnlyOnce, "closing it twice")]
)
def test_a_broken_close_is_caught(broken, promise):
    disk = MemoryDisk()
    with pytest.raises(AssertionError, match=promise):
        check_store(lambda: broken(disk))


def test_the_forwarding_itself_breaks_nothing():
    disk = MemoryDisk()
    check_store(lambda: BrokenStore(disk))
