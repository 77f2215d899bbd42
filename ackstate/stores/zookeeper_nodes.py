"""The names of the nodes of a store in ZooKeeper, and their bytes: a frame whose checksum covers the node's path.

So a node that was damaged, cut, or written for another place is recognised when it is read. `docs/wire-format.md`
draws the tree and the frame. All paths here are below the store's root.
"""

from __future__ import annotations

import struct
from enum import IntEnum
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

_COUNTER = struct.Struct("<Q")


class NodeKind(IntEnum):
    """The kind of a node's contents."""

    DIRECTORY = 2
    COUNTER = 3
    VALUE = 6
    BOOKKEEPER_STORE = 7
    BOOKKEEPER_LEDGER = 8
    BOOKKEEPER_WRITER = 9


class LedgerStatus(IntEnum):
    """The status of a ledger. A deleted one is invisible to every caller; its entries are still being removed."""

    OPEN = 0
    FENCED = 1
    DELETED = 2


def ledger_path(ledger_id: int) -> str:
    """Return the path of a ledger's state."""
    return f"{LEDGERS}/{ledger_id:d}"


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
