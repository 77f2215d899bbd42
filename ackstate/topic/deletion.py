"""Deletes a topic: its subscriptions, its messages, and the record of its log."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from ackstate.cursor.journal import delete_cursor
from ackstate.delay.bucket_storage import SnapshotStorage
from ackstate.inspect.stored_subscriptions import subscription_paths
from ackstate.topic.log_ownership import LogOwnership, log_owner, log_path
from ackstate.topic_name import check_name

if TYPE_CHECKING:
    from ackstate.stores.base import Store


def delete_topic(store: Store, topic: str) -> bool:
    """Delete a topic with all of its subscriptions. Owners that have it open are fenced.

    First the log is taken over. Then the subscriptions are deleted, then the delay buckets, then all messages at once,
    and last the record of the log. So a crash leaves a topic that opens, with fewer subscriptions or without messages,
    or none. If another owner opens the topic before the messages are deleted, it keeps them, and the subscriptions that
    are left; it rebuilds delay buckets that are gone from them. The policies of the topic stay.

    Returns:
        Whether there was anything to delete.

    Raises:
        TypeError, ValueError: The topic is no text, or is empty.
        UnsupportedVersionError: The record of the log or of a subscription has another version.
        LogFencedError: Another owner has opened the topic meanwhile; some subscriptions may be deleted, no message is.
        StoreError, CorruptStateError: The storage failed; a part may be deleted. Call again, or open the topic.

    Complexity: O(ledgers of the store).
    """
    check_name("topic", topic)
    paths = sorted(subscription_paths(store, topic))
    is_stored = bool(store.ledgers.owned_by(log_owner(topic))) or _is_recorded(store, topic)
    if not paths and not is_stored and not SnapshotStorage.of_topic(store, topic).is_stored:
        return False
    ownership = LogOwnership.take_over(store, topic)
    for path in paths:
        delete_cursor(store, path, check=ownership.check)
    SnapshotStorage.of_topic(store, topic, check=ownership.check).delete()
    ownership.delete()
    return True


def stored_topics(store: Store) -> list[str]:
    """Return the names of all topics that have a message log, sorted.

    Raises:
        StoreError, CorruptStateError: The storage failed.

    Complexity: O(ledgers of the store).
    """
    root, prefix = log_path("x").rpartition("/")[0], log_owner("")
    owning = (owner.removeprefix(prefix) for owner in store.ledgers.owners() if owner.startswith(prefix))
    return sorted({unquote(name) for name in (*store.metadata.children(root), *owning) if name})


def _is_recorded(store: Store, topic: str) -> bool:
    root, _, name = log_path(topic).rpartition("/")
    return name in store.metadata.children(root)
