"""Cursors whose snapshots refer to delay buckets: their records, the life of a bucket, the effect of a lost one."""

from __future__ import annotations

import random
from contextlib import closing
from itertools import count

import pytest
from pyroaring import BitMap

from ackstate import LedgerMap, Position
from ackstate.cursor import (
    CursorConfig,
    Format,
    ManagedCursor,
    MemoryStore,
    PersistTarget,
    Repair,
    SqliteStore,
    StoreError,
    UnreadableCursorError,
)
from ackstate.cursor.journal import cursor_holes, filled_ranges
from ackstate.cursor.journal.hole_pins import ROOT, BucketReferences
from ackstate.cursor.journal.journal import cursor_path
from ackstate.cursor.journal.shared_holes import LiveBucket, SharedHoles
from ackstate.cursor.state.unpersisted_acks import EVERYTHING
from ackstate.cursor.steps import run
from ackstate.cursor.store import ABSENT
from ackstate.inspect.findings import Status
from ackstate.inspect.store import inspect_store
from ackstate.wire import native
from ackstate.wire.native_shared import is_shared
from ackstate.wire.pulsar.delay_snapshot import SegmentMetadata, encode_metadata

ENTRIES = 4_000
HOLES = sorted(random.Random(7).sample(range(ENTRIES - 10), 1_000))
OTHERS = sorted(set(range(ENTRIES)) - set(HOLES))
BUCKETS = "delay buckets of t"


def bucket_bytes(*segments):
    """Entry 0 of a bucket, given the entries of each segment by message ledger."""
    return encode_metadata(
        [SegmentMetadata({ledger: BitMap(ids) for ledger, ids in held.items()}, 1, 2, 3) for held in segments]
    )


class BucketedTopic:
    """A log of two ledgers, the buckets of its delay index, and its cursors."""

    def __init__(self, store=None, **config):
        self.store = store or MemoryStore()
        self.log = LedgerMap.from_counts({1: ENTRIES, 4: ENTRIES})
        self.config = CursorConfig(**config)
        self.live = {}
        self.begin()

    def begin(self):
        self.shared = SharedHoles(self.store, lambda: [LiveBucket(*item) for item in self.live.items()])
        self.references = BucketReferences(self.store)

    def seal(self, *segments):
        bucket_id = self.store.ledgers.create(BUCKETS)
        self.store.ledgers.append(bucket_id, bucket_bytes(*segments))
        self.live[bucket_id] = 1
        return bucket_id

    def open(self, subscription="s", *, shares=True, store=None, config=None, **options):
        return ManagedCursor.open(
            store or self.store, topic="t", subscription=subscription, ledgers=self.log, config=config or self.config,
            shared_holes=self.shared if shares else None, now_ms=0, **options,
        )  # fmt: skip

    def restarted(self):
        """The same topic after a crash of the process."""
        self.store = MemoryStore(self.store.disk)
        self.begin()
        return self

    def ledger(self, subscription="s"):
        (ledger_id,) = self.store.ledgers.owned_by(f"cursor {cursor_path('t', subscription)}")
        return self.store.ledgers.read(ledger_id, 0, self.store.ledgers.last(ledger_id) + 1)

    def pins(self):
        """Which cursors hold which buckets, and which buckets are closed (None)."""
        metadata = self.store.metadata
        found = set()
        for name in metadata.children(ROOT):
            found |= {(int(name), pin) for pin in metadata.children(f"{ROOT}/{name}")}
            if metadata.get(f"{ROOT}/{name}"):
                found.add((int(name), None))
        return found


def pin_of(subscription):
    return f"%2Fmanaged-ledgers%2Ft%2F{subscription}"


def acked_but_holes(topic, **options):
    """A cursor that has acked all of ledger 1 but the holes, and whose next persist is a snapshot."""
    cursor = topic.open(**options)
    cursor.ack_entries(1, OTHERS, now_ms=0)
    return snapshot(cursor)


def snapshot(cursor, *, now_ms=0):
    """Persist a whole state: an append that failed may not be followed by another."""
    cursor._persister.journal._open_ledger = None
    cursor._state.require_persist()
    assert cursor.persist(now_ms=now_ms).route in {PersistTarget.SNAPSHOT, PersistTarget.METADATA}
    return cursor


