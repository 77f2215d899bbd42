"""A limit on ranges counts none that only shared holes part: compared with sets that are filled in and recounted."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from ackstate import DeletedRanges, Keep, LedgerMap, Position
from ackstate.cursor import CursorConfig, ManagedCursor, MemoryStore
from ackstate.cursor.journal.filled_ranges import FilledCount, filled
from ackstate.cursor.journal.shared_holes import LiveBucket, SharedHoles
from ackstate.cursor.persist.planner import RecordPlanner
from ackstate.wire.native_shared import BucketHoles, BucketReference
from ackstate.wire.pulsar.delay_snapshot import SegmentMetadata, encode_metadata

ENTRIES = 200
LOG = LedgerMap.from_counts({1: ENTRIES, 4: ENTRIES})


def count_filled(acked, holes):
    """How many stretches of acked entries and holes there are that hold an acked entry; both are sets of positions."""
    both = acked | holes
    stretches = []
    for ledger, entry in sorted(both):
        if (ledger, entry - 1) not in both:
            stretches.append(set())
        stretches[-1].add((ledger, entry))
    return sum(not stretch.isdisjoint(acked) for stretch in stretches)


positions = st.frozensets(st.tuples(st.integers(0, 2), st.integers(0, 40)), max_size=60)


def by_ledger(held):
    return {ledger: BitMap([entry for other, entry in held if other == ledger]) for ledger, _ in held}


@given(positions, st.lists(positions, max_size=2))
def test_filled_ranges_are_counted_right(acked, holes):
    ranges = DeletedRanges.from_bitmaps(sorted(by_ledger(acked).items()))
    buckets = [BucketHoles(BucketReference(n, 1, 0), by_ledger(held)) for n, held in enumerate(holes)]
    counts = filled(ranges, buckets)
    assert len(counts) == count_filled(acked, frozenset().union(*holes))
    assert counts.sum() == ranges.range_count
    assert all(counts > 0)


class Limited:
    """A cursor under a limit, and a bucket whose segments fall due, with everything counted from scratch."""

    def __init__(self, seed, *, keep, young):
        self.choose = random.Random(seed)
        self.store = MemoryStore()
        self.limit = self.choose.randint(2, 8)
        self.live = {}
        self.segments = []
        self.keep = keep
        shared = SharedHoles(self.store, lambda: [LiveBucket(*item) for item in self.live.items()])
        age = 10 if young else 0
        self.cursor = self.opened(
            CursorConfig(range_count_max=self.limit, keep=keep, become_old_ack_record_seconds=age), shared
        )
        self.now_ms = 0

    def opened(self, config, shared=None, store=None):
        return ManagedCursor.open(
            store or self.store, topic="t", subscription="s", ledgers=LOG, config=config, shared_holes=shared, now_ms=0
        )

    def seal(self):
        bucket_id = self.store.ledgers.create("delay buckets")
        self.segments = [
            {ledger: BitMap(self.choose.sample(range(ENTRIES), 40)) for ledger in (1, 4)} for _ in range(3)
        ]
        entry = encode_metadata([SegmentMetadata(segment, 1, 2, 3) for segment in self.segments])
        self.store.ledgers.append(bucket_id, entry)
        self.live = {bucket_id: 1}

    def holes(self):
        first = next(iter(self.live.values()), 1)
        return {
            (ledger, entry)
            for segment in self.segments[first - 1 :]
            for ledger, bitmap in segment.items()
            for entry in bitmap
        }

    def ack(self):
        ledger, begin, holes = self.choose.choice((1, 4)), self.choose.randrange(ENTRIES), self.holes()
        width = self.choose.choice((1, 1, 5, 60))
        entries = [n for n in range(begin, min(begin + width, ENTRIES)) if (ledger, n) not in holes]
        self.cursor.delivered(Position(4, ENTRIES - 1) if self.choose.random() < 0.5 else Position(1, 50), now_ms=0)
        self.cursor.ack_entries(ledger, entries, now_ms=self.now_ms)

    def durable(self):
        """Every acked entry above the mark-delete position that a recovery would know, and that position."""
        cursor = self.opened(CursorConfig(), store=MemoryStore(self.copy()))
        acked = {(run.ledger_id, n) for run in cursor.deleted.runs() for n in range(run.first, run.end)}
        return acked, cursor.mark_delete_position

    def copy(self):
        """A disk that an open of its own may change."""
        copied = MemoryStore().disk
        for ledger_id, ledger in self.store.disk.ledgers.items():
            copied.ledgers[ledger_id] = type(ledger)(ledger.owner, ledger.fenced, list(ledger.entries))
        copied.values = dict(self.store.disk.values)
        copied.next_ledger_id = self.store.disk.next_ledger_id
        return copied

    def persist(self):
        holes = self.holes()
        before, _ = self.durable()
        self.cursor.persist(now_ms=self.now_ms)
        self.cursor._check()
        after, mark_delete = self.durable()
        stays = {position for position in before if position > mark_delete}
        assert stays <= after
        counted = count_filled(after, holes)
        assert counted <= max(self.limit, count_filled(stays, holes)), f"{counted} ranges, the limit is {self.limit}"
        acked = {(run.ledger_id, n) for run in self.cursor.deleted.runs() for n in range(run.first, run.end)}
        assert self.cursor.redelivery_if_crashed == len(acked - after)
        assert mark_delete == self.cursor.mark_delete_position

    def run(self, steps):
        for _ in range(steps):
            self.now_ms += self.choose.choice((0, 0, 20_000))
            act = self.choose.randrange(12)
            if act == 0:
                self.seal()
            elif act == 1:
                self.live = {bucket_id: min(first + 1, 3) for bucket_id, first in self.live.items()}
            elif act < 8:
                self.ack()
            else:
                self.persist()


def check_limits(*, seeds, young=False):
    for seed in range(seeds):
        Limited(seed, keep=(Keep.LOWEST, Keep.WIDEST)[seed % 2], young=young).run(60)


@pytest.mark.slow
@pytest.mark.parametrize("young", [False, True], ids=["all ages", "young acks wait"])
def test_no_limit_is_passed_nothing_durable_is_lost_and_the_gauge_is_exact(young):
    check_limits(seeds=25, young=young)


def never_counts_again(count, deleted, buckets, **given):
    return count._count_max >= 0 or fits_once(count, deleted, buckets, **given)


fits_once = FilledCount.fits


def takes_what_goes_first(planner, up_to, limits, buckets):
    """As many ranges as the filled ones that go first would be, whether these are kept or not."""
    lowest = int(filled(planner._state.deleted, buckets)[: limits.range_count_max].sum()) if buckets else None
    return planner._begin_within(up_to, limits._replace(range_count_max=lowest or limits.range_count_max))


@pytest.mark.parametrize(
    ("where", "name", "bug"),
    [
        (FilledCount, "fits", never_counts_again),
        (RecordPlanner, "_begin", takes_what_goes_first),
    ],
    ids=["counts once", "takes the first ranges"],
)
def test_the_counting_from_scratch_finds_a_planted_bug(where, name, bug, monkeypatch):
    monkeypatch.setattr(where, name, bug)
    with pytest.raises(AssertionError, match="the limit is"):
        check_limits(seeds=25)


def test_a_count_is_made_again_after_as_many_acks_as_there_was_room_for_or_for_other_buckets():
    ranges = DeletedRanges.from_bitmaps([(1, BitMap(range(0, 40, 2)))])
    bucket = BucketHoles(BucketReference(9, 1, 0), {1: BitMap(range(1, 40, 2))})
    count = FilledCount()
    assert count.fits(ranges, [bucket], range_count_max=3, acked_count=20)
    ranges.add_entries(1, [100, 200, 300])
    # There was room for two more.
    assert count.fits(ranges, [bucket], range_count_max=3, acked_count=22)
    assert not count.fits(ranges, [bucket], range_count_max=3, acked_count=23)
    ranges.remove_at_most(Position(1, 100))
    assert count.fits(ranges, [bucket], range_count_max=3, acked_count=23)
    other = bucket._replace(reference=BucketReference(9, 2, 0), bitmaps={})
    ranges.add_entries(1, range(400, 440, 2))
    assert not count.fits(ranges, [other], range_count_max=3, acked_count=43)
