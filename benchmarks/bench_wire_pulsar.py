"""Pulsar's own format: the time to encode and decode a cursor's entry, in both forms."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate import DeletedRanges, Position, Run
from ackstate.wire.pulsar import PositionInfo, RangeForm, decode_position_info, encode_position_info
from ackstate.wire.pulsar.cursor_state_pb2 import LongListMap
from ackstate.wire.pulsar.cursor_state_pb2 import PositionInfo as PositionInfoMessage
from benchmarks.acked_entries import EntryIds, alternating, clustered, ninety_nine_percent, random_half
from benchmarks.measurement import Against, BenchmarkReport, Timing, timed_in_turn

if TYPE_CHECKING:
    from collections.abc import Callable

ABOUT = (
    "`ackstate.wire.pulsar`, a `PositionInfo` with its ranges as a list (field 3) and as words (field 6). Plain "
    "protobuf is the runtime alone, from and to a Python list of ranges or of words, which need not become a set of "
    "entries; it must write the same bytes. Pulsar's figures are for 10 thousand ranges of the same four shapes on "
    "another machine of 2 cores: for each form one span of times over all shapes, and the length of each."
)
LEDGER = 7


class Shape(NamedTuple):
    """The approximate numbers of ranges of the entries, and the bytes that Pulsar wrote for 10 thousand of them."""

    entries_of: Callable[[int], EntryIds]
    pulsar_words_bytes: float


SHAPES = {
    "alternating": Shape(alternating, 3_400),
    "random half": Shape(lambda count: random_half(4 * count), 6_600),
    "99 % acked": Shape(lambda count: ninety_nine_percent(101 * count), 175_000),
    "clustered": Shape(clustered, 237_000),
}
PULSAR_COUNT = 10_000
PULSAR_ENCODE_MS = {
    RangeForm.LIST: Against("Pulsar", 0.5, 1.0),
    RangeForm.WORDS: Against("Pulsar", 0.014, 0.8),
}
PULSAR_LIST_BYTES = Against("Pulsar", 163_000, 174_000)


def info_of(entry_ids: EntryIds) -> PositionInfo:
    """Return a cursor's state with these entries acked."""
    deleted = DeletedRanges()
    deleted.add_entries(LEDGER, entry_ids)
    return PositionInfo(Position(LEDGER, -1), deleted)


def plain_encode_list(runs: list[Run]) -> bytes:
    """Make a message a range; filling in is three times as fast as keyword arguments."""
    message = PositionInfoMessage(ledger_id=LEDGER, entry_id=-1)
    add = message.individual_deleted_messages.add
    for ledger_id, first, end in runs:
        added = add()
        lower, upper = added.lower_endpoint, added.upper_endpoint
        lower.ledger_id, lower.entry_id = ledger_id, first - 1
        upper.ledger_id, upper.entry_id = ledger_id, end - 1
    return message.SerializeToString()


def plain_decode_list(data: bytes) -> list[Run]:
    """Read a message a range."""
    runs = []
    for each in PositionInfoMessage.FromString(data).individual_deleted_messages:
        upper = each.upper_endpoint
        runs.append(Run(upper.ledger_id, each.lower_endpoint.entry_id + 1, upper.entry_id + 1))
    return runs


def plain_encode_words(words: list[int]) -> bytes:
    """Hand all words over at once."""
    message = PositionInfoMessage(ledger_id=LEDGER, entry_id=-1)
    message.individual_deleted_message_ranges.append(LongListMap(key=LEDGER, values=words))
    return message.SerializeToString()


def plain_decode_words(data: bytes) -> list[int]:
    """Take all words at once."""
    (only,) = PositionInfoMessage.FromString(data).individual_deleted_message_ranges
    return list(only.values)


def words_of(entry_ids: EntryIds) -> list[int]:
    """Return a bit for each entry as signed words, by way of a byte each."""
    bits = np.zeros(int(entry_ids[-1]) // 64 * 64 + 64, np.uint8)
    bits[entry_ids] = 1
    return np.packbits(bits, bitorder="little").view("<i8").tolist()


PLAIN = {
    RangeForm.LIST: (plain_encode_list, plain_decode_list),
    RangeForm.WORDS: (plain_encode_words, plain_decode_words),
}


def measure(report: BenchmarkReport, name: str, count: int, form: RangeForm) -> None:
    """Measure one shape of one size in one form, ours and plain."""
    shape = SHAPES[name]
    entry_ids = shape.entries_of(count)
    info = info_of(entry_ids)
    plain_info = list(info.deleted.runs()) if form is RangeForm.LIST else words_of(entry_ids)
    encoded = encode_position_info(info, form=form)
    plain_encode, plain_decode = PLAIN[form]
    assert encoded == plain_encode(plain_info)
    assert decode_position_info(encoded) == info
    assert plain_decode(encoded) == plain_info

    what = f"{form.name}, {info.deleted.range_count:,} ranges, {name}"
    spreads = timed_in_turn(
        {
            "encode": Timing(lambda each: encode_position_info(each, form=form), lambda: info, 1e6),
            "encode, plain": Timing(plain_encode, lambda: plain_info, 1e6),
            "decode": Timing(decode_position_info, lambda: encoded, 1e6),
            "decode, plain": Timing(plain_decode, lambda: encoded, 1e6),
        }
    )
    is_pulsars = count == PULSAR_COUNT
    report.time(f"{what}: encode", "ms", spreads["encode"], PULSAR_ENCODE_MS[form] if is_pulsars else None)
    report.time(f"{what}: decode", "ms", spreads["decode"])
    for way in ("encode", "decode"):
        plain = spreads[f"{way}, plain"]
        report.time(f"{what}: {way}, plain", "ms", plain, Against("ours", spreads[way].median))
    pulsars = PULSAR_LIST_BYTES if form is RangeForm.LIST else Against("Pulsar", shape.pulsar_words_bytes)
    report.count(f"{what}: length", "bytes", len(encoded), pulsars if is_pulsars else None)


if __name__ == "__main__":
    report = BenchmarkReport("wire_pulsar", ABOUT)
    for form in RangeForm:
        for count in (PULSAR_COUNT, 100_000):
            for name in SHAPES:
                measure(report, name, count, form)
    report.publish()