def state(cursor):
    return str(cursor.deleted), cursor.mark_delete_position


def test_holes_that_a_bucket_holds_take_no_bytes_of_a_snapshot_and_come_back():
    topic = BucketedTopic()
    topic.seal({1: HOLES})
    plain, shared = acked_but_holes(topic, subscription="plain", shares=False), acked_but_holes(topic)
    assert native.decode(topic.ledger("plain")[0]).deleted == plain.deleted == shared.deleted
    assert len(topic.ledger("plain")[0]) > 500
    assert is_shared(topic.ledger()[0])
    assert len(topic.ledger()[0]) < 150
    shared.ack(Position(4, 7), now_ms=0)
    assert shared.persist(now_ms=0).route is PersistTarget.DELTA
    for shares in (True, False):
        reopened = topic.restarted().open(shares=shares)
        assert state(reopened) == state(shared)
        assert reopened.redelivery_if_crashed == 0
        assert reopened.recovery_report.records_replayed == 2


def test_what_fell_due_and_was_acked_is_not_referred_to_any_more():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES[::2]}, {1: HOLES[1::2]})
    cursor = acked_but_holes(topic)
    before = len(topic.ledger()[0])
    cursor.ack_entries(1, HOLES[::2], now_ms=0)
    topic.live[bucket] = 2
    snapshot(cursor)
    assert len(topic.ledger()[0]) <= before
    assert state(topic.restarted().open()) == state(cursor)


def test_without_buckets_or_in_pulsars_format_nothing_is_pinned_or_referred_to():
    topic = BucketedTopic()
    acked_but_holes(topic)
    assert not is_shared(topic.ledger()[0])
    topic.seal({1: HOLES})
    acked_but_holes(topic, subscription="pulsar", config=CursorConfig(format=Format.PULSAR))
    assert topic.pins() == set()


def test_a_bucket_is_pinned_while_a_record_refers_to_it():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    cursor, other = acked_but_holes(topic), acked_but_holes(topic, subscription="other")
    assert topic.pins() == {(bucket, pin_of("s")), (bucket, pin_of("other"))}
    snapshot(cursor)
    assert topic.pins() == {(bucket, pin_of("s")), (bucket, pin_of("other"))}
    cursor.ack_entries(1, HOLES, now_ms=0)
    snapshot(cursor)
    assert topic.pins() == {(bucket, pin_of("other"))}
    other.reset(Position(1, 0), now_ms=0)
    assert topic.pins() == set()


def test_a_cursor_that_nobody_acks_lets_go_of_a_bucket_that_is_live_no_more():
    topic = BucketedTopic(ledger_rollover_ms=5_000)
    bucket, other = topic.seal({1: HOLES[::2]}), topic.seal({1: HOLES[1::2]})
    idle = acked_but_holes(topic)
    assert idle.tick(now_ms=10_000) is None
    del topic.live[bucket]
    assert idle.tick(now_ms=10_000) is None
    topic.open("another").ack(Position(1, 5), now_ms=0)
    topic.shared.buckets()
    assert idle.tick(now_ms=4_999) is None
    assert idle.tick(now_ms=5_000).route is PersistTarget.SNAPSHOT
    assert topic.pins() == {(other, pin_of("s"))}
    assert idle.tick(now_ms=50_000) is None
    assert state(topic.restarted().open()) == state(idle)


def test_a_change_of_cursor_properties_keeps_the_pins():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    cursor = acked_but_holes(topic)
    cursor.set_cursor_properties({"owner": "billing"})
    assert topic.pins() == {(bucket, pin_of("s"))}
    assert state(topic.restarted().open()) == state(cursor)


def test_an_open_deletes_the_pins_of_its_cursor_that_no_record_needs():
    topic = BucketedTopic()
    bucket, unused = topic.seal({1: HOLES}), topic.seal({4: HOLES})
    acked_but_holes(topic)
    for subscription in ("s", "other"):
        topic.store.metadata.put(f"{ROOT}/{unused}/{pin_of(subscription)}", b"1", expected_version=ABSENT)
    topic.restarted().open(shares=False)
    assert topic.pins() == {(bucket, pin_of("s")), (unused, pin_of("other"))}


