"""The decoders of foreign bytes, each with real bytes to begin from.

A target must return, or raise `AckStateError`; text that a caller passes may also be refused with `ValueError`. Any
other exception is a failure, and so are a crash, a hang and a gigabyte of memory.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import google_crc32c

from ackstate import AckStateError, LedgerMap, Position
from ackstate.analysis.crash import conversation
from ackstate.analysis.durations import Duration
from ackstate.analysis.pulsar.ack_state_file import decode_ack_states
from ackstate.analysis.pulsar.sources import TopicInternals, TopicStats, read_object
from ackstate.analysis.trace.check import BadRowsMax, check_events
from ackstate.analysis.trace.convert import convert
from ackstate.analysis.trace.parquet import MANIFEST, listed_names
from ackstate.analysis.trace.recording import read_recording
from ackstate.cursor.config import cursor_settings
from ackstate.limits.policies import decode_policies
from ackstate.message import Message, decode_messages, encode_message
from ackstate.pulsar_conf import decode_properties
from ackstate.stores import bookkeeper, zookeeper
from ackstate.stores.pulsar import parse_pulsar_url
from ackstate.stores.sqlite import SqliteStore
from ackstate.topic.log import decode_log_record
from ackstate.wire import native, pulsar
from ackstate.wire.native import JournalOffset, decode_deltas
from ackstate.wire.pulsar import delay_snapshot
from ackstate.wire.pulsar.codec import decode_ledger_info
from ackstate.wire.pulsar.message_entry import decode_message_times
from examples.broker import framing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

TESTS = Path(__file__).parents[1]
GOLDEN, VECTORS = TESTS / "golden", TESTS / "vectors"
LEDGERS = LedgerMap.from_counts({3: 100, 5: 0, 6: 70_000, 9: 10})
ZOOKEEPER_PATH = "/ledgers/7"


class FuzzTarget(NamedTuple):
    """A decoder.

    Attributes:
        decode: Takes bytes.
        seeds: Returns bytes that it accepts, or refuses late.
        seal: Gives damaged bytes a checksum that fits, so that they reach the checks behind it.
        refuses: The exceptions that it may raise.
    """

    decode: Callable[[bytes], Any]
    seeds: Callable[[], Sequence[bytes]]
    seal: Callable[[bytes], bytes] | None = None
    refuses: tuple[type[Exception], ...] = (AckStateError,)


def run(target: FuzzTarget, data: bytes) -> bool:
    """Decode, and return whether the bytes were accepted; raise any error that a target may not raise."""
    try:
        state = target.decode(data)
    except target.refuses:
        return False
    if hasattr(state, "deleted") and hasattr(state.deleted, "_check"):
        state.deleted._check()
    return True


def sealed_at_end(data: bytes) -> bytes:
    return data[:-4] + google_crc32c.value(data[:-4]).to_bytes(4, "little") if len(data) >= 4 else data


def sealed_snapshot(data: bytes) -> bytes:
    if data[:3] != b"\x85\x86\x31" or len(data) < 7:
        return data
    return data[:3] + google_crc32c.value(data[7:]).to_bytes(4, "little") + data[7:]


def sealed_node(data: bytes) -> bytes:
    if len(data) < 16:
        return data
    data = data[:8] + (len(data) - 16).to_bytes(4, "little") + data[12:]
    checksum = google_crc32c.value(ZOOKEEPER_PATH.encode())
    checksum = google_crc32c.extend(google_crc32c.extend(checksum, data[:12]), data[16:])
    return data[:12] + checksum.to_bytes(4, "little") + data[16:]


def sealed_lines(data: bytes) -> bytes:
    body = data[: data.rfind(b"\n", 0, -1) + 1]
    return body + b'{"crc32c":"%08x"}\n' % google_crc32c.value(body)


def golden(*names: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [path.read_bytes() for name in names for path in sorted(GOLDEN.glob(name))]


def vectors(name: str, *fields: str) -> Callable[[], Sequence[bytes]]:
    """Return a function that returns hexadecimal fields of a few recorded lines as bytes."""

    def found() -> Sequence[bytes]:
        with gzip.open(VECTORS / name, "rt", encoding="utf-8") as lines:
            rows = [json.loads(line) for _, line in zip(range(400), lines, strict=False)]
        seeds = {bytes.fromhex(row[field]) for row in rows for field in fields if field in row}
        return sorted(seeds, key=len)[:: max(1, len(seeds) // 40)]

    return found


def in_file(name: str, read: Callable[[Path], Any]) -> Callable[[bytes], Any]:
    """Return a decoder of a file: `read` takes its directory."""

    def decode(data: bytes) -> Any:
        with tempfile.TemporaryDirectory(prefix="ackstate-fuzz-", dir="/dev/shm") as directory:
            file = Path(directory, name)
            file.parent.mkdir(exist_ok=True)
            file.write_bytes(data)
            return read(Path(directory))

    return decode


def _segment(data: bytes) -> Any:
    return delay_snapshot.decode_segment(data, what="segment")


def _messages(data: bytes) -> Any:
    return list(decode_messages([(3, [data])]))


def _frame(data: bytes) -> Any:
    entry = framing.decode_frame(data).entry
    return framing.message_of(entry, framing.decode_metadata(entry)) if entry else None


def _node_seeds() -> Sequence[bytes]:
    return [zookeeper.encode(kind, ZOOKEEPER_PATH, b"owner") for kind in zookeeper.NodeKind]


def _text(parse: Callable[[str], Any]) -> Callable[[bytes], Any]:
    return lambda data: parse(data.decode("utf-8", "replace"))


def _json(kind: Any) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            content = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return read_object(kind, content, what="answer")

    return decode


def _stats(prefix: str) -> Callable[[], Sequence[bytes]]:
    return lambda: [path.read_bytes() for path in sorted((VECTORS / "internal-stats").glob(f"{prefix}*.json"))][:3]


def _recording(directory: Path) -> Any:
    return list(read_recording(directory))


def _converted(directory: Path) -> Any:
    return convert([directory / "lines"], directory / "trace", bad_rows_max=BadRowsMax(), text_bytes_max=1 << 20)


def _sqlite_store(directory: Path) -> None:
    SqliteStore.open_copy(directory, copy_bytes_max=1 << 24).close()


JSON_LINES = [
    b'{"topic": "t", "ts_ms": 1700000000000, "kind": "publish", "ledger_id": 3, "first_entry": 0, "last_entry": 99}\n'
    b'{"topic": "t", "subscription": "s", "ts_ms": 1700000000005, "kind": "ack", "ledger_id": 3, "first_entry": 1}\n'
]
CONVERSATION = [
    b'{"op": "ack", "number": 1, "ledger": 3, "entry": 7}\n', b'{"op": "persist", "number": 2}\n',
    b'{"op": "recover", "directory": "/d", "ledgers": {"3": 9}}\n', b'{"ready": true}\n',
    b'{"accepted": 1, "redelivery_if_crashed": 3}\n', b'{"durable": [1, 2]}\n', b'{"acked": [[3, 0, 7]]}\n',
]  # fmt: skip
TEXTS = [b"5s", b"1.5h", b"90ms", b"pulsar+zk://h:2181,i:2181/tenant/ns/topic", b"10%"]
BROKER_CONF = [
    b"managedLedgerMaxUnackedRangesToPersist=10000\nmanagedLedgerDefaultMarkDeleteRateLimit=1.0\n"
    b"# comment\nmanagedCursorInfoCompressionType=LZ4\nacknowledgmentAtBatchIndexLevelEnabled = \\u0074rue\n"
]


TARGETS = {
    "native-record": FuzzTarget(native.decode, golden("native-record-v2.bin"), sealed_at_end),
    "native-deltas": FuzzTarget(
        lambda data: decode_deltas([data], JournalOffset(2, 7, 0xDEADBEEF, Position(3, -1))),
        golden("native-record-v2.bin"), sealed_at_end,
    ),
    "cursor-pointer": FuzzTarget(native.decode_pointer, golden("cursor-pointer-*.bin"), sealed_at_end),
    "log-record": FuzzTarget(decode_log_record, golden("log-record-*.bin"), sealed_at_end),
    "position-info": FuzzTarget(
        lambda data: pulsar.decode_position_info(data, LEDGERS),
        vectors("positioninfo.jsonl.gz", "longArrayHex", "messageRangeHex"),
    ),
    "cursor-info": FuzzTarget(
        lambda data: pulsar.decode_cursor_info(data, LEDGERS), vectors("broker-positioninfo.jsonl.gz", "hex")
    ),
    "delay-metadata": FuzzTarget(
        lambda data: delay_snapshot.decode_metadata(data, what="snapshot"),
        golden("delay-snapshot-v1.bin", "delay-snapshot-pulsar.bin"), sealed_snapshot,
    ),
    "delay-segment": FuzzTarget(_segment, golden("delay-snapshot-segment-*.bin")),
    "ledger-info": FuzzTarget(decode_ledger_info, lambda: [bytes.fromhex("0a0808031064180020000a0408051000")]),
    "pulsar-entry": FuzzTarget(decode_message_times, lambda: [_pulsar_entry()]),
    "zookeeper-node": FuzzTarget(lambda data: zookeeper.decode(ZOOKEEPER_PATH, data), _node_seeds, sealed_node),
    "bookkeeper-entry": FuzzTarget(
        lambda data: bookkeeper.decode_entry(data, "entry"), lambda: bookkeeper.encode_batch([b"a", b"bc"])
    ),
    "message": FuzzTarget(_messages, lambda: [
        encode_message(Message(b"payload", key=key, properties=properties))
        for key in (None, b"key") for properties in ({}, {"name": "text"})
    ]),
    "policies": FuzzTarget(decode_policies, golden("policies-*.bin")),
    "ack-states": FuzzTarget(decode_ack_states, golden("ack-states-*.ack"), sealed_lines),
    "recording": FuzzTarget(in_file("000001.events", _recording), golden("recording-*.events")),
    "json-lines": FuzzTarget(in_file("lines", _converted), lambda: JSON_LINES),
    "parquet-trace": FuzzTarget(
        in_file("trace.parquet", check_events), golden("*.parquet")
    ),
    "trace-manifest": FuzzTarget(in_file(MANIFEST, listed_names), lambda: [
        b'{"magic": "ackstate trace", "version": 1, "files": {"a.parquet": {"bytes": 4, "footer_sha256": "00"}}}'
    ]),
    "sqlite-store": FuzzTarget(in_file("ackstate.sqlite3", _sqlite_store), golden("sqlite-store-*.sqlite3")),
    "internal-stats": FuzzTarget(_json(TopicInternals), _stats("internalStats")),
    "topic-stats": FuzzTarget(_json(TopicStats), _stats("stats")),
    "broker-conf": FuzzTarget(
        lambda data: cursor_settings(decode_properties(data)), lambda: BROKER_CONF,
        refuses=(AckStateError, ValueError),
    ),
    "broker-frame": FuzzTarget(_frame, lambda: [framing.encode_frame("ping")[4:], _send_frame()]),
    "subject-answer": FuzzTarget(conversation.read_answer, lambda: CONVERSATION),
    "subject-request": FuzzTarget(conversation.read_request, lambda: CONVERSATION),
    **{
        name: FuzzTarget(_text(parse), lambda: TEXTS, refuses=(AckStateError, ValueError))
        for name, parse in (("duration", Duration.parse), ("url", parse_pulsar_url), ("bad-rows", BadRowsMax.parse))
    },
}  # fmt: skip
"""Every decoder of bytes from a file, a store, a network or a user, by name."""


def _entry() -> bytes:
    from examples.broker.pulsar_api_pb2 import MessageMetadata

    metadata = MessageMetadata(producer_name="p", sequence_id=1, publish_time=1_700_000_000_000)
    encoded = metadata.SerializeToString()
    body = len(encoded).to_bytes(4) + encoded + b"payload"
    return b"\x0e\x01" + google_crc32c.value(body).to_bytes(4) + body


def _pulsar_entry() -> bytes:
    return _entry()


def _send_frame() -> bytes:
    return framing.encode_frame("send", _entry(), producer_id=1, sequence_id=2)[4:]
