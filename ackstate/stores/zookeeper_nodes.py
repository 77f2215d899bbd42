"""The names of the nodes of a ZooKeeper store, and their bytes: a frame whose checksum covers the node's path.

So a node that was damaged, cut, or written for another place is recognised when it is read. `docs/wire-format.md`
draws the tree and the frame. All paths here are below the store's root.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple
from urllib.parse import quote, unquote

import google_crc32c

from ackstate.errors import CorruptStateError, UnsupportedVersionError

STORE = ""
"""The root itself."""
LEDGER_COUNTER = "/last-ledger"
DELETIONS = "/deletions"
METADATA = "/metadata"
LEDGERS = "/ledgers"
OWNERS = "/owners"
GARBAGE = "/garbage"

_VERSION = 1
_MAGIC = b"ACKZ"
_HEADER = struct.Struct("<4sBBHI")  # magic, version, kind, reserved, body size
_CHECKSUM = struct.Struct("<I")
FRAME_BYTES = _HEADER.size + _CHECKSUM.size
"""The size of a frame without its body."""

_LEDGER = struct.Struct("<QB")  # entry count, status; then the owner in UTF-8
_CHUNK = struct.Struct("<I")  # chunk count; then the data
_COUNTER = struct.Struct("<Q")


class NodeKind(IntEnum):
    """The kind of a node's contents."""

    STORE = 1
    DIRECTORY = 2
    COUNTER = 3
    LEDGER = 4
    CHUNK = 5
    VALUE = 6
    BOOKKEEPER_STORE = 7
    BOOKKEEPER_LEDGER = 8
    BOOKKEEPER_WRITER = 9


class LedgerStatus(IntEnum):
    """The status of a ledger. A deleted one is invisible to every caller; its chunks are still being removed."""

    OPEN = 0
    FENCED = 1
    DELETED = 2


class LedgerState(NamedTuple):
    """The contents of a ledger's node."""

    entry_count: int
    status: LedgerStatus
    owner: str


class Chunk(NamedTuple):
    """One part of an entry, and the number of parts of the entry."""

    chunk_count: int
    data: bytes


def ledger_path(ledger_id: int) -> str:
    """Return the path of a ledger's state; its chunks are below."""
    return f"{LEDGERS}/{ledger_id:d}"


def chunk_path(ledger_id: int, entry_id: int, chunk: int) -> str:
    """Return the path of a part of an entry; parts count from 0."""
    return f"{ledger_path(ledger_id)}/{entry_id:010d}.{chunk:04d}"


def entry_id_of(path: str) -> int:
    """Return the entry id in a chunk's path.

    Raises:
        CorruptStateError: The path is not that of a chunk.
    """
    entry_id, dot, chunk = path.rpartition("/")[2].partition(".")
    if not (dot and entry_id.isdecimal() and chunk.isdecimal()):
        raise CorruptStateError(path, offset=0, expected="the name of a chunk", found=path)
    return int(entry_id)


def owner_path(owner: str) -> str:
    """Return the directory that names an owner's ledgers."""
    return f"{OWNERS}/{_node_name(owner)}"


def value_path(path: str) -> str:
    """Return the path of the node with a metadata path's value; ``/`` is the directory of all values."""
    names = path.split("/")[1:] if path != "/" else []
    return METADATA + "".join(f"/{_node_name(name)}" for name in names)


def directories_above(value: str) -> list[str]:
    """Return the nodes between a value and `METADATA`, both excluded, the nearest first."""
    parts = value.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts) - 1, 2, -1)]


def name_in_metadata(node_name: str) -> str:
    """Return the name that a node below `METADATA` encodes.

    Raises:
        CorruptStateError: The node encodes no name.
    """
    return _unquoted(node_name, METADATA)


def owner_in_owners(node_name: str) -> str:
    """Return the owner that a node below `OWNERS` encodes.

    Raises:
        CorruptStateError: The node encodes no owner.
    """
    return "" if node_name == _node_name("") else _unquoted(node_name, OWNERS)


def _unquoted(node_name: str, directory: str) -> str:
    name = unquote(node_name)
    if _node_name(name) != node_name:
        raise CorruptStateError(directory, offset=0, expected="a name percent-encoded by us", found=node_name)
    return name


def _node_name(name: str) -> str:
    # ZooKeeper allows no empty name, and treats one or two dots as a file system does.
    return quote(name, safe="").replace(".", "%2E") if name in {".", ".."} else quote(name, safe="") or "%"


