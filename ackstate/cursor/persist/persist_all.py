"""Writes the rounds of many cursors of one store: they share syncs.

All that append to their ledgers do so with one sync. Those that write a whole state, which takes several writes, do so
in lockstep (`ackstate.stores.steps`).
"""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from ackstate.cursor.results import PersistResult
from ackstate.errors import AckStateError, CorruptStateError, CursorClosedError
from ackstate.integers import check_count
from ackstate.stores.base import LedgerFencedError, LedgerNotFoundError, StoreError
from ackstate.stores.steps import GROUP_MAX, run_all

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from ackstate.cursor.managed import ManagedCursor
    from ackstate.cursor.persist.persister import Persister
    from ackstate.cursor.persist.round import Round
    from ackstate.stores.steps import Steps

Name = TypeVar("Name", bound=Hashable)
Outcome = PersistResult | AckStateError


def persist_all(cursors: Iterable[ManagedCursor], *, now_ms: int) -> list[PersistResult | AckStateError]:
    """Persist many cursors of one store: all that append to their journals do so with one sync.

    Those that begin a journal share the syncs of its steps: four for each 256 of them, in a store that writes together.

    Args:
        cursors: They share a store; each comes once.
        now_ms: The present.

    Returns:
        For each, in order, the result, or the error that its own `persist` would have raised: one cursor that fails
        does not keep the others from being persisted.

    Raises:
        ValueError: The cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    """
    persisters = [cursor._persister for cursor in cursors]
    outcomes = execute(persisters, lambda each: each.begin(now_ms=now_ms))
    for persister, outcome in zip(persisters, outcomes, strict=True):
        persister.listeners.persisted(outcome)
    return outcomes


def tick_all(cursors: Iterable[tuple[Name, ManagedCursor]], *, now_ms: int) -> dict[Name, Outcome]:
    """Persist those of many cursors that are due, as `ManagedCursor.tick` each, with one sync.

    Returns:
        For each that was due, by its name, the result or the error of its own.

    Raises:
        As `persist_all`.

    Complexity: O(cursors), at less than a microsecond for one that has nothing to persist.
    """
    busy = [each for each in cursors if not each[1]._persister.is_idle]
    due = {name: cursor for name, cursor in busy if cursor._persister.tick(now_ms=now_ms)}
    return dict(zip(due, persist_all(due.values(), now_ms=now_ms), strict=True))


def close_all(cursors: Sequence[ManagedCursor], *, now_ms: int) -> list[AckStateError | None]:
    """Close many cursors of one store, as `ManagedCursor.close` each; their last records share a sync.

    Returns:
        For each, in order, None, or the error of the last persist: that cursor stays open.
    """
    errors: dict[Persister, AckStateError] = {}
    persisters = [cursor._persister for cursor in cursors]
    while remaining := [each for each in persisters if not each.closed and each not in errors]:
        outcomes = execute(remaining, lambda each: each.begin_closing(now_ms=now_ms))
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


def execute(persisters: Sequence[Persister], begin: Callable[[Persister], Round | None]) -> list[Outcome]:
    """Write a round of each cursor: every write of a cursor but a reset goes through here.

    Returns:
        For each, in order, the result, or the error of its own.

    Raises:
        ValueError: The cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    """
    if len(persisters) == 1:
        with persisters[0].writing:
            return _execute(persisters, begin)
    if len(set(persisters)) < len(persisters) or len({id(each.journal.store) for each in persisters}) > 1:
        raise ValueError("cursors that are persisted together must share a store, and each must come once")
    held: list[threading.Lock] = []
    try:
        # In the order of identity, so that two calls at once cannot wait for each other.
        for persister in sorted(persisters, key=id):
            persister.writing.acquire()
            held.append(persister.writing)
        return _execute(persisters, begin)
    finally:
        for writing in held:
            writing.release()


def _execute(persisters: Sequence[Persister], begin: Callable[[Persister], Round | None]) -> list[Outcome]:
    outcomes: dict[Persister, Outcome] = {}
    appends: dict[Persister, Round] = {}
    wholes: dict[Persister, Round] = {}
    try:
        for persister in persisters:
            try:
                new_round = begin(persister)
            except AckStateError as error:
                outcomes[persister] = error
                continue
            if new_round is None:
                outcomes[persister] = persister.nothing_written()
            elif new_round.appends:
                appends[persister] = new_round
            else:
                wholes[persister] = new_round
        if wholes:
            outcomes |= _write({persister: each.write() for persister, each in wholes.items()})
        if appends:
            outcomes |= _append(appends, begin)
    finally:
        # The next persist must not take planned but unwritten acks for written ones.
        for rounds in (wholes, appends):
            for each in rounds.values():
                if each.is_open:
                    each.abandon()
    return [outcomes[persister] for persister in persisters]


def _write(writes: Mapping[Persister, Steps[PersistResult]]) -> dict[Persister, Outcome]:
    """Execute the writes of rounds in lockstep."""
    store, steps = next(iter(writes)).journal.store, [*writes.values()]
    # Group by group, since each begins by encoding a whole state.
    groups = [steps[first : first + GROUP_MAX] for first in range(0, len(steps), GROUP_MAX)]
    return dict(zip(writes, chain.from_iterable(run_all(store, group) for group in groups), strict=True))


def _append(rounds: Mapping[Persister, Round], begin: Callable[[Persister], Round | None]) -> dict[Persister, Outcome]:
    """Append with one sync; each by itself if one of the ledgers is damaged or no longer its cursor's."""
    entries = [each.prepare() for each in rounds.values()]
    persister = next(iter(rounds))
    is_one = len(rounds) == 1
    try:
        persister.journal.store.ledgers.append_all(entries)
    except (LedgerFencedError, LedgerNotFoundError) as error:
        if is_one:
            return {persister: _from(persister.journal.fenced(), error)}
        appends = zip(rounds.items(), entries, strict=True)
        return _write({persister: each.append(*entry) for (persister, each), entry in appends})
    except CorruptStateError as error:
        if is_one:
            return _fallen_back(rounds, _from(persister.journal.unwritable(error), error))
        # It is unknown which entries were appended: each begins a ledger of its own.
        for each in rounds.values():
            each.abandon()
        return _write({persister: _round(persister, begin) for persister in rounds})
    except StoreError as error:
        return _fallen_back(rounds, error)
    return {
        persister: each.commit(persister.journal.appended(*entry))
        for (persister, each), entry in zip(rounds.items(), entries, strict=True)
    }


def _round(persister: Persister, begin: Callable[[Persister], Round | None]) -> Steps[PersistResult]:
    new_round = begin(persister)
    assert new_round is None or not new_round.appends, "a ledger whose end is unknown is not appended to"
    return persister.nothing_written() if new_round is None else (yield from new_round.write())


def _fallen_back(rounds: Mapping[Persister, Round], error: AckStateError) -> dict[Persister, Outcome]:
    """Write each round to the metadata store; each that fails has an error of its own, with its outcome."""
    is_one = len(rounds) == 1
    return _write({persister: each.fall_back(error if is_one else copy(error)) for persister, each in rounds.items()})


def _from(error: AckStateError, cause: AckStateError) -> AckStateError:
    error.__cause__ = cause
    return error
