"""The embedded stores keep the contract of `ackstate.stores.base`, and `check_store` sees when a store does not."""

from contextlib import closing
from functools import partial

import pytest

from ackstate.stores.base import (
    ABSENT,
    METADATA_VALUE_BYTES_MAX,
    LedgerNotFoundError,
    PayloadTooLargeError,
    StoreError,
    Versioned,
    check_path,
)
from ackstate.stores.memory import MemoryDisk, MemoryStore
from ackstate.stores.sqlite import SqliteStore
from ackstate.testing import check_store

LIMIT = 200_000


@pytest.fixture(params=["memory", "sqlite"])
def open_store(request, tmp_path):
    """Open the same storage each time."""
    disk = MemoryDisk()
    return partial(MemoryStore, disk) if request.param == "memory" else partial(SqliteStore, tmp_path)


def test_each_embedded_store_keeps_the_contract(open_store):
    check_store(lambda: open_store(metadata_value_bytes_max=LIMIT), metadata_value_bytes_max=LIMIT)


def test_a_value_above_the_limit_of_an_opening_is_neither_written_nor_read_and_can_be_replaced(open_store):
    with closing(open_store()) as store:
        with pytest.raises(PayloadTooLargeError, match="67108865"):
            store.metadata.put("/a", bytes(METADATA_VALUE_BYTES_MAX + 1), expected_version=ABSENT)
        version = store.metadata.put("/a", bytes(1_001), expected_version=ABSENT)
    with closing(open_store(metadata_value_bytes_max=1_000)) as store:
        with pytest.raises(PayloadTooLargeError, match=r"/a: .* at most 1000 bytes .*, got 1001"):
            store.metadata.get("/a")
        assert store.metadata.children("/") == ["a"]
        store.metadata.put("/a", bytes(1_000), expected_version=version)
        assert store.metadata.get("/a").data == bytes(1_000)


def test_what_is_no_buffer_is_refused_and_leaves_the_store_usable(open_store):
    with closing(open_store()) as store:
        ledger_id = store.ledgers.create("billing")
        for not_bytes in ("text", 5, None):
            with pytest.raises(TypeError):
                store.ledgers.append(ledger_id, [b"good", not_bytes])
            with pytest.raises(TypeError):
                store.metadata.put("/a", not_bytes, expected_version=ABSENT)
        assert store.ledgers.append(ledger_id, [b"first"]) == 0
        assert store.metadata.get("/a") is None


def test_the_suite_refuses_a_used_storage_and_another_limit():
    store = MemoryStore()
    store.metadata.put("/a", b"", expected_version=ABSENT)
    with pytest.raises(ValueError, match="empty storage"):
        check_store(lambda: MemoryStore(store.disk))
    for limit, promise in (
        (METADATA_VALUE_BYTES_MAX, "put of too large a value over another: expected PayloadTooLargeError"),
        (LIMIT - 1, "accepts a value of `bytes_max` bytes"),
    ):
        disk = MemoryDisk()
        with pytest.raises(AssertionError, match=promise):
            check_store(partial(MemoryStore, disk, metadata_value_bytes_max=limit), metadata_value_bytes_max=LIMIT)


class Part:
    """Ledgers or metadata of a `MemoryStore` with other methods, of which `opened` is called at once."""

    def __init__(self, inner, disk, methods):
        self.inner, self.disk = inner, disk
        for name, method in methods.items():
            setattr(self, name, partial(method, self))
        methods.get("opened", lambda _: None)(self)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Broken:
    """A `MemoryStore` with other methods in one of its parts."""

    def __init__(self, disk, part="", methods=()):
        store = MemoryStore(disk)
        self.ledgers, self.metadata, self.close = store.ledgers, store.metadata, store.close
        if part:
            setattr(self, part, Part(getattr(store, part), disk, methods))
        elif methods:
            self.close = partial(methods["close"], store)


def assert_caught(part, breach):
    promise, methods = breach
    disk = MemoryDisk()
    with pytest.raises(AssertionError, match=promise):
        check_store(lambda: Broken(disk, part, methods))


