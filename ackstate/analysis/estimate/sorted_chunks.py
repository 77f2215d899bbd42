"""Groups and sorts the chunks of each subscription, and refuses traces that a replay would get wrong.

It checks that chunks are contiguous and that no ack is beyond the published entries of its topic. Only `ackstate trace
check` compares single events within chunks. The state of earlier days precedes the chunks.
"""

from __future__ import annotations

from functools import partial, reduce
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from ackstate.analysis.estimate.chunk_codec import decode
from ackstate.analysis.estimate.chunk_steps import (
    DAY_SEQ,
    LEDGER_COLUMNS,
    LEDGERS,
    PACKED,
    chunk_columns,
    ledgers,
    packed_batch,
    packed_chunks,
)
from ackstate.analysis.replay.interleaving_check import InterleavingCheck
from ackstate.analysis.replay.state_fields import CheckpointError
from ackstate.analysis.trace.events import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ackstate.analysis.estimate.rows import Rows
    from ackstate.analysis.estimate.trace_source import TraceSource
    from ackstate.analysis.replay.acked import EventChunk
    from ackstate.analysis.replay.policy import Policy

    Key = tuple[str, str]
    _Row = tuple[pa.RecordBatch, int]
    _Ledgers = dict[int, tuple[int, int, int]]

STATES = pa.schema([("topic", pa.string()), ("subscription", pa.string()), ("state", pa.string())])
"""The state of each subscription at the end of a day."""
LOGS = pa.schema([("topic", pa.string()), ("ledger_id", pa.int64()), ("entry_count", pa.int64())])
"""The message logs of all topics."""
_KEY = ("topic", "subscription")
# `seq` of the rows that precede the first chunk.
_STATE_SEQ, _HEAD_SEQ = -2, -1
_AnyRows = TypeVar("_AnyRows", bound="Rows")


class Kept(NamedTuple):
    """The stored state of earlier days.

    Attributes:
        states: Rows of `STATES`.
        keys: The same rows without the state.
        logs: Rows of `LOGS`.
    """

    states: Rows
    keys: Rows
    logs: Rows


class SubscriptionHead(NamedTuple):
    """The information about a subscription before its first chunk.

    Attributes:
        log: Ledger id -> entry count of its topic's message log, rising. For a subscription with a state it comes from
            the new traces, for a new one from all days. Empty if no policy needs it.
        is_published: Whether the traces have events of the topic itself, so that the log has the ends of ledgers.
        state: Its state, if it is not new.
    """

    log: dict[int, int]
    is_published: bool = False
    state: str | None = None


def sorted_chunks(
    days: Sequence[TraceSource],
    policies: Sequence[Policy | None],
    kept: Kept | None = None,
    *,
    is_log_needed: bool = False,
) -> Rows:
    """Return the chunks of subscriptions as bytes, sorted, and compacted if the policies allow it.

    Compaction runs before the chunks of a subscription are grouped, on all cores for any share of the trace.

    Args:
        days: Traces, each of which begins after the previous one has ended; at least one, if there is no earlier state.
        policies: The grid.
        kept: The state of the days before.
        is_log_needed: Whether to return message logs even if no policy needs them.

    Returns:
        Rows of `PACKED`, for `by_subscription`: the `SubscriptionHead` of each subscription, then its chunks.
    """
    is_small = all(map(is_counted, policies))
    chunks = [
        day.read(
            chunk_columns(has_intervals=day.has_intervals),
            partial(packed_chunks, is_counted=is_small, day=number),
            PACKED,
        )
        for number, day in enumerate(days)
    ]
    is_log_needed |= any(policy is not None for policy in policies)
    heads = named_ledgers(days, kept).together(("topic",)).through(partial(_heads, is_log_needed=is_log_needed), PACKED)
    states = [] if kept is None else [kept.states.through(_state_rows, PACKED)]
    return joined([*chunks, heads, *states]).together(_KEY, ("first_seq",))


def named_ledgers(days: Sequence[TraceSource], kept: Kept | None = None) -> Rows:
    """Return rows of `LEDGERS`, from the traces and from the stored state, which also marks known subscriptions."""
    told = [day.read(LEDGER_COLUMNS, ledgers, LEDGERS) for day in days]
    before = [] if kept is None else [kept.logs.through(_kept_logs, LEDGERS), kept.keys.through(_kept_keys, LEDGERS)]
    return joined([*told, *before])


