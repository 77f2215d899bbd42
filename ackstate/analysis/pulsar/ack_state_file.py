"""Reads the durable ack states of a topic's subscriptions from a live Pulsar cluster, and files of such states.

A file is lines of JSON, the last of which has a checksum of all bytes before it. The first line is a header, and each
line after it is one cursor. Its state is a `PositionInfo` as Pulsar writes it, base64-encoded. `docs/wire-format.md`
has the fields. In the cluster nothing is written or fenced.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

import google_crc32c

from ackstate.analysis.location import atomic_write
from ackstate.cursor.formats import CursorState
from ackstate.cursor.recovery import Recovery
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.base import LedgerNotFoundError
from ackstate.stores.pulsar import managed_ledger_name
from ackstate.topic.subscriptions import subscription_name, subscription_paths
from ackstate.topic_name import ROOT
from ackstate.wire.pulsar import PositionInfo, RangeForm, decode_position_info, encode_position_info
from ackstate.wire.pulsar.message_entry import decode_message_times

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from ackstate.stores.pulsar import PulsarLayout

VERSION = 1
"""The version that this release writes."""

_MAGIC = "ackstate_export"
_CHECKSUM = "crc32c"
_FINGERPRINTS_MAX = 100
_OWN_CURSORS = ("__compaction", "pulsar.dedup")
_REPLICATORS = "pulsar.repl."


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A message by which an import recognises the topic."""

    position: Position  # Where it is
    checksum: int  # The CRC-32C of its entry in the message log
    publish_time_ms: int  # When it was published, in milliseconds since 1970


@dataclass(frozen=True, slots=True)
class ExportedCursor:
    """One cursor."""

    topic: str  # Its topic, ``persistent://TENANT/NAMESPACE/TOPIC``
    subscription: str
    content: CursorState  # Its durable state. Must not be changed
    ledgers: Mapping[int, int]  # The topic's message log: ledger id -> entry count, in order
    cursor_properties: Mapping[str, str] = field(default_factory=dict)  # The properties attached to the cursor
    fingerprints: tuple[Fingerprint, ...] = ()  # Messages of the topic


@dataclass(frozen=True, slots=True)
class AckStateFile:
    """The contents of a file."""

    source: str  # The cluster that it was exported from
    exported_at_ms: int  # When, in milliseconds since 1970
    cursors: tuple[ExportedCursor, ...]  # The cursors, in the order of the file


def write_ack_states(path: Path, contents: AckStateFile) -> int:
    """Write a file, which exists either complete or not at all, and return its size in bytes."""
    data = encode_ack_states(contents)
    with atomic_write(path) as unfinished:
        unfinished.write_bytes(data)
    return len(data)


def read_ack_states(path: Path) -> AckStateFile:
    """Read a file."""
    return decode_ack_states(path.read_bytes(), what=str(path))


def encode_ack_states(contents: AckStateFile) -> bytes:
    """Return the bytes of a file."""
    header = {
        _MAGIC: VERSION,
        "source": contents.source,
        "exported_at_ms": contents.exported_at_ms,
        "cursor_count": len(contents.cursors),
    }
    body = b"".join(_line(each) for each in (header, *map(_cursor_json, contents.cursors)))
    return body + _line({_CHECKSUM: f"{google_crc32c.value(body):08x}"})


def decode_ack_states(data: bytes, *, what: str = "export") -> AckStateFile:
    """Return the contents of a file."""
    body, cursors = _checked_body(data, what), []
    lines = body.split(b"\n")[:-1]
    header = _object(lines[0], 0, what)
    offset = len(lines[0]) + 1
    for line in lines[1:]:
        cursors.append(_decoded_cursor(line, offset, what))
        offset += len(line) + 1
    expected = _value(header, "cursor_count", int, 0, what)
    if expected != len(cursors):
        _refuse(what, 0, f"{expected} cursors", len(cursors))
    return AckStateFile(
        _value(header, "source", str, 0, what), _value(header, "exported_at_ms", int, 0, what), tuple(cursors)
    )


def _checked_body(data: bytes, what: str) -> bytes:
    """Return the bytes before the checksum, if they match it and the version is known."""
    first, end, _ = data.partition(b"\n")
    version = _object(first, 0, what).get(_MAGIC) if end else None
    if not isinstance(version, int):
        _refuse(what, 0, f"a first line with {_MAGIC}", "another one")
    if version > VERSION:
        raise UnsupportedVersionError(f"{what}: version {version}; this release reads up to {VERSION}")
    begin = data.rfind(b"\n", 0, len(data) - 1) + 1
    if begin == 0 or not data.endswith(b"\n"):
        _refuse(what, len(data), "a last line with a checksum", "the end")
    declared = _object(data[begin:], begin, what).get(_CHECKSUM)
    actual = f"{google_crc32c.value(data[:begin]):08x}"
    if declared != actual:
        _refuse(what, begin, f"the checksum {actual}", declared)
    return data[:begin]


