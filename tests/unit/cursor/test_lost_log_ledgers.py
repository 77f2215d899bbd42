"""A message log that has lost acked entries: every number counts only entries that the log has, and no ack is lost."""

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
