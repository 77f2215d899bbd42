"""A message log that has lost acked entries: every number counts only entries that the log has, and no ack is lost."""

from __future__ import annotations

import pytest

from ackstate import (
    CursorConfig,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    Start,
    SubscriptionType,
    Topic,
    TopicSettings,
)
from ackstate import inspect as inspection
from ackstate.dispatch import SubscriptionOptions
from ackstate.errors import InvalidPositionError
from ackstate.wire import pulsar
from ackstate.wire.pulsar import CursorInfo

COUNTS = {1: 20, 2: 20, 4: 20, 7: 20}
LOSSES = {
    "a ledger gone": {1: 20, 4: 20, 7: 20},
    "two gone": {1: 20, 7: 20},
    "the first gone": {2: 20, 4: 20, 7: 20},
    "one empty": {1: 20, 2: 0, 4: 20, 7: 20},
    "one shorter": {1: 20, 2: 20, 4: 7, 7: 20},
    "one shorter, one gone": {1: 20, 2: 11, 7: 20},
}
ACKED = [*((2, each) for each in range(1, 20) if each != 9), *((4, each) for each in range(3, 19)), (7, 2)]
WAYS = ("cumulative", "skip", "clear", "one by one", "at once")


def positions_of(counts):
    return [Position(ledger_id, entry_id) for ledger_id, count in counts.items() for entry_id in range(count)]


def ack_rest(cursor, way, unacked, target):
    """Ack the unacked entries up to a target, and return the receipts."""
    wanted = [each for each in unacked if each <= target]
    if way == "cumulative":
        return wanted, [cursor.mark_delete(target, now_ms=5)]
    if way == "skip":
        return wanted, [cursor.skip(len(wanted), now_ms=5)]
    if way == "clear":
        return unacked, [cursor.clear_backlog(now_ms=5)]
    if way == "at once":
        return wanted, [cursor.ack_many(wanted, now_ms=5)]
    return wanted, [cursor.ack(each, now_ms=5) for each in wanted]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("form", Format)
def test_acks_over_a_lost_ledger_are_counted_written_and_only_then_durable(form, loss, way):
    store = MemoryStore()

    def opened(counts):
        ledgers, config = LedgerMap.from_counts(counts), CursorConfig(format=form)
        again = MemoryStore(store.disk)
        return ManagedCursor.open(again, topic="t", subscription="s", ledgers=ledgers, config=config, now_ms=0)

    cursor = opened(COUNTS)
    cursor.ack_many([Position(*each) for each in ACKED], now_ms=1)
    cursor.persist(now_ms=2)
    unacked = [each for each in positions_of(LOSSES[loss]) if tuple(each) not in ACKED]
    cursor = opened(LOSSES[loss])
    assert (cursor.backlog, cursor.redelivery_if_crashed) == (len(unacked), 0)
    mine, receipts = ack_rest(cursor, way, unacked, Position(7, 9))
    assert sum(receipt.newly_acked for receipt in receipts) == len(mine)
    assert cursor.redelivery_if_crashed == cursor.stats().redelivery_unwritten == len(mine)
    assert cursor.backlog == len(unacked) - len(mine)
    assert not any(map(cursor.durable, receipts))
    result = cursor.persist(now_ms=10)
    assert (result.messages_covered, cursor.redelivery_if_crashed) == (len(mine), 0)
    assert all(map(cursor.durable, receipts))
    cursor = opened(LOSSES[loss])
    assert all(map(cursor.is_acked, mine))
    assert cursor.backlog == len(unacked) - len(mine)


@pytest.mark.parametrize("form", Format)
def test_acks_of_a_ledger_that_was_trimmed_are_not_counted(form):
    ledgers = LedgerMap.from_counts(COUNTS)
    config = CursorConfig(format=form, become_old_ack_record_seconds=10)
    cursor = ManagedCursor.open(
        MemoryStore(), topic="t", subscription="s", ledgers=ledgers, config=config, now_ms=0
    )  # fmt: skip
    cursor.ack_entries(1, range(3, 9), now_ms=1)
    cursor.ack_entries(2, range(3, 5), now_ms=1)
    cursor.persist(now_ms=2)
    before = cursor.stats()
    assert (before.redelivery_if_crashed, before.redelivery_young) == (8, 8)
    ledgers.trim(2)
    after = cursor.stats()
    assert (after.redelivery_if_crashed, after.redelivery_young, after.redelivery_unwritten) == (2, 2, 0)
    cursor.mark_delete(Position(2, 2), now_ms=3)
    assert cursor.mark_delete_position == (2, 4)
    assert cursor.redelivery_if_crashed == 5
    ledgers.trim(4)
    assert cursor.redelivery_if_crashed == cursor.stats().redelivery_unwritten == 0
    cursor.ack(Position(7, 1), now_ms=4)
    assert cursor.redelivery_if_crashed == 1
    cursor.close(now_ms=5)
    assert cursor.redelivery_if_crashed == 0


def damage(disk, ledger_id, kind):
    if kind == "gone":
        del disk.ledgers[ledger_id]
    else:
        del disk.ledgers[ledger_id].entries[0 if kind == "empty" else 4 :]


