"""The comparisons in the checks of the suite, each with the promise that its failure names."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVarTuple

from ackstate.stores.base import LedgerFencedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ackstate.stores.base import Store

_Args = TypeVarTuple("_Args")


def expect(promise: str, found: object, wanted: object) -> None:
    """Raise `AssertionError` unless two values are equal."""
    # No assert statement: the suite must work under -O too.
    if found != wanted:
        raise AssertionError(f"{promise}: expected {_short(wanted)}, got {_short(found)}")


def expect_refusal(promise: str, error: type[Exception], call: Callable[[*_Args], object], *args: *_Args) -> None:
    """Raise `AssertionError` unless a call raises this error."""
    try:
        result = call(*args)
    except error:
        return
    except Exception as other:
        raise AssertionError(f"{promise}: expected {error.__name__}, got {other!r}") from other
    raise AssertionError(f"{promise}: expected {error.__name__}, got the result {_short(result)}")


def expect_fenced(store: Store, ledger_id: int) -> None:
    """Raise `AssertionError` unless a ledger refuses appends and stays unchanged."""
    last = store.ledgers.last(ledger_id)
    ledgers = store.ledgers
    for entries in ([b"late"], []):
        expect_refusal("append to a fenced ledger", LedgerFencedError, ledgers.append, ledger_id, entries)
    outcomes = ledgers.append_many([(ledger_id, [b"late"])])
    expect("append_many to a fenced ledger", [type(each) for each in outcomes], [LedgerFencedError])
    expect("last of a fenced ledger after refused appends", store.ledgers.last(ledger_id), last)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
