"""Lists the subscriptions that a store has for a topic, without opening them.

An open takes a cursor over from its owner. This only reads: nothing is written, fenced or taken over, so it may run
beside the owner of the topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from ackstate.cursor.journal import ROOT, cursor_owner
from ackstate.cursor.recovery import Recovery, UnreadableCursorError
from ackstate.errors import AckStateError, UnsupportedVersionError
from ackstate.inspect.store import assumed_log, message_log_ledgers, names_below
from ackstate.stores.base import PayloadTooLargeError, StoreError
from ackstate.topic.subscription_type import type_of
from ackstate.topic_name import check_name

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from ackstate.cursor.recovery import StoredCursor
    from ackstate.dispatch.consumers import SubscriptionType
    from ackstate.ledger_map import LedgerMap
    from ackstate.position import Position
    from ackstate.stores.base import Store


class StoredSubscription(NamedTuple):
    """A subscription as a store has it.

    Attributes:
        name: The name of the subscription.
        kind: Its type; None if no type is stored with it, or if it cannot be read.
        mark_delete: The durable mark-delete position; None if the subscription cannot be read.
        properties: The cursor properties, of the application and of the broker; empty if they cannot be read.
        problem: Why the subscription cannot be read; None if it can. An `UnreadableCursorError` has the repairs.
    """

    name: str
    kind: SubscriptionType | None
    mark_delete: Position | None
    properties: Mapping[str, str]
    problem: AckStateError | None


def stored_subscriptions(
    store: Store,
    topic: str,
    *,
    ledgers: LedgerMap | None = None,
    owners: Iterable[str] | None = None,
    besides: Collection[str] = (),
) -> list[StoredSubscription]:
    """Return the subscriptions of a topic, sorted by name, those that cannot be read too.

    A subscription whose record is lost is found by the journals that are left of it.

    Args:
        store: Where.
        topic: The name of the topic; a topic without subscriptions, or an unknown one, has none.
        ledgers: Those of the topic's message log, if the caller has it open. By default, reads them from the store.
        owners: ``store.ledgers.owners()``, if the caller lists many topics and so reads it once for all of them.
        besides: The names of subscriptions that are left out, and not read.

    Raises:
        TypeError, ValueError: The topic is no text, or is empty.
        CorruptStateError: The names of the subscriptions, or the message log's ledgers, cannot be read.
        StoreError: The storage failed.

    Complexity: O(size of the topic's journals) and, without `owners`, O(ledgers of the store).
    """
    check_name("topic", topic)
    if ledgers is None:
        ledgers = message_log_ledgers(store, topic)
    paths = subscription_paths(store, topic, owners=owners)
    found = (_read(store, path, ledgers) for path in paths if subscription_name(path) not in besides)
    return sorted((each for each in found if each is not None), key=lambda each: each.name)


def subscription_paths(store: Store, topic: str, *, owners: Iterable[str] | None = None) -> set[str]:
    """Return the metadata paths of all subscriptions of a topic, also of those that a crash has left parts of.

    Raises:
        CorruptStateError: The names of the subscriptions cannot be read.
        StoreError: The storage failed.
    """
    above = f"{ROOT}/{quote(topic, safe='')}"
    prefix = cursor_owner(f"{above}/")
    owners = store.ledgers.owners() if owners is None else owners
    owning = {owner.removeprefix(prefix) for owner in owners if owner.startswith(prefix)}
    return {f"{above}/{name}" for name in (*names_below(store, above), *owning) if name and "/" not in name}


def subscription_name(path: str) -> str:
    """Return the name of the subscription of a path."""
    return unquote(path.rpartition("/")[2])


def _read(store: Store, path: str, ledgers: LedgerMap | None) -> StoredSubscription | None:
    """Return the subscription of a path; None if there is none."""
    name = subscription_name(path)
    try:
        found = _find(store, path, ledgers)
    except StoreError as error:
        if not isinstance(error, PayloadTooLargeError):
            raise
        return StoredSubscription(name, None, None, {}, error)
    except AckStateError as error:
        return StoredSubscription(name, None, None, {}, error)
    if found is None:
        return None
    properties, mark_delete = found.record.cursor_properties, found.recovered.content.mark_delete
    try:
        return StoredSubscription(name, type_of(properties, subscription=name), mark_delete, properties, None)
    except UnsupportedVersionError as error:
        return StoredSubscription(name, None, mark_delete, properties, error)


def _find(store: Store, path: str, ledgers: LedgerMap | None) -> StoredCursor | None:
    """Return a cursor as a recovery finds it.

    Its ledgers are listed only if the record does not suffice: in some stores that is O(ledgers of the store).
    """
    if ledgers is not None:
        try:
            if (found := Recovery(store, path, ledgers).find(())) is not None:
                return found
        except UnreadableCursorError:
            pass  # Read again with the ledgers, for the repairs that they allow.
    owned = store.ledgers.owned_by(cursor_owner(path))
    return Recovery(store, path, ledgers or assumed_log(store.ledgers, owned)).find(owned)
