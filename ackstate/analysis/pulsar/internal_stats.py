"""Reads and checks a broker's answers about a topic, its `internalStats` and `stats`, from JSON.

The fields are those of ``PersistentTopicInternalStats`` and ``TopicStats`` of Apache Pulsar; irrelevant fields are
ignored.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel
from pyroaring import BitMap

from ackstate.errors import AckStateError
from ackstate.ledger_map import LedgerMap
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX, Position
from ackstate.wire.pulsar.ranges import InvalidRecordError, RangeRows, resolve

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ackstate.deleted_ranges import DeletedRanges

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


_Object = TypeVar("_Object", bound=BaseModel)


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


class Acks(Protocol):
    """Acked entries, in memory or durable."""

    @property
    def mark_delete(self) -> Position: ...
    @property
    def deleted(self) -> DeletedRanges: ...


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