def test_a_bucket_that_is_asked_for_is_closed_and_no_new_record_refers_to_it():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    assert not topic.references.is_needed(bucket)
    cursor = acked_but_holes(topic)
    assert not is_shared(topic.ledger()[0])
    assert topic.pins() == {(bucket, None)}
    topic.store.ledgers.delete(bucket)
    following = topic.seal({1: HOLES})
    assert not topic.references.is_needed(10**6)
    assert topic.pins() == {(10**6, None)}  # The notes of the one that is gone are forgotten.
    snapshot(cursor)
    assert topic.references.is_needed(following)
    assert topic.pins() == {(following, None), (following, pin_of("s"))}
    # It goes on as long as it is pinned, and not after that.
    assert is_shared(topic.ledger()[0])
    assert is_shared(snapshot(cursor) and topic.ledger()[0])
    cursor.reset(Position(1, 0), now_ms=0)
    assert not topic.references.is_needed(following)


def test_a_bucket_that_is_gone_or_cannot_be_read_is_not_referred_to():
    topic = BucketedTopic()
    gone = topic.seal({1: HOLES})
    topic.open()
    topic.shared.buckets()
    topic.store.ledgers.delete(gone)
    damaged = topic.store.ledgers.create(BUCKETS)
    topic.store.ledgers.append(damaged, bucket_bytes({1: HOLES})[:-1])
    topic.live[damaged] = 1
    cursor = acked_but_holes(topic)
    assert not is_shared(topic.ledger()[0])
    assert state(topic.restarted().open()) == state(cursor)
    assert topic.pins() == set()


def test_an_earlier_owner_can_take_no_pin_from_the_next():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    earlier = acked_but_holes(topic)
    stale = earlier._persister.journal.holes.pins
    cursor = topic.open()
    cursor.ack_entries(1, HOLES, now_ms=0)
    snapshot(cursor)
    assert topic.pins() == set()
    topic.seal({1: HOLES[1:]})
    del topic.live[bucket]
    cursor.reset(Position(1, 0), now_ms=0)
    cursor.ack_entries(1, OTHERS, now_ms=0)
    topic.live[bucket] = 1
    snapshot(cursor)
    pinned = topic.pins()
    assert (bucket, pin_of("s")) in pinned
    run(topic.store, stale.keep_only(()))
    assert topic.pins() == pinned


def damage_bit(topic, bucket):
    entries = topic.store.disk.ledgers[bucket].entries
    entries[0] = bytes([entries[0][0] ^ 1]) + entries[0][1:]


def swap(topic, bucket):
    topic.store.disk.ledgers[bucket].entries[0] = bucket_bytes({1: [*HOLES, 5]})


def empty(topic, bucket):
    topic.store.disk.ledgers[bucket].entries.clear()


