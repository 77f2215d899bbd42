"""Finds the message log of a topic, in a store of ours or in a Pulsar cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.stores.pulsar import PulsarLayout
from ackstate.topic.message_log import MessageLog

if TYPE_CHECKING:
    from ackstate.dispatch.options import ReadableLog
    from ackstate.stores.base import Store


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
