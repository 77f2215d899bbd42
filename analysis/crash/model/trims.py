"""The event of a trim: the log loses the ledgers that every subscription has acked durably, and no other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.crash.model.broker_events import crash
from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.store import StoreError
from ackstate.cursor.stores.memory import Fault, FaultKind
from ackstate.cursor.topic.retention import Retention, trim_log

if TYPE_CHECKING:
    from ackstate.analysis.crash.model.simulated_subscription import SimulatedSubscription
    from ackstate.analysis.crash.model.simulation import BrokerSimulation


_KINDS = (FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.FULL)


def trim(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Trim the log; if a write of the trim fails, the broker dies, and its log may have been trimmed.

    Raises:
        PromiseBrokenError: A message is gone that a subscription has not acked durably, or a ledger stayed that none
            needs.
    """
    log, numbered = simulation.message_log, simulation.log
    contents = [each.written.find(log.ledgers).recovered.content for each in simulation.sides]
    acked = set.intersection(*map(numbered.held_by, contents), *(each.model.acked for each in simulation.sides))
    simulation.note("trim")
    try:
        count = _trim(simulation)
    except StoreError as error:
        simulation.note(f"-> {error}")
        simulation.counts["failed_trims"] += 1
        crash(simulation, side)
    else:
        simulation.counts["trimmed_ledgers"] += count
        if all(each.is_certain for each in simulation.sides):
            _check_rest(simulation, acked)
    ledgers = simulation.message_log.ledgers
    lost = [number for number, each in enumerate(numbered.positions) if number not in acked and each not in ledgers]
    hold(Promise.I12, not lost, f"trimmed, and not acked durably by all: {numbered.text(lost)}")


def _trim(simulation: BrokerSimulation) -> int:
    """Trim, with or without a fault at one of the writes, and return how many ledgers left the log."""
    store, random = simulation.log_store, simulation.random
    if simulation.settings.fault_share and random.random() < 0.4:
        ahead, kind = random.randrange(4), random.choice(_KINDS)
        simulation.note(f"[{kind.name} at write {ahead} of the trim]")
        store.inject(Fault(store.mutation_count + ahead, kind))
    log, numbered = simulation.message_log, simulation.log
    cursors = {each.name: each.cursor for each in simulation.sides}
    try:
        return trim_log(log, Retention(), cursors, now_ms=simulation.now_ms, stored={})
    finally:
        store.forget_faults()
        numbered.trimmed_count = max(numbered.trimmed_count, numbered.count_up_to(log.ledgers.first_position))


def _check_rest(simulation: BrokerSimulation, acked: set[int]) -> None:
    """Check that a subscription needs the first ledger, unless it is the last one."""
    ledgers, numbered = simulation.message_log.ledgers, simulation.log
    lowest = ledgers.first_ledger_id
    inside = {number for number, position in enumerate(numbered.positions) if position.ledger_id == lowest}
    is_needed = lowest == ledgers.current_ledger_id or not inside <= acked
    hold(Promise.I11, is_needed, f"a trim left ledger {lowest}, which every subscription has acked durably")