DAMAGES = {
    "gone": lambda topic, bucket: topic.store.ledgers.delete(bucket),
    "damaged": damage_bit,
    "another": swap,
    "empty": empty,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("in_metadata", [False, True], ids=["journal", "record"])
def test_a_lost_bucket_makes_the_cursor_unreadable_and_no_ack_is_invented(damage, in_metadata):
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    if in_metadata:
        topic.open()
        topic.store.break_ledgers()
        acked_but_holes(topic)
        topic.store.mend_ledgers()
    else:
        acked_but_holes(topic).ack(Position(4, 3), now_ms=0)
    damage(topic, bucket)
    values = dict(topic.store.disk.values)
    with pytest.raises(
        UnreadableCursorError, match=f"delay bucket {bucket}, which /managed-ledgers/t/s refers"
    ) as caught:
        topic.restarted().open()
    assert caught.value.repairs == (Repair.USE_METADATA_SNAPSHOT, Repair.START_ANEW)
    assert topic.store.disk.values == values
    first = HOLES[0] - 1
    for repair, mark_delete in [
        (Repair.USE_METADATA_SNAPSHOT, Position(1, first)),
        (Repair.START_ANEW, Position(1, -1)),
    ]:
        disk = MemoryStore(topic.store.disk)
        topic.store.disk.values = dict(values)
        with pytest.raises(UnreadableCursorError):
            topic.open(store=disk, repair=Repair.DISCARD_DAMAGED_RECORDS)
        (inspection,) = [found for found in inspect_store(disk) if found.name.subscription == "s"]
        assert inspection.status is Status.PROBLEM
        (outcome,) = [found for found in inspection.problems[0].repairs if found.repair is repair]
        assert outcome.range_count == 0
        if repair is Repair.START_ANEW:
            repaired = topic.open(store=disk, repair=repair)
            assert state(repaired) == ("[]", mark_delete)
            assert repaired.recovery_report.repair is repair
            assert topic.pins() == set()
            assert state(topic.restarted().open()) == ("[]", mark_delete)


def test_a_repair_keeps_the_properties_of_a_record_whose_bucket_is_gone():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    topic.store.break_ledgers()
    cursor = topic.open()
    cursor.mark_delete(Position(1, 0), properties={"horizon": 7}, now_ms=0)
    cursor.ack_entries(1, OTHERS, now_ms=0)
    assert cursor.persist(now_ms=0).route is PersistTarget.METADATA
    topic.store.mend_ledgers()
    topic.store.ledgers.delete(bucket)
    (found,) = inspect_store(topic.store)
    kept, anew = found.problems[0].repairs
    assert (kept.properties_given_up, kept.has_unknown_properties) == ({}, False)
    assert (anew.properties_given_up, anew.has_unknown_properties) == ({"horizon": 7}, False)
    for _ in range(2):
        repaired = topic.restarted().open(repair=Repair.USE_METADATA_SNAPSHOT)
        assert dict(repaired.view.properties) == {"horizon": 7}


def test_a_repair_goes_on_from_where_the_record_says_the_cursor_stood():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    cursor = acked_but_holes(topic)
    cursor.mark_delete(Position(1, 2_000), now_ms=0)
    snapshot(cursor)
    topic.store.ledgers.delete(bucket)
    topic.restarted()
    assert state(topic.open(repair=Repair.USE_METADATA_SNAPSHOT)) == ("[]", cursor.persisted_mark_delete_position)


def test_a_whole_state_in_the_metadata_store_refers_to_buckets_too_and_survives_a_takeover():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    cursor = topic.open()
    topic.store.break_ledgers()
    cursor.ack_entries(1, OTHERS, now_ms=0)
    assert cursor.persist(now_ms=0).route is PersistTarget.METADATA
    assert len(topic.store.metadata.get(cursor_path("t", "s")).data) < 250
    assert topic.pins() == {(bucket, pin_of("s"))}
    cursor.set_cursor_properties({"owner": "billing"})
    for shares in (True, False):
        reopened = topic.restarted().open(shares=shares)
        assert state(reopened) == state(cursor)
        assert reopened.cursor_properties == {"owner": "billing"}
        assert topic.pins() == {(bucket, pin_of("s"))}
        assert len(topic.store.metadata.get(cursor_path("t", "s")).data) < 250


def test_a_record_of_the_metadata_store_is_measured_by_what_it_will_take():
    topic = BucketedTopic(metadata_bytes_max=400)
    topic.seal({1: HOLES})
    cursor, plain = topic.open(), topic.open("plain", shares=False)
    topic.store.break_ledgers()
    for each in (cursor, plain):
        each.ack_entries(1, OTHERS, now_ms=0)
    with pytest.raises(StoreError):
        plain.persist(now_ms=0)
    assert cursor.persist(now_ms=0).route is PersistTarget.METADATA
    assert cursor.redelivery_if_crashed == 0


def test_an_inspection_reads_what_the_buckets_hold():
    topic = BucketedTopic()
    topic.seal({1: HOLES})
    cursor = acked_but_holes(topic)
    cursor.ack(Position(4, 9), now_ms=0)
    cursor.persist(now_ms=0)
    (found,) = inspect_store(topic.store)
    assert found.status is Status.OK
    assert found.content.deleted == cursor.deleted
    assert [(record.kind, record.entry_count, record.damage) for record in found.records] == [
        ("SNAPSHOT", len(OTHERS) - HOLES[0], ""),
        ("DELTA", 1, ""),
    ]


# A limit on ranges.


def test_shared_holes_do_not_count_against_a_limit_on_ranges():
    topic = BucketedTopic(range_count_max=5)
    topic.seal({1: HOLES})
    limited, plain = topic.open(), topic.open("plain", shares=False)
    for cursor in (limited, plain):
        cursor.ack_entries(1, OTHERS, now_ms=0)
        cursor.persist(now_ms=0)
        cursor._check()
    assert limited.deleted.range_count > 600
    assert limited.redelivery_if_crashed == limited.stats().redelivery_cut == 0
    assert plain.stats().redelivery_cut == plain.redelivery_if_crashed > 2_000
    assert topic.restarted().open().deleted.range_count == limited.deleted.range_count


@pytest.mark.parametrize("young", [0, 10], ids=["all ages", "an age"])
def test_what_buckets_do_not_hold_is_cut_to_the_limit(young):
    topic = BucketedTopic(range_count_max=5, become_old_ack_record_seconds=young)
    topic.seal({1: HOLES})
    cursor = topic.open()
    cursor.delivered(EVERYTHING, now_ms=0)
    cursor.ack_entries(1, OTHERS, now_ms=20_000)
    cursor.ack_entries(4, range(0, 40, 2), now_ms=20_000)
    result = cursor.persist(now_ms=20_000)
    cursor._check()
    # Ledger 1 is one range with its holes filled in, so four of the twenty of ledger 4 have room.
    assert result.messages_cut == cursor.redelivery_if_crashed == 16
    recovered = topic.restarted().open(config=CursorConfig())
    assert recovered.deleted.range_count == cursor.deleted.range_count - 16
    assert list(recovered.deleted.entries(4)) == [0, 2, 4, 6]
    assert recovered.deleted.entries(1) == cursor.deleted.entries(1)


def test_ranges_between_holes_of_two_kinds_count():
    topic = BucketedTopic(range_count_max=5)
    topic.seal({1: [10, 20]})
    cursor = topic.open()
    # Not filled in: 15, 25, 31 and 41; 0 to 9 is below the mark-delete position. 10 to 14 count with 16 to 19 once.
    cursor.ack_entries(1, [n for n in range(50) if n not in {10, 15, 20, 25, 31, 41}], now_ms=0)
    assert cursor.persist(now_ms=0).messages_cut == 0
    cursor.ack(Position(1, 60), now_ms=0)
    assert cursor.persist(now_ms=0).messages_cut == 1


def test_a_limited_persist_counts_the_ranges_again_only_when_they_may_be_too_many(monkeypatch):
    topic = BucketedTopic(range_count_max=50)
    bucket = topic.seal({1: HOLES[:500]}, {1: HOLES[500:]})
    cursor = acked_but_holes(topic)
    counted = []
    original = filled_ranges.filled
    for module in (filled_ranges, cursor_holes):
        monkeypatch.setattr(module, "filled", lambda *given: counted.append(1) or original(*given))
    for entry in range(100, 140):
        cursor.ack(Position(4, 2 * entry), now_ms=0)
        assert cursor.persist(now_ms=0).route is PersistTarget.DELTA
    assert len(counted) <= 1
    cursor.ack_entries(1, HOLES[:500], now_ms=0)
    topic.live[bucket] = 2
    assert cursor.persist(now_ms=0).messages_cut == 0
    assert 1 <= len(counted) <= 3
    cursor._check()


def test_a_limit_is_not_passed_although_what_is_durable_already_stays():
    topic = BucketedTopic(range_count_max=3)
    topic.seal({1: [*range(101, 119, 2), *range(201, 219, 2), *range(301, 319, 2)]})
    cursor = topic.open()
    cursor.ack_entries(4, [100, 200], now_ms=0)
    cursor.persist(now_ms=0)
    # Three ranges with their holes filled in, of ten each; two others are durable, so there is room for one.
    cursor.ack_entries(1, [*range(100, 120, 2), *range(200, 220, 2), *range(300, 320, 2)], now_ms=0)
    assert cursor.persist(now_ms=0).messages_cut == 29
    cursor._check()
    recovered = topic.restarted().open(config=CursorConfig())
    assert str(recovered.deleted) == "[(1:99..1:100],(4:99..4:100],(4:199..4:200]]"


def test_the_metadata_store_counts_them_neither():
    topic = BucketedTopic(range_count_max=5)
    topic.seal({1: HOLES})
    cursor = acked_but_holes(topic)
    topic.store.break_ledgers()
    for entry in count(100, 2):
        cursor.ack(Position(4, entry), now_ms=0)
        result = cursor.persist(now_ms=0)
        assert result.route is PersistTarget.METADATA
        if result.messages_cut:
            break
    assert entry == 108
    assert state(topic.restarted().open(config=CursorConfig()))[0].endswith("(4:105..4:106]]")


def test_a_bucket_of_a_newer_release_is_left_alone():
    topic = BucketedTopic()
    bucket = topic.store.ledgers.create(BUCKETS)
    topic.store.ledgers.append(bucket, bucket_bytes({1: HOLES}) + b"\xfa\x7f\x01x")
    topic.live[bucket] = 1
    acked_but_holes(topic)
    assert not is_shared(topic.ledger()[0])


def test_buckets_are_read_once_for_all_cursors_and_forgotten_when_they_are_gone():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES}, {4: HOLES})
    reads = []
    original = topic.store.ledgers.read
    topic.store.ledgers.read = lambda *given: reads.append(given) or original(*given)
    first, second = topic.shared.buckets(), topic.shared.buckets()
    topic.live[bucket] = 2
    third = topic.shared.buckets()
    assert reads == [(bucket, 0, 1)]
    assert first[0] is second[0]
    assert (set(first[0].bitmaps), set(third[0].bitmaps)) == ({1, 4}, {4})
    topic.live.clear()
    assert topic.shared.buckets() == ()
    assert (topic.shared._read, topic.shared._holes) == ({}, {})


