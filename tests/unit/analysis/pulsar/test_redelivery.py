"""The redelivery of a killed broker: of recorded ones, of a model that moves while it is read, of single cursors."""

import gzip
import json
import random
from itertools import chain
from pathlib import Path

import pytest

from ackstate.analysis.pulsar.durable import CursorGoneError, DurableState
from ackstate.analysis.pulsar.judgement import Kind, Looks, at_most, exactly, judge, totals
from ackstate.analysis.pulsar.sources import (
    Acked,
    BrokerSettings,
    CursorInternals,
    TopicInternals,
    TopicStats,
    acked,
    read_object,
)
from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.errors import AckStateError
from ackstate.position import Position

VECTORS = Path(__file__).parents[3] / "vectors" / "internal-stats"
CLOSED = "graceful-alternate-small"


# --- Real brokers


def judged(name):
    internals = json.loads((VECTORS / f"internalStats-{name}.json").read_text())
    look = read_object(TopicInternals, internals, what=name)
    unread = dict.fromkeys(look.cursors, AckStateError("of a recording"))
    (found,) = judge(name, Looks(look, look, unread), BrokerSettings())
    return found


def durable_of(acks, batch=None):
    return DurableState(acks.mark_delete, acks.deleted, batch or BatchIndexes(), (1, 4, 1))


def lost(name):
    """What came back after the restart: the durable state is that which the restarted broker has in memory."""
    before, after = judged(name).acked, judged(f"after-restart-{name}").acked
    return exactly(before, before, durable_of(after), {3: 60})


@pytest.mark.parametrize(("name", "expected"), [("smoke-alternate", 27), ("flush60-alternate-small", 0)])
def test_a_killed_broker_redelivers_what_it_had_not_written(name, expected):
    assert (lost(name).low, lost(name).high) == (expected, expected)
    assert judged(name).comes_back.high >= expected


def test_a_broker_that_closes_in_good_order_redelivers_what_is_said_of_unloading():
    assert lost(CLOSED).high == judged(CLOSED).if_unloaded == 0


def memory_at_the_kill(run):
    """The broker's state in memory, from the commands that it got: counts, and its acks."""
    positions = [Position(ledger, entry) for ledger, first, last in run["entries"] for entry in range(first, last + 1)]
    left, done = {}, set()
    is_by_index = run["config"].get("acknowledgmentAtBatchIndexLevelEnabled") != "false"
    for entry in chain.from_iterable(entries for _, _, entries in run["broker_acks_ms"]):
        if isinstance(entry, int):
            done.add(entry)
        elif is_by_index:
            index, words = entry
            left[index] = [before & now for before, now in zip(left.get(index, [-1] * len(words)), words, strict=True)]
            done |= set() if any(left[index]) else {index}
    below = next((index for index in range(len(positions)) if index not in done), len(positions))
    held = DeletedRanges()
    for index in sorted(done):
        if index >= below:
            held.add(positions[index])
    mark_delete = positions[below - 1] if below else Position(positions[0].ledger_id, -1)
    return {ledger: last + 1 for ledger, _, last in run["entries"]}, Acked(mark_delete, held)


