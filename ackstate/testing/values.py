"""The promises of `MetadataStore` that a single opening can check."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ackstate.stores.base import ABSENT, PayloadTooLargeError, Versioned, VersionMismatchError
from ackstate.testing.expectation import expect, expect_refusal

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import Store

_MIB = 1 << 20


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


CHECKS_OF_VALUES = (
    _check_values,
    _check_expected_versions,
    _check_children,
    _check_paths,
)
"""Each receives an open store."""
