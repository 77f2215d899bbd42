"""A broker's answers over its admin interface, read and checked, and its settings that affect redelivery after a crash.

The fields of answers are those of ``PersistentTopicInternalStats`` and ``TopicStats`` of Apache Pulsar; irrelevant
fields are ignored.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeAlias, TypeVar, final

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pyroaring import BitMap

from ackstate import pulsar_conf
from ackstate.analysis.admin_client import InvalidNameError, RefusedError, namespace_path, topic_path
from ackstate.cursor.config import cursor_settings
from ackstate.errors import AckStateError
from ackstate.ledger_map import LedgerMap
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.pulsar_conf import flag, keys_of, whole_number
from ackstate.wire.pulsar import LimitRule, Limits, RangeForm
from ackstate.wire.pulsar.ranges import InvalidRecordError, RangeRows, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ackstate.analysis.admin_client import PulsarAdmin
    from ackstate.analysis.pulsar.durable import DurableState
    from ackstate.cursor.formats import CursorState
    from ackstate.deleted_ranges import DeletedRanges

_Object = TypeVar("_Object", bound=BaseModel)
_RANGE = re.compile(r"\((\d{1,19}):(-1|\d{1,10})\.\.(\d{1,19}):(\d{1,10})\]", re.ASCII)
_POSITION = re.compile(r"(-1|\d{1,19}):(-1|\d{1,10})", re.ASCII)


NAME_BYTES_MAX = 65_535
_ERROR_LENGTH_MAX = 200
# The acks of a cursor take a container of about 75 bytes for each ledger, and for each 65,536 entries of one. A few
# bytes of an answer can stand for all of them: a mark-delete position, or one range across all ledgers.
_CONTAINER_BITS = 16
_CONTAINERS_MAX = 1 << 24
_CONTAINERS_OF_CURSOR = 1_024  # of ledgers that the answer does not have, as `resolve` allows


class SnapshotError(AckStateError):
    """An answer of a broker or a file cannot be used; the message names it."""


def _name(text: str) -> str:
    if len(text.encode()) > NAME_BYTES_MAX:  # which also raises a `ValueError` if it is not Unicode
        raise ValueError(f"a name must have at most {NAME_BYTES_MAX} bytes")
    return text


_Name: TypeAlias = Annotated[str, AfterValidator(_name)]
_EntryCount: TypeAlias = Annotated[int, Field(le=ENTRY_ID_MAX)]


class _PulsarObject(BaseModel):
    """A model with Pulsar's names in JSON and strict types."""

    model_config = ConfigDict(alias_generator=to_camel, strict=True, frozen=True, extra="ignore")


class LedgerInternals(_PulsarObject):
    """One ledger of the topic's messages. For the open ledger, `entries` is always 0."""

    ledger_id: int = Field(ge=0, le=LEDGER_ID_MAX)
    entries: _EntryCount


class RedeliveryReported(_PulsarObject):
    """The redelivery of a crash as the broker itself counts it; a broker that embeds this library does."""

    entries: int = Field(ge=0)  # Acked entries
    batches: int = Field(ge=0)  # Partly acked batches, whose acked messages are redelivered in addition


class CursorInternals(_PulsarObject):
    """One cursor as it is in the broker's memory."""

    mark_delete_position: str
    individually_deleted_messages: str = "[]"
    cursor_ledger: int = -1
    state: str
    properties: dict[_Name, int] = {}
    redelivery_if_crashed: RedeliveryReported | None = None

    @property
    def range_count(self) -> int:
        """The number of acked ranges, as the broker counts them."""
        return self.individually_deleted_messages.count("(")


class TopicInternals(_PulsarObject):
    """`internalStats` of one topic or partition."""

    number_of_entries: int = 0  # Of all ledgers
    current_ledger_entries: _EntryCount = 0
    entries_added_counter: int = 0
    ledgers: list[LedgerInternals]
    cursors: dict[_Name, CursorInternals]

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        of_ledgers = sum(1 + (count >> _CONTAINER_BITS) for count in self.entry_counts().values())
        if len(self.cursors) * (_CONTAINERS_OF_CURSOR + of_ledgers) > _CONTAINERS_MAX:
            raise ValueError(f"{len(self.cursors):,} cursors over {of_ledgers:,} times 65536 entries are too many")
        return self

    def entry_counts(self) -> dict[int, int]:
        """Return the entry count of each existing ledger, in order."""
        counts = dict(sorted((each.ledger_id, max(each.entries, 0)) for each in self.ledgers))
        if counts:
            last = max(counts)
            counts[last] = max(counts[last], self.current_ledger_entries)
        return counts