def each_ledger(change):
    """Change each ledger when the store is opened."""

    def opened(it):
        for ledger in it.disk.ledgers.values():
            change(ledger, it.disk)

    return opened


def let_append(ledger, disk):
    ledger.writer = disk.openings


def share_one_error(it, appends):
    outcomes = it.inner.append_many(appends)
    errors = {type(each): each for each in outcomes if isinstance(each, Exception)}
    return [errors.get(type(each), each) for each in outcomes]


def stop_at_a_refusal(it, appends):
    outcomes = []
    for each in appends:
        refused = outcomes and isinstance(outcomes[-1], Exception)
        outcomes.append(StoreError("stopped") if refused else it.inner.append_many([each])[0])
    return outcomes or it.inner.append_many([])


def append_buffers(it, ledger_id, entries):
    last = it.inner.append(ledger_id, entries)
    it.disk.ledgers[ledger_id].entries[last + 1 - len(entries) :] = entries
    return last


def use_ids_again(it, *_):
    it.disk.next_ledger_id = max(it.disk.ledgers, default=0) + 1


def delete_if_there(it, ledger_id):
    it.last(ledger_id)
    it.inner.delete(ledger_id)


def keep_the_fenced(it, ledger_id):
    if ledger_id not in it.disk.ledgers or it.disk.ledgers[ledger_id].writer:
        it.inner.delete(ledger_id)


def append_though_closed(it, ledger_id, entries):
    try:
        return it.inner.append(ledger_id, entries)
    except StoreError as error:
        if "closed" in str(error):
            it.disk.ledgers[ledger_id].entries.extend(entries)
        raise


def bury(it, ledger_id):
    if ledger_id in it.disk.ledgers:
        vars(it.disk).setdefault("graves", {})[ledger_id] = it.disk.ledgers[ledger_id]
    it.inner.delete(ledger_id)


def read_no_range_beyond(it, ledger_id, first, end):
    if first == end > it.last(ledger_id) + 1:
        raise LedgerNotFoundError
    return it.inner.read(ledger_id, first, end)


def remember_owner(it, owner):
    vars(it).setdefault("made", set(it.inner.owners())).add(owner)
    return it.inner.create(owner)


def owners_of(it):
    return [ledger.owner for ledger in it.disk.ledgers.values()]


def utf_16(text):
    return text.encode("utf-16-be")


