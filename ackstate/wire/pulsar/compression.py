"""The header in front of a compressed metadata record: magic 0x4778, the compression, and the uncompressed size.

::

    0x47 0x78 | size of the metadata, 4 bytes, big-endian | metadata | payload

The metadata is a protobuf message: 1 compression type, 2 size of the record before compression. No record itself starts
with 0x47, because its first field makes it start with 0x08.

Source: ``MetaStoreImpl`` of Apache Pulsar.
"""

from __future__ import annotations

import struct
import zlib
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ackstate.errors import AckStateError, UnsupportedVersionError, corrupt
from ackstate.wire.pulsar.fields import Wire, fields_of, varint

if TYPE_CHECKING:
    from collections.abc import Callable

MAGIC = b"\x47\x78"
WHAT = "compressed cursor info"
_METADATA_SIZE = struct.Struct(">i")

# A payload that claims to grow more is refused before any allocation. Lists of 1,000 to 100,000 ranges of every kind
# shrink to a half or a third with LZ4 and Snappy, at most to an eighth with zlib, and at most to a twenty-fifth with
# zstd at its highest level.
RATIO_MAX = 128


class Compression(Enum):
    """The compression of a metadata record; the value is the number in Pulsar's schema."""

    NONE = 0
    LZ4 = 1
    ZLIB = 2
    ZSTD = 3
    SNAPPY = 4


class MissingCodecError(AckStateError):
    """A record needs a compression package that is not installed: ``pip install 'ackstate[compression]'``."""


def compress(record: bytes, compression: Compression) -> bytes:
    """Return a record with the header, compressed; unchanged if it would shrink more than `decompress` accepts."""
    payload = _COMPRESS[compression](record)
    if len(record) > RATIO_MAX * len(payload):
        return record
    metadata = b"\x08" + bytes([compression.value]) + b"\x10" + varint(len(record))
    return MAGIC + _METADATA_SIZE.pack(len(metadata)) + metadata + payload


def is_compressed(data: bytes) -> bool:
    """Return whether the bytes start with the header."""
    return data.startswith(MAGIC)


def compression_of(data: bytes) -> Compression:
    """Return how a record is compressed; errors as for `decompress`, of the header."""
    return Compression(_header(data)[0]) if is_compressed(data) else Compression.NONE


def decompress(data: bytes) -> bytes:
    """Return the record behind a header; `CorruptStateError`, `UnsupportedVersionError` or `MissingCodecError`."""
    number, size, end = _header(data)
    found: object
    try:
        record = _DECOMPRESS[number](memoryview(data)[end:], size)
    except MissingCodecError:
        raise
    except Exception as error:  # Three packages, each with its own errors.
        found = error
    else:
        found = f"{len(record)} bytes"
        if len(record) == size:
            return record
    return corrupt(WHAT, end, f"a payload of {size} bytes", found)


def _header(data: bytes) -> tuple[int, int, int]:
    """Return the compression type, the size of the record, and where the payload begins."""
    begin = len(MAGIC) + _METADATA_SIZE.size
    if len(data) < begin:
        corrupt(WHAT, len(data), f"a header of {begin} bytes", "the end")
    (size,) = _METADATA_SIZE.unpack_from(data, len(MAGIC))
    end = begin + size
    if not begin <= end <= len(data):
        corrupt(WHAT, len(MAGIC), "the metadata's size", f"{size}, with {len(data) - begin} bytes left")
    metadata = {each.number: each for each in fields_of(data, begin, end, what=WHAT) if each.wire == Wire.VARINT}
    for required, name in ((1, "compression_type"), (2, "uncompressed_size")):
        if required not in metadata:
            corrupt(WHAT, end, f"field {required} ({name}) of its metadata", "the end of it")
    number, record_size = metadata[1].signed, metadata[2].signed
    if number not in _DECOMPRESS:  # well-formed, so a newer Pulsar is more likely than damage
        raise UnsupportedVersionError(f"{WHAT}: compression type {number}; this release supports 0 to 4")
    payload_size = len(data) - end
    if not 0 <= record_size <= RATIO_MAX * payload_size:
        expected = f"a size of at most {RATIO_MAX} times the payload's {payload_size} bytes"
        corrupt(WHAT, metadata[2].offset, expected, record_size)
    return number, record_size, end


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise MissingCodecError(f"{WHAT}: needs the package {name}: pip install 'ackstate[compression]'") from None


def _unpack_lz4(payload: memoryview, size: int) -> bytes:
    record = bytearray(size)
    written = _package("cramjam").lz4.decompress_block_into(payload, record)
    return bytes(record[:written])


def _unpack_snappy(payload: memoryview, size: int) -> bytes:
    snappy = _package("cramjam").snappy
    if snappy.decompress_raw_len(payload) != size:
        raise ValueError(f"a payload that declares {snappy.decompress_raw_len(payload)} bytes")
    record = bytearray(size)
    written = snappy.decompress_raw_into(payload, record)
    return bytes(record[:written])


def _unpack_zlib(payload: memoryview, size: int) -> bytes:
    # Pulsar flushes its stream without ending it, so the declared size marks the end.
    stream = zlib.decompressobj()
    record = stream.decompress(payload, size + 1)
    if stream.unused_data:
        raise ValueError("more bytes after it")
    return record


def _unpack_zstd(payload: memoryview, size: int) -> bytes:
    zstandard = _package("zstandard")
    # A frame without a size needs a window, which may be larger than its contents.
    content_size = zstandard.get_frame_parameters(payload).content_size
    if content_size != size:
        raise ValueError(f"a frame of {content_size} bytes")
    record = zstandard.ZstdDecompressor().decompress(payload, max_output_size=size, allow_extra_data=False)
    return bytes(record)


_COMPRESS: dict[Compression, Callable[[bytes], bytes]] = {
    Compression.NONE: bytes,
    Compression.LZ4: lambda record: bytes(_package("cramjam").lz4.compress_block(record, store_size=False)),
    Compression.ZLIB: zlib.compress,
    Compression.ZSTD: lambda record: bytes(_package("zstandard").ZstdCompressor().compress(record)),
    Compression.SNAPPY: lambda record: bytes(_package("cramjam").snappy.compress_raw(record)),
}
_DECOMPRESS: dict[int, Callable[[memoryview, int], bytes]] = {
    Compression.NONE.value: lambda payload, _: bytes(payload),
    Compression.LZ4.value: _unpack_lz4,
    Compression.ZLIB.value: _unpack_zlib,
    Compression.ZSTD.value: _unpack_zstd,
    Compression.SNAPPY.value: _unpack_snappy,
}
