"""Converts the metadata paths of cursors between this library's layout and that of Apache Pulsar.

This library has ``/managed-ledgers/TOPIC/SUBSCRIPTION``, with percent-encoded names; Pulsar has
``/managed-ledgers/TENANT/NAMESPACE/DOMAIN/TOPIC/SUBSCRIPTION``, with the last two names as in a URL's query.

Source: ``TopicName.getPersistenceNamingEncoding``, ``MetaStoreImpl.PREFIX`` of Apache Pulsar.
"""

from __future__ import annotations

from urllib.parse import quote, unquote, unquote_plus

from ackstate.cursor.journal.journal import ROOT
from ackstate.errors import CorruptStateError
from ackstate.topic_name import parse_topic, persistence_name

DOMAIN = "persistent"
"""The domain of every topic with cursors."""


def managed_ledger_name(topic: str) -> str:
    """Return Pulsar's name of a topic's message log, as in the custom metadata of its ledgers.

    >>> managed_ledger_name("persistent://public/default/a/b")
    'public/default/persistent/a%2Fb'

    Raises:
        ValueError: The topic is not ``persistent://TENANT/NAMESPACE/TOPIC``.
    """
    parts = parse_topic(topic)
    if parts is None or parts.domain != DOMAIN:
        raise ValueError(f"topic must be {DOMAIN}://TENANT/NAMESPACE/TOPIC, got {topic!r}")
    return f"{parts.namespace}/{parts.domain}/{persistence_name(parts.local)}"


def decoded(name: str) -> str:
    """Return a topic's local name or a subscription's name from its stored form.

    Raises:
        CorruptStateError: Pulsar does not write such a name.
    """
    try:
        text = unquote_plus(name, errors="strict")
    except UnicodeDecodeError:
        text = ""
    if not text or persistence_name(text) != name:
        raise CorruptStateError(
            "name in the metadata store", offset=0, expected="a name as Pulsar encodes it", found=repr(name)
        )
    return text


def pulsar_path(path: str) -> str | None:
    """Return Pulsar's path of a topic's or a cursor's record; None for a path that Pulsar does not have.

    >>> pulsar_path("/managed-ledgers/persistent%3A%2F%2Fpublic%2Fdefault%2Forders/billing")
    '/managed-ledgers/public/default/persistent/orders/billing'

    Raises:
        ValueError: The topic is not ``persistent://TENANT/NAMESPACE/TOPIC``.
    """
    prefix, names = f"{ROOT}/", path.removeprefix(f"{ROOT}/").split("/")
    if not path.startswith(prefix) or len(names) > 2:
        return None
    topic, *subscription = map(unquote, names)
    return "/".join([ROOT, managed_ledger_name(topic), *map(persistence_name, subscription)])


def quoted(name: str) -> str:
    """Return a topic or a subscription as a path of this library spells it."""
    return quote(name, safe="")
