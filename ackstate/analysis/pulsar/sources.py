"""A broker's answers over its admin interface."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, final

from ackstate.analysis.admin_client import InvalidNameError, RefusedError, namespace_path, topic_path
from ackstate.analysis.pulsar.broker_settings import BrokerSettings, broker_settings
from ackstate.analysis.pulsar.internal_stats import SnapshotError, TopicInternals, TopicStats, read_object
from ackstate.errors import AckStateError
from ackstate.pulsar_conf import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ackstate.analysis.admin_client import PulsarAdmin


_Kind: TypeAlias = Literal["tenant", "namespace", "topic"]

_PERSISTENT = "persistent://"
_PARTITION = re.compile(r"-partition-\d+$", re.ASCII)
_SYSTEM_TENANT = "pulsar"
_OURS = "(ackstate "  # in the version that a broker reports which embeds this library
_NOT_TO_BE_READ = 403
_FORBIDDEN, _GONE = frozenset({401, _NOT_TO_BE_READ}), frozenset({404, 410})
_PARTITIONS_MAX = 100_000


class Unread(NamedTuple):
    """A topic that could not be read, or a tenant or namespace whose topics could not be listed."""

    kind: _Kind  # Which of the three
    name: str
    error: AckStateError  # Why

    @property
    def reason(self) -> str:
        """One of the keys of `REASONS`."""
        if isinstance(self.error, InvalidNameError):
            return "unsupported"
        status = self.error.status if isinstance(self.error, RefusedError) else 0
        return "forbidden" if status in _FORBIDDEN else "gone" if status in _GONE else "failing"

    def __str__(self) -> str:
        what = self.name if self.kind == "topic" else f"{self.kind} {self.name}"
        return f"{what} {REASONS[self.reason]}: {self.error}"

    def to_json(self) -> dict[str, str]:
        """Return it in the form of ``docs/json-output.md``."""
        return {"topic": self.name, "kind": self.kind, "reason": self.reason, "why": str(self.error)}

    def includes(self, topic: str) -> bool:
        """Return whether a topic is this one, or of this tenant or namespace."""
        if self.kind == "topic":
            return _PARTITION.sub("", topic) == _whole_name(self.name)
        return topic.startswith(f"{_PERSISTENT}{self.name}/")


REASONS = {
    "gone": "does not exist, or was deleted meanwhile",
    "forbidden": "may not be read",
    "failing": "could not be read",
    "unsupported": "has a name that cannot be requested, as those of Pulsar 1 with a cluster in them",
}


class Listing(NamedTuple):
    """The topics of a source."""

    topics: list[str]  # Names of the topics or partitions; in order, each once
    unread: Sequence[Unread] = ()  # What could not be listed: there may be topics in it


@final
class LiveBroker:
    """Requests answers over REST. Threads may share it."""

    def __init__(
        self,
        admin: PulsarAdmin,
        *,
        topics: Sequence[str] = (),
        namespaces: Sequence[str] = (),
        tenants: Sequence[str] = (),
    ) -> None:
        self._admin = admin
        self._chosen = (topics, namespaces, tenants)
        for path, names in ((topic_path, topics), (namespace_path, namespaces), (_tenant_path, tenants)):
            for name in names:
                path(name)  # refused before any request
        self.settings = BrokerSettings()
        """Those of the broker, as of `look_at_broker`."""
        self.cursor_properties: dict[str, str] | None = None

    def listing(self) -> Listing:
        """Return the topics; what cannot be listed, of a tenant, namespace or topic, does not hide the others."""
        topics, namespaces, tenants = self._chosen
        self.look_at_broker()
        if not (topics or namespaces or tenants):
            tenants = [each for each in self._names("/admin/v2/tenants") if each != _SYSTEM_TENANT]
        unread: list[Unread] = []

        def listed(kind: _Kind, names: Iterable[str], ask: Callable[[str], list[str]]) -> list[list[str]]:
            found = request_all([*dict.fromkeys(names)], ask)
            unread.extend(Unread(kind, name, each) for name, each in found.items() if isinstance(each, AckStateError))
            return [each for each in found.values() if not isinstance(each, AckStateError)]

        # The path of a tenant's namespaces is a prefix of a namespace's path.
        of_tenants = listed("tenant", tenants, lambda tenant: self._names(_tenant_path(tenant)))
        of_namespaces = listed("namespace", chain(namespaces, *of_tenants), self._of_namespace)
        of_topics = listed("topic", topics, self._partitions)
        if unread and not (of_namespaces or of_topics or [] in of_tenants):
            raise unread[0].error
        return Listing(sorted({*chain(*of_namespaces, *of_topics)}), unread)

    def look_at_broker(self) -> None:
        """Read the version and the settings of the broker, as `listing` does."""
        self.settings = self._broker_settings()

    def includes(self, topic: str) -> bool:
        """Return whether `listing` has a topic, or one of its partitions, if it exists."""
        topics, namespaces, tenants = self._chosen
        whole = _PARTITION.sub("", topic)
        namespace = whole.removeprefix(_PERSISTENT).rpartition("/")[0]
        tenant = namespace.partition("/")[0]
        if not (topics or namespaces or tenants):
            return tenant != _SYSTEM_TENANT
        return whole in map(_whole_name, topics) or namespace in namespaces or tenant in tenants

    def internals(self, topic: str) -> TopicInternals:
        """Return the cursors of a topic in memory."""
        answer = self._admin.get(f"{topic_path(topic)}/internalStats")
        return read_object(TopicInternals, answer, what=f"{topic}: internalStats")

    def stats(self, topic: str) -> TopicStats:
        """Return the statistics of a topic."""
        return read_object(TopicStats, self._admin.get(f"{topic_path(topic)}/stats"), what=f"{topic}: stats")

    def _names(self, path: str) -> list[str]:
        names = self._admin.get(path)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SnapshotError(f"{path}: must be a list of names, got {str(names)[:40]!r}")
        return names

    def _of_namespace(self, namespace: str) -> list[str]:
        path = namespace_path(namespace).replace("/namespaces/", "/persistent/", 1)
        return [name for name in self._names(path) if name.startswith(_PERSISTENT)]

    def _partitions(self, topic: str) -> list[str]:
        path = topic_path(topic)
        answer = self._admin.get(f"{path}/partitions")
        count = answer.get("partitions") if isinstance(answer, dict) else None
        if type(count) is not int or not 0 <= count <= _PARTITIONS_MAX:
            raise SnapshotError(
                f"{path}/partitions: must be a number of partitions up to {_PARTITIONS_MAX:,}, got {str(answer)[:40]!r}"
            )
        whole = _whole_name(topic)
        return [f"{whole}-partition-{number}" for number in range(count)] if count else [whole]

    def _broker_settings(self) -> BrokerSettings:
        version = self._admin.get_text("/admin/v2/brokers/version").strip('"')
        is_pulsar = _OURS not in version
        self.cursor_properties = {} if is_pulsar else None
        try:
            configuration = self._admin.get("/admin/v2/brokers/configuration/runtime")
        except RefusedError as error:
            if error.status != _NOT_TO_BE_READ:
                raise
            why = f"the configuration may not be read: the defaults of Pulsar {version}"
            return broker_settings(None, version, assumed=why)
        texts = _texts(configuration, "configuration of the broker")
        if is_pulsar:
            self.cursor_properties = {key: texts[key] for key in keys_of("CursorConfig") if key in texts}
        return broker_settings(texts, version)


def _whole_name(topic: str) -> str:
    if topic.startswith(_PERSISTENT):
        return topic
    return f"{_PERSISTENT}{topic}" if "/" in topic else f"{_PERSISTENT}public/default/{topic}"


def _tenant_path(tenant: str) -> str:
    return namespace_path(f"{tenant}/-").rpartition("/")[0]


def _texts(content: Any, what: str) -> dict[str, str]:
    if not isinstance(content, dict) or not all(isinstance(value, str) for value in content.values()):
        raise SnapshotError(f"{what}: must be an object of texts, got {str(content)[:40]!r}")
    return content


_Answer = TypeVar("_Answer")

AT_ONCE = 8
"""Requests under way."""


def request_all(
    topics: Sequence[str],
    request: Callable[[str], _Answer],
    *,
    done: Callable[[], None] = lambda: None,
    at_once: int = AT_ONCE,
) -> dict[str, _Answer | AckStateError]:
    """Request each topic, and return the answers and errors, in the order of the topics."""

    def answer_of(topic: str) -> _Answer | AckStateError:
        """Return the answer or the error of one topic."""
        try:
            return request(topic)
        except AckStateError as error:
            return error
        finally:
            done()

    pool = ThreadPoolExecutor(at_once)
    try:
        return dict(zip(topics, pool.map(answer_of, topics), strict=True))
    finally:
        # After Ctrl-C no further request starts.
        pool.shutdown(cancel_futures=True)
