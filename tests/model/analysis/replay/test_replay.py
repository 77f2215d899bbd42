"""The replay in arrays against the real cursor, crashed at every instant, whatever happens to the cursor."""

import copy
import logging

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import montecarlo
from ack_commands import acks_of
from ackstate.analysis.replay.cursor_replay import PersistTicks
from ackstate.analysis.replay.curves import CAUSES
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.trace.events import Event, EventKind
from ackstate.cursor.cursor import ManagedCursor
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryDisk, MemoryStore
from montecarlo import PLAIN, SIZES, assert_agreement, replayed
from strategies import few

ACK, CRASH, RECOVER, RESET, REDELIVER, DELIVER = (
    EventKind.ACK, EventKind.CRASH, EventKind.RECOVER, EventKind.RESET, EventKind.REDELIVER, EventKind.DELIVER,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _quiet(caplog):
    caplog.set_level(logging.ERROR)


GRIDS = st.lists(montecarlo.POLICIES, min_size=1, max_size=2)
test_every_instant_agrees_with_a_real_cursor = pytest.mark.slow(
    few(given(montecarlo.small_traces(), GRIDS, SIZES)(assert_agreement))
)
test_every_instant_of_a_plain_policy_agrees = pytest.mark.slow(
    few(given(montecarlo.small_traces(), st.tuples(PLAIN), SIZES)(assert_agreement))
)


# Acks given at once may leave a bitmap in another form: where a limit on bytes decides, a size that has none.
NO_LEDGER = {"ledger_writable": "false", "format": "PULSAR", "range_form": "LIST"}
# A record too large for the metadata store is tried in vain, often because a permit admits it.
IN_VAIN = st.lists(st.fixed_dictionaries(
    {
        "mark_delete_rate_limit": st.sampled_from((3, 20, 500)),
        "metadata_bytes_max": st.sampled_from((45, 60, 75)),
        "flush_interval_ms": st.sampled_from((30, 400)),
    },
    optional={
        "tick_ms": st.sampled_from((1, 7, 50)),
        "metadata_range_count_max": st.sampled_from((1, 3)),
        "keep": st.sampled_from(("LOWEST", "WIDEST")),
        "become_old_ack_record_seconds": st.sampled_from((1, 2)),
        "ledger_retry_ms": st.sampled_from((0, 10, 1_000)),
    },
).map(lambda found: Policy.from_mapping({**NO_LEDGER, **found})), min_size=1, max_size=2)  # fmt: skip


def sent(ledger_id, entries, at_ms=0):
    return [Event(at_ms, DELIVER, ledger_id, entry, entry) for entry in entries]


def acked(ts_ms, *runs, kind=ACK):
    return [Event(ts_ms, kind, 3, *run) for run in runs]


@st.composite
def acks_anywhere(draw):
    """Messages sent at once, of which single ones and stretches are acked, the lowest no sooner than others."""
    chance = draw(st.randoms(use_true_random=False))
    ts_ms, events = 1_000, sent(3, range(40), 1_000)
    for _ in range(draw(st.integers(5, 30))):
        ts_ms += chance.choice((0, 1, 1, 3, 20, 300))
        first = chance.randrange(40)
        events += acked(ts_ms, (first, min(first + chance.choice((0, 0, 1, 9)), 39)))
    return events, {3: 60}


@pytest.mark.slow
def test_every_instant_agrees_where_persists_fail(monkeypatch):
    before_flush = []
    failed = PersistTicks.failed

    def counted(self, at_ms):
        before_flush.append(at_ms < self.flush_at)
        failed(self, at_ms)

    monkeypatch.setattr(PersistTicks, "failed", counted)
    runs = [(1_020, 33, 33), (1_021, 31, 31), (1_021, 30, 39), (1_021, 16, 16), (1_022, 12, 12)]
    events = [*sent(3, range(40), 1_000), *(Event(ts_ms, ACK, 3, *run) for ts_ms, *run in runs)]
    found = {"mark_delete_rate_limit": 500, "metadata_bytes_max": 60, "flush_interval_ms": 400}
    assert_agreement((events, {3: 60}), [Policy.from_mapping({**NO_LEDGER, **found, "ledger_retry_ms": 1_000})], [])
    assert set(before_flush) == {True, False}
    third = settings(max_examples=few.max_examples // 3, derandomize=few.max_examples < 300)
    third(given(acks_anywhere(), IN_VAIN, SIZES)(assert_agreement))()


def restarted(*second):
    """100 acks, a crash, a recovery after which they are acked again, and another restart a second later."""
    events = [*acked(100, (0, 99)), Event(200, CRASH), Event(300, RECOVER), *second]
    return [*events, *sent(3, [100], 1_400)]


# There is room for one range; the lowest would take the place of a wider one that is durable, and so none may. Where
# there is a permit, the acks at 3001 and 3050 are tried in vain at once, and not again before 3400, when the flush
# interval is over; from then on at every tick.
TOO_LARGE = [
    *sent(3, range(20), 1_000), *acked(3_000, (10, 19)), *acked(3_001, (2, 2)), *acked(3_050, (4, 4)),
    *acked(3_450, (0, 9)),
]  # fmt: skip
ONE_RANGE = {**NO_LEDGER, "metadata_bytes_max": 50, "flush_interval_ms": 400}
# 60 ranges fill the metadata store; when wider numbers become old, as many as are tried are fewer than those. A ledger
# is tried then in vain for the second time, and so both are tried again a second later.
BECOME_OLD = [
    *sent(3, [120], 1_000), *sent(3, [16_520], 2_500),
    *acked(2_600, *((entry, entry) for entry in (*range(1, 120, 2), *range(16_400, 16_520, 2)))),
    *acked(4_600, (0, 119)),
]  # fmt: skip
FLUSHES_LATE = {"flush_interval_ms": 60_000}
# Events and the setting of a policy, each with what it tells; and when persists fail.
STORIES = {
    "the flush interval begins at the opening": (
        [*sent(1, [0]), Event(0, ACK, 1, 0, 0), *sent(2, range(4))], {"flush_interval_ms": 1, "tick_ms": 7},
    ),
    "young acks are looked at again": (
        [*sent(2, range(3)), Event(0, ACK, 2, 1, 1), *sent(2, [4], 1_500), *sent(2, [5], 3_000)],
        {"flush_interval_ms": 1, "become_old_ack_record_seconds": 1},
    ),
    "the flush interval begins again after a reset": (
        [*sent(2, range(3)), Event(0, ACK, 2, 1, 1), Event(10, RESET, 2, 0, 0), Event(20, ACK, 2, 1, 1)],
        {"flush_interval_ms": 30},
    ),
    "what is delivered again after a reset becomes old again": (
        [*sent(3, range(6), 1_000), Event(1_100, RESET), *sent(3, range(4), 1_200), *acked(1_201, (2, 2)),
         Event(2_100, EventKind.PUBLISH)],
        {"flush_interval_ms": 50, "become_old_ack_record_seconds": 1},
    ),
    "what would become old in the millisecond of a reset is reset": (
        [*sent(3, range(3), 1_000), *acked(1_010, (1, 1)), Event(2_000, RESET, 3, 0, 0)],
        {**NO_LEDGER, "flush_interval_ms": 30, "become_old_ack_record_seconds": 1},
    ),
    "what a cursor found may come in two chunks": (
        [*acked(5, (0, 4), (7, 7), (9, 9), kind=RECOVER), *acked(9, (5, 5))], FLUSHES_LATE,
    ),
    "a trace begins with what its cursor found": (
        [*acked(5, (0, 4), (7, 7), kind=RECOVER), *acked(9, (5, 5))], {"range_count_max": 0},
    ),
    **{f"two restarts are not one, {name}": (restarted(*second), FLUSHES_LATE) for name, second in {
        "a reset": [Event(1_300, RESET)], "a recovery": [Event(1_300, RECOVER)],
        "a crash": [Event(1_300, CRASH), Event(1_300, RECOVER)], "a redelivery": [Event(1_300, REDELIVER, 3, 0, 9)],
        "after a delivery": [*sent(3, [100], 1_300), Event(1_300, RESET)],
        # Had they been several, all 103 would have been acked after the first.
        "of one millisecond": [*acked(1_300, (200, 201), (205, 205), kind=RECOVER),
                               *acked(1_300, (0, 9), (50, 50), kind=REDELIVER)],
    }.items()},
    "entries that a dead cursor gives back do not open it": (
        [*acked(5, (0, 9)), Event(6, CRASH), Event(8, REDELIVER, 3, 0, 3), Event(20, RECOVER)], FLUSHES_LATE,
    ),
    "a dead cursor persists nothing": (
        [*acked(100, (0, 4), (5, 9)), Event(200, CRASH), Event(1_000, RECOVER)], {"flush_interval_ms": 500},
    ),
    "no permit": (TOO_LARGE, ONE_RANGE, range(3_400, 3_450)),
    "what one permit let through in vain waits for the flush": (
        TOO_LARGE, ONE_RANGE | {"mark_delete_rate_limit": 1}, [3_001, *range(3_400, 3_450)],
    ),
    "what permits let through in vain waits for the flush": (
        TOO_LARGE, ONE_RANGE | {"mark_delete_rate_limit": 20}, [3_001, 3_050, *range(3_400, 3_450)],
    ),
    "what became old in vain is tried again with the ledger": (
        BECOME_OLD,
        {**NO_LEDGER, "metadata_bytes_max": 870, "become_old_ack_record_seconds": 1, "flush_interval_ms": 30},
        [3_500, 4_500],
    ),
}  # fmt: skip


@pytest.fixture
def failed_ms(monkeypatch):
    """When ticks failed, of replays and of real cursors, one after another."""
    found = []
    tick = ManagedCursor.tick

    def told(cursor, *, now_ms):
        try:
            return tick(cursor, now_ms=now_ms)
        except StoreError:
            found.append(now_ms)
            raise

    monkeypatch.setattr(ManagedCursor, "tick", told)
    return found


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_each_story_agrees(story, failed_ms):
    events, setting, *fails = story
    policy = Policy.from_mapping({"compaction_bytes_min": 100, **setting})
    log = dict.fromkeys(sorted({event.ledger_id for event in events} - {-1}), 1)
    log[max(log)] = 17_000
    assert_agreement((events, log), [policy], [2])
    assert failed_ms == 2 * [at_ms for each in fails for at_ms in each]


@pytest.mark.parametrize("kind", [RECOVER, RESET])
@pytest.mark.parametrize(("settings", "cause"), [
    ({"format": "PULSAR", "range_count_max": 2}, "cut_by_ranges"),
    ({"range_count_max": 2}, "cut_by_ranges"),
    ({"format": "PULSAR", "timing": "PULSAR", "range_count_max": 2}, "cut_by_ranges"),
    ({"format": "PULSAR", "ledger_writable": "false", "metadata_range_count_max": 2}, "cut_by_route"),
    ({"format": "PULSAR", "ledger_writable": "false", "range_count_max": 2}, "cut_by_ranges"),
])  # fmt: skip
def test_what_a_restart_finds_beyond_a_limit_counts_from_the_start(kind, settings, cause):
    policy = Policy.from_mapping(settings)
    found = [*acked(1_000, *((entry, entry) for entry in (1, 3, 5, 7, 9)), kind=kind), *sent(3, [10], 2_000)]
    for events in (found, [*sent(3, [0], 10), *found] if kind is RESET else found):
        (curve,), replay = replayed(events, [policy], {3: 11}, end_ms=2_000)
        assert {curve[ts_ms] for ts_ms in range(1_000, 2_001)} == {3}
        sums = replay.curves[0].sum
        assert (sums.peak, sums.cause_sums) == (3, [3_000 * (name == cause) for name in CAUSES])


_WORD = 2**64 - 1


@st.composite
def ack_commands(draw):
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
@given(ack_commands(), st.tuples(PLAIN))
def test_batch_index_acks_of_a_log_agree_with_a_real_cursor_of_batches(run, policies):
    sizes, events = run["batch_sizes"], acks_of(run)
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
