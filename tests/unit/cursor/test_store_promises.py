"""Promises of a store that `check_store` must not take on trust; `test_store_conformance` has the others."""

from functools import partial

import pytest

from ackstate.stores.base import ABSENT, StoreError, Versioned
from ackstate.stores.memory import MemoryDisk, MemoryStore
from ackstate.testing import check_store
from wrapped_store import WrappedStore


def keep_the_fenced(disk, delete, key, **version):
    if key not in disk.ledgers or disk.ledgers[key].writer:
        delete(key, **version)


def name_a_leaf(disk, children, path):
    return children(path) or [""] * (path in disk.values)


def take_any_version_below_absent(disk, put, path, data, *, expected_version):
    if expected_version < ABSENT and path in disk.values:
        expected_version = disk.values[path].version
    return put(path, data, expected_version=expected_version)


def append_though_closed(disk, append, ledger_id, entries):
    try:
        return append(ledger_id, entries)
    except StoreError as error:
        if "closed" in str(error):
            disk.ledgers[ledger_id].entries.extend(entries)
        raise


def put_though_closed(disk, put, path, data, *, expected_version):
    try:
        return put(path, data, expected_version=expected_version)
    except StoreError as error:
        if "closed" in str(error):
            disk.values[path] = Versioned(data, expected_version)
        raise


BROKEN = {
    "a fenced ledger can be deleted": ("delete", keep_the_fenced),
    "children of a leaf": ("children", name_a_leaf),
    "put of /cas expecting version -2": ("put", take_any_version_below_absent),
    "a ledger after calls to a closed store": ("append", append_though_closed),
    "a value after calls to a closed store": ("put", put_though_closed),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_store_that_breaks_a_promise_is_caught(promise):
    disk, (broken, instead) = MemoryDisk(), BROKEN[promise]

    def look_up(name, call):
        return partial(instead, disk, call) if name == broken else call

    with pytest.raises(AssertionError, match=promise):
        check_store(lambda: WrappedStore(MemoryStore(disk), look_up))
