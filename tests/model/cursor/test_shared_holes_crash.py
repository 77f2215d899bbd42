"""Cursors that refer to delay buckets, cut at every write or failing at one; and bugs that these cuts must find.

Checked after every cut: a record refers only to buckets that are there and pinned (I10); a cursor recovers as it was
before or after the write that was cut (I1, I2, I3, I9), and the same again (I5); and once no record needs a bucket, all
are deleted and no pin is left.
"""

from __future__ import annotations

import random
from contextlib import suppress
from unittest import mock

import pytest
from pyroaring import BitMap

from ackstate import LedgerMap, Position
from ackstate.cursor import CursorConfig, ManagedCursor, MemoryStore, StoreError, UnreadableCursorError
from ackstate.cursor.journal.cursor_holes import CursorHoles
from ackstate.cursor.journal.hole_pins import ROOT, BucketReferences, HolePins
from ackstate.cursor.journal.journal import cursor_path
from ackstate.cursor.journal.native import SharedCursorRecord
from ackstate.cursor.journal.recovery import decode_record
from ackstate.cursor.journal.shared_holes import LiveBucket, SharedHoles
from ackstate.cursor.steps import run
from ackstate.stores.memory import Fault, FaultKind, PowerCutError
from ackstate.wire.native_shared import decode_shared, is_shared
from ackstate.wire.pulsar.delay_snapshot import SegmentMetadata, encode_metadata

ENTRIES = 600
LOG = LedgerMap.from_counts({1: ENTRIES, 4: ENTRIES})
CONFIG = CursorConfig(compaction_bytes_min=250)
SUBSCRIPTIONS = ("a", "b")
BUCKETS = "delay buckets"
CUTS = (FaultKind.CRASH_BEFORE, FaultKind.CRASH_AFTER)
FAILURES = (FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER)


class CursorsWithSharedHoles:
    """Two cursors and a delay index that keeps the rules for its buckets."""

    def __init__(self, store):
        self.store = store
        self.references = BucketReferences(store)
        # The buckets that an index would recover: each one that is there, whole or not.
        self.live = dict.fromkeys(store.ledgers.owned_by(BUCKETS), 1)
        self.shared = SharedHoles(store, lambda: [LiveBucket(*item) for item in self.live.items()])
        self.cursors = {name: self.open(name) for name in SUBSCRIPTIONS}

    def open(self, name):
        return ManagedCursor.open(
            self.store, topic="t", subscription=name, ledgers=LOG, config=CONFIG, shared_holes=self.shared, now_ms=0
        )

    def seal(self, *segments):
        bucket_id = self.store.ledgers.create(BUCKETS)
        held = [SegmentMetadata({ledger: BitMap(ids) for ledger, ids in each.items()}, 1, 2, 3) for each in segments]
        self.store.ledgers.append(bucket_id, encode_metadata(held))
        self.live[bucket_id] = 1
        return bucket_id

    def fall_due(self, bucket_id):
        self.live[bucket_id] += 1

    def drop(self, bucket_id):
        self.live.pop(bucket_id, None)
        if not self.references.is_needed(bucket_id):
            self.store.ledgers.delete(bucket_id)

    def state(self, name):
        cursor = self.cursors[name]
        return str(cursor.deleted), cursor.mark_delete_position


class HoleRun:
    """One run of a workload, and for each cursor the states between which a crash may leave it."""

    def __init__(self, store, *, survives=False):
        self.store = store
        self.survives = survives
        self.possible = {name: [("[]", Position(1, -1))] for name in SUBSCRIPTIONS}
        self.broker = CursorsWithSharedHoles(store)

    def attempt(self, call, *given):
        """Do something with the store, which may fail and go on where the run survives."""
        try:
            return call(*given)
        except PowerCutError:
            raise
        except StoreError:
            if not self.survives:
                raise

    def persist(self, name):
        self.possible[name] = [self.possible[name][-1], self.broker.state(name)]
        self.attempt(lambda: self.broker.cursors[name].persist(now_ms=0))
        check_references(self.store)

    def reset(self, name, entry):
        self.possible[name] = [self.possible[name][-1], ("[]", Position(1, entry - 1))]
        self.attempt(lambda: self.broker.cursors[name].reset(Position(1, entry), now_ms=0))
        check_references(self.store)

    def ack(self, name, ledger, entries):
        self.broker.cursors[name].ack_entries(ledger, entries, now_ms=0)


