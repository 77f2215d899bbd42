"""Estimates over a growing directory of daily traces; each run reads only the new days.

A checkpoint holds the state of every subscription at the end of the last day, and the results until then. The answer
equals that of reading all days at once, if each day begins after the last event of the day before. One exception is
refused: bytes written, when the length of a ledger without PUBLISH events is not known before a day ends.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ackstate.analysis.estimate.checkpoint import (
    DAYS_KEPT,
    RESTART,
    Checkpoint,
    claimed,
    keep,
    next_path,
    settings_of,
)
from ackstate.analysis.estimate.compact_curve import SLICES_MAX, ThinnedCurve
from ackstate.analysis.estimate.daily import days_of, files_of, fingerprint, unread
from ackstate.analysis.estimate.daily_state import BrokerState, decoded, decoded_broker, encoded_broker
from ackstate.analysis.estimate.estimates import in_slices, slice_count
from ackstate.analysis.estimate.parts import (
    CRASHES_MAX,
    ESTIMATE,
    PART,
    RESULT_KEY,
    RUN,
    STATE,
    chosen,
    merge,
    put_together,
)
from ackstate.analysis.estimate.slices import CRASHES, CURVE, RESULT, Slices
from ackstate.analysis.estimate.sorted_chunks import LOGS, STATES, Kept, highest, named_ledgers, sorted_chunks
from ackstate.analysis.estimate.subscription_parts import RequestedParts, replay
from ackstate.analysis.location import remove_tree
from ackstate.analysis.replay.curve_sum import SERIES
from ackstate.analysis.replay.state_fields import CheckpointError
from ackstate.analysis.trace.events import TraceError
from ackstate.analysis.trace.times import RULE, WALL_CLOCK_MS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.estimate.rows import Rows
    from ackstate.analysis.estimate.trace_source import Engine
    from ackstate.analysis.location import Location
    from ackstate.analysis.replay.policy import Policy
    from ackstate.analysis.trace.parquet import Span

_KEYS = pa.schema([field for field in STATES if field.name != "state"])
_OF_STATES = pa.schema([RUN.field("slice"), *STATES])


@dataclass(frozen=True, slots=True)
class DailyEstimates:
    """The estimates over all days up to now.

    Attributes:
        rows: Rows as returned by `ackstate.analysis.estimate.estimates.estimates`.
        days_read: The names of the days that this run has read.
        day_count: The number of days up to now.
        begin_ms: Time of their first event.
        end_ms: Time of their last event.
        broker: The state of all subscriptions together.
        states: ``topic, subscription, state`` of each subscription, while the state is at hand.
    """

    rows: list[dict[str, Any]]
    days_read: tuple[str, ...]
    day_count: int
    begin_ms: int
    end_ms: int
    broker: BrokerState
    states: Rows

    @property
    def text(self) -> str:
        """The days that were read, in a line."""
        read = f"read now: {', '.join(self.days_read)}" if self.days_read else "no day is new"
        return f"{self.day_count} {'day' if self.day_count == 1 else 'days'}; {read}"

    def curves_of(self, key: tuple[str, str], policies: Sequence[Policy | None]) -> list[ThinnedCurve]:
        """Return a subscription's own curves, one for each policy of the grid."""
        (row,) = self.states.through(partial(_of_key, key=key), STATES).collect()
        return decoded(row["state"], policies).curves


@contextmanager
def daily_estimates(
    engine: Engine,
    directory: Location,
    state: Location,
    policies: Sequence[Policy | None],
    *,
    crashes_per_day: float = 1,
) -> Iterator[DailyEstimates]:
    """Estimate over all days of a directory, reading only those that are new to the state.

    The state is written when the block ends without an error: after the report, so that a run that fails can be
    repeated.

    Args:
        engine: Runs the job; its workers must see both directories.
        directory: See `days_of`.
        state: A directory, created if it does not exist.
        policies: The same grid in every run; only policies that `persistable` accepts, and the recording.
        crashes_per_day: See `estimates`.

    Raises:
        TraceError: A day is missing, is not a trace, or begins before the previous day has ended.
        CheckpointError: The state is damaged, has other policies, or is in use; a day has changed since it was read.
        UnsupportedVersionError: A newer release wrote one of them.
        OSError: The disk is full or failed; the state is unchanged.
    """
    days = days_of(directory)
    with claimed(state) as unfinished:
        before = Checkpoint.latest(state, policies)
        new = unread(directory, days, before)
        # Taken before the days are read: the next run detects changes made meanwhile.
        prints = {day.name: fingerprint(day) for day in new}
        after = _read(engine, directory, new, before, unfinished, policies, prints) if new else before
        assert after is not None
        source = unfinished if new else after.path
        make = partial(put_together, duration_ms=after.end_ms - after.begin_ms, crashes_per_day=crashes_per_day)
        results = engine.rows(source / "results", PART).together(RESULT_KEY)
        yield DailyEstimates(
            results.through(make, ESTIMATE).collect(), tuple(prints), after.day_count, after.begin_ms, after.end_ms,
            _broker(after), engine.rows(source / "states", STATES),
        )  # fmt: skip
        if new:
            keep(unfinished, after)


