"""Run the estimates of some subscriptions day by day, and at once, from rows as they are when they are sorted."""

from __future__ import annotations

from functools import partial

import pyarrow as pa

from ackstate.analysis.estimate import incremental
from ackstate.analysis.estimate.chunk_codec import encode
from ackstate.analysis.estimate.chunk_steps import PACKED
from ackstate.analysis.estimate.compact_curve import OWN_SLICES_MAX, ThinnedCurve
from ackstate.analysis.estimate.daily_state import (
    BrokerState,
    DailyState,
    decoded,
    decoded_broker,
    encoded,
    encoded_broker,
)
from ackstate.analysis.estimate.estimates import in_slices
from ackstate.analysis.estimate.parts import ESTIMATE, PART, RESULT_KEY, RUN, STATE, chosen, merge, put_together
from ackstate.analysis.estimate.rows import LocalRows
from ackstate.analysis.estimate.slices import RESULT, Slices
from ackstate.analysis.estimate.subscription_parts import RequestedParts, replay
from ackstate.analysis.replay.curve_sum import SERIES, Histogram
from ackstate.analysis.replay.plain_replay import PlainReplay
from chunks import chunk_of

_NOT_OF_ALL_DAYS = ("curve_ms", "curve", "crash_ms", "crashes", "crash_count")


def rows_of(key, *, events=(), state=None, log=None, is_published=False):
    """Return the rows of a subscription, as `sorted_chunks` has them: its state, its message log, and its chunk."""
    names = dict.fromkeys(PACKED.names) | {"topic": key[0], "subscription": key[1]}
    rows = [] if state is None else [names | {"first_seq": -2, "state": state}]
    pairs = [{"ledger_id": each, "entry_count": count} for each, count in sorted((log or {}).items())]
    rows.append(names | {"first_seq": -1, "log": pairs, "is_published": is_published})
    if events:
        bounds = {"end_seq": len(events), "first_ts_ms": events[0].ts_ms, "last_ts_ms": events[-1].ts_ms}
        rows.append(names | bounds | {"first_seq": 0, "chunk": 0, "events": encode(chunk_of(events))})
    return rows


def replayed(rows, wanted):
    """Return the results of rows, those of one subscription after those of another."""
    batches = [pa.RecordBatch.from_pylist([row], PACKED) for row in rows]
    schema = RUN if wanted.keeps_states else PART
    return pa.Table.from_batches(list(replay(batches, wanted=wanted)), schema)


def of_table(table):
    return LocalRows(table.to_batches, table.schema)


def joined(log, more):
    return {each: max(log.get(each, 0), more.get(each, 0)) for each in {*log, *more}}


def answers(parts, duration_ms):
    """Return the estimates, without the parts that a run over all days gets from elsewhere."""
    make = partial(put_together, duration_ms=duration_ms)
    rows = parts.together(RESULT_KEY).through(make, ESTIMATE).collect()
    return sorted(({name: row[name] for name in row if name not in _NOT_OF_ALL_DAYS} for row in rows), key=str)


def run_at_once(events_of, logs, policies):
    begin_ms, end_ms = span(events_of)
    wanted = RequestedParts(tuple(policies), range(len(policies)), begin_ms, Slices.of(begin_ms, end_ms, 3))
    rows = [row for key, events in sorted(events_of.items()) if events
            for row in rows_of(key, events=events, log=logs[key])]  # fmt: skip
    return answers(in_slices(of_table(replayed(rows, wanted)), wanted.slices), end_ms - begin_ms)


def run_by_days(days_of, logs_of, policies, *, is_published):
    """Run day by day; each day is key -> events, each log its published entries."""
    states, results, begin_ms, last_ms, broker, whole = {}, None, None, None, None, {}
    for events_of, logs in zip(days_of, logs_of, strict=True):
        whole = {key: joined(whole.get(key, {}), log) for key, log in logs.items()}
        first_ms, end_ms = span(events_of)
        begin_ms = first_ms if begin_ms is None else begin_ms
        broker = broker or BrokerState([ThinnedCurve(begin_ms, slices_max=20) for _ in policies], [], 0, "")
        for curve in broker.curves:
            curve.widen_until(end_ms)
        width_ms = broker.curves[0].width_ms
        slices = Slices.of(begin_ms, end_ms, 2, from_ms=last_ms, width_ms_max=width_ms)
        wanted = RequestedParts(
            tuple(policies), range(len(policies)), begin_ms, slices, is_plotted=True, keeps_states=True
        )
        rows = [
            row for key in sorted({*states, *(key for key, events in events_of.items() if events)})
            for row in rows_of(key, events=events_of[key], state=states.get(key), is_published=is_published,
                               log=logs.get(key) if key in states else whole[key])
        ]  # fmt: skip
        found = replayed(rows, wanted)
        states = {(row["topic"], row["subscription"]): row["state"] for row in found.to_pylist() if row["state"]}
        parts = of_table(found.drop_columns("state")).through(partial(chosen, slices=[STATE], is_any_other=True), PART)
        summed = in_slices(parts, slices)
        together = (summed if results is None else summed.plus(results)).together(RESULT_KEY)
        merged = pa.Table.from_batches(together.through(merge, PART)._batches(), PART)
        incremental._follow(of_table(merged), broker)
        results = of_table(pa.Table.from_batches(chosen(merged.to_batches(), slices=[RESULT]), PART))
        last_ms = end_ms
        text = encoded_broker(broker)
        assert encoded_broker(decoded_broker(text, len(policies))) == text
    return answers(results, last_ms - begin_ms), states, broker


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
        assert again.view.unpersisted_record_bytes == cursor.view.unpersisted_record_bytes
        assert again.persisted_mark_delete_position == cursor.persisted_mark_delete_position
    return state.replay


def cursors_of(replay):
    """Return the cursors of all replays that have one."""
    replays = [each for group in replay._groups for each in group.replays.values()]
    return [each._cursor for each in replays if not isinstance(each, PlainReplay)]
