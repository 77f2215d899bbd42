"""Groups and sorts the chunks of each subscription, and refuses traces that a replay would get wrong.

It checks that chunks are contiguous and that no ack is beyond the published entries of its topic. Only `ackstate trace
check` compares single events within chunks.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Any, final

import numpy as np
import pyarrow as pa

from ackstate.analysis.estimate.chunk_codec import decode
from ackstate.analysis.estimate.chunk_steps import (
    LEDGER_COLUMNS,
    LEDGERS,
    PACKED,
    chunk_columns,
    ledgers,
    packed_chunks,
)
from ackstate.analysis.trace.days import DAY_SEQ
from ackstate.analysis.trace.events import EventKind, TraceError
from ackstate.analysis.trace.order import ALIVE, LIVES, PERSIST_ENDS, PERSISTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.analysis.estimate.rows import Rows
    from ackstate.analysis.estimate.trace_source import TraceSource
    from ackstate.analysis.replay.acked import EventChunk
    from ackstate.analysis.replay.policy import Policy

    Key = tuple[str, str]
    _Row = tuple[pa.RecordBatch, int]


# A sequence of these events is reduced to one.
_MANY = tuple(kind for kind in ALIVE if kind not in (*PERSISTS, EventKind.RESET))


@final
class InterleavingCheck:
    """Follows the chunks of a subscription, and refuses an action after its crash or a persist begun within another.

    `ackstate.analysis.trace.order.EventOrder` checks more, event by event: which persist ends, and recoveries of a
    process whose death was not recorded. A recorder within the process alone cannot record when it died.

    Args:
        key: Topic and subscription.
    """

    def __init__(self, key: tuple[str, str]) -> None:
        self._key = key
        self._is_dead = False
        self._is_persisting = False

    def check(self, chunk: EventChunk) -> None:
        """Check the next chunk, compact or not.

        Complexity: a pass over its kinds, and a step for each persist, crash and recovery.

        Raises:
            TraceError: The events cannot come from a single cursor.
        """
        few = np.flatnonzero(~chunk.is_any_of(_MANY))
        following = 0
        for at, kind in zip(few.tolist(), chunk.kind[few].tolist(), strict=True):
            self._refuse_if(self._is_dead and at > following, chunk, following)
            self._refuse_if(self._is_dead and kind in ALIVE, chunk, at)
            self._refuse_if(self._is_persisting and kind == EventKind.PERSIST_BEGUN, chunk, at)
            if kind in LIVES:
                self._is_dead = kind == EventKind.CRASH
            if kind in LIVES or kind in PERSIST_ENDS:
                self._is_persisting = False
            elif kind == EventKind.PERSIST_BEGUN:
                self._is_persisting = True
            following = at + 1
        self._refuse_if(self._is_dead and following < len(chunk.kind), chunk, following)

    def _refuse_if(self, is_wrong: bool, chunk: EventChunk, at: int) -> None:
        if is_wrong:
            topic, subscription = self._key
            raise TraceError(
                f"two cursors under one name, seen at {chunk.ts_ms[at]} ms: subscription {subscription!r} of {topic}: "
                "run ackstate trace check for details; record each cursor under a name of its own"
            )


_KEY = ("topic", "subscription")
# `seq` of the row that precedes the first chunk.
_HEAD_SEQ = -1


def sorted_chunks(trace: TraceSource, policies: Sequence[Policy | None]) -> Rows:
    """Return the chunks of subscriptions as bytes, sorted, and compacted if the policies allow it.

    Compaction runs before the chunks of a subscription are grouped, on all cores for any share of the trace.
    """
    is_small = all(map(takes_compact, policies))
    columns = chunk_columns(has_intervals=trace.has_intervals)
    chunks = trace.read(columns, partial(packed_chunks, is_compact=is_small), PACKED)
    named = trace.read(LEDGER_COLUMNS, ledgers, LEDGERS).together(("topic",))
    is_log_needed = any(policy is not None for policy in policies)
    return chunks.plus(named.through(partial(_heads, is_log_needed=is_log_needed), PACKED)).together(
        _KEY, ("first_seq",)
    )


def by_subscription(
    batches: Iterable[pa.RecordBatch], days: Sequence[str] = ()
) -> Iterator[tuple[Key, dict[int, int], Iterator[EventChunk]]]:
    """Yield each subscription of some `sorted_chunks`: its key, its topic's message log, and its chunks in order.

    The caller must read the chunks before it takes the next subscription. The log maps ledger id to entry count,
    rising; it is empty if no policy needs it.

    Raises:
        TraceError: Chunks are not contiguous, or the chunks of a subscription come from several cursors.
    """
    rows = ((batch, index) for batch in batches for index in range(batch.num_rows))
    for key, mine in groupby(rows, key=_key):
        in_order = _in_order(mine, days)
        if not key[1]:
            # Chunks of the topic itself, with its PUBLISH events.
            for _ in in_order:
                pass
            continue
        log: dict[int, int] = {}
        first: list[_Row] = []
        for batch, index in in_order:
            if batch["first_seq"][index].as_py() >= 0:
                first = [(batch, index)]
                break
            log = {each["ledger_id"]: each["entry_count"] for each in batch["log"][index].as_py()}
        yield key, log, _chunks(key, chain(first, in_order))


def takes_compact(policy: Policy | None) -> bool:
    """Return whether chunks may be compacted for a policy."""
    return policy is None or policy.ignores_deliveries


def _heads(batches: Iterable[pa.RecordBatch], *, is_log_needed: bool) -> Iterator[pa.RecordBatch]:
    """Check that no ack is beyond the published entries of its topic, and yield the logs, if they are needed.

    Ledgers are not checked in a topic without PUBLISH events, nor before the first ledger that has some.
    `ackstate trace check` finds missing entries in between.
    """
    for topic, mine in groupby(_values(batches, LEDGERS.names), key=lambda row: row[0]):
        subscriptions: set[str] = set()
        found: dict[int, tuple[int, ...]] = {}
        for _, subscription, ledger_id, *counts in mine:
            subscriptions.add(subscription)
            if ledger_id >= 0:
                found[ledger_id] = tuple(map(max, found.get(ledger_id, (0, 0, 0)), counts))
        _check_published(topic, found)
        if is_log_needed:
            log = [{"ledger_id": each, "entry_count": found[each][0]} for each in sorted(found)]
            head = dict.fromkeys(PACKED.names) | {"topic": topic, "first_seq": _HEAD_SEQ, "log": log}
            heads = [head | {"subscription": each} for each in sorted(subscriptions) if each]
            yield pa.RecordBatch.from_pylist(heads, PACKED)


def _values(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    return (row for batch in batches for row in zip(*(batch[name].to_pylist() for name in names), strict=True))


def _check_published(topic: str, found: dict[int, tuple[int, ...]]) -> None:
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


def _in_order(rows: Iterable[_Row], days: Sequence[str]) -> Iterator[_Row]:
    """Pass on the rows of a subscription; check that each chunk continues the previous one, in `seq` and in time."""
    seq, last_ms = 0, None
    for batch, index in rows:
        first_seq = batch["first_seq"][index].as_py()
        if first_seq >= 0:
            if days:
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
                when = f"{days[first_seq // DAY_SEQ]}: " if days else ""
                of_whom = " of ".join(filter(None, reversed(_key((batch, index)))))
                raise TraceError(
                    f"{when}chunk {batch['chunk'][index].as_py()} of {of_whom} {problem}: run ackstate trace check for "
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
