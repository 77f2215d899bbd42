"""Writes the properties (name -> text) that the application and the broker attach to a cursor, apart from its acks."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.wire.native import check_cursor_properties

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping

    from ackstate.cursor.journal.journal import Journal

INTERNAL_PREFIX = "#pulsar.internal."
"""The prefix of the names that belong to the broker, not to the application."""


OWN_PREFIX = f"{INTERNAL_PREFIX}ackstate."
"""The prefix of the names of our own properties."""

DELETED_PROPERTY = f"{OWN_PREFIX}deleted"
"""Marks the record of a subscription that is being deleted; see `ackstate.cursor.journal.deletion`."""


@final
class CursorProperties:
    """The properties of one cursor. Every change is durable when the call returns. Safe for any number of threads.

    Every method that changes something raises:
        CursorFencedError: Another owner has the cursor.
        PayloadTooLargeError: It would leave no room in the record: of `CursorConfig.metadata_bytes_max`, all properties
            must leave about 150 bytes. Nothing was changed.
        StoreError: The write failed; whether it happened is unknown.
        CursorClosedError: The cursor is closed.

    Args:
        journal: Where they are stored.
        writing: Held while the journal is written.
        check_open: Raises `CursorClosedError` if the cursor is closed.
    """

    def __init__(self, journal: Journal, *, writing: threading.Lock, check_open: Callable[[], None]) -> None:
        self._journal = journal
        self._writing = writing
        self._check_open = check_open

    def get_all(self) -> Mapping[str, str]:
        """Return all properties: to be read, not changed."""
        return self._journal.cursor_properties

    def replace(self, properties: Mapping[str, str]) -> None:
        """Replace the application's properties; those of the broker stay.

        Raises:
            ValueError: A name belongs to the broker, or a name or a text is too long.
            TypeError: One is not text.

        Source: ``ManagedCursorImpl.setCursorProperties`` of Apache Pulsar.
        """
        check_cursor_properties(properties)
        for name in properties:
            if name.startswith(INTERNAL_PREFIX):
                raise ValueError(f"cursor property {name!r}: names that begin with {INTERNAL_PREFIX!r} are internal")
        with self._writing:
            self._check_open()
            internal = {name: text for name, text in self.get_all().items() if name.startswith(INTERNAL_PREFIX)}
            self._write({**internal, **properties})

    def put_internal(self, name: str, text: str) -> None:
        """Set one of the broker's own properties.

        Raises:
            ValueError: The name does not begin with ``#pulsar.internal.``, or it or the text is too long.
            TypeError: One is not text.

        Source: ``ManagedCursorImpl.putCursorProperty`` of Apache Pulsar.
        """
        check_cursor_properties({name: text})
        if not name.startswith(INTERNAL_PREFIX):
            raise ValueError(f"cursor property {name!r}: internal names begin with {INTERNAL_PREFIX!r}")
        with self._writing:
            self._check_open()
            before = self.get_all()
            if before.get(name) != text:
                self._write({**before, name: text})

    def _write(self, properties: Mapping[str, str]) -> None:
        self._journal.write_cursor_properties(properties)
