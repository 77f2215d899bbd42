"""What many acks add to the size of what is not durable, against the cursor that is given them one by one."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ackstate.analysis.redelivery import record_bytes, record_growth
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.managed import ManagedCursor
from ackstate.cursor.stores.memory import MemoryStore
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.record_size import isolated_range_bytes

COUNTS = {3: 20, 7: 150, 200: 40}


@pytest.fixture(autouse=True)
def _silent(caplog):
    caplog.set_level(logging.ERROR)


@st.composite
def acked(draw):
    """A cursor with some acks, some of them durable, some passed by, and what is acked next."""
    config = CursorConfig(
        range_count_max=draw(st.sampled_from((None, None, 2))),
        become_old_ack_record_seconds=draw(st.sampled_from((0, 0, 1))),
    )
    cursor = ManagedCursor.open(
        MemoryStore(), topic="t", subscription="s", ledgers=LedgerMap.from_counts(COUNTS), config=config, now_ms=0
    )
    chance = draw(st.randoms(use_true_random=False))
    spread = draw(st.sampled_from((1, 4, 12, 1_000)))
    every = [Position(ledger_id, entry_id) for ledger_id, count in COUNTS.items() for entry_id in range(count)]
    places = {position: at + chance.randrange(spread) for at, position in enumerate(every)}
    every.sort(key=places.__getitem__)
    begin = draw(st.integers(0, len(every) - 1))
    for now_ms, position in enumerate(every[:begin]):
        cursor.delivered(position, now_ms=20 * now_ms)
        cursor.ack(position, now_ms=20 * now_ms)
        if chance.random() < 0.05:
            cursor.persist(now_ms=20 * now_ms)
    return cursor, every[begin : begin + draw(st.integers(1, 120))]


def columns(positions):
    return np.array([each.ledger_id for each in positions]), np.array([each.entry_id for each in positions])


def assert_growth(found):
    cursor, positions = found
    growth = record_growth.record_growth(cursor, *columns(positions)).tolist()
    for number, position in enumerate(positions):
        before, ledger_id = cursor.unpersisted_record_bytes, cursor.next_unread.ledger_id
        cursor.ack(position, now_ms=100_000)
        if number == len(growth):
            assert cursor.next_unread.ledger_id > ledger_id or cursor.backlog == 0
            return
        assert cursor.unpersisted_record_bytes - before == growth[number], (number, position)


test_each_ack_adds_what_it_adds_to_the_cursor = given(acked())(assert_growth)


def test_what_is_reserved_is_what_the_library_reserves():
    positions = [Position(*each) for each in ((0, 0), (5, 1), (127, 128), (128, 129), (2**40, 2**32 - 1), (3, 16_384))]
    found = record_bytes.isolated_bytes(*columns(positions)).tolist()
    assert found == [isolated_range_bytes(*each) for each in positions]


def assert_growth_fails():
    search = settings(max_examples=200, database=None, derandomize=True, deadline=None, phases=[Phase.generate])
    with pytest.raises(AssertionError):
        search(given(acked())(assert_growth))()


def test_it_catches_ranges_that_the_mark_delete_position_does_not_take_away(monkeypatch):
    monkeypatch.setattr(record_growth, "_cover", lambda growth, acks, held, covered: len(growth))
    assert_growth_fails()


def test_it_catches_an_entry_that_joins_what_is_acked_later(monkeypatch):
    joining = record_growth._joining

    def as_if_at_once(acks, held):
        return joining(acks._replace(at=np.arange(len(acks.at))), held)

    monkeypatch.setattr(record_growth, "_joining", as_if_at_once)
    assert_growth_fails()


def test_it_catches_a_ledger_that_is_never_left(monkeypatch):
    monkeypatch.setattr(ManagedCursor, "is_unacked", lambda self, position: True)
    assert_growth_fails()
