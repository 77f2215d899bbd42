"""`Format.PULSAR`: a cursor writes as Pulsar would, and opens Pulsar's own records, in either format."""

import gzip
import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from ackstate import CursorConfig, DeletedRanges, Format, LedgerMap, ManagedCursor, MemoryStore, Position, Repair
from ackstate.cursor import PersistTarget, RecoverySource
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.recovery import decode_record
from ackstate.wire.pulsar import (
    CursorInfo,
    LimitRule,
    Limits,
    PositionInfo,
    RangeForm,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
    limit_ranges,
)
from ackstate.wire.pulsar import cursor_state_pb2 as messages
from cursors import StoryCursor

VECTORS = Path(__file__).parents[2] / "vectors"
RANGE = re.compile(r"\((\d+):(-?\d+)\.\.(\d+):(\d+)\]")
PATH = cursor_path("orders", "billing")
P = Position


@pytest.fixture
def log():
    return LedgerMap.from_counts({3: 10, 5: 10, 7: 0})


def open_cursor(store, log, *, repair=Repair.NONE, **config):
    config = CursorConfig(**{"format": Format.PULSAR, **config})
    return ManagedCursor.open(
        store, topic="orders", subscription="billing", ledgers=log, config=config, repair=repair, now_ms=0
    )


def told(story):
    StoryCursor({3: 10, 5: 10, 7: 0}, format=Format.PULSAR).tell(story)


def crashed(store):
    return MemoryStore(store.disk)


def put_record(store, encoded):
    found = store.metadata.get(PATH)
    store.metadata.put(PATH, encoded, expected_version=-1 if found is None else found.version)


def record_of(store):
    return decode_cursor_info(store.metadata.get(PATH).data)


def entries_of(store):
    ledger_id = record_of(store).cursors_ledger_id
    return store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1)


def put_recorded(record, entry=None):
    """Return a store with Pulsar's data: a record and, in the ledger that it names, one entry."""
    store = MemoryStore()
    put_record(store, record)
    if entry is not None:
        store.disk.next_ledger_id = decode_cursor_info(record).cursors_ledger_id
        store.ledgers.append(store.ledgers.create("pulsar"), [entry])
    return store


def replace_entries(store, change):
    """Let the record name a changed copy of the cursor ledger, as damage on a disk would."""
    copy = store.ledgers.create("damage")
    store.ledgers.append(copy, change(entries_of(store)))
    message = messages.ManagedCursorInfo.FromString(store.metadata.get(PATH).data)
    message.cursors_ledger_id = copy
    put_record(store, message.SerializeToString())


def state_of(cursor):
    return cursor.mark_delete_position, str(cursor.deleted), dict(cursor.view.batch), dict(cursor.view.properties)


def fill(cursor):
    """Give it a bit of everything."""
    cursor.mark_delete(P(3, 1), properties={"horizon": -7}, now_ms=0)
    cursor.ack_many([P(3, 4), P(3, 5), P(3, 9), P(5, 0), P(5, 8)], now_ms=0)
    cursor.ack_batch(P(3, 7), [0b1010], now_ms=0)
    cursor.ack_batch(P(5, 5), [0, 1], now_ms=0)


@pytest.mark.parametrize("form", RangeForm)
def test_every_persist_writes_the_whole_state_as_one_position_info(store, log, form):
    cursor = open_cursor(store, log, range_form=form)
    acks = [
        lambda: cursor.ack(P(3, 2), now_ms=0),
        lambda: cursor.ack_batch(P(3, 0), [0b110], now_ms=0),
        lambda: cursor.mark_delete(P(3, 0), properties={"horizon": 4}, now_ms=0),
        lambda: cursor.ack_entries(5, range(1, 9, 2), now_ms=0),
        lambda: cursor.ack(P(3, 1), now_ms=0),
    ]
    for count, ack in enumerate(acks, 1):
        ack()
        result = cursor.persist(now_ms=0)
        assert result.route is (PersistTarget.SNAPSHOT if count == 1 else PersistTarget.WHOLE)
        entries = entries_of(store)
        assert len(entries) == count
        info = PositionInfo(cursor.mark_delete_position, cursor.deleted, cursor.view.batch, cursor.view.properties)
        assert decode_position_info(entries[-1]) == info
        assert entries[-1] == encode_position_info(info, form=form)
        assert result.bytes_written == len(entries[-1])
        assert open_state(store, log) == state_of(cursor)
    assert cursor.persist(now_ms=0).route is PersistTarget.NOTHING


