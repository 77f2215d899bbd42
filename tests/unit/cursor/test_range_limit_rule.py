"""The limit on ranges by the rule of a Pulsar release: the redelivery of 4.2.4, the gauge, receipts, and the gate."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ackstate import CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore, Position
from ackstate.cursor import CursorListener
from ackstate.selection import Keep
from ackstate.wire.pulsar import LimitRule, RangeForm
from topics import NumberedTopic

BROKERS = Path(__file__).parents[2] / "vectors" / "broker-redelivery.jsonl.gz"
PULSAR_RULES = [rule for rule in LimitRule if rule is not LimitRule.EXACT]


def opened(store, log, **config):
    config = CursorConfig(format=Format.PULSAR, **config)
    return ManagedCursor.open(store, topic="t", subscription="s", ledgers=log, config=config, now_ms=0)


def limited_runs():
    """Brokers of 4.2.4 with a limit, that were killed once all acks had been flushed."""
    with gzip.open(BROKERS, "rt") as lines:
        runs = [run for run in map(json.loads, lines) if "managedLedgerMaxUnackedRangesToPersist" in run["config"]]
    assert len(runs) == 4
    return runs


def replay(run, rule):
    """Return how many acked messages are redelivered, by the gauge, and which ones."""
    positions = [Position(ledger, entry) for ledger, first, last in run["entries"] for entry in range(first, last + 1)]
    ends = {ledger: last + 1 for ledger, _, last in run["entries"]}
    is_list = run["config"].get("managedLedgerPersistIndividualAckAsLongArray") in {False, "false"}
    config = {
        "range_count_max": int(run["config"]["managedLedgerMaxUnackedRangesToPersist"]),
        "range_form": RangeForm.LIST if is_list else RangeForm.WORDS,
        "range_limit_rule": rule,
    }
    store, log = MemoryStore(), LedgerMap.from_counts(ends)
    cursor = opened(store, log, **config)
    cursor.ack_many([positions[number] for number in run["client_ack_order"]], now_ms=0)
    cursor.persist(now_ms=0)
    recovered = opened(MemoryStore(store.disk), log, **config)
    acked = sorted(set(run["client_ack_order"]))
    return cursor.redelivery_if_crashed, [number for number in acked if not recovered.is_acked(positions[number])]


def test_killed_brokers_redelivered_what_the_rule_of_4_2_excludes():
    for run in limited_runs():
        gauge, redelivered = replay(run, LimitRule.PULSAR_4_2)
        assert redelivered == sorted(run["redelivered_acked"]), run["topic"]
        assert gauge == len(redelivered)


@pytest.mark.parametrize(
    ("rule", "form", "limit", "kept"),
    [
        (LimitRule.EXACT, RangeForm.WORDS, 3, "[(1:0..1:1],(1:2..1:3],(2:0..2:1]]"),
        (LimitRule.PULSAR_4_2, RangeForm.WORDS, 1, "[(1:0..1:1],(1:2..1:3]]"),
        (LimitRule.PULSAR_4_2, RangeForm.WORDS, 2, "[(1:0..1:1],(1:2..1:3],(2:0..2:1],(2:2..2:3]]"),
        (LimitRule.PULSAR_4_2, RangeForm.LIST, 2, "[(1:0..1:1],(1:2..1:3],(2:0..2:1]]"),
        (LimitRule.PULSAR_5_0_M1, RangeForm.LIST, 2, "[(1:0..1:1],(1:2..1:3]]"),
        (LimitRule.PULSAR_5_0, RangeForm.WORDS, 3, "[(1:0..1:1],(1:2..1:3]]"),
        (LimitRule.PULSAR_5_0, RangeForm.WORDS, 1, "[(1:0..1:1]]"),
    ],
)
def test_what_each_rule_keeps(rule, form, limit, kept):
    store, log = MemoryStore(), LedgerMap.from_counts({1: 10, 2: 10, 3: 10})
    cursor = opened(store, log, range_count_max=limit, range_form=form, range_limit_rule=rule)
    receipts = [
        (Position(ledger_id, entry_id), cursor.ack(Position(ledger_id, entry_id), now_ms=0))
        for ledger_id in (1, 2, 3)
        for entry_id in (1, 3)
    ]
    result = cursor.persist(now_ms=0)
    recovered = opened(MemoryStore(store.disk), log, range_count_max=100)
    assert str(recovered.deleted) == kept
    assert {position for position, receipt in receipts if cursor.durable(receipt)} == {
        position for position, _ in receipts if recovered.is_acked(position)
    }
    assert cursor.redelivery_if_crashed == result.messages_cut == 6 - len(recovered.deleted)


@pytest.mark.parametrize(("bytes_max", "kept"), [(56, "[(1:0..1:1],(1:2..1:3]]"), (55, "[(2:0..2:1],(2:2..2:3]]")])
def test_lower_acks_take_the_place_of_durable_ones_unless_those_had_no_room_beside_them(bytes_max, kept):
    class Bound(CursorListener):
        def record_bytes_max(self):
            return bytes_max

    store, log = MemoryStore(), LedgerMap.from_counts({1: 10, 2: 10, 3: 10})
    cursor = opened(store, log, range_count_max=1, range_limit_rule=LimitRule.PULSAR_4_2)
    cursor.add_listener(Bound())
    for ledger_id in (2, 1):
        cursor.ack_entries(ledger_id, [1, 3], now_ms=0)
        cursor.persist(now_ms=0)
    assert str(opened(MemoryStore(store.disk), log).deleted) == kept


def test_a_rule_of_pulsar_is_for_its_format_and_its_order():
    config = CursorConfig(format=Format.PULSAR)
    with pytest.raises(ValueError, match="format must be PULSAR with range_limit_rule=PULSAR_5_0, got NATIVE"):
        CursorConfig(range_limit_rule=LimitRule.PULSAR_5_0)
    with pytest.raises(ValueError, match="keep must be LOWEST with range_limit_rule=PULSAR_4_2, got WIDEST"):
        replace(config, range_limit_rule=LimitRule.PULSAR_4_2, keep=Keep.WIDEST)
    with pytest.raises(TypeError, match="range_limit_rule"):
        replace(config, range_limit_rule="4.2")


@pytest.mark.parametrize("rule", PULSAR_RULES)
def test_the_gate_closes_before_an_ack_could_be_excluded_and_opens_again(rule):
    """By the rules up to 5.0.0-M1 the first ack in a later ledger may add all of an earlier one to the count."""
    config = CursorConfig(format=Format.PULSAR, range_count_max=6, range_limit_rule=rule)
    topic = NumberedTopic(config=config, max_unacked_ranges=6)
    topic.publish(160)  # in four ledgers
    sent, seen_closed = [], False
    for _ in range(1_000):
        deliveries = topic.subscription.dispatch("a", 3, now_ms=0)
        sent += [each.position for each in deliveries]
        if not sent and not deliveries:
            break
        seen_closed |= not deliveries
        # The lowest is held as long as others can be acked: a hole at the front.
        position = sent.pop() if len(sent) > 1 and deliveries else sent.pop(0)
        topic.subscription.ack(position, now_ms=0)
        topic.cursor.persist(now_ms=0)
        assert topic.cursor.stats().redelivery_cut == 0, "an ack was excluded though the gate bounds them"
    assert seen_closed
    assert topic.cursor.backlog == 0
