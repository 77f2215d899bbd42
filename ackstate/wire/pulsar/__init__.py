"""Pulsar's own formats: decodes bytes that Pulsar wrote, and encodes bytes that Pulsar reads.

A `PositionInfo` is an entry of a cursor ledger, a `CursorInfo` the cursor's record in the metadata store.
The snapshots of delayed messages are in `delay_snapshot`.
"""

from ackstate.wire.pulsar.codec import (
    COMPRESSION_THRESHOLD_BYTES,
    CursorInfo,
    PositionInfo,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
)
from ackstate.wire.pulsar.compression import Compression, MissingCodecError
from ackstate.wire.pulsar.ranges import LimitRule, Limits, RangeForm, limit_ranges

__all__ = [
    "COMPRESSION_THRESHOLD_BYTES",
    "Compression",
    "CursorInfo",
    "LimitRule",
    "Limits",
    "MissingCodecError",
    "PositionInfo",
    "RangeForm",
    "decode_cursor_info",
    "decode_position_info",
    "encode_cursor_info",
    "encode_position_info",
    "limit_ranges",
]