def open_state(store, log):
    """The result of a recovery, on a copy."""
    copy = MemoryStore()
    record = record_of(store)
    put_record(copy, store.metadata.get(PATH).data)
    if record.cursors_ledger_id >= 0:
        copy.disk.next_ledger_id = record.cursors_ledger_id
        ledger_id = copy.ledgers.create("copy")
        copy.ledgers.append(ledger_id, entries_of(store))
    return state_of(open_cursor(copy, log))


@pytest.mark.parametrize(("range_count", "route"), [(2, PersistTarget.METADATA), (3, PersistTarget.WHOLE)])
def test_a_cursor_closes_into_the_metadata_store_if_it_is_small_enough(store, log, range_count, route):
    cursor = open_cursor(store, log, metadata_range_count_max=2)
    cursor.ack(P(3, 1), now_ms=0)
    cursor.persist(now_ms=0)
    for entry_id in range(3, 2 * range_count, 2):
        cursor.ack(P(3, entry_id), now_ms=0)
    cursor.ack_batch(P(5, 3), [0b10], now_ms=0)
    assert cursor.deleted.range_count == range_count
    held = state_of(cursor)
    assert cursor.close(now_ms=0).route is route
    in_ledger = route is PersistTarget.WHOLE
    assert (record_of(store).cursors_ledger_id >= 0) is in_ledger
    assert bool(store.ledgers.owners()) is in_ledger
    reopened = open_cursor(crashed(store), log)
    assert state_of(reopened) == held
    assert reopened.recovery_report.source is (RecoverySource.JOURNAL if in_ledger else RecoverySource.METADATA)


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("path", [[Format.NATIVE, Format.PULSAR, Format.NATIVE], [Format.PULSAR, Format.NATIVE] * 2])
def test_a_cursor_of_one_format_is_converted_by_the_next_persist_in_the_other(store, log, path, is_closed):
    cursor = open_cursor(store, log, format=path[0])
    fill(cursor)
    cursor.set_cursor_properties({"owner": "billing"})
    cursor.persist(now_ms=0)
    held = state_of(cursor)
    for before, after in pairwise(path):
        if is_closed:
            cursor.close(now_ms=0)
        store = crashed(store)
        cursor = open_cursor(store, log, format=after)
        assert cursor.recovery_report.format is before
        assert decode_record(store.metadata.get(PATH).data).form.name is before
        assert state_of(cursor) == held
        assert cursor.redelivery_if_crashed == 0
        assert cursor.persist(now_ms=0).route is PersistTarget.SNAPSHOT
        assert decode_record(store.metadata.get(PATH).data).form.name is after
        assert cursor.cursor_properties == {"owner": "billing"}


def as_pulsar_would_write(store):
    """Rewrite a record without the field of ours, and the entry that counts by Pulsar's schema alone."""
    message = messages.ManagedCursorInfo.FromString(store.metadata.get(PATH).data)
    assert message.HasField("ackstate_term")
    message.ClearField("ackstate_term")
    message.last_active = 1_795_191_315_442
    put_record(store, message.SerializeToString())
    if message.cursors_ledger_id >= 0:
        info = decode_position_info(entries_of(store)[-1])
        store.ledgers.append(message.cursors_ledger_id, [encode_position_info(info, form=RangeForm.WORDS)])


@pytest.mark.parametrize("format_after", Format)
@pytest.mark.parametrize("is_closed", [False, True])
def test_after_pulsar_has_written_the_cursor_again_it_opens_with_all_it_had(store, log, is_closed, format_after):
    cursor = open_cursor(store, log, range_form=RangeForm.LIST)
    fill(cursor)
    cursor.set_cursor_properties({"owner": "billing"})
    cursor.persist(now_ms=0)
    if is_closed:
        cursor.close(now_ms=0)
    held = state_of(cursor)
    as_pulsar_would_write(store)
    reopened = open_cursor(crashed(store), log, format=format_after)
    assert state_of(reopened) == held
    assert reopened.cursor_properties == {"owner": "billing"}
    assert reopened.recovery_report.bytes_discarded == 0