class ConsumerStats(_PulsarObject):
    """One consumer."""

    avg_messages_per_entry: int = 0


class SubscriptionStats(_PulsarObject):
    """One subscription of `stats`."""

    is_durable: bool | None = None
    consumers: list[ConsumerStats] = []


class TopicStats(_PulsarObject):
    """`stats` of one topic or partition."""

    subscriptions: dict[str, SubscriptionStats]  # By name
    msg_in_counter: int = 0  # Messages published since the topic was loaded
    owner_broker: _Name | None = None  # The broker that has it; None if the broker omits it


def read_object(kind: type[_Object], content: Any, *, what: str) -> _Object:
    """Check an answer of a broker."""
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))[:_ERROR_LENGTH_MAX].encode("utf-8", "replace").decode()
        raise SnapshotError(f"{what}: {where or 'the answer'}: {first['msg']}") from None


def _position(text: str, what: str) -> Position:
    found = _POSITION.fullmatch(text)
    if found is None or int(found[1]) > LEDGER_ID_MAX or int(found[2]) > ENTRY_ID_MAX:
        raise SnapshotError(f"{what} must be a position, got {text!r}")
    return Position(max(int(found[1]), 0), int(found[2]))


Acks: TypeAlias = "Acked | CursorState | DurableState"


class Acked(NamedTuple):
    """The acks in a broker's memory: every entry up to `mark_delete`, inclusive, and `deleted` above it."""

    mark_delete: Position
    deleted: DeletedRanges


def acked_in(acks: Acks, ledger_id: int, count: int) -> BitMap:
    """Return the acked entries of a ledger with a number of entries, or more: the broker counted them before."""
    below = acks.mark_delete
    end = count if ledger_id < below.ledger_id else below.entry_id + 1 if ledger_id == below.ledger_id else 0
    return BitMap(range(end)) | acks.deleted.entries(ledger_id)


def acked(
    cursor: CursorInternals, counts: Mapping[int, int], *, what: str, range_count_max: int | None = None
) -> Acked:
    """Return the acks of a cursor; of its first ranges alone, as a broker counts ranges: one may cross ledgers.

    Complexity: O(length of the text).
    """
    mark_delete = _position(cursor.mark_delete_position, f"{what}: markDeletePosition")
    deleted = _ranges(cursor.individually_deleted_messages, counts, what=what, range_count_max=range_count_max)
    deleted.remove_at_most(mark_delete)
    return Acked(mark_delete, deleted)


def _ranges(text: str, counts: Mapping[int, int], *, what: str, range_count_max: int | None) -> DeletedRanges:
    """Read ``[(3:0..3:4],(3:6..3:9]]``; older brokers write a blank after the comma."""
    plain = text.replace(", ", ",")
    found = list(_RANGE.finditer(plain))
    if plain != f"[{','.join(each[0] for each in found)}]":
        raise SnapshotError(
            f"{what}: individuallyDeletedMessages must be ranges as Pulsar writes them, got {text[:60]!r}"
        )
    try:
        numbers = [[*map(int, each.groups())] for each in found[:range_count_max]]
        columns = np.array(numbers, np.int64).reshape(-1, 4).T
        rows = RangeRows(*columns)
        # The map takes longer than the ranges of most cursors.
        needs_map = (rows.lower_ledger != rows.upper_ledger).any() or (rows.upper_entry >> _CONTAINER_BITS).any()
        ledgers = LedgerMap.from_counts(counts) if counts and needs_map else None
        return resolve(rows, ledgers, record_bytes=len(text))
    except InvalidRecordError as refused:
        why = f"expected {refused.expected}, got {refused.found}"
    except OverflowError:
        why = f"expected ledger ids up to {LEDGER_ID_MAX}"
    raise SnapshotError(f"{what}: individuallyDeletedMessages: {why}")


PAUSE = "dispatcherPauseOnAckStatePersistentEnabled"
MESSAGE_BYTES = "maxMessageSize"
UNPERSISTED_BYTES = "maxUnPersistAckRecordsBytes"

