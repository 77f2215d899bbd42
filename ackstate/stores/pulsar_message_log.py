"""Reads the message log of a topic in a Pulsar cluster; nothing is written or fenced."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.errors import CorruptStateError
from ackstate.ledger_map import LedgerMap
from ackstate.message import Message
from ackstate.stores.base import LedgerNotFoundError
from ackstate.wire.pulsar.ledger_info import decode_ledger_info
from ackstate.wire.pulsar.message_entry import decode_message_times

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ackstate.position import Position
    from ackstate.stores.base import LedgerStore
    from ackstate.wire.pulsar.ledger_info import MessageLedger


@final
class PulsarMessageLog:
    """The message log of one topic, as it was when it was found.

    Attributes:
        ledgers: How many entries each ledger holds.
    """

    def __init__(self, ledgers: LedgerMap, store: LedgerStore, offloaded: frozenset[int]) -> None:
        self.ledgers = ledgers
        self._store = store
        self._offloaded = offloaded

    def can_read(self, ledger_id: int) -> bool:
        """Return whether the messages of a ledger are in BookKeeper, so that one that cannot be read is lost."""
        return ledger_id not in self._offloaded

    def read(self, positions: Iterable[Position]) -> Iterator[Message]:
        """Yield messages, without their payloads.

        Raises:
            LedgerNotFoundError: A message does not exist.
            CorruptStateError: A message cannot be decoded.
            StoreError: The storage failed.
        """
        for ledger_id, entry_id in positions:
            times = decode_message_times(self._store.read(ledger_id, entry_id, entry_id + 1)[0])
            yield Message(
                b"",
                publish_time_ms=times.publish_time_ms,
                deliver_at_ms=times.deliver_at_ms,
                message_count=times.message_count,
            )


def read_message_log(data: bytes, store: LedgerStore, *, topic: str) -> PulsarMessageLog:
    """Return the message log of a topic.

    The record does not have the size of the ledger that is written to, nor that of one whose broker died: the last
    entry that can be read is its last one.

    Raises:
        CorruptStateError: The record cannot be decoded, or names no ledger.
        StoreError: The storage failed.
    """
    found = decode_ledger_info(data)
    if not found:
        raise CorruptStateError(f"message log of {topic}", offset=0, expected="a ledger", found="none")
    counts = {each.ledger_id: _entry_count(each, store, is_last=each is found[-1]) for each in found}
    offloaded = frozenset(each.ledger_id for each in found if each.is_offloaded)
    return PulsarMessageLog(LedgerMap.from_counts(counts), store, offloaded)


def _entry_count(ledger: MessageLedger, store: LedgerStore, *, is_last: bool) -> int:
    if ledger.entry_count or not is_last:
        return ledger.entry_count
    try:
        return store.last(ledger.ledger_id) + 1
    except LedgerNotFoundError:
        # The broker has named the ledger that it is about to create.
        return 0