def idle_times_of(store):
    """Return the times of idleness that a broker could find: of the record, and of the entry that counts."""
    message = messages.ManagedCursorInfo.FromString(store.metadata.get(PATH).data)
    entry = entries_of(store)[-1] if message.cursors_ledger_id >= 0 else b"\x08\0\x10\0"
    return message.last_active, message.idle_since, messages.PositionInfo.FromString(entry).idle_since


IDLE = {
    "opened": lambda cursor: None,
    "persisted without an ack": lambda cursor: cursor.persist(now_ms=0),
    "an ack": lambda cursor: (cursor.ack(P(5, 3), now_ms=0), cursor.persist(now_ms=0)),
    "a partly acked batch": lambda cursor: (cursor.ack_batch(P(5, 3), [2], now_ms=0), cursor.persist(now_ms=0)),
    "a cumulative ack": lambda cursor: (cursor.mark_delete(P(3, 8), now_ms=0), cursor.persist(now_ms=0)),
    "properties": lambda cursor: cursor.set_cursor_properties({"owner": "billing"}),
    "a reset": lambda cursor: cursor.reset(P(3, 2), now_ms=0),
    "closed": lambda cursor: cursor.close(now_ms=0),
}


@pytest.mark.parametrize("use", IDLE.values(), ids=IDLE)
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("metadata_range_count_max", [0, 100])
def test_no_use_of_a_cursor_leaves_a_time_since_which_it_is_idle(store, log, use, is_closed, metadata_range_count_max):
    """The next broker would delete the subscription: to it, all this time nobody has used it."""
    cursor = open_cursor(store, log)
    fill(cursor)
    cursor.persist(now_ms=0)
    if is_closed:
        cursor.close(now_ms=0)
    held = state_of(cursor)
    message = messages.ManagedCursorInfo.FromString(store.metadata.get(PATH).data)
    message.ClearField("ackstate_term")
    message.last_active, message.idle_since = 1_795_191_315_442, 1_795_191_315_443
    put_record(store, message.SerializeToString())
    if not is_closed:
        info = decode_position_info(entries_of(store)[-1])
        entry = encode_position_info(replace(info, idle_since_ms=1_795_191_315_444))
        store.ledgers.append(message.cursors_ledger_id, [entry])
    assert all(idle_times_of(store)[: 2 if is_closed else 3])
    reopened = open_cursor(crashed(store), log, metadata_range_count_max=metadata_range_count_max)
    assert state_of(reopened) == held
    use(reopened)
    assert idle_times_of(store) == (0, 0, 0)
    assert open_state(store, log) == state_of(reopened)


@pytest.mark.parametrize("repair", [Repair.DISCARD_DAMAGED_RECORDS, Repair.USE_METADATA_SNAPSHOT, Repair.START_ANEW])
def test_no_repair_leaves_a_time_since_which_the_cursor_is_idle(store, log, repair):
    persisted_three_times(store, log)
    idle = replace(decode_position_info(entries_of(store)[-1]), idle_since_ms=1_795_191_315_444)
    replace_entries(store, lambda entries: [encode_position_info(idle), b"\xff", b"\xff"])
    message = messages.ManagedCursorInfo.FromString(store.metadata.get(PATH).data)
    message.idle_since = 1_795_191_315_443
    put_record(store, message.SerializeToString())
    open_cursor(crashed(store), log, repair=repair)
    assert idle_times_of(store) == (0, 0, 0)


def ranges_of(text):
    ranges = DeletedRanges()
    for ids in RANGE.findall(text):
        lower_ledger, lower_entry, upper_ledger, upper_entry = map(int, ids)
        ranges.add_open_closed(P(lower_ledger, lower_entry), P(upper_ledger, upper_entry))
    return ranges


def recorded(name):
    with gzip.open(VECTORS / name, "rt") as lines:
        return list(map(json.loads, lines))


def log_after_reopening(case):
    """Pulsar drops empty ledgers and begins a new one."""
    counts = {ledger_id: count for ledger_id, count in case["ledgers"] if count}
    return LedgerMap.from_counts({**counts, max(case["ledgers"][-1][0] + 1, case["reopenedFromMeta"]["md"][0]): 0})