_FRAME_PADDING_BYTES = 10 * 1024  # of BookKeeper's frames besides the largest message
_VERSION = re.compile(r"(\d+)\.(\d+)")
_LATEST = "4.2.4"


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The settings of a broker. The defaults are those of Pulsar 4.2."""

    version: str = _LATEST  # Version of the broker
    form: RangeForm = RangeForm.WORDS  # The form of acked entries in a cursor-ledger entry
    range_count_max: int = 10_000  # ``managedLedgerMaxUnackedRangesToPersist``; its unit depends on `rule`
    metadata_range_count_max: int = 1_000  # The same limit in the metadata store
    record_bytes_max: int = 5 * 1024 * 1024 + _FRAME_PADDING_BYTES  # The largest entry that BookKeeper accepts
    unpersisted_bytes_max: int | None = None  # ``maxUnPersistAckRecordsBytes``; None for a broker without this setting
    can_have_words: bool = True  # Whether the broker has a setting for `form`
    is_paused_by_ranges: bool = False  # Whether dispatch pauses above `range_count_max` ranges
    # The metadata store, if it is ZooKeeper, as ``zk:HOST:PORT``; empty if it is not, or unknown.
    metadata_url: str = ""
    # The reason why some settings are Pulsar's defaults instead of the broker's; empty if all are known.
    assumed: str = ""

    @property
    def rule(self) -> LimitRule:
        """The unit of the limit on ranges in this version."""
        return LimitRule.of_release(self.version)

    @property
    def limits(self) -> Limits:
        """The limits on a record in the cursor ledger."""
        return Limits(range_count_max=self.range_count_max, rule=self.rule)

    @property
    def ranges_kept_max(self) -> int:
        """The most ranges in a record of the list form."""
        return self.range_count_max + (self.rule is LimitRule.PULSAR_4_2)


def broker_settings(configuration: Mapping[str, str], version: str = "", *, assumed: str = "") -> BrokerSettings:
    """Return the settings of a broker: those given, and else the defaults of its version."""
    known = BrokerSettings(version=version or _LATEST, assumed=assumed)
    release = _VERSION.match(known.version)
    if release is None:
        raise SnapshotError(f"the version of Pulsar must look like {_LATEST}, got {known.version[:40]!r}")
    if (int(release[1]), int(release[2])) >= (5, 0):
        known = replace(known, range_count_max=200_000, metadata_range_count_max=200_000)
    elif (int(release[1]), int(release[2])) < (4, 1):
        known = replace(known, form=RangeForm.LIST, can_have_words=False)
    try:
        ours = cursor_settings({key: configuration[key] for key in _CURSOR_KEYS if key in configuration})
        message_bytes = whole_number(configuration, MESSAGE_BYTES, least=1)
        found: dict[str, Any] = {
            "form": ours.get("range_form"),
            "range_count_max": ours.get("range_count_max"),
            "metadata_range_count_max": ours.get("metadata_range_count_max"),
            "record_bytes_max": message_bytes and message_bytes + _FRAME_PADDING_BYTES,
            "unpersisted_bytes_max": whole_number(configuration, UNPERSISTED_BYTES, least=-1),
            "is_paused_by_ranges": flag(configuration, PAUSE),
            "can_have_words": True if pulsar_conf.AS_WORDS in configuration else None,
            "metadata_url": _zookeeper(configuration),
        }
        return replace(known, **{name: value for name, value in found.items() if value is not None})
    except (ValueError, TypeError) as error:
        raise SnapshotError(f"configuration of the broker: {error}") from None


def _zookeeper(configuration: Mapping[str, str]) -> str:
    """Return the metadata store if it is named as ``zk:...`` or, in the old form, by hosts and ports alone."""
    places = (configuration.get(key, "").strip() for key in ("metadataStoreUrl", "zookeeperServers"))
    place = next((each for each in places if each not in {"", "null"}), "")
    name, _, rest = place.partition(":")
    if name == "zk":
        return place
    return f"zk:{place}" if rest.partition("/")[0].partition(",")[0].isdigit() else ""


# Other keys are read here, or are irrelevant.
_CURSOR_KEYS = (
    pulsar_conf.RANGES, pulsar_conf.METADATA_RANGES, pulsar_conf.METADATA_RANGES_ALIAS, pulsar_conf.AS_WORDS,
)  # fmt: skip


_Kind: TypeAlias = Literal["tenant", "namespace", "topic"]
_Answer = TypeVar("_Answer")

_PERSISTENT = "persistent://"
PARTITION = re.compile(r"-partition-\d+$", re.ASCII)
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
            return PARTITION.sub("", topic) == _whole_name(self.name)
        return topic.startswith(f"{_PERSISTENT}{self.name}/")


REASONS = {
    "gone": "does not exist, or was deleted meanwhile",
    "forbidden": "may not be read",
    "failing": "could not be read",
    "unsupported": "has a name that cannot be requested, as those of Pulsar 1 with a cluster in them",
}


Listing: TypeAlias = tuple[list[str], list[Unread]]
"""The names of topics or partitions, in order, each once; and what could not be listed: there may be topics in it."""


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
        # The path of a tenant's namespaces is a prefix of a namespace's path.
        of_tenants, unread = request_all("tenant", tenants, lambda tenant: self._names(_tenant_path(tenant)))
        of_namespaces, unlisted = request_all("namespace", chain(namespaces, *of_tenants.values()), self._of_namespace)
        of_topics, unknown = request_all("topic", topics, self._partitions)
        unread = [*unread, *unlisted, *unknown]
        if unread and not (of_namespaces or of_topics or [] in of_tenants.values()):
            raise unread[0].error
        return sorted({*chain(*of_namespaces.values(), *of_topics.values())}), unread

    @property
    def request_count(self) -> int:
        """The requests sent so far."""
        return self._admin.request_count

    def look_at_broker(self) -> None:
        """Read the version and the settings of the broker, as `listing` does."""
        version = self._admin.get_text("/admin/v2/brokers/version").strip('"')
        texts, assumed = {}, ""
        try:
            texts = self._admin.get("/admin/v2/brokers/configuration/runtime")
        except RefusedError as error:
            if error.status != _NOT_TO_BE_READ:
                raise
            assumed = f"the configuration may not be read: the defaults of Pulsar {version}"
        if not isinstance(texts, dict) or not all(isinstance(value, str) for value in texts.values()):
            raise SnapshotError(f"configuration of the broker: must be an object of texts, got {str(texts)[:40]!r}")
        properties = {key: texts[key] for key in keys_of("CursorConfig") if key in texts}
        self.cursor_properties = None if _OURS in version else properties
        self.settings = broker_settings(texts, version, assumed=assumed)

    def includes(self, topic: str) -> bool:
        """Return whether `listing` has a topic, or one of its partitions, if it exists."""
        topics, namespaces, tenants = self._chosen
        whole = PARTITION.sub("", topic)
        namespace = whole.removeprefix(_PERSISTENT).rpartition("/")[0]
        tenant = namespace.partition("/")[0]
        if not (topics or namespaces or tenants):
            return tenant != _SYSTEM_TENANT
        return whole in map(_whole_name, topics) or namespace in namespaces or tenant in tenants

    def internals(self, topic: str) -> TopicInternals:
        """Return the cursors of a topic in memory."""
        return self.ask(TopicInternals, topic, "internalStats")

    def stats(self, topic: str) -> TopicStats:
        """Return the statistics of a topic."""
        return self.ask(TopicStats, topic, "stats")

    def ask(self, kind: type[_Object], topic: str, resource: str) -> _Object:
        """Return a resource of a topic."""
        answer = self._admin.get(f"{topic_path(topic)}/{resource}")
        return read_object(kind, answer, what=f"{topic}: {resource.partition('?')[0]}")

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


def _whole_name(topic: str) -> str:
    if topic.startswith(_PERSISTENT):
        return topic
    return f"{_PERSISTENT}{topic}" if "/" in topic else f"{_PERSISTENT}public/default/{topic}"


def _tenant_path(tenant: str) -> str:
    return namespace_path(f"{tenant}/-").rpartition("/")[0]


AT_ONCE = 8
"""Requests under way."""


def request_all(
    kind: _Kind, names: Iterable[str], request: Callable[[str], _Answer], *, done: Callable[[], None] = lambda: None
) -> tuple[dict[str, _Answer], list[Unread]]:
    """Request each of some topics, tenants or namespaces; return the answers, and what could not be read, in order."""
    found: dict[str, _Answer] = {}
    unread: list[Unread] = []

    def answer_of(name: str) -> _Answer | AckStateError:
        """Return the answer or the error of one name."""
        try:
            return request(name)
        except AckStateError as error:
            return error
        finally:
            done()

    asked = [*dict.fromkeys(names)]
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        for name, answer in zip(asked, pool.map(answer_of, asked), strict=True):
            if isinstance(answer, AckStateError):
                unread.append(Unread(kind, name, answer))
            else:
                found[name] = answer
    finally:
        # After Ctrl-C no further request starts.
        pool.shutdown(cancel_futures=True)
    return found, unread