def _read(  # noqa: PLR0913, PLR0917 - each is needed once
    engine: Engine, directory: Location, new: Sequence[Location], before: Checkpoint | None, unfinished: Location,
    policies: Sequence[Policy | None], prints: Mapping[str, str],
) -> Checkpoint:  # fmt: skip
    """Read new days, write their states and results, and return the new checkpoint."""
    days = {day.name: engine.trace(day) for day in new if files_of(day)}
    spans = [(name, each.span()) for name, each in days.items()]
    for name, covered in spans:
        if covered.has_intervals:
            raise TraceError(f"{directory / name}: a trace of polls is estimated as a whole, without --state")
    begin_ms, end_ms = _covered(spans, before, directory)
    curves = [ThinnedCurve(begin_ms, slices_max=SLICES_MAX) for _ in policies]
    broker = BrokerState(curves, [], 0, "") if before is None else _broker(before)
    for curve in broker.curves:
        curve.widen_until(end_ms)
    chunk_count = sum(each.chunk_count for _, each in spans)
    slices = Slices.of(
        begin_ms, end_ms, max(slice_count(chunk_count), 1), from_ms=None if before is None else before.end_ms,
        width_ms_max=broker.curves[0].width_ms,
    )  # fmt: skip
    wanted = RequestedParts(
        tuple(policies), range(len(policies)), begin_ms, slices, is_plotted=True, keeps_states=True,
        states="" if before is None else str(before.path / "states"),
    )  # fmt: skip
    kept = None if before is None else Kept(
        engine.rows(before.path / "states", STATES), engine.rows(before.path / "states", _KEYS),
        engine.rows(before.path / "logs", LOGS),
    )  # fmt: skip
    _extend(engine, sorted_chunks(list(days.values()), policies, kept, is_log_needed=True), wanted, before, unfinished)
    ledgers = named_ledgers(list(days.values()), kept).together(("topic", "ledger_id"))
    ledgers.through(highest, LOGS).stored(unfinished / "logs")
    _follow(engine.rows(unfinished / "staged" / "results", PART), broker)
    remove_tree(unfinished / "staged")
    for each in prints.values():
        broker.days_digest = hashlib.sha256((broker.days_digest + each).encode()).hexdigest()
    day_count = (before.day_count if before else 0) + len(new)
    known = dict(list({**(before.days if before else {}), **prints}.items())[-DAYS_KEPT:])
    return Checkpoint(
        next_path(unfinished, day_count), tuple(settings_of(policies)), day_count, known, begin_ms, end_ms,
        encoded_broker(broker), {},
    )  # fmt: skip


def _broker(checkpoint: Checkpoint) -> BrokerState:
    try:
        return decoded_broker(checkpoint.broker, len(checkpoint.policies))
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.path}: broker: {error}; {RESTART}") from None


def _covered(spans: Sequence[tuple[str, Span]], before: Checkpoint | None, directory: Location) -> tuple[int, int]:
    """Return the begin and end of all days; check that each begins after the previous one."""
    last, last_ms = (before.last_day, before.end_ms) if before else ("", None)
    for name, covered in spans:
        if last_ms is not None and covered.begin_ms <= last_ms:
            raise TraceError(
                f"{name}: it begins at {covered.begin_ms} ms, and {last} ends at {last_ms} ms: a day must begin after "
                "the previous one; split them where there is no event"
            )
        if last_ms is not None and (covered.begin_ms in WALL_CLOCK_MS) != (last_ms in WALL_CLOCK_MS):
            raise TraceError(
                f"{name}: all days must have times of the same clock, got {covered.begin_ms} ms after {last} ended at "
                f"{last_ms} ms: write {RULE}"
            )
        last, last_ms = name, covered.end_ms
    if last_ms is None:
        raise TraceError(f"{directory}: no day has an event")
    return before.begin_ms if before else spans[0][1].begin_ms, last_ms


def _extend(
    engine: Engine, chunks: Rows, wanted: RequestedParts, before: Checkpoint | None, unfinished: Location
) -> None:
    """Replay new days from the stored states, and write the new states and results."""
    staged = unfinished / "staged"
    # The stored rows are read several times, but replayed once.
    chunks.through(partial(replay, wanted=wanted), RUN).stored(staged / "run")
    states = engine.rows(staged / "run", _OF_STATES).through(_states, STATES)
    states.stored(unfinished / "states")
    parts = engine.rows(staged / "run", PART).through(partial(chosen, slices=[STATE], is_any_other=True), PART)
    found = in_slices(parts, wanted.slices)
    if before is not None:
        found = found.plus(engine.rows(before.path / "results", PART))
    found.together(RESULT_KEY).through(merge, PART).stored(staged / "results")
    results = engine.rows(staged / "results", PART).through(partial(chosen, slices=[RESULT]), PART)
    results.stored(unfinished / "results")


def _states(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in chosen(batches, slices=[STATE]):
        yield batch.select(STATES.names)


def _of_key(batches: Iterable[pa.RecordBatch], *, key: tuple[str, str]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        is_it = pc.and_(pc.equal(batch["topic"], key[0]), pc.equal(batch["subscription"], key[1]))
        yield batch.filter(is_it)


def _follow(results: Rows, broker: BrokerState) -> None:
    """Add the curves of all subscriptions, and the times at which processes died, from parts of results.

    Subscriptions that died in the same millisecond died together.
    """
    rows = results.through(partial(chosen, slices=[CURVE, CRASHES]), PART).collect()
    for row in sorted((row for row in rows if row["slice"] == CURVE), key=lambda row: row["first"]):
        ts_ms = np.array(row["first"], np.int64)
        broker.curves[row["policy"]].add_thinned(ts_ms, np.array(row["second"], np.int64).reshape(SERIES, -1))
    died = [row["first"] for row in rows if row["slice"] == CRASHES and row["scope"] == "total"]
    times = sorted({ts_ms for each in died for ts_ms in each})
    broker.died_ms += times[: CRASHES_MAX - len(broker.died_ms)]
    broker.death_count += len(times)