@pytest.mark.parametrize("format_of_ours", Format)
@pytest.mark.parametrize("name", ["longArrayHex", "messageRangeHex", "metaClosedHex"])
def test_what_pulsar_5_0_m1_wrote_is_opened(name, format_of_ours):
    moved = 0
    for case in recorded("positioninfo.jsonl.gz"):
        state, limits = case["state"], case["config"]
        record, entry = bytes.fromhex(case["metaWhileOpenHex"]), bytes.fromhex(case[name])
        store = put_recorded(entry) if name == "metaClosedHex" else put_recorded(record, entry)
        cursor = open_cursor(
            store, log_after_reopening(case), format=format_of_ours, range_count_max=100_000, batch_count_max=None
        )
        mark_delete = case["reopenedFromMeta"]["md"] if format_of_ours is Format.PULSAR else state["md"]
        moved += mark_delete != state["md"]
        assert list(cursor.mark_delete_position) == mark_delete, case["id"]
        form = RangeForm.WORDS if name == "longArrayHex" else RangeForm.LIST
        rule = Limits(limits["maxUnackedRangesToPersist"], rule=LimitRule.PULSAR_5_0_M1)
        assert cursor.deleted == limit_ranges(ranges_of(state["ranges"]), form=form, limits=rule).kept
        # More than Pulsar read back, which leaves out those of the metadata record. Of the limit, those have their part
        # that it had not yet forgotten, at or below the mark-delete.
        late = 0 if name == "metaClosedHex" else sum(p <= P(*state["md"]) for p in decode_position_info(entry).batch)
        kept = list((state["batch"] or {}).items())[: limits["maxBatchDeletedIndexToPersist"] - late]
        assert {str(position): list(words) for position, words in cursor.view.batch.items()} == dict(kept)
        assert (cursor.view.properties, cursor.cursor_properties) == (state["props"], state["cursorProps"])
        assert cursor.recovery_report.format is Format.PULSAR
        cursor._check()
    assert moved == (format_of_ours is Format.PULSAR)


@pytest.mark.slow
@pytest.mark.parametrize("format_of_ours", Format)
def test_what_brokers_wrote_before_they_were_killed_is_opened_as_they_did(format_of_ours):
    opened = 0
    for case in recorded("broker-positioninfo.jsonl.gz"):
        if "recovered" not in case:
            continue
        data, held = bytes.fromhex(case["hex"]), case["recovered"]
        is_record = case["source"] == "metadata store record"
        store = put_recorded(data) if is_record else put_recorded(encode_cursor_info(CursorInfo(case["ledger"])), data)
        ranges = ranges_of(held["individuallyDeleted"])
        mark_delete = P.parse(held["markDelete"])
        ends = {ledger_id: bitmap.max() + 2 for ledger_id, bitmap in ranges.bitmaps()}
        ends.setdefault(mark_delete.ledger_id, mark_delete.entry_id + 2)
        log = LedgerMap.from_counts(dict(sorted(ends.items())))
        cursor = open_cursor(store, log, format=format_of_ours, range_count_max=100_000)
        assert (cursor.mark_delete_position, str(cursor.deleted)) == (mark_delete, held["individuallyDeleted"])
        opened += 1
    assert opened == 20


def persisted_three_times(store, log):
    cursor = open_cursor(store, log)
    for entry_id in (2, 4, 6):
        cursor.ack(P(3, entry_id), now_ms=0)
        cursor.persist(now_ms=0)


@pytest.mark.parametrize("damage", [lambda entry: entry[:-1], lambda entry: b"\x08" * 30, lambda entry: b""])
def test_a_last_entry_that_cannot_be_read_is_left_out_and_reported(store, log, damage):
    persisted_three_times(store, log)
    last = damage(entries_of(store)[-1])
    replace_entries(store, lambda entries: [*entries[:-1], last])
    cursor = open_cursor(crashed(store), log)
    assert str(cursor.deleted) == "[(3:1..3:2],(3:3..3:4]]"
    report = cursor.recovery_report
    assert (report.bytes_discarded, report.records_replayed) == (len(last), 1)
    assert report.discarded_offset >= 0
    assert PATH in report.discarded_reason


