"""The open topics of a broker, as the admin server reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from ackstate.topic_name import parse_topic

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.cursor.config import CursorConfig
    from ackstate.dispatch.subscription import Subscription
    from ackstate.limits.gate import GateLimits
    from ackstate.topic.log import MessageLog

PERSISTENT = "persistent"


class LiveTopic(Protocol):
    """An open topic. `cursor.Topic` is one."""

    @property
    def log(self) -> MessageLog:
        """The messages."""

    @property
    def subscriptions(self) -> Mapping[str, Subscription]:
        """The open subscriptions, by name."""


class LiveSettings(Protocol):
    """The settings of a broker's topics."""

    @property
    def cursor(self) -> CursorConfig:
        """How the cursors persist."""

    @property
    def limits(self) -> GateLimits:
        """The limits of each subscription."""


class LiveTopics(Protocol):
    """The open topics of a broker, by name. `cursor.Topics` is one."""

    @property
    def settings(self) -> LiveSettings:
        """The settings of the topics."""

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the open topics."""

    def __getitem__(self, name: str, /) -> LiveTopic:
        """Return an open topic; raise `KeyError` if there is none of that name."""


class NamedTopic(NamedTuple):
    """The name of a topic, in the parts of a path."""

    tenant: str
    namespace: str
    full_name: str


def named_topics(topics: LiveTopics) -> list[NamedTopic]:
    """Return the open topics that have a name of Pulsar, sorted. No path leads to the others."""
    found = []
    for name in topics:
        parts = parse_topic(name)
        if parts is not None and parts.domain == PERSISTENT:
            tenant, _, namespace = parts.namespace.partition("/")
            found.append(NamedTopic(tenant, namespace, name))
    return sorted(found)
