"""Many cursors of one store persisted with one sync."""

from __future__ import annotations

from contextlib import ExitStack
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from ackstate.cursor.store import LedgerFencedError, LedgerNotFoundError, StoreError
from ackstate.errors import AckStateError, CorruptStateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ackstate.cursor.persist.persister import Persister, Plan
    from ackstate.cursor.results import PersistResult

_Outcome = TypeVar("_Outcome")


def persist_together(persisters: Iterable[Persister], *, now_ms: int) -> list[PersistResult | AckStateError]:
    """Persist many cursors of one store: all that append to their journals do so with one sync.

    Args:
        persisters: Of cursors that share a store, each once.
        now_ms: The present.

    Returns:
        For each, in order, the result, or the error that its own persist would have raised.

    Raises:
        ValueError: The cursors are not of one store, or one comes twice; or a property of one does not fit a record.
    """
    ordered = list(persisters)
    if len(set(ordered)) < len(ordered) or len({id(persister.journal.store) for persister in ordered}) > 1:
        raise ValueError("cursors that are persisted together share a store, and each comes once")
    with ExitStack() as held:
        # In the order of identity, so that two calls at once cannot wait for each other.
        for persister in sorted(ordered, key=id):
            held.enter_context(persister.writing)
        outcomes: dict[Persister, PersistResult | AckStateError] = {}
        appends: dict[Persister, Plan] = {}
        try:
            for persister in ordered:
                plan = _or_error(partial(_plan, persister, now_ms=now_ms))
                if isinstance(plan, AckStateError):
                    outcomes[persister] = plan
                elif plan is not None and plan.appends:
                    appends[persister] = plan
                else:
                    outcomes[persister] = _or_error(partial(_carry_out, persister, plan, now_ms=now_ms))
            outcomes |= _append_together(appends, now_ms=now_ms)
        except BaseException:
            # What was planned and not written must not count as written by the next persist.
            for persister in appends:
                persister.abandon()
            raise
    return [outcomes[persister] for persister in ordered]


def _plan(persister: Persister, *, now_ms: int) -> Plan | None:
    return persister.plan(persister.frontier(now_ms=now_ms), now_ms=now_ms)


def _persist(persister: Persister, *, now_ms: int) -> PersistResult:
    return persister.persist(persister.frontier(now_ms=now_ms), now_ms=now_ms)


def _carry_out(persister: Persister, plan: Plan | None, *, now_ms: int) -> PersistResult:
    return persister.carry_out(plan, persister.frontier(now_ms=now_ms), now_ms=now_ms)


def _fall_back(persister: Persister, error: AckStateError, *, now_ms: int) -> PersistResult:
    return persister.fall_back(error, persister.frontier(now_ms=now_ms), now_ms=now_ms)


def _or_error(act: Callable[[], _Outcome]) -> _Outcome | AckStateError:
    try:
        return act()
    except AckStateError as error:
        return error


def _append_together(appends: dict[Persister, Plan], *, now_ms: int) -> dict[Persister, PersistResult | AckStateError]:
    """Append all with one sync; one by one if one of the ledgers is damaged or no longer its cursor's."""
    if not appends:
        return {}
    prepared = {persister: persister.journal.prepare(plan.content) for persister, plan in appends.items()}
    store = next(iter(appends)).journal.store
    try:
        store.ledgers.append_all(list(prepared.values()))
    except (LedgerFencedError, LedgerNotFoundError):
        for persister, (ledger_id, _) in prepared.items():
            persister.journal.not_appended(ledger_id)
        again = {persister: partial(_carry_out, persister, plan, now_ms=now_ms) for persister, plan in appends.items()}
        return {persister: _or_error(act) for persister, act in again.items()}
    except CorruptStateError:
        # Each with a ledger of its own that is new: what was appended is not known for certain.
        for persister in appends:
            persister.abandon()
        return {persister: _or_error(partial(_persist, persister, now_ms=now_ms)) for persister in appends}
    except StoreError as error:
        # Each has an error of its own, which says what became of its second try.
        return {
            persister: _or_error(partial(_fall_back, persister, copy(error), now_ms=now_ms)) for persister in appends
        }
    return {
        persister: persister.commit(plan, persister.journal.appended(*prepared[persister]), now_ms=now_ms)
        for persister, plan in appends.items()
    }
