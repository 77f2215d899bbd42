"""Reads a topic's record in the metadata store: the ledgers of its message log.

Only the fields that a reader needs are decoded.

Source: ``MLDataFormats.proto`` (``ManagedLedgerInfo``), ``ManagedLedgerImpl`` of Apache Pulsar.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ackstate.errors import CorruptStateError
from ackstate.position import ENTRY_ID_MAX, LEDGER_ID_MAX
from ackstate.wire.pulsar.compression import decompress, is_compressed
from ackstate.wire.pulsar.loose_fields import loose_fields

if TYPE_CHECKING:
    from ackstate.wire.pulsar.loose_fields import LooseField

WHAT = "managed ledger info"


@dataclass(frozen=True, slots=True)
class MessageLedger:
    """One ledger of a message log.

    Attributes:
        ledger_id: Its id.
        entry_count: How many entries it had when it was closed; 0 while it is open, or if it was not closed properly.
        is_offloaded: Whether its entries are elsewhere and BookKeeper no longer has them.
    """

    ledger_id: int
    entry_count: int
    is_offloaded: bool = False


def decode_ledger_info(data: bytes) -> tuple[MessageLedger, ...]:
    """Decode a topic's record and return the ledgers of its message log, lowest first.

    Raises:
        CorruptStateError: The bytes are not such a record.
        UnsupportedVersionError: It is compressed in an unknown way.
        MissingCodecError: It is compressed, and the package for that is not installed.
    """
    record = decompress(data) if is_compressed(data) else bytes(data)
    found = tuple(
        _ledger(record, field) for field in loose_fields(record, 0, len(record), what=WHAT) if field.number == 1
    )
    for before, after in pairwise(found):
        if before.ledger_id >= after.ledger_id:
            raise CorruptStateError(
                WHAT, offset=0, expected=f"a ledger above {before.ledger_id}", found=after.ledger_id
            )
    return found


def _ledger(record: bytes, within: LooseField) -> MessageLedger:
    numbers = {"ledger id": -1, "entries": 0}
    is_offloaded = False
    for field in loose_fields(record, within.begin, within.end, what=WHAT):
        if field.number == 1:
            numbers["ledger id"] = field.value
        elif field.number == 2:
            numbers["entries"] = field.value
        elif field.number == 5:
            is_offloaded = any(
                each.number == 4 and each.value == 1 for each in loose_fields(record, field.begin, field.end, what=WHAT)
            )
    ledger_id, entry_count = numbers.values()
    if not (0 <= ledger_id <= LEDGER_ID_MAX and 0 <= entry_count <= ENTRY_ID_MAX + 1):
        expected = f"a ledger id of 0 or more, and at most {ENTRY_ID_MAX + 1} entries"
        raise CorruptStateError(WHAT, offset=within.begin, expected=expected, found=f"{ledger_id} and {entry_count}")
    return MessageLedger(ledger_id, entry_count, is_offloaded)
