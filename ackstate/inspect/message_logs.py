"""Finds the message log of a topic, in a store of ours or in a Pulsar cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ackstate.stores.pulsar import PulsarLayout
from ackstate.topic.message_log import MessageLog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.ledger_map import LedgerMap
    from ackstate.message import Message
    from ackstate.position import Position
    from ackstate.stores.base import Store


class ReadableLog(Protocol):
    """The messages of one topic, to be read only."""

    @property
    def ledgers(self) -> LedgerMap:
        """How many entries each ledger holds."""
        ...

    def can_read(self, ledger_id: int) -> bool:
        """Return whether the messages of a ledger are in the store, so that one that cannot be read is lost."""
        ...

    def read(self, positions: Sequence[Position]) -> Iterator[Message]:
        """Yield the messages at positions, in their order.

        Raises:
            LedgerNotFoundError: A message does not exist.
            CorruptStateError: A message cannot be decoded.
        """
        ...


def find_message_log(store: Store, topic: str) -> ReadableLog | None:
    """Return the message log of a topic as it is now, None if the store has none; nothing is written.

    Raises:
        TypeError, ValueError: The topic is no text, or is empty, or cannot be one of the store's.
        CorruptStateError: The sizes of its ledgers cannot be read.
        StoreError: The storage failed.
    """
    if isinstance(store, PulsarLayout):
        return store.find_message_log(topic)
    return MessageLog.find(store, topic=topic)