def test_batches_beyond_the_limit_are_a_truncation_though_no_range_is_cut(store, log, caplog):
    cursor = open_cursor(store, log, batch_count_max=1)
    for entry_id in (2, 4):
        cursor.ack_batch(P(3, entry_id), [0b01], now_ms=0)
    for now_ms, entry_id in enumerate((6, 8)):
        caplog.clear()
        cursor.ack(P(3, entry_id), now_ms=now_ms)
        result = cursor.persist(now_ms=now_ms)
        assert (result.messages_cut, result.batches_cut, cursor.stats().truncation_count) == (0, 1, 1)
        # As long as the limit goes on cutting, that is no new event.
        assert ("leave 0 acked messages, 1 partly acked batches" in caplog.text) == (now_ms == 0)
    cursor.ack(P(3, 4), now_ms=2)
    assert cursor.persist(now_ms=2).batches_cut == 0
    receipt = cursor.ack_batch(P(3, 5), [0b01], now_ms=3)
    assert cursor.persist(now_ms=3).batches_cut == 1
    assert not cursor.durable(receipt)
    told("begin batch_count_max=0; upto 5 0b10; persist; durable -> -")
    assert cursor.stats().truncation_count == 2


@pytest.mark.parametrize(
    ("mark_delete", "counts", "expected"),
    [
        pytest.param(P(3, 9), {3: 10, 5: 10}, P(5, -1), id="the end of a ledger that another follows"),
        pytest.param(P(3, 9), {3: 10, 5: 0, 6: 4}, P(5, -1), id="the next one is empty"),
        pytest.param(P(3, 9), {3: 10}, P(3, 9), id="the end of the log"),
        pytest.param(P(3, 9), {3: 11, 5: 10}, P(3, 9), id="one before the end"),
        pytest.param(P(4, -1), {3: 10, 5: 10}, P(5, -1), id="a ledger that was empty and is gone"),
        pytest.param(P(4, -1), {3: 10, 4: 0, 5: 10}, P(4, -1), id="an empty ledger that is there"),
        pytest.param(P(5, -1), {3: 10}, P(3, 9), id="a ledger beyond the last"),
        pytest.param(P(3, 12), {3: 10}, P(3, 9), id="beyond the end of the log"),
        pytest.param(P(6, 2), {3: 10, 5: 0}, P(5, -1), id="beyond the end, where an empty ledger follows"),
        pytest.param(P(2, 4), {3: 10}, P(2, 4), id="a ledger that was trimmed"),
        pytest.param(P(2, 0), {3: 10}, P(2, 0), id="the first entry of one that was trimmed"),
    ],
)
def test_where_a_mark_delete_of_pulsar_stands_on_a_log_that_has_changed(mark_delete, counts, expected):
    store, log = put_recorded(encode_cursor_info(CursorInfo(-1, mark_delete))), LedgerMap.from_counts(counts)
    cursor = open_cursor(store, log)
    assert cursor.mark_delete_position == cursor.persisted_mark_delete_position == expected
    assert cursor.recovery_report.mark_delete == mark_delete
    is_moved = expected != mark_delete
    assert (record_of(store).cursors_ledger_id >= 0) is is_moved
    assert record_of(store).mark_delete == expected
    assert open_cursor(crashed(store), log).mark_delete_position == expected


def test_lower_ranges_take_the_place_of_durable_ones_and_the_gauge_counts_those():
    told(
        "begin range_count_max=2; ack 6 8; persist; durable -> 6 8; ack 2; persist -> WHOLE 0 cut 1; durable -> 6 2; "
        "gauge -> 1; stat redelivery_cut -> 1; backlog -> 17; crash; ranges -> 2 6; backlog -> 18"
    )


# Deviations from Pulsar that no recording shows; docs/proposals.md lists these and the recorded ones.


def test_deviation_a_cumulative_ack_into_the_first_batch_of_a_ledger_is_taken_after_reopening():
    """Pulsar takes the position before the batch, the last entry of the ledger before, as one below the mark-delete."""
    told(
        "upto 9; close; crash; marked -> 5:-1; upto 5:0 0b1100; marked -> 5:-1; batches -> 5:0=0b1100; persist; "
        "durable -> 5:0; crash; batches -> 5:0=0b1100"
    )


def test_deviation_a_read_that_finds_nothing_leaves_the_read_position_where_it_is():
    """Pulsar moves it to the first entry of the next ledger, although that is empty; the same entries are read."""
    told("read 100; reads -> 5:10; roll 20; read 5 -> -; reads -> 5:10; append; read 5 -> 20:0; reads -> 20:1")


def test_deviation_a_batch_below_the_mark_delete_takes_no_slot_of_the_limit():
    """Pulsar forgets it only after it was written once more; with one slot the batch above is not on its disk."""
    told(
        "begin batch_count_max=1; batch 1 0b10; persist; batch 8 0b10; upto 5; persist; durable -> 1 8 5; crash; "
        "batches -> 8=0b10"
    )
