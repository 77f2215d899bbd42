"""Run the estimates of some subscriptions day by day, and at once, without Spark: the steps of the jobs by hand."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute

from ackstate.analysis.redelivery import daily_subscription, incremental
from ackstate.analysis.redelivery import estimates as at_once
from ackstate.analysis.redelivery import parts as of_parts
from ackstate.analysis.redelivery.acked import Chunk
from ackstate.analysis.redelivery.curve_changes import SERIES, batch_of, string_together, sum_changes
from ackstate.analysis.redelivery.curve_sum import Histogram
from ackstate.analysis.redelivery.daily_state import (
    OWN_SLICES_MAX,
    BrokerState,
    DailyState,
    decoded,
    decoded_broker,
    encoded,
    encoded_broker,
)
from ackstate.analysis.redelivery.daily_subscription import Days
from ackstate.analysis.redelivery.plain_replay import PlainReplay
from ackstate.analysis.redelivery.slices import Slices
from ackstate.analysis.redelivery.thinned_curve import ThinnedCurve
from ackstate.analysis.redelivery.thinning import packed
from chunks import chunk_of


def row_of(key, first_seq, *, events=None, state=None, log=None, whole_log=None, is_published=False):
    arrays = {name: None if events is None else getattr(chunk_of(events), name) for name in Chunk._fields}
    names = {"topic": key[0], "subscription": key[1], "first_seq": first_seq, "chunk": 0}
    if events:
        names |= {"end_seq": first_seq + len(events), "first_ts_ms": events[0].ts_ms, "last_ts_ms": events[-1].ts_ms}
    small = None if events is None else packed(chunk_of(events))
    logs = {"log": pairs_of(log), "whole_log": pairs_of(log if whole_log is None else whole_log)}
    return names | arrays | logs | {"events": small, "state": state, "is_published": is_published}


def pairs_of(log):
    return None if log is None else [{"ledger_id": each, "entry_count": count} for each, count in sorted(log.items())]


def joined(log, more):
    return {each: max(log.get(each, 0), more.get(each, 0)) for each in {*log, *more}}


_PAIRS = pa.list_(pa.struct([("ledger_id", pa.int64()), ("entry_count", pa.int64())]))


_ROW = pa.schema([
    ("topic", pa.string()), ("subscription", pa.string()), ("first_seq", pa.int64()), ("chunk", pa.int32()),
    ("end_seq", pa.int64()), ("first_ts_ms", pa.int64()), ("last_ts_ms", pa.int64()),
    *((name, pa.list_(pa.int64())) for name in Chunk._fields), ("events", pa.binary()),
    ("state", pa.string()),
    ("log", _PAIRS), ("whole_log", _PAIRS),
    ("is_published", pa.bool_()),
])  # fmt: skip


def batches_of(rows):
    ordered = sorted(rows, key=lambda row: (row["topic"], row["subscription"], row["first_seq"]))
    return [pa.RecordBatch.from_pylist([row], _ROW) for row in ordered]


def summed(parts, slices, before):
    """Return the results as batches, as the job's later steps make them."""
    order = sorted(parts, key=lambda part: (part.policy, part.slice, part.namespace, part.topic))
    found = [*of_parts.parts_of(of_parts.add_slices(of_parts.batches_of(order), slices=slices)), *before]
    found.sort(key=lambda part: tuple(getattr(part, name) for name in of_parts.RESULT_KEY))
    return list(of_parts.parts_of(of_parts.merge(of_parts.batches_of(found))))


def answers(results, duration_ms):
    rows = [
        row for batch in of_parts.put_together(of_parts.batches_of(results), duration_ms=duration_ms)
        for row in batch.to_pylist()
    ]  # fmt: skip
    return sorted(rows, key=str)


def run_at_once(events_of, logs, policies):
    begin_ms, end_ms = span(events_of)
    slices = Slices.of(begin_ms, end_ms, 3)
    rows = [row_of(key, 0, events=events, log=logs[key]) for key, events in events_of.items() if events]
    parts = list(of_parts.parts_of(at_once._replay(batches_of(rows), policies=policies, slices=slices)))
    return answers(summed(parts, slices, []), end_ms - begin_ms)