def story(run):
    """Two segments scattered in a ledger fall due one after the other; a second bucket takes over from the first."""
    broker, choose = run.broker, random.Random(3)
    early, late = set(choose.sample(range(ENTRIES), 90)), set(choose.sample(range(ENTRIES), 90))
    late -= early
    first = run.attempt(lambda: broker.seal({1: early}, {1: late}))
    for begin in range(0, ENTRIES, 200):
        for name in SUBSCRIPTIONS:
            run.ack(name, 1, sorted(set(range(begin, begin + 200)) - early - late))
            run.persist(name)
    if first in broker.live:
        broker.fall_due(first)
    for begin in range(0, ENTRIES, 200):
        run.ack("a", 1, [entry for entry in sorted(early) if begin <= entry < begin + 200])
        run.persist("a")
    second = run.attempt(lambda: broker.seal({4: range(0, ENTRIES, 3)}, {1: late}))
    for begin in range(0, ENTRIES, 100):
        run.ack("a", 4, [entry for entry in range(begin, begin + 100) if entry % 3])
        run.persist("a")
        if begin == 300:
            run.attempt(broker.drop, first or 0)
    run.reset("b", 300)
    run.attempt(broker.drop, first or 0)
    run.ack("b", 1, sorted(set(range(300, ENTRIES)) - late))
    run.persist("b")
    run.attempt(broker.drop, second or 0)
    run.ack("a", 1, sorted(late))
    for begin in range(0, ENTRIES, 150):
        run.ack("b", 4, [entry for entry in range(begin, begin + 150) if entry % 5])
        run.persist("b")
        run.ack("a", 4, [entry for entry in range(begin, begin + 150) if not entry % 3])
        run.persist("a")
    run.attempt(broker.drop, first or 0)


def anything(seed):
    """A workload of whatever comes, the same for a seed."""

    def workload(run):
        choose, broker, sealed = random.Random(seed), run.broker, []
        for _ in range(60):
            name, ledger = choose.choice(SUBSCRIPTIONS), choose.choice((1, 4))
            act = choose.randrange(12)
            if act == 0:
                segments = [{ledger: choose.sample(range(ENTRIES), 120)} for _ in range(choose.randint(1, 3))]
                sealed.append(run.attempt(lambda held=segments: broker.seal(*held)))
            elif act == 1 and broker.live:
                broker.fall_due(choose.choice(sorted(broker.live)))
            elif act == 2 and sealed:
                run.attempt(broker.drop, choose.choice(sealed) or 0)
            elif act == 3 and choose.random() < 0.3:
                run.reset(name, choose.randrange(ENTRIES))
            elif act < 8:
                held = set().union(*(bucket.bitmaps.get(ledger, ()) for bucket in broker.shared.buckets()))
                begin = choose.randrange(ENTRIES)
                run.ack(name, ledger, [n for n in range(begin, min(begin + 200, ENTRIES)) if n not in held])
            else:
                run.ack(name, ledger, choose.sample(range(ENTRIES), 3))
                run.persist(name)

    return workload


WORKLOADS = {"story": story, **{f"seed {seed}": anything(seed) for seed in (1, 2)}}


def references_of(store, name):
    """The buckets that the record of a cursor refers to, and whether it refers to any, as the bytes on the disk say."""
    value = store.disk.values.get(cursor_path("t", name))
    if value is None:
        return frozenset()
    record = decode_record(value.data).record
    if isinstance(record, SharedCursorRecord):
        return record.shared.bucket_ids
    entries = store.disk.ledgers[record.cursor_ledger_id].entries if record.cursor_ledger_id is not None else []
    return decode_shared(entries[0]).bucket_ids if entries and is_shared(entries[0]) else frozenset()


def check_references(store):
    """See that each record on a disk refers to buckets that are there and pinned."""
    for name in SUBSCRIPTIONS:
        for bucket_id in references_of(store, name):
            assert bucket_id in store.disk.ledgers, f"bucket {bucket_id} was deleted under {name}"
            pin = f"{ROOT}/{bucket_id}/%2Fmanaged-ledgers%2Ft%2F{name}"
            assert pin in store.disk.values, f"bucket {bucket_id} is not pinned for {name}"


