"""The event that deletes a subscription and creates it again, while the owner of the deleted one lives on."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, cast, final

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.journal.deletion import delete_subscription
from ackstate.cursor.journal.journal import cursor_owner
from ackstate.cursor.results import RecoverySource
from ackstate.cursor.store import StoreError
from ackstate.errors import CursorFencedError
from ackstate.stores.memory import MemoryStore
from crash.model.earlier_owner import EarlierOwner

if TYPE_CHECKING:
    from ackstate.cursor.store import Store
    from crash.model.simulated_subscription import SimulatedSubscription
    from crash.model.simulation import BrokerSimulation


def delete(simulation: BrokerSimulation, side: SimulatedSubscription, number: int | None = None) -> None:
    """Delete a subscription, and create it again at some entry.

    A deletion that fails has happened or not, and the next open finds out; its owner writes meanwhile.
    """
    if not simulation.log.kept:
        return
    number = simulation.random.choice(simulation.log.kept) if number is None else number
    simulation.note("delete, and create at", [number])
    _close_parts(side)
    is_deleted = False
    side.is_writing, side.rival = True, cast("EarlierOwner", _Owner(side))
    try:
        delete_subscription(cast("Store", simulation.cursor_store), topic="t", subscription=side.name)
        is_deleted = True
    except StoreError as error:
        simulation.excuse(error, side)
    finally:
        side.is_writing, side.rival = False, None
    if is_deleted:
        _check_fenced(side)
        _check_nothing_left(side)
    owner = EarlierOwner(side, race_count=0)
    side.is_certain, side.start = is_deleted, simulation.log.positions[number]
    side.open()
    if is_deleted or side.cursor.recovery_report.source is RecoverySource.NEW:
        hold(Promise.I17, side.cursor.recovery_report.source is RecoverySource.NEW, "it opens a deleted subscription")
        side.model.recreate(number)
        side.judge(None)
        hold(Promise.I17, not side.cursor.view.batch, "a new subscription has partly acked batches")
        simulation.counts["deletions"] += 1
    else:
        side.judge(None)
    side.earlier = owner
    owner.go_on(side)


def _close_parts(side: SimulatedSubscription) -> None:
    """Close everything of a subscription but its cursor, as if its owner were another broker."""
    delayed = side.subscription._messages.delayed
    delayed.clear()
    delayed.close()
    side.gate.close()


def _check_fenced(side: SimulatedSubscription) -> None:
    """Check that the owner of the deleted subscription cannot write, not even a whole state in a new ledger."""
    side.store.forget_faults()
    try:
        side.cursor.reset(side.simulation.log.positions[0], now_ms=side.simulation.now_ms)
    except CursorFencedError:
        return
    hold(Promise.I14, False, "the owner of a deleted subscription could write")


def _check_nothing_left(side: SimulatedSubscription) -> None:
    owned = MemoryStore(side.disk).ledgers.owned_by(cursor_owner(side.cursor_path))
    is_recorded = side.cursor_path in side.disk.values
    hold(Promise.I17, not owned and not is_recorded, f"ledgers {owned} are left, and a record: {is_recorded}")


@final
class _Owner:
    """The owner of the subscription that is being deleted: it writes if it can, also a new ledger."""

    def __init__(self, side: SimulatedSubscription) -> None:
        self._is_over = False
        side.cursor.remove_listener(side)
        # As of another broker: its faults are its own, and its writes are not those of this one.
        side.cursor._persister.journal.store = MemoryStore(side.disk)

    def race(self, side: SimulatedSubscription) -> None:
        """Ack and persist once, before the record is replaced for the first or for the second time."""
        if self._is_over or side.simulation.random.random() < 0.5:
            return
        self._is_over = True
        cursor, now_ms = side.cursor, side.simulation.now_ms
        for position in cursor.view.lowest_unacked(1):
            side.model.ack([side.simulation.log.numbers[position]])
            cursor.ack(position, now_ms=now_ms)
        with suppress(CursorFencedError, StoreError):
            cursor.persist(now_ms=now_ms)
