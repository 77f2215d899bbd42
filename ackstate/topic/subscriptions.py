"""The subscriptions that a store has for a topic, and the message log that they ack: read, without opening them.

An open takes a cursor over from its owner. This only reads: nothing is written, fenced or taken over, so it may run
beside the owner of the topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote, unquote

from ackstate.cursor.formats import OWN_PREFIX
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.cursor.recovery import Recovery, UnreadableCursorError, decode_record
from ackstate.dispatch.consumers import SubscriptionType
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.ledger_map import LedgerMap
from ackstate.stores.base import PayloadTooLargeError, StoreError
from ackstate.topic.log import MessageLog
from ackstate.topic_name import ROOT, check_name
from ackstate.wire import native

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from ackstate.cursor.recovery import StoredCursor
    from ackstate.dispatch.options import ReadableLog
    from ackstate.position import Position
    from ackstate.stores.base import LedgerStore, Store

TYPE_PROPERTY = f"{OWN_PREFIX}type"  # the internal cursor property with the type, as a value of `SubscriptionType`

SCHEDULE = f"{OWN_PREFIX}schedule"
"""The name of the cursor with the changed times of a topic, which is no subscription."""


class SubscriptionTypeError(AckStateError):
    """The subscription is stored with another type; nothing was changed."""


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
    besides: Collection[str] = (),
) -> list[StoredSubscription]:
    """Return the subscriptions of a topic, sorted by name, those that cannot be read too.

    A subscription whose record is lost is found by the journals that are left of it.

    Args:
        store: Where.
        topic: The name of the topic; a topic without subscriptions, or an unknown one, has none.
        ledgers: Those of the topic's message log, if the caller has it open. By default, reads them from the store.
        besides: The names of subscriptions that are left out, and not read.

    Raises:
        TypeError, ValueError: The topic is no text, or is empty.
        CorruptStateError: The names of the subscriptions, or the message log's ledgers, cannot be read.
        StoreError: The storage failed.

    Complexity: O(size of the topic's journals + ledgers of the store).
    """
    check_name("topic", topic)
    if ledgers is None:
        ledgers = message_log_ledgers(store, topic)
    paths = subscription_paths(store, topic)
    found = (_read(store, path, ledgers) for path in paths if subscription_name(path) not in besides)
    return sorted((each for each in found if each is not None), key=lambda each: each.name)


def subscription_paths(store: Store, topic: str) -> set[str]:
    """Return the metadata paths of all subscriptions of a topic, also of those that a crash has left parts of."""
    above = f"{ROOT}/{quote(topic, safe='')}"
    prefix = cursor_owner(f"{above}/")
    owning = {owner.removeprefix(prefix) for owner in store.ledgers.owners() if owner.startswith(prefix)}
    names = {name for name in (*names_below(store, above), *owning) if name and "/" not in name}
    return {f"{above}/{name}" for name in names if unquote(name) != SCHEDULE}


def subscription_name(path: str) -> str:
    """Return the name of the subscription of a path."""
    return unquote(path.rpartition("/")[2])


def names_below(store: Store, path: str) -> list[str]:
    """Return the names one level below a metadata path; an empty one is refused as corrupt."""
    names = store.metadata.children(path)
    if not all(names):
        raise CorruptStateError(f"metadata below {path}", offset=0, expected="names", found="one that is empty")
    return names


def _read(store: Store, path: str, ledgers: LedgerMap | None) -> StoredSubscription | None:
    """Return the subscription of a path; None if there is none."""
    name = subscription_name(path)
    try:
        found = _find(store, path, ledgers)
    except AckStateError as error:
        if isinstance(error, StoreError) and not isinstance(error, PayloadTooLargeError):
            raise
        return StoredSubscription(name, None, None, {}, error)
    if found is None:
        return None
    properties, mark_delete = found.record.cursor_properties, found.recovered.content.mark_delete
    try:
        return StoredSubscription(name, type_of(properties, subscription=name), mark_delete, properties, None)
    except UnsupportedVersionError as error:
        return StoredSubscription(name, None, mark_delete, properties, error)


def _find(store: Store, path: str, ledgers: LedgerMap | None) -> StoredCursor | None:
    """Return a cursor as a recovery finds it."""
    # Its ledgers are listed only if the record does not suffice: in some stores that is O(ledgers of the store).
    if ledgers is not None:
        try:
            if (found := Recovery(store, path, ledgers).find(())) is not None:
                return found
        except UnreadableCursorError:
            pass  # Read again with the ledgers, for the repairs that they allow.
    owned = store.ledgers.owned_by(cursor_owner(path))
    return Recovery(store, path, ledgers or assumed_log(store.ledgers, owned)).find(owned)


def stored_properties(store: Store, *, topic: str, subscription: str) -> Mapping[str, str] | None:
    """Return the cursor properties of a subscription, by its record alone; None if there is no such subscription."""
    try:
        value = store.metadata.get(cursor_path(topic, subscription))
        record = None if value is None else decode_record(value.data).record
    except CorruptStateError:
        return {}  # Opening it reports the damage.
    return None if record is None or record.is_deleted else record.cursor_properties


def type_of(properties: Mapping[str, str], *, subscription: str) -> SubscriptionType | None:
    """Return the type that cursor properties store; None if they store none. One of another release is refused."""
    stored = properties.get(TYPE_PROPERTY)
    try:
        return None if stored is None else SubscriptionType(stored)
    except ValueError:
        raise UnsupportedVersionError(
            f"subscription {subscription!r} has the type {stored!r}, which this release lacks"
        ) from None


def check_type(kind: SubscriptionType | None, stored: SubscriptionType | None, *, subscription: str) -> None:
    """Raise `SubscriptionTypeError` if a type differs from the stored one."""
    if kind is not None and stored is not None and kind is not stored:
        raise SubscriptionTypeError(
            f"subscription {subscription!r} is of type {stored.value}, got {kind.value}: delete it to change its type"
        )


def find_message_log(store: Store, topic: str) -> ReadableLog | None:
    """Return the message log of a topic as it is now, None if the store has none; errors as `MessageLog.find`."""
    from ackstate.stores.pulsar import PulsarLayout  # noqa: PLC0415 - slow, and few programs use it

    if isinstance(store, PulsarLayout):
        return store.find_message_log(topic)
    return MessageLog.find(store, topic=topic)


def message_log_ledgers(store: Store, topic: str) -> LedgerMap | None:
    """Return the ledgers of a topic's message log, None if the store has no log of that topic."""
    log = find_message_log(store, topic)
    return None if log is None else log.ledgers


def assumed_log(ledgers: LedgerStore, owned: Sequence[int]) -> LedgerMap:
    """Return a substitute for a message log that the store does not hold."""
    # A recovery uses it to find where the log begins, to check that leftovers of the creation of a cursor have no acks,
    # and for ranges of Pulsar across ledgers. It has no entries, so these count in their upper ledger only: fewer acks,
    # never more.
    starts = []
    for ledger_id in owned:
        try:
            starts.append(native.decode_parts(ledgers.read(ledger_id, 0, 1)[0]).mark_delete)
        except (AckStateError, IndexError):
            continue
    # No entry is at or below such a position: a mark-delete goes to the entry before, where there is one.
    is_before_all = all(position.entry_id < 0 for position in starts)
    return LedgerMap(max((position.ledger_id for position in starts), default=0) if is_before_all else 0)
