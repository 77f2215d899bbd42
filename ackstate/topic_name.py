"""The parts of a topic's name, where it is one of Pulsar's."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import quote_plus

ROOT = "/managed-ledgers"
"""The path in a metadata store below which the cursors' records are, of ours as of Pulsar."""

_TOPIC = re.compile(r"(?P<domain>[^:/]+)://(?P<namespace>[^/]+/[^/]+)/(?P<local>.+)", re.DOTALL)


class TopicName(NamedTuple):
    """The parts of a name like ``persistent://public/default/orders``."""

    domain: str  # ``persistent``
    namespace: str  # the tenant and the namespace: ``public/default``
    local: str  # ``orders``; it may have slashes


def parse_topic(topic: str) -> TopicName | None:
    """Return the parts of a topic's name; None of any other text."""
    parts = _TOPIC.fullmatch(topic)
    return None if parts is None else TopicName(*parts.groups())


def persistence_name(name: str) -> str:
    """Return the local name of a topic, or the name of a subscription, as Pulsar stores and reports it.

    Source: ``TopicName.getPersistenceNamingEncoding``, ``Codec.encode`` of Apache Pulsar.
    """
    return quote_plus(name, safe="*").replace("~", "%7E")  # as java.net.URLEncoder does


def check_name(kind: str, name: object) -> None:
    """Refuse the name of a topic or subscription that is no text (`TypeError`), empty or not UTF-8 (`ValueError`)."""
    if not isinstance(name, str):
        raise TypeError(f"{kind} must be a str, got {name!r}")
    if not name:
        raise ValueError(f"{kind} must not be empty")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(name[error.start]):04X} at index {error.start}"
        raise ValueError(f"{kind} must be text that UTF-8 can encode, got the lone surrogate {found}") from None
