"""Brings the chunks of each subscription together, in order, and refuses traces that a replay would get wrong.

It checks that chunks follow one another and that no ack goes beyond what its topic published. Only `ackstate trace
check` compares single events inside of chunks.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, groupby
from typing import TYPE_CHECKING

import pyarrow as pa

from ackstate.analysis.redelivery.chunk_steps import (
    LEDGERS,
    PACKED,
    bound_columns,
    chunk_bounds,
    chunk_columns,
    ledger_columns,
    ledgers,
    packed_chunks,
)
from ackstate.analysis.redelivery.one_cursor import OneCursor
from ackstate.analysis.redelivery.thinning import unpacked
from ackstate.analysis.trace.events import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ackstate.analysis.redelivery.acked import Chunk
    from ackstate.analysis.redelivery.policy import Policy
    from ackstate.analysis.redelivery.rows import Rows
    from ackstate.analysis.redelivery.trace_source import TraceSource

    Key = tuple[str, str]
    _Row = tuple[pa.RecordBatch, int]
    _Ledgers = dict[int, tuple[int, int, int]]

_KEY = ("topic", "subscription")
_HEAD_SEQ = -1  # Of the row with the log, which comes before the first chunk.


def sorted_chunks(source: TraceSource, policies: Sequence[Policy | None]) -> Rows:
    """Return the chunks of subscriptions as bytes, sorted and made small if the policies allow.

    That happens before the chunks of a subscription are brought together, on all cores whatever its share of the trace.

    Returns:
        Rows of `PACKED`, for `by_subscription`. If a replay needs the message log of the topic, a row without events
        comes before those of each subscription and has it; all others have none.
    """
    packed = partial(packed_chunks, is_counted=all(map(is_counted, policies)))
    chunks = source.read(chunk_columns(is_packed=source.is_packed), packed, PACKED)
    return chunks.plus(topic_logs(source, policies)).together(_KEY, ("first_seq",))


def check_chunks(source: TraceSource) -> None:
    """Check what `sorted_chunks` and `by_subscription` check, without a replay.

    Raises:
        TraceError: Chunks do not follow one another, or an ack goes beyond what its topic published.
    """
    bounds = source.read(bound_columns(is_packed=source.is_packed), chunk_bounds, PACKED)
    bounds.plus(topic_logs(source)).together(_KEY, ("first_seq",)).through(_checked, PACKED).collect()


def _checked(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _, _, chunks in by_subscription(batches):
        for _ in chunks:
            pass
    yield from ()


def topic_logs(source: TraceSource, policies: Sequence[Policy | None] = ()) -> Rows:
    """Check that no ack goes beyond what its topic published, and return the rows with logs that policies need.

    A topic without PUBLISH events says nothing of what it published, nor does one of what came before its first.
    Entries that are missing in between are found by `ackstate trace check`.
    """
    heads = partial(_heads, is_log_needed=any(policy is not None for policy in policies))
    named = source.read(ledger_columns(is_packed=source.is_packed), ledgers, LEDGERS)
    return named.together(("topic",)).through(heads, PACKED)


def by_subscription(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Key, dict[int, int], Iterator[Chunk]]]:
    """Yield each subscription of some `sorted_chunks`: its key, its topic's message log, and its chunks in order.

    The log, ledger id -> entry count, rising, is empty if no policy needs it. The chunks are to be taken before the
    next subscription is.

    Raises:
        TraceError: Chunks do not follow one another, or several cursors tell the chunks of a subscription.
    """
    rows = ((batch, index) for batch in batches for index in range(batch.num_rows))
    for key, mine in groupby(rows, key=_key):
        in_order = _in_order(mine)
        if not key[1]:
            # Chunks of the topic itself, which say what was published.
            for _ in in_order:
                pass
            continue
        first = next(in_order)
        batch, index = first
        log = {each["ledger_id"]: each["entry_count"] for each in batch["log"][index].as_py() or ()}
        yield key, log, _chunks(key, chain((first,), in_order))


def is_counted(policy: Policy | None) -> bool:
    """Say whether counting replaces the cursor, so that chunks may be made small."""
    return policy is None or policy.is_plain


def _heads(batches: Iterable[pa.RecordBatch], *, is_log_needed: bool) -> Iterator[pa.RecordBatch]:
    rows = (row for batch in batches for row in zip(*(column.to_pylist() for column in batch.columns), strict=True))
    for topic, mine in groupby(rows, key=lambda row: row[0]):
        subscriptions: set[str] = set()
        highest: _Ledgers = {}
        for _, subscription, ledger_id, *counts in mine:
            subscriptions.add(subscription)
            if ledger_id >= 0:
                before = highest.get(ledger_id, (0, 0, 0))
                highest[ledger_id] = tuple(map(max, before, counts))
        _check_published(topic, highest)
        if is_log_needed:
            log = [{"ledger_id": each, "entry_count": highest[each][0]} for each in sorted(highest)]
            head = dict.fromkeys(PACKED.names) | {"topic": topic, "first_seq": _HEAD_SEQ, "log": log}
            found = [head | {"subscription": each} for each in sorted(subscriptions - {""})]
            yield pa.RecordBatch.from_pylist(found, PACKED)


def _check_published(topic: str, highest: _Ledgers) -> None:
    first = min((each for each, (_, published, _) in highest.items() if published), default=None)
    if first is None:
        return
    for ledger_id in sorted(highest):
        _, published, acked = highest[ledger_id]
        if ledger_id >= first and acked > published:
            until = f"up to entry {published - 1}" if published else "not at all"
            raise TraceError(
                f"{ledger_id}:{acked - 1} of {topic} is acked, whose ledger was published {until}: ackstate trace "
                "check says more; record it anew, or leave out its PUBLISH events"
            )


def _key(row: _Row) -> Key:
    batch, index = row
    return batch["topic"][index].as_py(), batch["subscription"][index].as_py()


def _in_order(rows: Iterable[_Row]) -> Iterator[_Row]:
    """Pass the rows of a subscription if each chunk begins where the one before it ended, in `seq` and in time."""
    seq, last_ms = 0, None
    for batch, index in rows:
        first_seq = batch["first_seq"][index].as_py()
        if first_seq != _HEAD_SEQ:
            first_ms = batch["first_ts_ms"][index].as_py()
            problem = (
                "repeats a seq" if first_seq < seq
                else "comes after a gap in seq" if first_seq > seq
                else "begins before the one before it ended" if last_ms is not None and first_ms < last_ms
                else ""
            )  # fmt: skip
            if problem:
                of_whom = " of ".join(filter(None, reversed(_key((batch, index)))))
                raise TraceError(
                    f"chunk {batch['chunk'][index].as_py()} of {of_whom} {problem}: ackstate trace check says more; "
                    "convert it anew"
                )
            seq, last_ms = batch["end_seq"][index].as_py(), batch["last_ts_ms"][index].as_py()
        yield batch, index


def _chunks(key: Key, rows: Iterable[_Row]) -> Iterator[Chunk]:
    one_cursor = OneCursor(key)
    for batch, index in rows:
        events = batch["events"][index]
        if events.is_valid:
            chunk = unpacked(memoryview(events.as_buffer()))
            one_cursor.check(chunk)
            yield chunk
