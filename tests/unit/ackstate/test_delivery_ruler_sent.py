"""When does a ruler say that positions were sent? Against one look at every mark for every entry."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap, FrozenBitMap

from ackstate import Position
from ackstate.delivery_ruler import DeliveryRuler
from strategies import ENTRY_ID_MAX, LEDGER_ID_MAX, entry_ids

P = Position

ledger_ids = st.sampled_from([0, 3, 4, LEDGER_ID_MAX])
positions = st.builds(P, ledger_ids, st.one_of(st.just(-1), st.integers(0, 40), entry_ids))
records = st.lists(st.tuples(positions, st.integers(-3, 60)), max_size=30)
bitmaps = st.sets(st.one_of(st.integers(0, 40), entry_ids), max_size=60).map(BitMap)


def ruler_of(records):
    ruler = DeliveryRuler()
    for position, now_ms in sorted(records):
        ruler.record(position, now_ms)
    return ruler


def by_every_mark(ruler, position):
    marks = zip(ruler._times, ruler._positions, strict=True)
    return min((time for time, mark in marks if mark >= position), default=None)


def assert_as_by_every_mark(ruler, ledger_id, bitmap):
    expected = Counter(ruler.sent_by(P(ledger_id, entry_id)) for entry_id in bitmap)
    del expected[None]
    counts = list(ruler.sent_counts(ledger_id, bitmap))
    assert counts == sorted(expected.items()), "not the counts"


@given(records=records, ledger_id=ledger_ids, position=positions, bitmap=bitmaps)
def test_sent_by_and_sent_counts_are_as_by_every_mark(records, ledger_id, position, bitmap):
    ruler = ruler_of(records)
    assert ruler.sent_by(position) == by_every_mark(ruler, position)
    for entry_id in bitmap:
        assert ruler.sent_by(P(ledger_id, entry_id)) == by_every_mark(ruler, P(ledger_id, entry_id))
    assert_as_by_every_mark(ruler, ledger_id, bitmap)


@given(count=st.integers(129, 400), step_ms=st.sampled_from([1, 7]), now_ms=st.integers(0, 3_000))
def test_never_before_it_was_sent_and_old_as_for_the_frontier(count, step_ms, now_ms):
    """Thinned or not; the old_up_to of a ruler that never was asked is of its marks alone."""
    ruler = DeliveryRuler(marks_max=128)
    for entry in range(count):
        ruler.record(P(3, entry), entry * step_ms)
    old_up_to = ruler.old_up_to(100, now_ms)
    for entry in range(count):
        time = ruler.sent_by(P(3, entry))
        assert time >= entry * step_ms
        assert (now_ms - time >= 100) == (old_up_to is not None and P(3, entry) <= old_up_to)
    assert_as_by_every_mark(ruler, 3, BitMap(range(count + 5)))


def test_the_story_of_pulsar_issue_19966():
    ruler = ruler_of([(P(3, 1), 0), (P(4, 1), 2_000), (P(5, 1), 4_000), (P(6, 1), 5_000)])
    assert [ruler.sent_by(P.parse(text)) for text in ("1:1", "3:1", "3:2", "5:20", "6:1")] == [
        0,
        0,
        2_000,
        5_000,
        5_000,
    ]
    assert ruler.sent_by(P(6, 2)) is None
    assert list(ruler.sent_counts(5, BitMap([0, 1, 2, 20]))) == [(4_000, 2), (5_000, 2)]
    assert list(ruler.sent_counts(6, BitMap([0, 1, 2, 20]))) == [(5_000, 2)]
    assert list(ruler.sent_counts(7, BitMap([0]))) == []


def test_without_marks_or_entries_there_is_nothing():
    ruler = DeliveryRuler()
    assert ruler.sent_by(P(0, -1)) is None
    assert list(ruler.sent_counts(3, BitMap([1]))) == []
    ruler.record(P(3, 5), 10)
    assert list(ruler.sent_counts(3, BitMap())) == []


def test_the_highest_ids_are_counted():
    ruler = ruler_of([(P(LEDGER_ID_MAX, ENTRY_ID_MAX - 1), 1), (P(LEDGER_ID_MAX, ENTRY_ID_MAX), 2)])
    counts = ruler.sent_counts(LEDGER_ID_MAX, FrozenBitMap([0, ENTRY_ID_MAX - 1, ENTRY_ID_MAX]))
    assert list(counts) == [(1, 2), (2, 1)]


def test_the_counts_are_of_the_instant_of_the_call():
    ruler = ruler_of([(P(3, entry), entry) for entry in range(5)])
    bitmap = BitMap(range(5))
    counts = ruler.sent_counts(3, bitmap)
    ahead = list(islice(counts, 1))
    ruler.clear()
    bitmap.clear()
    assert [*ahead, *counts] == [(entry, 1) for entry in range(5)]


class CountedBitMap(BitMap):
    """Counts the look-ups, and refuses to be walked through."""

    look_ups = 0

    def rank(self, value):
        self.look_ups += 1
        return super().rank(value)

    def __getitem__(self, value):
        self.look_ups += 1
        return super().__getitem__(value)

    def __iter__(self):
        raise AssertionError("walked through")


@pytest.mark.parametrize("entries", [range(0, 10**6, 2), [77_777]])
def test_costs_two_look_ups_a_mark_that_entries_fall_to(entries):
    ruler = ruler_of([(P(3, 4_000 * mark), mark) for mark in range(251)])
    bitmap = CountedBitMap(entries)
    counts = list(ruler.sent_counts(3, bitmap))
    assert sum(count for _, count in counts) == len(entries)
    assert bitmap.look_ups == 2 * len(counts)
    assert len(counts) <= 251


def test_a_refused_call_changes_nothing():
    ruler = ruler_of([(P(3, 5), 10)])
    for refused, error, text in [
        (lambda: ruler.sent_by(P(3, 2**32)), ValueError, str(2**32)),
        (lambda: ruler.sent_by(P(3, 0.5)), TypeError, "0.5"),
        (lambda: ruler.sent_counts(-1, BitMap([1])), ValueError, "-1"),
        (lambda: ruler.sent_counts("3", BitMap([1])), TypeError, "'3'"),
        (lambda: ruler.sent_counts(3, [1, 2]), TypeError, "1, 2"),
    ]:
        with pytest.raises(error, match=text):
            refused()
    assert list(ruler.sent_counts(3, BitMap([5]))) == [(10, 1)]


def check_story():
    ruler = ruler_of([(P(3, 1), 0), (P(3, 9), 4), (P(4, 2), 6), (P(6, 1), 7)])
    for ledger_id in (3, 4, 5, 6):
        assert_as_by_every_mark(ruler, ledger_id, BitMap([0, 1, 2, 9, 10]))


@pytest.mark.parametrize("off_by", [-1, 1])
def test_the_comparison_catches_a_count_that_is_one_off(monkeypatch, off_by):
    check_story()
    sent_counts = DeliveryRuler.sent_counts

    def shifted(self, ledger_id, bitmap):
        return sent_counts(self, ledger_id, BitMap(max(entry_id + off_by, 0) for entry_id in bitmap))

    monkeypatch.setattr(DeliveryRuler, "sent_counts", shifted)
    with pytest.raises(AssertionError, match="not the counts"):
        check_story()


def test_the_comparison_catches_a_mark_of_another_ledger_that_counts_by_its_entry(monkeypatch):
    sent_counts = DeliveryRuler.sent_counts

    def same_ledger(self, ledger_id, bitmap):
        other = DeliveryRuler()
        other._times = [*self._times]
        other._positions = [
            P(ledger_id, mark.entry_id) if mark.ledger_id > ledger_id else mark for mark in self._positions
        ]
        return sent_counts(other, ledger_id, bitmap)

    monkeypatch.setattr(DeliveryRuler, "sent_counts", same_ledger)
    with pytest.raises(AssertionError, match="not the counts"):
        check_story()