BROKEN_LEDGERS = {
    "append stops halfway": ("append of three", {"append": lambda it, id_, all_: it.inner.append(id_, all_[:1])}),
    "append returns the first": (
        "append of three", {"append": lambda it, id_, entries: it.inner.append(id_, entries) + 1 - len(entries)}
    ),
    "append of nothing is not checked": (
        "append of nothing", {"append": lambda it, id_, entries: it.inner.append(id_, entries) if entries else -1}
    ),
    "an empty entry becomes zero": (
        "an entry of 0 bytes", {"append": lambda it, id_, all_: it.inner.append(id_, [each or b"\0" for each in all_])}
    ),
    "entries are buffers": ("after the caller's buffer changed", {"append": append_buffers}),
    "append stops at a thousand": (
        "append of 1,500", {"append": lambda it, id_, entries: it.inner.append(id_, entries[:1000])}
    ),
    "append_many stops at a refusal": ("append_many with refused appends", {"append_many": stop_at_a_refusal}),
    "append_many shares one error": ("has different errors", {"append_many": share_one_error}),
    "append_many takes a ledger twice": (
        "append_many with a ledger twice",
        {"append_many": lambda it, all_: [it.inner.append_many([one])[0] for one in all_] or it.inner.append_many([])},
    ),
    "later openings append": (
        "append to a fenced ledger",
        {"opened": each_ledger(lambda ledger, disk: ledger.writer and let_append(ledger, disk))},
    ),
    "fence is ignored": ("append_many with refused appends", {"fence": lambda it, id_: it.last(id_)}),
    "fence is forgotten at a reopen": ("append to a fenced ledger", {"opened": each_ledger(let_append)}),
    "fence of the empty is forgotten at a reopen": (
        "append to a fenced ledger",
        {"opened": each_ledger(lambda ledger, disk: ledger.entries or let_append(ledger, disk))},
    ),
    "fence returns the count": ("fence returns the last id", {"fence": lambda it, id_: it.inner.fence(id_) + 1}),
    "ids return": (
        "is above a deleted one", {"create": lambda it, owner: use_ids_again(it) or it.inner.create(owner)}
    ),
    "ids return after a reopen": ("are above every earlier one", {"opened": use_ids_again}),
    "the last entry is lost at a reopen": (
        "are there after a reopen",
        {"opened": each_ledger(lambda ledger, _: ledger.entries and ledger.entries.pop())},
    ),
    "read stops at the end": (
        "read from 0 to 4 of three entries",
        {"read": lambda it, id_, first, end: it.inner.read(id_, first, min(end, it.last(id_) + 1))},
    ),
    "read includes the end": (
        "read from 0 to 0 of three entries",
        {"read": lambda it, id_, first, end: it.inner.read(id_, first, min(end + 1, it.last(id_) + 1))},
    ),
    "an empty range must exist": ("returns the entries from first", {"read": read_no_range_beyond}),
    "delete misses the missing": ("does nothing if the ledger does not exist", {"delete": delete_if_there}),
    "delete keeps the ledger": (
        "append with a deleted ledger",
        {"delete": lambda it, id_: id_ in it.disk.ledgers and it.disk.ledgers[id_].entries.clear()},
    ),
    "deleted ledgers return at a reopen": (
        "owned_by after a reopen",
        {"delete": bury, "opened": lambda it: it.disk.ledgers.update(vars(it.disk).pop("graves", {}))},
    ),
    "owned_by takes a prefix": (
        "owned_by",
        {"owned_by": lambda it, owner: [id_ for id_, each in it.disk.ledgers.items() if each.owner.startswith(owner)]},
    ),
    "owned_by is sorted as text": (
        "lowest number first", {"owned_by": lambda it, owner: sorted(it.inner.owned_by(owner), key=str)}
    ),
    "owned_by forgets the fenced": (
        "owned_by with fenced ledgers",
        {"owned_by": lambda it, owner: [id_ for id_ in it.inner.owned_by(owner) if it.disk.ledgers[id_].writer]},
    ),
    "owners are repeated": ("owners, sorted", {"owners": lambda it: sorted(owners_of(it))}),
    "owners are sorted as UTF-16": ("owners, sorted", {"owners": lambda it: sorted(it.inner.owners(), key=utf_16)}),
    "owners of nothing": (
        "owners after the last ledger was deleted",
        {"create": remember_owner, "owners": lambda it: sorted(vars(it).get("made", it.inner.owners()))},
    ),
    "owners of the fenced are forgotten": (
        "owners after one ledger of two",
        {"owners": lambda it: sorted({ledger.owner for ledger in it.disk.ledgers.values() if ledger.writer})},
    ),
    "owners are cut": (
        "owners that differ late, or by blanks",
        {"create": lambda it, owner: it.inner.create(owner[:100]),
         "owned_by": lambda it, owner: it.inner.owned_by(owner[:100])},
    ),
    "an owner has a name": (
        "owners with any names", {"create": lambda it, owner: it.inner.create(owner.strip("/.") or "none")}
    ),
    "a fenced ledger stays": ("a fenced ledger can be deleted", {"delete": keep_the_fenced}),
    "a closed store appends": ("a ledger after calls to a closed store", {"append": append_though_closed}),
    "owners are not checked": ("an owner with a lone surrogate", {"create": lambda it, owner: it.inner._create(owner)}),
}  # fmt: skip


@pytest.mark.parametrize("breach", BROKEN_LEDGERS.values(), ids=BROKEN_LEDGERS)
def test_broken_ledgers_are_caught(breach):
    assert_caught("ledgers", breach)


def put_at_any_version(it, path, data, *, expected_version):
    value = it.get(path)
    return it.inner.put(path, data, expected_version=value.version if value else ABSENT)


def create_over(it, path, data, *, expected_version):
    value = it.get(path) if expected_version == ABSENT else None
    return it.inner.put(path, data, expected_version=value.version if value else expected_version)


