"""What the state of a replay is made of: the classes that are written down by name, and what is made anew of them.

A cursor that a policy needs is kept as it is, with the store in memory that it wrote to. So these tables name what
others have inside; what is missing here is refused by name when a state is written, and a field that one of them gets
or loses needs another `ackstate.analysis.redelivery.checkpoint.VERSION`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ackstate.analysis.redelivery.acked import AckedFold
from ackstate.analysis.redelivery.cursor_replay import CursorReplay
from ackstate.analysis.redelivery.curve_sum import CurveSum, Histogram, Points
from ackstate.analysis.redelivery.fold import LeftOut, RedeliveryFold
from ackstate.analysis.redelivery.gated_replay import GatedReplay
from ackstate.analysis.redelivery.journal_size import JournalSize
from ackstate.analysis.redelivery.last_records import StoreOfLastRecords, _Last
from ackstate.analysis.redelivery.mark_delete import MarkDeleteFold
from ackstate.analysis.redelivery.on_their_way import OnTheirWay
from ackstate.analysis.redelivery.plain_replay import PlainReplay
from ackstate.analysis.redelivery.schedule import Schedule
from ackstate.analysis.redelivery.subscription_replay import (
    NO_EVENTS,
    Costs,
    PolicyCurve,
    RecordedCurve,
    SubscriptionReplay,
    _Life,
)
from ackstate.analysis.redelivery.thinned_curve import ThinnedCurve
from ackstate.analysis.redelivery.waiting_line import Times, TimesKept, WaitingLine
from ackstate.analysis.redelivery.wrong_route import StoreWithoutLedgers
from ackstate.batch_indexes import BatchIndexes
from ackstate.cursor.ack_state import AckState, PersistLimits
from ackstate.cursor.auto_age import AgeChoice, AgeChooser, AutoAge
from ackstate.cursor.dispatch.admission import Admission
from ackstate.cursor.dispatch.deliveries import Deliveries, Sent
from ackstate.cursor.journal import Journal
from ackstate.cursor.journal_format import Format, Repair
from ackstate.cursor.managed import ManagedCursor
from ackstate.cursor.native_format import NativeFormat
from ackstate.cursor.outcome import PersistResult, RecoveryReport, Route, Source
from ackstate.cursor.persister import Persister
from ackstate.cursor.pulsar_format import PulsarFormat
from ackstate.cursor.rate_limiter import MarkDeleteRateLimiter
from ackstate.cursor.shared_holes import FilledCount
from ackstate.cursor.store import PayloadTooLargeError, StoreError, StoreFullError, Versioned
from ackstate.cursor.stores.memory import MemoryDisk, MemoryStore, _Ledger, _MemoryLedgers, _MemoryMetadata, _Session
from ackstate.cursor.undurable import Undurable
from ackstate.cursor.undurable_batches import UndurableBatches, _Before
from ackstate.cursor.young_age import YoungAge
from ackstate.delay.position_set import PositionSet
from ackstate.deleted_ranges import DeletedRanges
from ackstate.delivery_ruler import DeliveryRuler
from ackstate.ledger_map import LedgerMap
from ackstate.limits.gate import DispatchGate
from ackstate.limits.rule_state import RuleState
from ackstate.limits.rules import Accounting, GateLimits, Rule
from ackstate.limits.subscription_rules import ConsumerStates, SubscriptionRules
from ackstate.limits.waiters import Waiters
from ackstate.position import Position
from ackstate.selection import Keep
from ackstate.wire.pulsar import Compression, LimitRule, RangeForm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from enum import Enum
    from typing import Any


@dataclass(slots=True)
class DailyState:
    """A subscription at the end of a day.

    Attributes:
        replay: Under all policies.
        curves: Of each policy, from the begin of the first day on.
    """

    replay: SubscriptionReplay
    curves: list[ThinnedCurve]


@dataclass(slots=True)
class BrokerState:
    """All subscriptions at the end of a day.

    Attributes:
        curves: Of each policy that of all together, from the begin of the first day on.
        died_ms: When processes died, rising: the first times.
        death_count: How many such times there were.
        days_digest: SHA-256 over the fingerprints of all days, in their order.
    """

    curves: list[ThinnedCurve]
    died_ms: list[int]
    death_count: int
    days_digest: str


_REPLAYS = (
    AckedFold, BrokerState, CursorReplay, CurveSum, DailyState, GatedReplay, Histogram, JournalSize, LeftOut,
    MarkDeleteFold, OnTheirWay, PlainReplay, PolicyCurve, RecordedCurve, RedeliveryFold, Schedule, StoreWithoutLedgers,
    SubscriptionReplay, ThinnedCurve, TimesKept, WaitingLine, _Life,
)  # fmt: skip
_CURSORS = (
    AckState, AgeChoice, AgeChooser, AutoAge, BatchIndexes, DeletedRanges, DeliveryRuler, FilledCount, Journal,
    LedgerMap, ManagedCursor, MarkDeleteRateLimiter, NativeFormat, Persister, PulsarFormat, RecoveryReport, Undurable,
    UndurableBatches, YoungAge,
)  # fmt: skip
_STORES = (MemoryDisk, MemoryStore, StoreOfLastRecords, _Last, _Ledger, _MemoryLedgers, _MemoryMetadata, _Session)
_GATES = (
    Admission, ConsumerStates, Deliveries, DispatchGate, GateLimits, PositionSet, RuleState, SubscriptionRules, Waiters,
)  # fmt: skip


def _by_name(classes: tuple[type[Any], ...]) -> Mapping[str, type[Any]]:
    named = {each.__name__: each for each in classes}
    assert len(named) == len(classes), "two of them have the same name"
    return named


OBJECTS: Mapping[str, type[Any]] = _by_name((*_REPLAYS, *_CURSORS, *_STORES, *_GATES))
"""By name, what is made without its constructor, and given its fields."""

TUPLES: Mapping[str, type[Any]] = _by_name(
    (Costs, PersistLimits, PersistResult, Points, Position, Sent, Times, Versioned, _Before)
)
"""By name, what is made of its values."""

ENUMS: Mapping[str, type[Enum]] = _by_name(
    (Accounting, Compression, Format, Keep, LimitRule, RangeForm, Repair, Route, Rule, Source)
)
"""By name, of which members are kept."""

ERRORS: Mapping[str, type[Exception]] = _by_name((PayloadTooLargeError, StoreError, StoreFullError))
"""By name, what went wrong last."""

LOCKS: Mapping[str, Callable[[], Any]] = {"lock": threading.Lock, "RLock": threading.RLock, "object": object}
"""By name of its type, what has no state: which is the same as which is all that counts."""

# Who is told of something is no part of a state: nobody waits at a gate between two chunks.
_NOT_KEPT = {
    "NativeFormat": {"_resolve"}, "Waiters": {"_held", "_numbers", "_waiting"}, "ConsumerStates": {"_when_opened"},
    "SubscriptionReplay": {"latest_of_restart"},
}  # fmt: skip


def fields_of(value: object) -> Iterator[tuple[str, Any]]:
    """Yield the fields of an object that are kept, with what is in them."""
    left_out = _NOT_KEPT.get(type(value).__name__, ())
    slots = [name for each in type(value).__mro__ for name in each.__dict__.get("__slots__", ())]
    for name in (*slots, *getattr(value, "__dict__", ())):
        if name not in left_out and hasattr(value, name):
            yield name, getattr(value, name)


def complete(value: object) -> None:
    """Make anew what is not kept of an object, all of whose fields are there."""
    match value:
        case NativeFormat():
            NativeFormat.__init__(value)
        case SubscriptionReplay():
            value.latest_of_restart = NO_EVENTS
        case Waiters():
            Waiters.__init__(value)
        case DispatchGate():
            value._rules.consumers._when_opened = value._waiters.release
