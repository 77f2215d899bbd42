"""Writes the rounds of many cursors of one store: they share syncs.

All that append to their ledgers do so with one sync. Those that write a whole state, which takes several writes, do so
in threads, so that the store groups their writes.
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from typing import TYPE_CHECKING, TypeVar

from ackstate.cursor.results import PersistResult
from ackstate.errors import AckStateError, CursorClosedError
from ackstate.integers import check_count
from ackstate.stores.base import call_each

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Executor

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.persist.persister import Persister
    from ackstate.cursor.persist.round import Round

Name = TypeVar("Name", bound=Hashable)
Outcome = PersistResult | AckStateError


def persist_all(
    cursors: Iterable[ManagedCursor], *, now_ms: int, executor: Executor | None = None
) -> list[PersistResult | AckStateError]:
    """Persist many cursors of one store: all that append to their journals do so with one sync.

    Those that begin a journal do so in threads; a store on a disk shares a sync among the threads that wait for one.

    Args:
        cursors: They share a store; each comes once.
        now_ms: The present.
        executor: Begins journals; None for a pool of 64 threads that lives for this call. No thread of it may be the
            caller's.

    Returns:
        For each, in order, the result, or the error that its own `persist` would have raised: one cursor that fails
        does not keep the others from being persisted.

    Raises:
        ValueError: The cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    """
    persisters = [cursor._persister for cursor in cursors]
    outcomes = execute(persisters, lambda each: each.begin(now_ms=now_ms), executor)
    for persister, outcome in zip(persisters, outcomes, strict=True):
        persister.listeners.persisted(outcome)
    return outcomes


def tick_all(
    cursors: Iterable[tuple[Name, ManagedCursor]], *, now_ms: int, executor: Executor | None = None
) -> dict[Name, Outcome]:
    """Persist those of many cursors that are due, as `ManagedCursor.tick` each; otherwise as `persist_all`.

    Returns:
        For each that was due, by its name, the result or the error of its own.

    Raises:
        As `persist_all`.

    Complexity: O(cursors), at less than a microsecond for one that has nothing to persist.
    """
    busy = [each for each in cursors if not each[1]._persister.is_idle]
    due = {name: cursor for name, cursor in busy if cursor._persister.tick(now_ms=now_ms)}
    return dict(zip(due, persist_all(due.values(), now_ms=now_ms, executor=executor), strict=True))


def close_all(
    cursors: Sequence[ManagedCursor], *, now_ms: int, executor: Executor | None = None
) -> list[AckStateError | None]:
    """Close many cursors of one store, as `ManagedCursor.close` each; their last records share syncs.

    Returns:
        For each, in order, None, or the error of the last persist: that cursor stays open.
    """
    errors: dict[Persister, AckStateError] = {}
    persisters = [cursor._persister for cursor in cursors]
    while remaining := [each for each in persisters if not each.closed and each not in errors]:
        outcomes = execute(remaining, lambda each: each.begin_closing(now_ms=now_ms), executor)
        errors |= {
            persister: outcome
            for persister, outcome in zip(remaining, outcomes, strict=True)
            if isinstance(outcome, AckStateError) and not isinstance(outcome, CursorClosedError)
        }
    return [errors.get(persister) for persister in persisters]


def abandon(cursor: ManagedCursor) -> None:
    """Close a cursor without persisting anything, as its subscription was deleted; no-op if it is closed."""
    persister = cursor._persister
    with persister.writing, persister.lock:
        persister.closed = True


def has_record(cursor: ManagedCursor) -> bool:
    """Return whether the store has the record of this cursor, and not that of a later owner or of a deletion.

    Raises:
        StoreError: The storage failed.
    """
    return cursor._persister.journal.has_record()


def promote(persister: Persister, record_bytes_max: int, *, now_ms: int) -> PersistResult:
    """Persist, also young acks; see `ManagedCursor.promote`."""
    check_count("record_bytes_max", record_bytes_max, least=0)
    (outcome,) = execute([persister], lambda each: each.begin_promotion(record_bytes_max, now_ms=now_ms))
    persister.listeners.persisted(outcome)
    return result_of(outcome)


def close(persister: Persister, *, now_ms: int) -> PersistResult | None:
    """Persist everything and close; see `ManagedCursor.close`."""
    result = None
    # Acks accepted during the final write need another record.
    while not persister.closed:
        (outcome,) = execute([persister], lambda each: each.begin_closing(now_ms=now_ms))
        if isinstance(outcome, CursorClosedError):
            return result  # Another thread has closed it.
        result = result_of(outcome)
    return result


def result_of(outcome: Outcome) -> PersistResult:
    """Return the result, or raise the error."""
    if isinstance(outcome, AckStateError):
        raise outcome
    return outcome


def execute(
    persisters: Sequence[Persister], begin: Callable[[Persister], Round | None], executor: Executor | None = None
) -> list[Outcome]:
    """Write a round of each cursor: every write of a cursor but a reset goes through here.

    Returns:
        For each, in order, the result, or the error of its own.

    Raises:
        ValueError: The cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    """
    if len(persisters) == 1:
        with persisters[0].writing:
            return _execute(persisters, begin, executor)
    if len(set(persisters)) < len(persisters) or len({id(each.journal.store) for each in persisters}) > 1:
        raise ValueError("cursors that are persisted together must share a store, and each must come once")
    held: list[threading.Lock] = []
    try:
        # In the order of identity, so that two calls at once cannot wait for each other.
        for persister in sorted(persisters, key=id):
            persister.writing.acquire()
            held.append(persister.writing)
        return _execute(persisters, begin, executor)
    finally:
        for writing in held:
            writing.release()


def _execute(
    persisters: Sequence[Persister], begin: Callable[[Persister], Round | None], executor: Executor | None
) -> list[Outcome]:
    outcomes: dict[Persister, Outcome] = {}
    rounds: dict[Persister, Round] = {}
    try:
        for persister in persisters:
            try:
                new_round = begin(persister)
            except AckStateError as error:
                outcomes[persister] = error
                continue
            if new_round is None:
                outcomes[persister] = persister.nothing_written()
            else:
                rounds[persister] = new_round
        failed = _append({each: of_each for each, of_each in rounds.items() if of_each.appends}, outcomes)
        left = [each for each in rounds if each not in outcomes]
        written = call_each(
            lambda each: rounds[each].append_failed(failed[each]) if each in failed else rounds[each].write(),
            left,
            executor,
        )
        outcomes.update(zip(left, written, strict=True))
    finally:
        # The next persist must not take planned but unwritten acks for written ones.
        for each in rounds.values():
            if each.is_open:
                each.abandon()
    return [outcomes[persister] for persister in persisters]


def _append(rounds: dict[Persister, Round], outcomes: dict[Persister, Outcome]) -> dict[Persister, AckStateError]:
    """Append with one sync, commit what was appended, and return the error of each that was not."""
    if not rounds:
        return {}
    failed: dict[Persister, AckStateError] = {}
    entries = [each.prepare() for each in rounds.values()]
    ledgers = next(iter(rounds)).journal.store.ledgers
    try:
        appended = ledgers.append_many([(ledger_id, (entry,)) for ledger_id, entry in entries])
    except AckStateError as error:
        appended = [copy(error) for _ in entries] if len(entries) > 1 else [error]
    for (persister, each), entry, outcome in zip(rounds.items(), entries, appended, strict=True):
        if isinstance(outcome, AckStateError):
            failed[persister] = outcome
        else:
            outcomes[persister] = each.commit(persister.journal.appended(*entry))
    return failed
