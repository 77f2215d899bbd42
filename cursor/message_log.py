"""A topic's messages in ledgers of a store: what cursors acknowledge and a restart reads again."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple, final
from urllib.parse import quote

from ackstate.errors import CorruptStateError
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cursor.store import Store

NO_DELAY = -1

_HEADER = struct.Struct("<qq")


class Message(NamedTuple):
    """What a producer published.

    Attributes:
        publish_time_ms: When.
        deliver_at_ms: Not to be delivered before; `NO_DELAY` for at once.
        payload: Opaque bytes.
    """

    publish_time_ms: int
    deliver_at_ms: int
    payload: bytes


@final
class MessageLog:
    """The messages of one topic, appended in batches with one sync each, in ledgers of a bounded number of entries.

    Made by `open`. After an open the first batch begins a new ledger, as in Pulsar. One writer at a time.
    """

    def __init__(self, store: Store, owner: str, *, entries_per_ledger_max: int) -> None:
        if entries_per_ledger_max < 1:
            raise ValueError(f"entries_per_ledger_max must be positive, found {entries_per_ledger_max}")
        self._store = store
        self._owner = owner
        self._entries_per_ledger_max = entries_per_ledger_max
        self._room = 0  # entries that the open ledger may still take; none after a recovery
        ledger_ids = store.ledgers.owned_by(owner)
        if not ledger_ids:
            ledger_ids = [store.ledgers.create(owner)]
            self._room = entries_per_ledger_max
        counts = {ledger_id: store.ledgers.last(ledger_id) + 1 for ledger_id in ledger_ids}
        self.ledgers = LedgerMap.from_counts(counts)

    @classmethod
    def open(cls, store: Store, *, topic: str, entries_per_ledger_max: int = 50_000) -> MessageLog:
        """Open a topic's log, or create it if the store has none.

        Args:
            store: Where the ledgers live; stays open.
            topic: Any text.
            entries_per_ledger_max: A ledger that has this many is closed and a new one begun; Pulsar's
                ``managedLedgerMaxEntriesPerLedger``.

        Raises:
            StoreError: The storage failed.
        """
        return cls(store, log_owner(topic), entries_per_ledger_max=entries_per_ledger_max)

    def publish(self, messages: Sequence[Message]) -> list[Position]:
        """Append messages with one sync, all or nothing, and return their positions in order.

        A batch that does not fit into the open ledger begins a new one, and may itself be larger than a ledger's limit.

        Raises:
            StoreError: The append failed; the log's ledgers are as before.
        """
        if not messages:
            return []
        if self._room < len(messages):
            self.ledgers.roll(self._store.ledgers.create(self._owner))
            self._room = self._entries_per_ledger_max
        ledger_id = self.ledgers.current_ledger_id
        entries = [
            (ledger_id, _HEADER.pack(message.publish_time_ms, message.deliver_at_ms) + message.payload)
            for message in messages
        ]
        entry_ids = self._store.ledgers.append_all(entries)
        self._room -= len(messages)
        self.ledgers.append(len(messages))
        return [Position(ledger_id, entry_id) for entry_id in entry_ids]

    def read(self, positions: Sequence[Position]) -> Iterator[Message]:
        """Yield the messages at positions, in their order; neighbours are read from the store together.

        Raises:
            LedgerNotFoundError: A position is not in the log.
            CorruptStateError: What is stored there is no message.
        """
        begin = 0
        for index in range(1, len(positions) + 1):
            ends_here = index == len(positions) or positions[index] != _following(positions[index - 1])
            if ends_here:
                ledger_id, first = positions[begin]
                for entry in self._store.ledgers.read(ledger_id, first, positions[index - 1].entry_id + 1):
                    yield _decode(entry, ledger_id)
                begin = index


def _following(position: Position) -> Position:
    return Position(position.ledger_id, position.entry_id + 1)


def _decode(entry: bytes, ledger_id: int) -> Message:
    if len(entry) < _HEADER.size:
        raise CorruptStateError(
            f"message of ledger {ledger_id}", offset=0, expected=f"{_HEADER.size} bytes", found=f"{len(entry)} bytes"
        )
    publish_time_ms, deliver_at_ms = _HEADER.unpack_from(entry)
    return Message(publish_time_ms, deliver_at_ms, bytes(entry[_HEADER.size :]))


def log_owner(topic: str) -> str:
    """Return in whose name the ledgers of a topic's log are made."""
    return f"topic {quote(topic, safe='')}"