def run_by_days(days_of, logs_of, policies, *, is_published):
    """Run day by day; each day is key -> events, each log what it tells."""
    states, results, begin_ms, last_ms, broker, whole = {}, [], None, None, None, {}
    for events_of, logs in zip(days_of, logs_of, strict=True):
        whole = {key: joined(whole.get(key, {}), log) for key, log in logs.items()}
        first_ms, end_ms = span(events_of)
        begin_ms = first_ms if begin_ms is None else begin_ms
        slices = Slices.of(begin_ms if last_ms is None else last_ms, end_ms, 2)
        rows = [row_of(key, -1, state=state, log=logs.get(key), is_published=is_published)
                for key, state in states.items()]  # fmt: skip
        rows += [row_of(key, 0, events=events, log=logs[key], whole_log=whole[key], is_published=is_published)
                 for key, events in events_of.items() if events]  # fmt: skip
        broker = broker or BrokerState([ThinnedCurve(begin_ms, slices_max=20) for _ in policies], [], 0, "")
        for curve in broker.curves:
            curve.widen_until(end_ms)
        read = Days(begin_ms, slices, incremental._plotted(begin_ms, slices, broker.curves[0].width_ms, 1_000))
        found = pa.Table.from_batches(
            list(incremental._replay(batches_of(rows), policies=policies, days=read)), daily_subscription.RUN
        )
        is_state = found["state"].is_valid()
        states = {(row["topic"], row["subscription"]): row["state"] for row in found.filter(is_state).to_pylist()}
        is_part = pa.compute.is_in(found["scope"], pa.array(of_parts.SCOPES))
        parts = found.filter(is_part).drop_columns("state").to_batches()
        results, last_ms = summed(list(of_parts.parts_of(parts)), slices, results), end_ms
        follow_curves(found, read.plotted, broker)
        text = encoded_broker(broker)
        assert encoded_broker(decoded_broker(text, len(policies))) == text
    return answers(results, last_ms - begin_ms), states, broker


def follow_curves(found, plotted, broker):
    """Go on with the curves as the job does."""
    changed = found.filter(pa.compute.equal(found["scope"], daily_subscription.CURVE))
    rows = [(row["policy"], row["slice"], row["topic"], row["subscription"], np.array(row["first"], np.int64),
             np.array(row["second"], np.int64)) for row in changed.to_pylist()]  # fmt: skip
    sums = list(sum_changes([batch_of(sorted(rows, key=lambda row: row[:4]))], wanted=frozenset()))
    per_point = broker.curves[0].width_ms // plotted.width_ms
    rows = sorted((row for batch in sums for row in batch.to_pylist()), key=lambda row: (row["policy"], row["slice"]))
    ordered = [pa.RecordBatch.from_pylist([row], sums[0].schema) for row in rows]
    strung = string_together(ordered, per_point=per_point)
    incremental._go_on_with(broker, [row for batch in strung for row in batch.to_pylist()])


def drawn(states, broker, policies):
    """Return the points of all curves that are kept."""
    own = {key: decoded(state, policies).curves for key, state in sorted(states.items())}
    return {
        key: [[each.tolist() for each in curve.points(SERIES)] for curve in curves]
        for key, curves in {None: broker.curves, **own}.items()
    }


def span(events_of):
    times = [event.ts_ms for events in events_of.values() for event in events]
    return min(times), max(times)


def again_from_state(replay, policies):
    """Return a replay that was written to a state at the end of a day, and read, as the job does."""
    for curve in replay.curves:
        curve.sum.histogram = Histogram()
    curves = [ThinnedCurve(0, slices_max=OWN_SLICES_MAX) for _ in policies]
    text = encoded(DailyState(replay, curves))
    state = decoded(text, policies)
    assert encoded(state) == text
    for cursor, again in zip(cursors_of(replay), cursors_of(state.replay), strict=True):
        assert again.stats().redelivery_if_crashed == cursor.stats().redelivery_if_crashed
        assert again.unpersisted_record_bytes == cursor.unpersisted_record_bytes
        assert again.persisted_mark_delete_position == cursor.persisted_mark_delete_position
    return state.replay


def cursors_of(replay):
    """Return the cursors of all replays that have one."""
    replays = [each for life in replay._lives for each in life.replays.values()]
    return [each._cursor for each in replays if not isinstance(each, PlainReplay)]
