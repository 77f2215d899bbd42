"""Chunks made small before they are brought together: the same answer to the message."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import montecarlo
from ackstate.analysis.estimate import chunks as thinning
from ackstate.analysis.replay import acked
from ackstate.analysis.replay.policy import Policy
from ackstate.analysis.replay.subscription_replay import SubscriptionReplay
from ackstate.analysis.trace.events import Event, EventKind
from montecarlo import chunk_of
from strategies import few
from trace_files import table_of_rows

COMPACTING = Policy.from_mapping({"flush_interval_ms": 30, "compaction_bytes_min": 100})
POLICIES = [
    None,
    COMPACTING,
    *map(Policy.from_mapping, (
        {"flush_interval_ms": 0},
        {"flush_interval_ms": 400, "mark_delete_rate_limit": 20, "tick_ms": 7}, {"range_count_max": 2},
        {"format": "PULSAR", "flush_interval_ms": 30},
    )),
]  # fmt: skip
SIZES = st.lists(st.integers(1, 12), max_size=8)


@st.composite
def persisted_traces(draw):
    """As `small_traces`, with persists put in, some within a millisecond with acks before and after."""
    events, log = draw(montecarlo.small_traces())
    found = []
    for event in events:
        found.append(event)
        if draw(st.integers(0, 9)) == 0 and event.kind not in (EventKind.CRASH, EventKind.RECOVER):
            found.append(Event(event.ts_ms, draw(st.sampled_from((5, 6, 7))), -1, -1, -1, 1))
    return found, log


def chunks_of(events, sizes):
    rest = chunk_of(events)
    chunks = []
    for size in [*sizes, len(events)]:
        if len(rest.kind):
            chunks.append(rest.part(0, size))
        rest = rest.part(size, len(rest.kind))
    return chunks


def outcome(chunks, log, end_ms):
    """Return everything that is said of a subscription: each curve by the millisecond, its sums, and its costs."""
    replay, values = SubscriptionReplay(POLICIES, log), [{} for _ in POLICIES]
    for part in [*map(replay.take, chunks), replay.end(end_ms)]:
        for points, mine in zip(part, values, strict=True):
            mine.update(zip(points.ts_ms.tolist(), points.value.tolist(), strict=True))
    sums = [
        (each.sum.peak, each.sum.peak_ts_ms, [column.tolist() for column in each.sum.histogram.columns()], each.costs)
        for each in replay.curves
    ]
    return values, sums


def row_of(name, seq, chunk):
    times = {"first_ts_ms": int(chunk.ts_ms[0]), "last_ts_ms": int(chunk.ts_ms[-1])}
    lists = {column: values.tolist() for column, values in zip(acked.EventChunk._fields, chunk, strict=True)}
    lists.setdefault("number", [-1] * len(chunk.kind))
    return {"topic": "t", "subscription": name, "first_seq": seq, "chunk": seq} | times | lists


def packed_chunks(batches):
    """Return the chunks of each subscription that a worker makes of some batches of rows, in order."""
    found = {}
    rows = (batch for each in batches for batch in table_of_rows(each).to_batches())
    for batch in thinning.packed_chunks(rows, is_compact=True):
        for row in batch.to_pylist():
            found.setdefault(row["subscription"], {})[row["first_seq"]] = thinning.decode(memoryview(row["events"]))
    return {name: [chunks[seq] for seq in sorted(chunks)] for name, chunks in found.items()}


def is_as_costly(policy, sums, others):
    """Tell whether sums are equal; acks given at once may leave a bitmap in the other of two forms that are as large.

    These few bytes move a compaction, so that bytes are compared only where none is due.
    """
    *sums, costs = sums
    *others, other_costs = others
    stored = dict.fromkeys(("bytes_written", "bytes_kept", "bytes_kept_max"), 0)
    differences = [abs(getattr(costs, name) - getattr(other_costs, name)) for name in stored]
    is_near = policy is COMPACTING or max(differences) <= 10 * costs.write_count
    return sums == others and is_near and costs._replace(**stored) == other_costs._replace(**stored)


CUT_TRACES = st.tuples(*[st.tuples(persisted_traces(), SIZES)] * 2)


@pytest.mark.slow
@few
@given(CUT_TRACES, st.randoms(use_true_random=False))
def test_a_thinned_trace_says_the_same(traces, chance):
    """Two workers make chunks small that come in any order."""
    rows = []
    for name, ((events, _), sizes) in zip("ab", traces, strict=True):
        seq = 0
        for chunk in chunks_of(events, sizes):
            rows.append(row_of(name, seq, chunk))
            seq += len(chunk.kind)
    batches = [[], []]
    for row in chance.sample(rows, len(rows)):
        batches[chance.randrange(2)].append(row)
    found = packed_chunks([batch for batch in batches if batch])
    for name, ((events, log), sizes) in zip("ab", traces, strict=True):
        end_ms = events[-1].ts_ms + 450
        (values, sums), (values_apart, sums_apart) = (
            outcome(chunks, log, end_ms) for chunks in (found[name], chunks_of(events, sizes))
        )
        # Differences would be printed in full, which takes minutes.
        is_same = values == values_apart and all(map(is_as_costly, POLICIES, sums, sums_apart))
        assert is_same


def test_what_is_put_together_has_no_more_events_than_a_few_chunks(monkeypatch):
    monkeypatch.setattr(thinning, "_EVENTS_THINNED", 100)
    events = [Event(ts_ms, EventKind.ACK, 3, ts_ms, ts_ms) for ts_ms in range(330)]
    rows = [row_of("s", 40 * at, chunk) for at, chunk in enumerate(chunks_of(events, [40] * 7))]
    assert [len(chunk.kind) for chunk in packed_chunks([rows])["s"]] == [80, 80, 80, 90]


ANY = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-1, 300))


@given(st.lists(st.tuples(ANY, st.sampled_from(EventKind), ANY, ANY, ANY), min_size=1, max_size=20))
def test_whatever_a_chunk_holds_comes_out_of_its_bytes(rows):
    columns = [np.array(column, np.int64) for column in zip(*rows, strict=True)]
    found = thinning.decode(memoryview(thinning.encode(acked.EventChunk(*columns))))
    assert [column.tolist() for column in found] == [column.tolist() for column in columns]
    assert {column.dtype for column in found} == {np.dtype(np.int64)}
