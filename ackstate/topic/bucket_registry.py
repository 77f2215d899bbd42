"""The registry of the snapshots of delay buckets, as `delay.BucketRegistry`: a value of the metadata store for each."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.stores.base import ABSENT, check_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.delay.buckets.snapshots import BucketRegistry, SnapshotLedgers
    from ackstate.stores.base import LedgerStore, MetadataStore


@final
class MetadataBucketRegistry:
    """The buckets of one topic: a value for each below a path that nothing else uses.

    Every call reads the present value, so that a bucket of another owner is not overwritten unseen: the second owner
    gets `VersionMismatchError`, a `StoreError`.

    Args:
        metadata: The store.
        path: Above the values, such as ``/delayed-buckets/orders``.

    Raises:
        ValueError: It is not a path.
    """

    def __init__(self, metadata: MetadataStore, path: str) -> None:
        check_path(path)
        self._metadata = metadata
        self._path = path

    def get_all(self) -> Mapping[str, str]:
        """Return every name with its text; bytes that are not UTF-8 are escaped, so that no bucket has such a text.

        Raises:
            StoreError: The store failed.
        """
        found = {name: self._metadata.get(self._value_path(name)) for name in self._metadata.children(self._path)}
        return {
            name: value.data.decode(errors="backslashreplace") for name, value in found.items() if value is not None
        }

    def put(self, name: str, text: str) -> None:
        """Set the text of a name.

        Raises:
            ValueError: The name is empty or has a slash.
            StoreError: The store failed; whether it happened is unknown.
        """
        found = self._metadata.get(self._value_path(name))
        version = ABSENT if found is None else found.version
        self._metadata.put(self._value_path(name), text.encode(), expected_version=version)

    def remove(self, name: str) -> None:
        """Remove a name, if it is there; errors as for `put`."""
        found = self._metadata.get(self._value_path(name))
        if found is not None:
            self._metadata.delete(self._value_path(name), expected_version=found.version)

    def _value_path(self, name: str) -> str:
        if "/" in name:
            raise ValueError(f"a name in the registry must have no slash, got {name!r}")
        path = f"{self._path}/{name}"
        check_path(path)
        return path


if TYPE_CHECKING:
    _: type[BucketRegistry] = MetadataBucketRegistry

    def _is_enough(ledgers: LedgerStore) -> SnapshotLedgers:
        return ledgers
