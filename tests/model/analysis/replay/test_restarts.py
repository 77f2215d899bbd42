"""Traces in which cursors restart in any order, any number of times: against the real cursor, at every instant."""

from __future__ import annotations

import copy
import json
import logging

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import montecarlo
from ackstate.analysis.replay.curves import CAUSES
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace import ack_log
from ackstate.analysis.trace.check import BadRows
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.analysis.trace.rows import KINDS
from ackstate.cursor.cursor import ManagedCursor
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.memory import MemoryDisk, MemoryStore
from replay_runs import PLAIN, replayed
from strategies import few

ACK, CRASH, RECOVER, RESET, REDELIVER = (
    EventKind.ACK, EventKind.CRASH, EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


def two_restarts(second, *, between=()):
    """100 acks, a crash, a recovery after which they are acked again, and another restart 10 s later."""
    events = [Event(1_000, ACK, 3, 0, 99), Event(2_000, CRASH), Event(3_000, RECOVER), *between]
    return [*events, *second, Event(14_000, EventKind.DELIVER, 3, 100, 100)]


_WORD = 2**64 - 1
FLUSH_60_S = Policy.from_mapping({"flush_interval_ms": 60_000})
HARMLESS = [Event(13_000, EventKind.DELIVER, 3, 100, 100)]


@pytest.mark.parametrize("between", [(), HARMLESS])
@pytest.mark.parametrize("second", [
    [Event(13_000, RESET)], [Event(13_000, RECOVER)], [Event(13_000, CRASH), Event(13_000, RECOVER)],
    [Event(13_000, REDELIVER, 3, 0, 9)],
])  # fmt: skip
def test_two_restarts_are_not_one(second, between):
    (curve,), replay = replayed(
        two_restarts(second, between=between), [FLUSH_60_S], {3: 101}, sizes=[], end_ms=14_000
    )  # fmt: skip
    assert {curve[ts_ms] for ts_ms in (*range(1_000, 2_000), *range(3_000, 13_000))} == {100}
    after = {RESET: 0, REDELIVER: 90}.get(second[0].kind, 100)
    assert {curve[ts_ms] for ts_ms in range(13_000, 14_001)} == {after}
    assert replay.curves[0].sum.peak == 100


@pytest.mark.parametrize("sizes", [[], [3], [4], [5]])
def test_what_one_millisecond_tells_of_a_restart_is_one_also_in_two_chunks(sizes):
    events = two_restarts([Event(13_000, RECOVER, 3, 200, 201), Event(13_000, RECOVER, 3, 205, 205),
                           Event(13_000, REDELIVER, 3, 0, 9), Event(13_000, REDELIVER, 3, 50, 50)])  # fmt: skip
    policies = [FLUSH_60_S]
    (curve,), replay = replayed(events, policies, {3: 300}, sizes=sizes, end_ms=14_000)
    # Had they been two, all 103 would have been acked after the first.
    assert (curve[13_000], replay.curves[0].sum.peak) == (92, 100)


def over_limit(kind):
    events = [Event(1_000, kind, 3, entry, entry) for entry in (1, 3, 5, 7, 9)]
    return [*events, Event(2_000, EventKind.DELIVER, 3, 10, 10)]


@pytest.mark.parametrize("kind", [RECOVER, RESET])
@pytest.mark.parametrize(("settings", "cause"), [
    ({"format": "PULSAR", "range_count_max": 2}, "cut_by_ranges"),
    ({"range_count_max": 2}, "cut_by_ranges"),
    ({"format": "PULSAR", "ledger_writable": "false", "metadata_range_count_max": 2}, "cut_by_route"),
])  # fmt: skip
def test_what_a_restart_finds_beyond_a_limit_counts_from_the_start(kind, settings, cause):
    policy = Policy.from_mapping(settings)
    for events in (over_limit(kind), [Event(10, EventKind.DELIVER, 3, 0, 0), *over_limit(RESET)]):
        (curve,), replay = replayed(events, [policy], {3: 11}, sizes=[], end_ms=2_000)
        assert {curve[ts_ms] for ts_ms in range(1_000, 2_001)} == {3}
        sums = replay.curves[0].sum
        assert (sums.peak, sums.cause_sums) == (
            3, [3_000 * (name == cause) for name in CAUSES]
        )  # fmt: skip


def test_entries_that_a_dead_cursor_gives_back_do_not_open_it():
    events = [Event(5, ACK, 3, 0, 9), Event(6, CRASH), Event(8, REDELIVER, 3, 0, 3), Event(20, RECOVER)]
    (curve,), _ = replayed(events, [FLUSH_60_S], {3: 10}, sizes=[], end_ms=30)
    assert [curve[ts_ms] for ts_ms in (5, 6, 8, 19, 20, 30)] == [10, 0, 0, 0, 6, 6]


@st.composite
def ack_logs(draw):
    """A run of a broker with batches, of which messages are acked in any order, some of them twice."""
    sizes = draw(st.lists(st.sampled_from((1, 1, 2, 5, 70)), min_size=1, max_size=8))
    chance = draw(st.randoms(use_true_random=False))
    commands, ts_ms = [], 0
    for _ in range(draw(st.integers(1, 25))):
        ts_ms += chance.choice((0, 0, 1, 3, 30))
        index = chance.randrange(len(sizes))
        size = sizes[index]
        unacked_share = chance.choice((0.0, 0.02, 0.5, 0.9))
        unacked = {bit for bit in range(size) if chance.random() < unacked_share}
        words = [sum(1 << (bit % 64) for bit in unacked if bit // 64 == word) for word in range(-(-size // 64))]
        words = [word - (word >> 63 << 64) for word in words]  # signed, as in Java
        while words and not words[-1]:
            words.pop()  # as Java's BitSet writes them
        is_plain = size == 1 or (not unacked and chance.random() < 0.5)  # a whole batch may have no words left
        commands.append([ts_ms, ts_ms, [index if is_plain else [index, words]]])
    return {
        "topic": "t", "subscription": "s", "entries": [[4, 0, len(sizes) - 1]], "batch_sizes": sizes,
        "broker_acks_ms": commands,
    }  # fmt: skip


_RUN = ("ledger_id", "first_entry", "last_entry")  # without values in an event of kind command


def events_of(run):
    """Return the acks of a run as events of messages."""
    table, _ = next(ack_log.tables([json.dumps(run).encode()], 1, bad_rows=BadRows(), place=str))
    return [
        Event(row["ts_ms"], EventKind(KINDS[row["kind"]]), *(row[name] or 0 for name in _RUN))
        for row in table.to_pylist() if row["subscription"]
    ]  # fmt: skip


def lost_messages(cursor, store, sizes, ledgers, policy):
    """Return how many acked messages a copy of the disk does not know of."""
    twin = MemoryStore(copy.deepcopy(store.disk, {id(store.disk.lock): MemoryDisk().lock}))
    found = ManagedCursor.open(twin, ledgers=ledgers, config=policy.cursor, now_ms=0, **montecarlo.NAMES)
    return sum(acked_count(cursor, index, size) - acked_count(found, index, size) for index, size in enumerate(sizes))


def acked_count(cursor, index, size):
    position = Position(4, index)
    if cursor.is_acked(position):
        return size
    if position not in cursor.view.batch:
        return 0
    return size - sum((word & _WORD).bit_count() for word in cursor.view.batch[position])


@pytest.mark.slow
@settings(max_examples=few.max_examples // 2)
@given(ack_logs(), PLAIN)
def test_batch_index_acks_of_a_log_agree_with_a_real_cursor_of_batches(run, policies):
    sizes, events = run["batch_sizes"], events_of(run)
    assume(events)
    # An ack of no message of a batch, which no client sends, is new to a cursor that does not know the size of the
    # batch: it may persist then. The replay leaves such an ack out.
    assume(
        all(isinstance(each, int) or each[1] != [2 ** sizes[each[0]] - 1] for _, _, (each,) in run["broker_acks_ms"])
    )
    (policy,), end_ms = policies, run["broker_acks_ms"][-1][1] + 450
    (curve,), _ = replayed(events, policies, {4: sum(sizes)}, sizes=[3, 5], end_ms=end_ms)
    store, ledgers = MemoryStore(), LedgerMap.from_counts({4: len(sizes)})
    opened_ms = events[0].ts_ms
    cursor = ManagedCursor.open(store, ledgers=ledgers, config=policy.cursor, now_ms=opened_ms, **montecarlo.NAMES)
    waiting, seen = list(run["broker_acks_ms"]), {}
    for now_ms in range(opened_ms, end_ms + 1):
        while waiting and waiting[0][1] <= now_ms:
            (entry,) = waiting.pop(0)[2]
            index, words = (entry, []) if isinstance(entry, int) else entry
            if not words:
                cursor.ack(Position(4, index), now_ms=now_ms)
            else:
                cursor.ack_batch(Position(4, index), words, now_ms=now_ms)
        if now_ms % policy.tick_ms == 0:
            cursor.tick(now_ms=now_ms)
        seen[now_ms] = lost_messages(cursor, store, sizes, ledgers, policy)
    assert montecarlo.first_difference(curve, seen) is None, policy.label
