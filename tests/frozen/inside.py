"""All that the frozen answers need of modules; after a move, only this page follows."""

from __future__ import annotations

import hashlib

from ackstate import CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.analysis.pulsar.ack_state_file import decode_ack_states, encode_ack_states
from ackstate.limits.policies import decode_policies, encode_policies
from ackstate.topic.log import decode_log_record, encode_log_record
from ackstate.wire import native
from ackstate.wire.native import decode_pointer, encode_pointer
from ackstate.wire.pulsar.delay_snapshot import decode_metadata, decode_segment, encode_metadata, encode_segment

WRITTEN = {
    "native-record-v2.bin": lambda data: native.encode(native.decode(data)),
    "cursor-pointer-v2.bin": lambda data: encode_pointer(decode_pointer(data)),
    "cursor-pointer-v2-state.bin": lambda data: encode_pointer(decode_pointer(data)),
    "log-record-v2.bin": lambda data: encode_log_record(decode_log_record(data)),
    "log-record-v2-times.bin": lambda data: encode_log_record(decode_log_record(data)),
    "policies-v1.bin": lambda data: encode_policies(decode_policies(data)),
    "ack-states-v1.ack": lambda data: encode_ack_states(decode_ack_states(data)),
    "delay-snapshot-v1.bin": lambda data: encode_metadata(decode_metadata(data, what="")),
    "delay-snapshot-segment-1.bin": lambda data: encode_segment(decode_segment(data, what="")),
    "delay-snapshot-segment-2.bin": lambda data: encode_segment(decode_segment(data, what="")),
}
"""Golden file of a format that is written today -> its bytes, read and written again."""


def again(golden):
    """Return whether each file comes back as it was."""
    return {
        name: write((golden / name).read_bytes()) == (golden / name).read_bytes() for name, write in WRITTEN.items()
    }


CONFIGS = {
    "native": CursorConfig(compaction_bytes_min=150, ledger_entry_count_max=7),
    "native, 3 ranges, young": CursorConfig(range_count_max=3, become_old_ack_record_seconds=2),
    "pulsar": CursorConfig(format=Format.PULSAR, ledger_rollover_ms=1_900),
    "pulsar, 3 ranges": CursorConfig(format=Format.PULSAR, range_count_max=3),
}


def journal_of():
    """Return what cursors that all do the same have written: their ledgers and their values, and what is recovered."""
    found = {}
    for name, config in CONFIGS.items():
        store, ledgers = MemoryStore(), LedgerMap.from_counts({3: 300, 8: 200, 2**40: 100})
        opening = {"topic": "t", "subscription": "s", "ledgers": ledgers, "config": config}
        cursor = ManagedCursor.open(store, **opening, now_ms=0)
        for step in range(1, 200):
            now_ms, ledger_id = 100 * step, (3, 3, 8, 2**40)[step % 4]
            position = Position(ledger_id, step * 37 % 100)
            if step % 3:
                cursor.delivered(position, now_ms=now_ms - 1_500)
            cursor.ack(position, now_ms=now_ms)
            cursor.ack_batch(Position(3, 150 + step % 9), [step % 4, 1], now_ms=now_ms)
            if step % 60 == 0:
                cursor.mark_delete(Position(3, step // 3), now_ms=now_ms)
            if step == 130:
                cursor.reset(Position(3, 30), now_ms=now_ms)
            cursor.tick(now_ms=now_ms)
        written = _written(store)
        recovered = ManagedCursor.open(MemoryStore(store.disk), **opening, now_ms=20_000)
        state = {"mark-delete": str(recovered.mark_delete_position), "ranges": str(recovered.deleted)}
        found[name] = written | state | {"lost": cursor.redelivery_if_crashed}
    return found


def _written(store):
    entries = {
        f"{number}": store.ledgers.read(number, 0, store.ledgers.last(number) + 1)
        for owner in store.ledgers.owners()
        for number in store.ledgers.owned_by(owner)
    }
    values, paths = {}, [""]
    while paths:
        path = paths.pop()
        paths += [f"{path}/{child}" for child in store.metadata.children(path or "/")]
        held = store.metadata.get(path) if path else None
        if held is not None:
            values[path] = hashlib.sha256(held.data).hexdigest()
    return {
        "ledgers": {
            number: {"entries": len(each), "sha256": hashlib.sha256(b"".join(each)).hexdigest()}
            for number, each in entries.items()
        },
        "values": values,
    }
