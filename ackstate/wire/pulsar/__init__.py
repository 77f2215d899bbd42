"""Pulsar's own formats: decodes bytes that Pulsar wrote, and encodes bytes that Pulsar reads.

A `PositionInfo` is an entry of a cursor ledger, a `CursorInfo` the cursor's record in the metadata store.
The snapshots of delayed messages are in `delay_snapshot`.
"""

from ackstate.wire.pulsar.codec import (
    COMPRESSION_THRESHOLD_BYTES as COMPRESSION_THRESHOLD_BYTES,
    CursorInfo as CursorInfo,
    PositionInfo as PositionInfo,
    decode_cursor_info as decode_cursor_info,
    decode_position_info as decode_position_info,
    encode_cursor_info as encode_cursor_info,
    encode_position_info as encode_position_info,
)
from ackstate.wire.pulsar.compression import Compression as Compression, MissingCodecError as MissingCodecError
from ackstate.wire.pulsar.ranges import (
    LimitRule as LimitRule,
    Limits as Limits,
    RangeForm as RangeForm,
    limit_ranges as limit_ranges,
)
