"""The type of a subscription, stored with its cursor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.cursor.formats import OWN_PREFIX
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.recovery import decode_record
from ackstate.dispatch.consumers import SubscriptionType
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.cursor.cursor import ManagedCursor
    from ackstate.stores.base import Store


TYPE_PROPERTY = f"{OWN_PREFIX}type"
"""The internal cursor property that holds the subscription's type, as the value of `SubscriptionType`."""


class SubscriptionTypeError(AckStateError):
    """The subscription is stored with another type; nothing was changed."""


def type_properties(kind: SubscriptionType) -> dict[str, str]:
    """Return the cursor property that stores a type."""
    return {TYPE_PROPERTY: kind.value}


def stored_properties(store: Store, *, topic: str, subscription: str) -> Mapping[str, str] | None:
    """Return the cursor properties of a subscription; None if there is no such subscription.

    Reads the cursor's record and nothing else. A damaged one has none: opening it reports the damage.

    Raises:
        TypeError, ValueError: A name is no text, or is empty.
        UnsupportedVersionError: It has another version.
        StoreError: The storage failed.
    """
    try:
        value = store.metadata.get(cursor_path(topic, subscription))
        record = None if value is None else decode_record(value.data).record
    except CorruptStateError:
        return {}
    return None if record is None or record.is_deleted else record.cursor_properties


def type_of(properties: Mapping[str, str], *, subscription: str) -> SubscriptionType | None:
    """Return the type that cursor properties store; None if they store none.

    Raises:
        UnsupportedVersionError: It is of another release.
    """
    stored = properties.get(TYPE_PROPERTY)
    try:
        return None if stored is None else SubscriptionType(stored)
    except ValueError:
        raise UnsupportedVersionError(
            f"subscription {subscription!r} has the type {stored!r}, which this release lacks"
        ) from None


def check_type(kind: SubscriptionType | None, stored: SubscriptionType | None, *, subscription: str) -> None:
    """Refuse a type that differs from the stored one.

    Raises:
        SubscriptionTypeError: They differ.
    """
    if kind is not None and stored is not None and kind is not stored:
        raise SubscriptionTypeError(
            f"subscription {subscription!r} is of type {stored.value}, got {kind.value}: delete it to change its type"
        )


def store_type(cursor: ManagedCursor, kind: SubscriptionType) -> None:
    """Store the type of a subscription that was created without one; errors as for `CursorProperties.put_internal`."""
    if TYPE_PROPERTY not in cursor.cursor_properties:
        cursor.attached.put_internal(TYPE_PROPERTY, kind.value)