def recorded_runs():
    with gzip.open(VECTORS.parent / "broker-redelivery.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("run", recorded_runs(), ids=lambda run: run["topic"])
def test_a_recorded_run_redelivers_what_was_acked_and_not_durable(run):
    counts, memory = memory_at_the_kill(run)
    before, after = run["memory_before"], run["durable_after"]
    assert (str(memory.mark_delete), memory.deleted.range_count) == (before["markDelete"], before["ranges"])
    fields = {"markDeletePosition": after["markDelete"], "individuallyDeletedMessages": after["individuallyDeleted"]}
    durable = acked(CursorInternals.model_validate(fields | {"state": ""}), counts, what="")
    back = exactly(memory, memory, durable_of(durable), counts)
    assert back.is_exact
    assert back.high <= at_most(memory, counts, "").high
    if run["batch_sizes"] is None:
        assert back.high == run["n_redelivered_acked"]


def test_acks_of_committed_transactions_may_not_come_back():
    before, durable = judged("smoke-alternate").acked, durable_of(judged("after-restart-smoke-alternate").acked)
    back = exactly(before, before, durable._replace(has_transactions=True), {3: 60})
    assert (back.low, back.high, back.is_moving) == (0, 27, False)
    assert exactly(before, before, durable_of(before)._replace(has_transactions=True), {3: 60}).is_exact


# --- A model that moves while it is read


COUNTS = {3: 30, 5: 0, 8: 25}
LOG = [Position(ledger, entry) for ledger, count in COUNTS.items() for entry in range(count)]


def acks_of(entries):
    """The mark-delete position and the ranges of acked entries."""
    below = next((index for index, position in enumerate(LOG) if position not in entries), len(LOG))
    held = DeletedRanges()
    for position in sorted(entries):
        if position not in LOG[:below]:
            held.add(position)
    return Acked(LOG[below - 1] if below else Position(3, -1), held)


@pytest.mark.parametrize("seed", range(40))
def test_the_truth_is_in_the_range_and_equals_it_where_nothing_moved(seed):
    """Acks, writes that exclude some of them, and seeks, at any moment between two looks."""
    rng = random.Random(seed)
    entries, durable = set(), set()
    for _ in range(40):
        before = set(entries)
        entries |= {*rng.sample(LOG, rng.choice([0, 0, 1, 5]))}
        if rng.random() < 0.1:
            entries = set(LOG[: rng.randrange(len(LOG))])
        truth, was_durable = len(entries - durable), set(durable)
        entries |= {*rng.sample(LOG, rng.choice([0, 0, 2]))}
        back = exactly(acks_of(before), acks_of(entries), durable_of(acks_of(was_durable)), COUNTS)
        if before <= entries:
            assert back.low <= truth <= back.high
        if before == entries:
            assert back.is_exact
        assert truth <= max(back.high, at_most(acks_of(entries), COUNTS, "").high)
        if rng.random() < 0.5:
            durable = {each for each in entries if rng.random() < 0.9}


# --- Single cursors


def look_at(*names, **cursor):
    fields = {"markDeletePosition": "3:4", "state": "Open"} | cursor
    internals = {"ledgers": [{"ledgerId": 3, "entries": 9}], "cursors": dict.fromkeys(names, fields)}
    return read_object(TopicInternals, internals, what="")


def test_a_cursor_that_is_no_subscription_and_one_that_is_not_durable_are_in_no_total():
    names = ["__compaction", "a+b", "pulsar.dedup", "pulsar.repl.east", "reader-1", "s"]
    subscriptions = {"a b": {"isDurable": False}, "__compaction": {}, "s": {}}
    stats, look = read_object(TopicStats, {"subscriptions": subscriptions}, what=""), look_at(*names)
    unknown = dict.fromkeys(names, AckStateError("unknown"))
    found = judge("t", Looks(look, look, unknown, stats), BrokerSettings())
    kinds = {each.subscription: each.kind for each in found}
    assert kinds == dict.fromkeys([*names[:1], *names[2:5]], Kind.BROKERS_OWN) | {
        "a b": Kind.NOT_DURABLE, "s": Kind.SUBSCRIPTION,
    }  # fmt: skip
    assert {each.subscription: each.comes_back and each.comes_back.high for each in found} == dict.fromkeys(
        kinds, 5
    ) | {"a b": None}
    (total,) = totals(found)
    assert (total["subscriptions"], total["comes_back"]) == (1, 5)
    gone = dict.fromkeys(names, CursorGoneError(""))
    looks = Looks(look, look, gone, stats)
    found = {each.subscription: each.kind for each in judge("t", looks, BrokerSettings())}
    assert (found["reader-1"], found["s"]) == (Kind.NOT_DURABLE, Kind.SUBSCRIPTION)


def test_what_a_broker_reports_itself_is_taken():
    reported = {"redeliveryIfCrashed": {"entries": 2, "batches": 1}}
    look = look_at("s", **reported)
    (found,) = judge("t", Looks(look, look, {}), BrokerSettings())
    assert (found.comes_back.low, found.comes_back.high, found.may_have_batches) == (2, 2, True)