def encode(kind: NodeKind, path: str, body: bytes = b"") -> bytes:
    """Return the bytes of a node, which are valid only at this path."""
    header = _HEADER.pack(_MAGIC, _VERSION, kind, 0, len(body))
    return b"".join((header, _CHECKSUM.pack(_checksum(path, header, body)), body))


def kind_of(path: str, data: bytes) -> NodeKind:
    """Return the kind of a node.

    Raises:
        CorruptStateError: Its bytes are damaged, or were written to another path.
        UnsupportedVersionError: A newer release wrote them.
    """
    return _open_frame(path, data)[0]


def decode(kind: NodeKind, path: str, data: bytes) -> bytes:
    """Return the body of a node of the expected kind.

    Raises:
        CorruptStateError: The node is of another kind, its bytes are damaged, or they were written to another path.
        UnsupportedVersionError: A newer release wrote them.
    """
    found, body = _open_frame(path, data)
    if found is not kind:
        raise _damage(path, 5, f"kind {kind.name}", found.name)
    return body


def encode_ledger(ledger_id: int, state: LedgerState) -> bytes:
    """Return the bytes of a ledger's node."""
    body = _LEDGER.pack(state.entry_count, state.status) + state.owner.encode()
    return encode(NodeKind.LEDGER, ledger_path(ledger_id), body)


def decode_ledger(ledger_id: int, data: bytes) -> LedgerState:
    """Return the state in a ledger's node; errors as `decode`."""
    path = ledger_path(ledger_id)
    body = decode(NodeKind.LEDGER, path, data)
    try:
        entry_count, status = _LEDGER.unpack_from(body)
        return LedgerState(entry_count, LedgerStatus(status), body[_LEDGER.size :].decode())
    except (struct.error, ValueError) as error:
        raise _damage(path, FRAME_BYTES, "the state of a ledger", error) from error


def encode_chunk(path: str, chunk: Chunk) -> bytes:
    """Return the bytes of a chunk's node."""
    return encode(NodeKind.CHUNK, path, _CHUNK.pack(chunk.chunk_count) + chunk.data)


def decode_chunk(path: str, data: bytes) -> Chunk:
    """Return the chunk in a node; errors as `decode`."""
    body = decode(NodeKind.CHUNK, path, data)
    count = _CHUNK.unpack_from(body)[0] if len(body) >= _CHUNK.size else 0
    if not count:
        raise _damage(path, FRAME_BYTES, "a chunk count", body[: _CHUNK.size])
    return Chunk(count, body[_CHUNK.size :])


def encode_counter(path: str, number: int) -> bytes:
    """Return the bytes of a counter's node."""
    return encode(NodeKind.COUNTER, path, _COUNTER.pack(number))


def decode_counter(path: str, data: bytes) -> int:
    """Return the number in a counter's node; errors as `decode`."""
    body = decode(NodeKind.COUNTER, path, data)
    if len(body) != _COUNTER.size:
        raise _damage(path, FRAME_BYTES, f"{_COUNTER.size} bytes", f"{len(body)} bytes")
    number: int = _COUNTER.unpack(body)[0]
    return number


def _open_frame(path: str, data: bytes) -> tuple[NodeKind, bytes]:
    if len(data) < FRAME_BYTES:
        raise _damage(path, len(data), f"a frame of at least {FRAME_BYTES} bytes", f"{len(data)} bytes")
    magic, version, kind, reserved, size = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise _damage(path, 0, _MAGIC, magic)
    if version > _VERSION:
        raise UnsupportedVersionError(
            f"node {path or '/'} has format version {version}; this release reads up to version {_VERSION}"
        )
    body = data[FRAME_BYTES:]
    if size != len(body):
        raise _damage(path, 8, f"a body of {size} bytes", f"{len(body)} bytes")
    (stored,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    computed = _checksum(path, data[: _HEADER.size], body)
    if stored != computed:
        raise _damage(path, _HEADER.size, f"CRC-32C {computed:#010x}", f"{stored:#010x}")
    if version != _VERSION or reserved or kind not in set(NodeKind):
        raise _damage(path, 4, f"version {_VERSION}, a known kind, 0", (version, kind, reserved))
    return NodeKind(kind), body


def _checksum(path: str, header: bytes, body: bytes) -> int:
    checksum: int = google_crc32c.value(path.encode())
    for part in (header, body):
        checksum = google_crc32c.extend(checksum, part)
    return checksum


def _damage(path: str, offset: int, expected: object, found: object) -> CorruptStateError:
    return CorruptStateError(f"node {path or '/'}", offset=offset, expected=expected, found=found)