def check_recovered(run, *, exactly=False):
    """Open the disk twice; then acknowledge all, and see that nothing is left of the buckets."""
    store = MemoryStore(run.store.disk)
    check_references(store)
    broker = CursorsWithSharedHoles(store)
    check_references(store)
    for name in SUBSCRIPTIONS:
        possible = run.possible[name][-1:] if exactly else run.possible[name]
        assert broker.state(name) in possible, name
        broker.cursors[name]._check()
    again = CursorsWithSharedHoles(MemoryStore(run.store.disk))
    for name in SUBSCRIPTIONS:
        assert again.state(name) == broker.state(name)
    again.live.clear()
    for name in SUBSCRIPTIONS:
        # All is as it was, and the journals are old.
        again.cursors[name].tick(now_ms=4 * 3_600_000)
    for bucket_id in store.ledgers.owned_by(BUCKETS):
        again.drop(bucket_id)
    assert store.ledgers.owned_by(BUCKETS) == []
    assert not again.references.is_needed(0)
    left = [path for path in store.disk.values if path.startswith(ROOT)]
    assert left == [f"{ROOT}/0"]


def mutations_of(workload):
    store = MemoryStore()
    workload(HoleRun(store))
    return store.mutation_count


def cut_everywhere(workload):
    for mutation in range(mutations_of(workload)):
        for kind in CUTS:
            store = MemoryStore(faults=[Fault(mutation, kind)])
            run = None
            with suppress(PowerCutError):
                run = HoleRun(store)
                workload(run)
            if run is not None:
                check_recovered(run)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_crash_at_any_write_leaves_every_cursor_readable_as_it_was(workload):
    cut_everywhere(workload)


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=WORKLOADS)
def test_a_failure_of_any_write_loses_nothing_and_leaves_no_reference_open(workload):
    for mutation in range(mutations_of(workload)):
        for kind in FAILURES:
            store = MemoryStore(faults=[Fault(mutation, kind)])
            try:
                run = HoleRun(store, survives=True)
            except StoreError:
                continue  # At the creation of a cursor.
            workload(run)
            for name in SUBSCRIPTIONS:
                run.persist(name)
                run.persist(name)
            check_recovered(run, exactly=True)


def test_the_story_refers_to_buckets_changes_over_and_lets_go():
    referred = []
    with mock.patch.object(
        HoleRun, "persist", lambda run, name, persist=HoleRun.persist: note(run, name, persist, referred)
    ):
        mutations_of(story)
    assert {(name, len(buckets)) for name, buckets in referred} >= {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
    assert len({bucket for _, buckets in referred for bucket in buckets}) == 2
    assert max(len(buckets) for _, buckets in referred) == 2


def note(run, name, persist, referred):
    persist(run, name)
    referred.append((name, references_of(run.store, name)))


# Bugs that the cuts must find.


def drop_without_asking(broker, bucket_id):
    broker.live.pop(bucket_id, None)
    broker.store.ledgers.delete(bucket_id)


def pin_later(pins, bucket_id):
    pins._usable.add(bucket_id)
    yield from ()
    return True


def keep_only_and_pin(pins, needed, keep_only=HolePins.keep_only, pin=HolePins.pin):
    for bucket_id in needed:
        pins._usable.discard(bucket_id)
        yield from pin(pins, bucket_id)
    yield from keep_only(pins, needed)


def shared_and_unpinned(holes, state, buckets, share=CursorHoles.share):
    snapshot = yield from share(holes, state, buckets)
    yield from holes.keep_only(() if snapshot is None else snapshot.bucket_ids)
    return snapshot


def buckets_that_go_on(shared, buckets=SharedHoles.buckets):
    """The part of each bucket in memory, in place of the stored one: an entry has become another."""
    return tuple(
        each._replace(
            bitmaps={
                ledger: BitMap([*list(bitmap)[1:], next(n for n in range(ENTRIES) if n not in bitmap)])
                for ledger, bitmap in each.bitmaps.items()
            }
        )
        for each in buckets(shared)
    )


def take_nothing_over(holes, needed, find_pins=CursorHoles.find_pins, **named):
    find_pins(holes, needed, **named)
    run(holes._store, holes.keep_only(()))


PLANTED = {
    "a bucket is deleted without asking": [(CursorsWithSharedHoles, "drop", drop_without_asking)],
    "the pin comes after the record": [(HolePins, "pin", pin_later), (HolePins, "keep_only", keep_only_and_pin)],
    "the pin of the record before goes first": [(CursorHoles, "share", shared_and_unpinned)],
    "the base is not the stored one": [(SharedHoles, "buckets", buckets_that_go_on)],
    "an open lets a bucket go that its record needs": [(CursorHoles, "find_pins", take_nothing_over)],
    "pins are never let go of": [(HolePins, "keep_only", lambda pins, needed: iter(()))],
}


@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED.values(), ids=PLANTED)
def test_the_cuts_find_a_planted_bug(planted, monkeypatch):
    for where, name, bug in planted:
        monkeypatch.setattr(where, name, bug)
    with pytest.raises((AssertionError, UnreadableCursorError)):
        cut_everywhere(story)