def highest(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield rows of `LOGS`, the length of each ledger, from rows of `LEDGERS` sorted by topic and ledger."""
    rows = _values(batches, ("topic", "ledger_id", "entry_count"))
    found = [
        (topic, ledger_id, max(count for _, _, count in mine))
        for (topic, ledger_id), mine in groupby(rows, key=lambda row: row[:2])
        if ledger_id >= 0
    ]
    if found:
        yield pa.RecordBatch.from_arrays([pa.array(each) for each in zip(*found, strict=True)], schema=LOGS)


def by_subscription(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Key, SubscriptionHead, Iterator[EventChunk]]]:
    """Yield each subscription of some `sorted_chunks`: its key, its head, and its chunks in order.

    The caller must read the chunks before it takes the next subscription.

    Raises:
        TraceError: Chunks are not contiguous, or the chunks of a subscription come from several cursors.
        CheckpointError: A subscription has two states.
    """
    rows = ((batch, index) for batch in batches for index in range(batch.num_rows))
    for key, mine in groupby(rows, key=_key):
        in_order = _in_order(mine)
        if not key[1]:
            # Chunks of the topic itself, with its PUBLISH events.
            for _ in in_order:
                pass
            continue
        head = SubscriptionHead({})
        first: list[_Row] = []
        for batch, index in in_order:
            if batch["first_seq"][index].as_py() >= 0:
                first = [(batch, index)]
                break
            head = _with_row(key, head, batch, index)
        yield key, head, _chunks(key, chain(first, in_order))


def is_counted(policy: Policy | None) -> bool:
    """Return whether counting replaces the cursor, so that chunks may be compacted."""
    return policy is None or policy.persists_everything


def joined(rows: Sequence[_AnyRows]) -> _AnyRows:
    """Return the union of some rows."""
    return reduce(lambda some, others: some.plus(others), rows)


def _with_row(key: Key, head: SubscriptionHead, batch: pa.RecordBatch, index: int) -> SubscriptionHead:
    state = batch["state"][index].as_py()
    if state is None:
        log = {each["ledger_id"]: each["entry_count"] for each in batch["log"][index].as_py()}
        return head._replace(log=log, is_published=batch["is_published"][index].as_py())
    if head.state is not None:
        raise CheckpointError(f"subscription {key[1]!r} of {key[0]} has two states")
    return head._replace(state=state)


def _state_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        seqs = pa.array(np.full(batch.num_rows, _STATE_SEQ))
        yield packed_batch({**{name: batch[name] for name in STATES.names}, "first_seq": seqs})


def _kept_logs(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield _kept_ledgers(batch["topic"], pa.array([""] * batch.num_rows), batch["ledger_id"], batch["entry_count"])


def _kept_keys(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        none = np.zeros(batch.num_rows, np.int64)
        yield _kept_ledgers(batch["topic"], batch["subscription"], pa.array(none - 1), pa.array(none))


def _kept_ledgers(*columns: pa.Array) -> pa.RecordBatch:
    none = pa.array(np.zeros(len(columns[0]), np.int64))
    is_kept = pa.array(np.ones(len(columns[0]), np.bool_))
    return pa.RecordBatch.from_arrays([*columns, none, none, is_kept], schema=LEDGERS)


def _heads(batches: Iterable[pa.RecordBatch], *, is_log_needed: bool) -> Iterator[pa.RecordBatch]:
    """Check that no ack is beyond the published entries of its topic, and yield the logs, if they are needed.

    Ledgers are not checked in a topic without PUBLISH events, nor before the first ledger that has some.
    `ackstate trace check` finds missing entries in between.
    """
    for topic, mine in groupby(_values(batches, LEDGERS.names), key=lambda row: row[0]):
        is_known: dict[str, bool] = {}
        new: _Ledgers = {}
        whole: _Ledgers = {}
        is_published = False
        for _, subscription, ledger_id, *counts, is_kept in mine:
            is_published |= not subscription and not is_kept
            is_known[subscription] = is_known.get(subscription, False) or is_kept
            if ledger_id >= 0:
                for log in (whole,) if is_kept else (whole, new):
                    log[ledger_id] = tuple(map(max, log.get(ledger_id, (0, 0, 0)), counts))
        _check_published(topic, new)
        if is_log_needed:
            heads = dict.fromkeys(PACKED.names) | {"topic": topic, "first_seq": _HEAD_SEQ, "is_published": is_published}
            logs = {False: _log_of(whole), True: _log_of(new)}
            found = [
                heads | {"subscription": each, "log": logs[known]} for each, known in sorted(is_known.items()) if each
            ]
            yield pa.RecordBatch.from_pylist(found, PACKED)


def _values(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return (row for batch in batches for row in zip(*(batch[name].to_pylist() for name in names), strict=True))


def _log_of(found: Mapping[int, tuple[int, int, int]]) -> list[dict[str, int]]:
    return [{"ledger_id": each, "entry_count": found[each][0]} for each in sorted(found)]


def _check_published(topic: str, found: Mapping[int, tuple[int, int, int]]) -> None:
    first = min((each for each, (_, published, _) in found.items() if published), default=None)
    if first is None:
        return
    for ledger_id in sorted(found):
        _, published, acked = found[ledger_id]
        if ledger_id >= first and acked > published:
            until = f"up to entry {published - 1}" if published else "not at all"
            raise TraceError(
                f"{ledger_id}:{acked - 1} of {topic} is acked, but the ledger was published {until}: run ackstate "
                "trace check for details; record the trace again, or remove its PUBLISH events"
            )


def _key(row: _Row) -> Key:
    batch, index = row
    return batch["topic"][index].as_py(), batch["subscription"][index].as_py()


def _in_order(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Pass on the rows of a subscription; check that each chunk continues the previous one, in `seq` and in time."""
    seq, last_ms = 0, None
    for batch, index in rows:
        first_seq = batch["first_seq"][index].as_py()
        if first_seq >= 0:
            # Every day starts from 0.
            seq = max(seq, first_seq // DAY_SEQ * DAY_SEQ)
            first_ms = batch["first_ts_ms"][index].as_py()
            problem = (
                "repeats a seq" if first_seq < seq
                else "comes after a gap in seq" if first_seq > seq
                else "begins before the previous chunk ended" if last_ms is not None and first_ms < last_ms
                else ""
            )  # fmt: skip
            if problem:
                of_whom = " of ".join(filter(None, reversed(_key((batch, index)))))
                raise TraceError(
                    f"chunk {batch['chunk'][index].as_py()} of {of_whom} {problem}: run ackstate trace check for "
                    "details; convert the trace again"
                )
            seq, last_ms = batch["end_seq"][index].as_py(), batch["last_ts_ms"][index].as_py()
        yield batch, index


def _chunks(key: Key, rows: Iterable[_Row]) -> Iterator[EventChunk]:
    one_cursor = InterleavingCheck(key)
    for batch, index in rows:
        chunk = decode(memoryview(batch["events"][index].as_buffer()))
        one_cursor.check(chunk)
        yield chunk