def _line(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _cursor_json(cursor: ExportedCursor) -> dict[str, Any]:
    mark_delete, deleted, batch, properties, _ = cursor.content
    info = PositionInfo(mark_delete, deleted, batch, properties)
    # Whichever is shorter: words take a bit for each entry, and a list some bytes for each range.
    state = min((encode_position_info(info, form=form) for form in RangeForm), key=len)
    return {
        "topic": cursor.topic,
        "subscription": cursor.subscription,
        "mark_delete": str(mark_delete),
        "range_count": deleted.range_count,
        "cursor_properties": dict(cursor.cursor_properties),
        "ledgers": [list(each) for each in cursor.ledgers.items()],
        "fingerprints": [[*each.position, each.checksum, each.publish_time_ms] for each in cursor.fingerprints],
        "state": base64.b64encode(state).decode(),
    }


def _decoded_cursor(line: bytes, offset: int, what: str) -> ExportedCursor:
    found = _object(line, offset, what)
    topic, subscription = (_value(found, name, str, offset, what) for name in ("topic", "subscription"))
    properties = _value(found, "cursor_properties", dict, offset, what)
    try:
        info = decode_position_info(base64.b64decode(_value(found, "state", str, offset, what), validate=True))
        log = LedgerMap.from_counts({row[0]: row[1] for row in _rows(found, "ledgers", 2, offset, what)})
        fingerprints = tuple(
            Fingerprint(Position(ledger_id, entry_id), checksum, publish_time_ms)
            for ledger_id, entry_id, checksum, publish_time_ms in _rows(found, "fingerprints", 4, offset, what)
        )
    except CorruptStateError as error:
        if error.what == what:
            raise
        _refuse(what, offset, "a cursor", str(error))
    except (AckStateError, ValueError, TypeError) as error:
        _refuse(what, offset, "a cursor", str(error))
    if found.get("mark_delete") != str(info.position):
        _refuse(what, offset, f"the mark-delete position {info.position} of the state", found.get("mark_delete"))
    if not all(isinstance(each, str) for each in (*properties, *properties.values())):
        _refuse(what, offset, "cursor properties that are text", properties)
    content = CursorState(info.position, info.deleted, info.batch, info.properties)
    return ExportedCursor(topic, subscription, content, log.counts(), properties, fingerprints)


def _rows(found: Mapping[str, Any], name: str, width: int, offset: int, what: str) -> list[list[int]]:
    """Return lists of integers, each of the same length."""
    rows: list[list[int]] = _value(found, name, list, offset, what)
    for row in rows:
        if not isinstance(row, list) or len(row) != width or not all(type(each) is int for each in row):
            _refuse(what, offset, f"{name} of {width} integers each", row)
    return rows


def _value(found: Mapping[str, Any], name: str, kind: type, offset: int, what: str) -> Any:
    value = found.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        _refuse(what, offset, f"{name} as {kind.__name__}", repr(value)[:60])
    return value


def _object(line: bytes, offset: int, what: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        _refuse(what, offset, "a JSON object", repr(line[:60]))
    return found


def _refuse(what: str, offset: int, expected: object, found: object) -> NoReturn:
    raise CorruptStateError(what, offset=offset, expected=expected, found=found)


def exported_cursors(cluster: PulsarLayout, topic: str, *, subscriptions: Sequence[str] = ()) -> list[ExportedCursor]:
    """Return the cursors of a topic, of each partition if it has some, by topic and subscription.

    Acks that the broker has not persisted yet are not in a state.
    """
    topics = topics_of(cluster, topic)
    found = [cursor for each in topics for cursor in _cursors(cluster, each, subscriptions)]
    missing = set(subscriptions) - {cursor.subscription for cursor in found}
    if missing:
        names = sorted({subscription_name(path) for each in topics for path in subscription_paths(cluster, each)})
        there = ", ".join(map(repr, names)) or "none"
        raise AckStateError(f"{topic} has no subscription {min(missing)!r}; its subscriptions are: {there}")
    return found


def topics_of(cluster: PulsarLayout, topic: str) -> list[str]:
    """Return a topic, or its partitions."""
    path, _, stored = f"{ROOT}/{managed_ledger_name(topic)}".rpartition("/")
    names = cluster.nodes.children(path)
    if stored in names:
        return [topic]
    prefix = f"{stored}-partition-"
    numbers = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    partitions = [f"{topic}-partition-{number}" for number in sorted(filter(str.isdecimal, numbers), key=int)]
    if not partitions:
        raise AckStateError(f"{cluster.nodes.name} has no topic {topic}")
    return partitions


def _cursors(cluster: PulsarLayout, topic: str, subscriptions: Sequence[str]) -> Iterator[ExportedCursor]:
    for path in sorted(subscription_paths(cluster, topic)):
        name = subscription_name(path)
        is_of_broker = name in _OWN_CURSORS or name.startswith(_REPLICATORS)
        if (name not in subscriptions) if subscriptions else is_of_broker:
            continue
        log = cluster.find_message_log(topic)
        if log is None:
            raise AckStateError(f"{topic} was deleted meanwhile")
        found = Recovery(cluster, path, log.ledgers).find(())
        if found is None:
            continue
        content = found.recovered.content
        # Read after the state, so that the log is not older than the state.
        log = cluster.find_message_log(topic) or log
        yield ExportedCursor(
            topic,
            name,
            content,
            log.ledgers.counts(),
            dict(found.record.cursor_properties),
            tuple(_fingerprints(cluster, content, log.ledgers)),
        )


def _fingerprints(cluster: PulsarLayout, content: CursorState, log: LedgerMap) -> Iterator[Fingerprint]:
    """Yield the first unacked message and the last acked one of each ledger, as far as BookKeeper has them."""
    found = {Position(ledger_id, bitmap.max()) for ledger_id, bitmap in content.deleted.bitmaps()}
    found |= {content.mark_delete, log.next_valid(content.mark_delete)}
    for position in sorted(each for each in found if log.is_valid(each))[:_FINGERPRINTS_MAX]:
        ledger_id, entry_id = position
        try:
            (entry,) = cluster.ledgers.read(ledger_id, entry_id, entry_id + 1)
            times = decode_message_times(entry)
        except (LedgerNotFoundError, CorruptStateError):
            continue
        yield Fingerprint(position, google_crc32c.value(entry), times.publish_time_ms)