@pytest.mark.parametrize("kind", SubscriptionType)
@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("losses", [("gone",), ("gone", "gone"), ("empty",), ("shorter",), ("shorter", "gone")])
def test_a_topic_whose_log_lost_ledgers_delivers_the_rest_once(kind, form, losses):
    settings = TopicSettings(entries_per_ledger_max=10, cursor=CursorConfig(format=form))
    store = MemoryStore()
    topic = Topic.open(store, "t", settings=settings, now_ms=0)
    subscription = topic.subscribe("s", kind=kind, start=Start.EARLIEST, now_ms=0)
    sent = [topic.publish([Message(b"%d" % number, key=b"k")], now_ms=1)[0] for number in range(50)]
    acked = {*sent[11:19], *sent[23:28], *sent[40:42]}
    subscription.ack_many(sorted(acked), now_ms=2)
    subscription.cursor.persist(now_ms=3)
    for loss, first in zip(losses, (sent[10], sent[20]), strict=False):
        damage(store.disk, first.ledger_id, loss)

    topic = Topic.open(MemoryStore(store.disk), "t", settings=settings, now_ms=5)
    subscription = topic.subscribe("s", kind=kind, options=SubscriptionOptions(round_entries_max=100), now_ms=5)
    left = [each for each in sent if each in topic.log.ledgers and each not in acked]
    assert len(left) < len(sent) - len(acked)
    assert subscription.cursor.backlog == len(left)
    delivered = [each.position for each in subscription.dispatch("ann", 100, now_ms=6)]
    assert delivered == left
    receipts = [subscription.ack(each, now_ms=7) for each in delivered]
    assert sum(receipt.newly_acked for receipt in receipts) == len(left) == subscription.cursor.redelivery_if_crashed
    assert not any(map(subscription.cursor.durable, receipts))
    subscription.close(now_ms=8)
    again = Topic.open(MemoryStore(store.disk), "t", settings=settings, now_ms=9).subscribe("s", kind=kind, now_ms=9)
    assert (again.cursor.backlog, again.dispatch("ann", 100, now_ms=9)) == (0, [])


def test_a_repair_gives_up_no_ack_of_an_entry_that_the_log_has_lost():
    store, ledgers = MemoryStore(), LedgerMap.from_counts({1: 10, 2: 10, 3: 10})
    cursor = ManagedCursor.open(store, topic="t", subscription="s", ledgers=ledgers, now_ms=0)
    cursor.ack_many([Position(2, each) for each in range(1, 9)] + [Position(3, 4)], now_ms=1)
    cursor.persist(now_ms=1)
    (ledger_id,) = store.disk.ledgers
    store.disk.ledgers[ledger_id].entries[0] = b"damaged"
    (name,) = inspection.find_cursors(store)
    for counts, given_up in (({1: 10, 2: 10, 3: 10}, 9), ({1: 10, 2: 4, 3: 10}, 4), ({1: 10, 3: 10}, 1)):
        log = LedgerMap.from_counts(counts)
        found = inspection.inspect_cursor(store, name, read_log=lambda _, log=log: log)
        assert [each.acks_given_up_min for each in found.problems[0].repairs] == [given_up] * 2


@pytest.mark.parametrize("counts", [{0: 0}, {1: 0}, {1: 5}, {1: 5, 2: 0}, {1: 5, 2: 3, 4: 0}])
@pytest.mark.parametrize("mark_delete", [(9, -1), (9, 0), (9, 7), (2**62, -1), (2**62, 3)])
def test_a_native_mark_delete_beyond_the_log_is_refused_in_every_spelling(counts, mark_delete):
    store = MemoryStore()
    record = pulsar.encode_cursor_info(CursorInfo(-1, Position(*mark_delete)))
    store.metadata.put("/managed-ledgers/t/s", record, expected_version=-1)
    ledgers = LedgerMap.from_counts(counts)
    with pytest.raises(InvalidPositionError, match=rf"reaches {mark_delete[0]}:.*log ends at {ledgers.last_confirmed}"):
        ManagedCursor.open(store, topic="t", subscription="s", ledgers=ledgers, now_ms=0)
    assert store.metadata.get("/managed-ledgers/t/s").data == record


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("counts", [{3: 10}, {3: 10, 9: 0}, {3: 10, 9: 5}])
def test_an_ack_beyond_the_log_is_refused_and_the_owner_before_goes_on(form, counts):
    store, config = MemoryStore(), CursorConfig(format=form)

    def opened(counts):
        ledgers = LedgerMap.from_counts(counts)
        return ManagedCursor.open(store, topic="t", subscription="s", ledgers=ledgers, config=config, now_ms=0)

    cursor = opened({3: 10, 9: 10})
    cursor.ack(Position(9, 8), now_ms=1)
    cursor.persist(now_ms=1)
    with pytest.raises(InvalidPositionError, match="reaches 9:8"):
        opened(counts)
    receipt = cursor.ack(Position(9, 6), now_ms=2)
    cursor.persist(now_ms=2)
    assert cursor.durable(receipt)


@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("counts", [{3: 5, 9: 0}, {3: 5, 11: 0}, {3: 5, 9: 4}, {11: 0}])
def test_the_position_before_a_ledger_that_the_log_has_or_has_passed_is_no_state_beyond_it(form, counts):
    store = MemoryStore()
    store.metadata.put(
        "/managed-ledgers/t/s", pulsar.encode_cursor_info(CursorInfo(-1, Position(9, -1))), expected_version=-1
    )
    ledgers = LedgerMap.from_counts(counts)
    cursor = ManagedCursor.open(
        store, topic="t", subscription="s", ledgers=ledgers, config=CursorConfig(format=form), now_ms=0
    )
    ledgers.append(3)
    assert len(cursor.reader.read(10)) == cursor.backlog == 3 + (counts.get(9) or 0)
