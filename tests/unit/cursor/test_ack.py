"""The ways that one ack takes through a cursor."""

from __future__ import annotations

import numpy as np
import pytest
from pyroaring import BitMap

from ackstate import AckStateError, CursorConfig, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import ReceiptStatus

P = Position


def opened(counts, **config):
    log = LedgerMap.from_counts(counts)
    cursor = ManagedCursor.open(
        MemoryStore(), topic="t", subscription="s", ledgers=log, config=CursorConfig(**config), now_ms=0
    )
    return cursor, log


def ack(cursor, *positions):
    for position in positions:
        cursor.ack(position, now_ms=1)
        cursor._check()


def test_acks_move_the_mark_delete_over_the_ends_of_ledgers():
    cursor, _ = opened({3: 2, 4: 0, 5: 2, 6: 3})
    ack(cursor, P(5, 0), P(5, 1), P(6, 1), P(3, 0))
    assert cursor.mark_delete_position == P(3, 0)
    ack(cursor, P(3, 1))
    assert (cursor.mark_delete_position, cursor.read_position) == (P(5, 1), P(6, 0))
    ack(cursor, P(6, 0))
    assert (cursor.mark_delete_position, cursor.read_position) == (P(6, 1), P(6, 2))


def test_acks_in_order_leave_no_ranges_durable_or_not():
    cursor, _ = opened({3: 20})
    ack(cursor, P(3, 1), P(3, 3), P(3, 4), P(3, 5))
    cursor.persist(now_ms=2)
    ack(cursor, P(3, 7), P(3, 0), P(3, 2), P(3, 6))
    assert cursor.mark_delete_position == P(3, 7)
    assert (len(cursor.deleted), cursor.view.unpersisted_record_bytes, cursor.redelivery_if_crashed) == (0, 0, 4)


def test_an_ack_in_another_ledger_finds_that_ledgers_were_trimmed():
    cursor, log = opened({3: 5, 4: 5})
    ack(cursor, P(3, 0), P(3, 2), P(4, 0))
    log.trim(4)
    assert cursor.ack(P(3, 2), now_ms=1).newly_acked == 0, "a late ack is not wrong"
    with pytest.raises(AckStateError):
        cursor.ack(P(3, 3), now_ms=1)
    assert cursor.mark_delete_position == P(3, 0)
    ack(cursor, P(4, 2))
    assert cursor.mark_delete_position == P(4, 0)


def test_an_ack_is_refused_beyond_an_end_that_moves():
    cursor, log = opened({3: 1})
    with pytest.raises(AckStateError, match="3:1"):
        cursor.ack(P(3, 1), now_ms=1)
    log.append()
    ack(cursor, P(3, 1))
    log.roll(4)
    for position in (P(3, 2), P(4, 0)):
        with pytest.raises(AckStateError):
            cursor.ack(position, now_ms=1)
    ack(cursor, P(3, 0))
    log.append()
    ack(cursor, P(4, 0))
    assert cursor.mark_delete_position == P(4, 0)


@pytest.mark.parametrize("position", [P(3, -1), P(-1, 0), P(2**63, 0), P(3, 2**32)])
@pytest.mark.parametrize("marked", [P(3, -1), P(3, 2)])
def test_an_id_out_of_range_is_refused_wherever_the_mark_delete_stands(position, marked):
    cursor, _ = opened({3: 5})
    cursor.mark_delete(marked, now_ms=0)
    with pytest.raises(ValueError, match=r"must be in 0\.\."):
        cursor.ack(position, now_ms=1)


@pytest.mark.parametrize("position", [P(3, 0.0), P(3.0, 0), P(3, 2.0), P("3", 0)])
def test_what_is_no_integer_is_refused(position):
    cursor, _ = opened({3: 5})
    with pytest.raises(TypeError, match="integers"):
        cursor.ack(position, now_ms=1)
    assert cursor.redelivery_if_crashed == 0


@pytest.mark.parametrize("position", [(3, 0), P(np.int64(3), np.uint32(0)), P(3, False)])
def test_other_integers_become_a_plain_position(position):
    cursor, _ = opened({3: 5})
    ack(cursor, position)
    marked = cursor.mark_delete_position
    assert (type(marked), *map(type, marked)) == (P, int, int)


@pytest.mark.parametrize("config", [{}, {"range_count_max": 3}])
def test_a_receipt_cannot_be_changed_and_is_short(config):
    cursor, _ = opened({3: 5_000_000}, **config)
    one, many = cursor.ack(P(3, 1), now_ms=1), cursor.ack_entries(3, range(0, 5_000_000, 2), now_ms=1)
    assert (one.newly_acked, one.status, one.opened) == (1, ReceiptStatus.ACCEPTED, many.opened)
    assert one.number < many.number
    with pytest.raises(AttributeError):
        one.number = 5
    assert max(len(repr(one)), len(repr(many))) < 100


def test_entries_of_many_ledgers_are_acked_together_or_not_at_all():
    (one, _), (many, _) = (opened({3: 5, 4: 5}, become_old_ack_record_seconds=1) for _ in range(2))
    for cursor in (one, many):
        cursor.delivered(P(4, 4), now_ms=0)
    entries = {3: BitMap([0, 1, 3]), 4: BitMap([2])}
    with pytest.raises(AckStateError, match="4:5"):
        many.ack_bitmaps({**entries, 4: BitMap([5])}, now_ms=1)
    assert many.redelivery_if_crashed == 0
    receipt = many.ack_bitmaps(entries, now_ms=1)
    for ledger_id, bitmap in entries.items():
        one.ack_entries(ledger_id, bitmap, now_ms=1)
    assert (receipt.newly_acked, receipt.entries) == (4, entries)
    assert (many.mark_delete_position, many.deleted) == (one.mark_delete_position, one.deleted)
    assert many.ack_bitmaps(entries, now_ms=1).newly_acked == 0
    many.close(now_ms=2)
    with pytest.raises(AckStateError):
        many.ack_bitmaps(entries, now_ms=3)