def put_at_any_version_below_absent(it, path, data, *, expected_version):
    if expected_version < ABSENT and path in it.disk.values:
        expected_version = it.disk.values[path].version
    return it.inner.put(path, data, expected_version=expected_version)


def put_though_closed(it, path, data, *, expected_version):
    try:
        return it.inner.put(path, data, expected_version=expected_version)
    except StoreError as error:
        if "closed" in str(error):
            it.disk.values[path] = Versioned(data, expected_version)
        raise


def delete_at_any_version(it, path, *, expected_version):
    if value := it.get(path):
        it.inner.delete(path, expected_version=value.version)


def forget_versions(it, path, *, expected_version):
    it.inner.delete(path, expected_version=expected_version)
    it.disk.first_version = 0


def delete_of_an_earlier_life(it, path, *, expected_version):
    value = it.get(path)
    is_earlier = value and 0 <= expected_version < it.disk.first_version
    it.inner.delete(path, expected_version=value.version if is_earlier else expected_version)


def children_that_are_leaves(it, path):
    prefix = path if path == "/" else f"{path}/"
    below = (each[len(prefix) :] for each in it.disk.values if each.startswith(prefix))
    return sorted(name for name in below if "/" not in name)


def children_of_namesakes(it, path):
    check_path(path if path != "/" else "/top")
    below = [each[len(path) :] for each in it.disk.values if each.startswith(path)]
    return sorted({name.strip("/").partition("/")[0] for name in below if name})


BROKEN_METADATA = {
    "the version is not checked": ("put of /cas expecting version -1", {"put": put_at_any_version}),
    "create overwrites": ("put of /cas expecting version -1", {"put": create_over}),
    "any negative version is absent": (
        "put of /nothing expecting version -2",
        {"put": lambda it, path, data, *, expected_version:
            it.inner.put(path, data, expected_version=max(ABSENT, expected_version))},
    ),
    "a version below absent is any": ("put of /cas expecting version -2", {"put": put_at_any_version_below_absent}),
    "a closed store puts": ("a value after calls to a closed store", {"put": put_though_closed}),
    "a leaf has a child": (
        "children of a leaf", {"children": lambda it, path: it.inner.children(path) or [""] * (path in it.disk.values)}
    ),
    "delete is not checked": ("delete of /cas expecting version -1", {"delete": delete_at_any_version}),
    "delete accepts an earlier life": (
        "delete instead of put expecting version", {"delete": delete_of_an_earlier_life}
    ),
    "versions return": ("of a deleted value", {"delete": forget_versions}),
    "versions return after a reopen": (
        "of a deleted value", {"opened": lambda it: setattr(it.disk, "first_version", 0)}
    ),
    "children are leaves": ("children", {"children": children_that_are_leaves}),
    "children of namesakes": ("children", {"children": children_of_namesakes}),
    "children are sorted as UTF-16": (
        "children, sorted by code points", {"children": lambda it, path: sorted(it.inner.children(path), key=utf_16)}
    ),
    "paths are cleaned up": (
        "get of 'plain'", {"get": lambda it, path: it.inner.get("/" + "/".join(filter(None, path.split("/"))))}
    ),
    "paths are cut": (
        "path that differs late",
        {"get": lambda it, path: it.inner.get(path[:200]),
         "put": lambda it, path, data, **version: it.inner.put(path[:200], data, **version)},
    ),
    "lone surrogates are replaced": (
        "get of '/lone", {"get": lambda it, path: it.inner.get(path.encode(errors="replace").decode())}
    ),
}  # fmt: skip


@pytest.mark.parametrize("breach", BROKEN_METADATA.values(), ids=BROKEN_METADATA)
def test_broken_metadata_is_caught(breach):
    assert_caught("metadata", breach)


def close_once(store):
    if store.is_over:
        raise RuntimeError("closed already")
    store.close()


@pytest.mark.parametrize(
    "breach", [("create after close", {"close": lambda store: None}), ("closing it twice", {"close": close_once})]
)
def test_a_broken_close_is_caught(breach):
    assert_caught("", breach)