def test_a_bucket_is_read_once_for_all_cursors_that_are_opened():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    for name in ("a", "b", "c"):
        acked_but_holes(topic, subscription=name)
    topic.restarted()
    reads = []
    original = topic.store.ledgers.read
    topic.store.ledgers.read = lambda *given: reads.append(given) or original(*given)
    for name in ("a", "b", "c"):
        topic.open(name)
    assert reads.count((bucket, 0, 1)) == 1


def test_segments_count_from_1():
    topic = BucketedTopic()
    topic.live[topic.seal({1: HOLES})] = 0
    with pytest.raises(ValueError, match="at least 1"):
        topic.shared.buckets()


def test_a_segment_beyond_the_last_holds_nothing():
    topic = BucketedTopic()
    bucket = topic.seal({1: HOLES})
    topic.live[bucket] = 2
    acked_but_holes(topic)
    assert not is_shared(topic.ledger()[0])


def test_on_a_disk_it_is_the_same(tmp_path):
    with closing(SqliteStore(tmp_path / "store")) as store:
        topic = BucketedTopic(store)
        bucket = topic.seal({1: HOLES})
        cursor = acked_but_holes(topic)
        assert is_shared(topic.ledger()[0])
        assert topic.references.is_needed(bucket)
        assert topic.pins() == {(bucket, pin_of("s")), (bucket, None)}
    with closing(SqliteStore(tmp_path / "store")) as store:
        again = BucketedTopic(store)
        reopened = again.open()
        assert state(reopened) == state(cursor)
        reopened.reset(Position(1, 0), now_ms=0)
        assert not again.references.is_needed(bucket)
        store.ledgers.delete(bucket)
        assert not again.references.is_needed(bucket + 1_000)
        assert again.pins() == {(bucket + 1_000, None)}


def test_a_damaged_pin_hinders_nobody():
    topic = BucketedTopic()
    topic.seal({1: HOLES})
    topic.store.metadata.put(f"{ROOT}/not-a-bucket/x", b"", expected_version=ABSENT)
    cursor = acked_but_holes(topic)
    assert is_shared(topic.ledger()[0])
    assert state(topic.restarted().open()) == state(cursor)
