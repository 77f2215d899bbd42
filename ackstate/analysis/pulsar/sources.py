"""The sources of a broker's answers: its admin interface, or files with the same JSON."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, final

from ackstate.analysis.admin_client import InvalidNameError, RefusedError, namespace_path, read_json, topic_path
from ackstate.analysis.pulsar.broker_settings import BrokerSettings, broker_settings, with_policies
from ackstate.analysis.pulsar.internal_stats import SnapshotError, TopicInternals, TopicStats, read_object
from ackstate.errors import AckStateError
from ackstate.pulsar_conf import keys_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from ackstate.analysis.admin_client import PulsarAdmin


_Kind: TypeAlias = Literal["tenant", "namespace", "topic"]

_PERSISTENT = "persistent://"
_PARTITION = re.compile(r"-partition-\d+$", re.ASCII)
_SYSTEM_TENANT = "pulsar"
_OURS = "(ackstate "  # in the version that a broker reports which embeds this library
_NOT_TO_BE_READ = 403
_FORBIDDEN, _GONE = frozenset({401, _NOT_TO_BE_READ}), frozenset({404, 410})
_PARTITIONS_MAX = 100_000
_NOT_SET = frozenset({404, 405, 412})  # no such policy, or topic policies are disabled
_FILE = re.compile(r"(internalStats|stats)-(.+)\.json")
_CONFIGURATION, _VERSION = "configuration.json", "version.txt"


class TopicAnswers(NamedTuple):
    """The answers about one topic or partition."""

    internals: TopicInternals  # Its cursors in memory
    stats: TopicStats | None  # None if unknown


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


class Source(Protocol):
    """A source of answers."""

    def listing(self) -> Listing:
        """Return the topics."""

    def settings(self, topic: str) -> BrokerSettings:
        """Return the settings in effect for a topic."""

    def read(self, topic: str) -> TopicAnswers:
        """Return the answers about one topic."""

    def internals(self, topic: str) -> TopicInternals:
        """Return the cursors of a topic in memory."""


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
        self._of_broker = BrokerSettings()  # as of `look_at_broker`
        self.cursor_properties: dict[str, str] | None = None
        self._known: dict[str, BrokerSettings | AckStateError] = {}
        self._locks: dict[str, Lock] = {}

    def listing(self) -> Listing:
        """Return the topics; what cannot be listed, of a tenant, namespace or topic, does not hide the others."""
        topics, namespaces, tenants = self._chosen
        self.look_at_broker()
        for name, known in [*self._known.items()]:
            if isinstance(known, AckStateError):
                del self._known[name]
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
        self._of_broker = self._broker_settings()

    @property
    def metadata_url(self) -> str:
        """The metadata store that the broker names, if it is ZooKeeper; empty if not, or before `look_at_broker`."""
        return self._of_broker.metadata_url

    def includes(self, topic: str) -> bool:
        """Return whether `listing` has a topic, or one of its partitions, if it exists."""
        topics, namespaces, tenants = self._chosen
        whole = _PARTITION.sub("", topic)
        namespace = whole.removeprefix(_PERSISTENT).rpartition("/")[0]
        tenant = namespace.partition("/")[0]
        if not (topics or namespaces or tenants):
            return tenant != _SYSTEM_TENANT
        return whole in map(_whole_name, topics) or namespace in namespaces or tenant in tenants

    def settings(self, topic: str) -> BrokerSettings:
        """Return the settings in effect for a topic of `listing`: of the broker, its namespace and itself."""
        whole = _PARTITION.sub("", topic)
        namespace = whole.removeprefix(_PERSISTENT).rpartition("/")[0]
        of_namespace = self._once(namespace, lambda: self._with_namespace(self._of_broker, namespace))
        return self._once(whole, lambda: self._with_topic(of_namespace, topic_path(whole)))

    def read(self, topic: str) -> TopicAnswers:
        """Return the answers about one topic."""
        stats = self.stats(topic)
        return TopicAnswers(self.internals(topic), stats)

    def internals(self, topic: str) -> TopicInternals:
        """Return the cursors of a topic in memory."""
        answer = self._admin.get(f"{topic_path(topic)}/internalStats")
        return read_object(TopicInternals, answer, what=f"{topic}: internalStats")

    def stats(self, topic: str) -> TopicStats:
        """Return the statistics of a topic."""
        return read_object(TopicStats, self._admin.get(f"{topic_path(topic)}/stats"), what=f"{topic}: stats")

    def _once(self, name: str, ask: Callable[[], BrokerSettings]) -> BrokerSettings:
        with self._locks.setdefault(name, Lock()):
            if name not in self._known:
                try:
                    self._known[name] = ask()
                except AckStateError as error:
                    self._known[name] = error
            known = self._known[name]
        if isinstance(known, AckStateError):
            raise known
        return known

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

    def _with_namespace(self, settings: BrokerSettings, namespace: str) -> BrokerSettings:
        policies = self._policy(namespace_path(namespace))
        if not isinstance(policies, dict):
            return settings
        return with_policies(
            settings,
            consumer_unacked_max=policies.get("max_unacked_messages_per_consumer"),
            subscription_unacked_max=policies.get("max_unacked_messages_per_subscription"),
        )

    def _with_topic(self, settings: BrokerSettings, path: str) -> BrokerSettings:
        return with_policies(
            settings,
            consumer_unacked_max=self._policy(f"{path}/maxUnackedMessagesOnConsumer"),
            subscription_unacked_max=self._policy(f"{path}/maxUnackedMessagesOnSubscription"),
        )

    def _policy(self, path: str) -> Any:
        """Return a policy, None if it is not set or this role is not allowed to read it."""
        try:
            return self._admin.get(path)
        except RefusedError as error:
            if error.status in _NOT_SET or error.status == _NOT_TO_BE_READ:
                return None
            raise


@final
class RecordedAnswers:
    """Reads files with answers.

    There are ``internalStats-NAME.json`` and optionally ``stats-NAME.json`` for each topic, and optionally, for the
    broker, ``configuration.json``, as from ``/admin/v2/brokers/configuration/runtime``, and ``version.txt``.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[tuple[str, str], Path] = {}
        self._of_broker: dict[str, Path] = {}
        listed = list(paths)
        for path in listed:
            is_directory = path.is_dir()
            for each in sorted(path.iterdir()) if is_directory else [path]:
                self._take(each, is_named=not is_directory)
        if not self.listing().topics:
            raise SnapshotError(f"{', '.join(map(str, listed))}: no file internalStats-NAME.json")

    def listing(self) -> Listing:
        """Return the topics named by the files."""
        return Listing(sorted(name for kind, name in self._files if kind == "internalStats"))

    def settings(self, topic: str) -> BrokerSettings:  # noqa: ARG002 -- files hold no policies
        """Return the configured settings, or Pulsar's defaults without a file."""
        version_file = self._of_broker.get(_VERSION)
        version = _text(version_file).strip() if version_file else ""
        path = self._of_broker.get(_CONFIGURATION)
        if path is None:
            why = f"there is no {_CONFIGURATION}: the defaults of Pulsar {version or BrokerSettings().version}"
            return broker_settings(None, version, assumed=why)
        return broker_settings(_texts(_json(path), str(path)), version)

    def read(self, topic: str) -> TopicAnswers:
        """Read the files of one topic."""
        stats_path = self._files.get(("stats", topic))
        stats = read_object(TopicStats, _json(stats_path), what=str(stats_path)) if stats_path else None
        return TopicAnswers(self.internals(topic), stats)

    def internals(self, topic: str) -> TopicInternals:
        """Read the file with the cursors of one topic."""
        path = self._files["internalStats", topic]
        return read_object(TopicInternals, _json(path), what=str(path))

    def _take(self, path: Path, *, is_named: bool) -> None:
        found = _FILE.fullmatch(path.name)
        if found:
            self._files[found[1], found[2]] = path
        elif path.name in {_CONFIGURATION, _VERSION}:
            self._of_broker[path.name] = path
        elif is_named:
            expected = f"internalStats-NAME.json, stats-NAME.json, {_CONFIGURATION} or {_VERSION}"
            raise SnapshotError(f"{path}: expected a file named {expected}")


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


def _json(path: Path) -> Any:
    try:
        return read_json(_text(path))
    except (ValueError, RecursionError):
        raise SnapshotError(f"{path}: is not JSON, or has a number of more than 64 bits") from None


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not text"
        raise SnapshotError(f"{path}: {why}") from None


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