# A bucket that is deleted by another process while a cursor begins to refer to it.


class Watched:
    """A part of a store that tells of each call before it is made."""

    def __init__(self, part, before):
        self._part, self._before = part, before

    def __getattr__(self, name):
        def call(*given, **named):
            self._before()
            return getattr(self._part, name)(*given, **named)

        return call


class InterruptedStore:
    """A store of which something else happens before some of the calls, counted from 0."""

    def __init__(self, disk, happens=None):
        self.disk, self.happens, self.call_count = disk, dict(happens or {}), 0
        store = MemoryStore(disk)
        self.ledgers, self.metadata = Watched(store.ledgers, self._before), Watched(store.metadata, self._before)

    def _before(self):
        happening = self.happens.pop(self.call_count, None)
        self.call_count += 1
        if happening:
            happening()


def refer_while_deleted(asked_at, deleted_at):
    """Persist a state that refers to a bucket; before these calls another process asks for it, and deletes it then."""
    before = MemoryStore()
    bucket_id = CursorsWithSharedHoles(before).seal({1: range(1, ENTRIES, 2)})
    other, needed = MemoryStore(before.disk), []

    def ask():
        needed.append(BucketReferences(other).is_needed(bucket_id))

    def delete():
        if needed == [False]:
            other.ledgers.delete(bucket_id)

    store = InterruptedStore(before.disk)
    run = HoleRun(store)
    run.ack("a", 1, range(0, ENTRIES, 2))
    run.broker.cursors["a"]._persister.journal._open_ledger = None
    begin = store.call_count
    store.happens = {begin + asked_at: ask, begin + deleted_at: delete}
    run.broker.cursors["a"].persist(now_ms=0)
    check_references(before)
    assert CursorsWithSharedHoles(MemoryStore(before.disk)).state("a") == run.broker.state("a")
    return store.call_count - begin, bucket_id in before.disk.ledgers


def check_all_orders():
    call_count, is_there = refer_while_deleted(10**6, 10**6)
    assert is_there
    outcomes = {
        (asked_at, deleted_at): refer_while_deleted(asked_at, deleted_at)[1]
        for asked_at in range(call_count)
        for deleted_at in range(asked_at + 1, call_count)
    }
    # Asked before anything is pinned it is deleted; asked at the end it is not.
    assert not outcomes[0, 1]
    assert outcomes[call_count - 2, call_count - 1]


def test_a_bucket_is_either_kept_or_not_referred_to_in_whatever_order_two_processes_come():
    check_all_orders()


def pin_and_never_look(pins, bucket_id):
    pins._versions[bucket_id] = yield from pins._put(pins._pin_path(bucket_id), -1)
    return True


def look_and_then_pin(pins, bucket_id, pin=HolePins.pin):
    metadata = pins._store.metadata
    is_closed = metadata.get(f"{ROOT}/{bucket_id}") is not None
    return not is_closed and (yield from pin_and_never_look(pins, bucket_id))


@pytest.mark.parametrize("bug", [pin_and_never_look, look_and_then_pin])
def test_the_orders_find_a_cursor_that_does_not_look_after_it_has_pinned(bug, monkeypatch):
    monkeypatch.setattr(HolePins, "pin", bug)
    with pytest.raises((AssertionError, UnreadableCursorError)):
        check_all_orders()


def test_the_orders_find_an_index_that_looks_before_it_closes(monkeypatch):
    def is_needed(references, bucket_id):
        return bool(references._store.metadata.children(f"{ROOT}/{bucket_id}"))

    monkeypatch.setattr(BucketReferences, "is_needed", is_needed)
    with pytest.raises((AssertionError, UnreadableCursorError)):
        check_all_orders()
