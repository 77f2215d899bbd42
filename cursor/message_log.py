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

_PLAIN = struct.Struct("<qq")
# Read as a publish time it would be negative, which none is.
_KEYED_MAGIC = b"ackmsg2\xff"
_KEYED = struct.Struct("<8sqqIi")
_NO_KEY = -1
_TIME_MS_END = 2**63
_COUNT_END = 2**32


class Message(NamedTuple):
    """What a producer published: one entry of the log, which may be a batch of messages.

    Attributes:
        publish_time_ms: When; 0 or more.
        deliver_at_ms: Not to be delivered before; `NO_DELAY` for at once.
        payload: Opaque bytes.
        key: Messages of one key go to one consumer of a Key_Shared subscription, in order; None for no key.
        message_count: How many messages the entry holds.
    """

    publish_time_ms: int
    deliver_at_ms: int
    payload: bytes
    key: bytes | None = None
    message_count: int = 1


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
            ValueError: A time, or how many messages an entry holds, is out of range.
            StoreError: The append failed; the log's ledgers are as before.
        """
        contents = [_encode(message) for message in messages]
        if not contents:
            return []
        if self._room < len(messages):
            self.ledgers.roll(self._store.ledgers.create(self._owner))
            self._room = self._entries_per_ledger_max
        ledger_id = self.ledgers.current_ledger_id
        entry_ids = self._store.ledgers.append_all([(ledger_id, content) for content in contents])
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


def _encode(message: Message) -> bytes:
    """Return the entry of a message: with a longer header if it has a key or is a batch."""
    publish_time_ms, deliver_at_ms, payload, key, message_count = message
    if not 0 <= publish_time_ms < _TIME_MS_END or not -_TIME_MS_END <= deliver_at_ms < _TIME_MS_END:
        raise ValueError(f"published at {publish_time_ms} ms, to be delivered at {deliver_at_ms} ms: out of range")
    if not 1 <= message_count < _COUNT_END:
        raise ValueError(f"an entry holds 1 to {_COUNT_END - 1} messages, found {message_count}")
    if key is None and message_count == 1:
        return _PLAIN.pack(publish_time_ms, deliver_at_ms) + payload
    key_bytes = _NO_KEY if key is None else len(key)
    header = _KEYED.pack(_KEYED_MAGIC, publish_time_ms, deliver_at_ms, message_count, key_bytes)
    return header + (key or b"") + payload


def _decode(entry: bytes, ledger_id: int) -> Message:
    if not entry.startswith(_KEYED_MAGIC):
        _check_size(entry, _PLAIN.size, ledger_id)
        publish_time_ms, deliver_at_ms = _PLAIN.unpack_from(entry)
        return Message(publish_time_ms, deliver_at_ms, bytes(entry[_PLAIN.size :]))
    _check_size(entry, _KEYED.size, ledger_id)
    _, publish_time_ms, deliver_at_ms, message_count, key_bytes = _KEYED.unpack_from(entry)
    if key_bytes < _NO_KEY or not message_count:
        raise CorruptStateError(
            f"message of ledger {ledger_id}",
            offset=_PLAIN.size + len(_KEYED_MAGIC),
            expected="a number of messages above 0, and of bytes of the key",
            found=f"{message_count} and {key_bytes}",
        )
    end = _KEYED.size + max(key_bytes, 0)
    _check_size(entry, end, ledger_id)
    key = None if key_bytes == _NO_KEY else bytes(entry[_KEYED.size : end])
    return Message(publish_time_ms, deliver_at_ms, bytes(entry[end:]), key, message_count)


def _check_size(entry: bytes, size: int, ledger_id: int) -> None:
    if len(entry) < size:
        raise CorruptStateError(
            f"message of ledger {ledger_id}",
            offset=len(entry),
            expected=f"at least {size} bytes",
            found=f"{len(entry)} bytes",
        )


def log_owner(topic: str) -> str:
    """Return in whose name the ledgers of a topic's log are made."""
    return f"topic {quote(topic, safe='')}"
