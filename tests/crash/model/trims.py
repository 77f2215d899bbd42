"""The events by which a log loses ledgers: trims, of those that every subscription has acked durably; and disasters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.store import StoreError
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic.retention import Retention, trim_log
from crash.model.broker_events import crash

if TYPE_CHECKING:
    from crash.model.simulated_subscription import SimulatedSubscription
    from crash.model.simulation import BrokerSimulation


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


def lose_ledger(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """A ledger below the last message is gone, empty or shorter when the broker starts again after a crash.

    Its messages no longer exist: no number counts them, and all others are acked or sent as before.
    """
    if not simulation.settings.crash_weight:
        return
    crash(simulation, side)  # From here on nothing is known but the disk.
    ledgers, numbered = simulation.message_log.ledgers, simulation.log
    below = ledgers.ledgers_between(-1, ledgers.last_confirmed.ledger_id)
    if not below:
        return
    ledger_id, kind = simulation.random.choice(below), simulation.random.choice(("gone", "empty", "shorter"))
    left = simulation.random.randrange(ledgers.entry_count(ledger_id) + 1) if kind == "shorter" else 0
    simulation.lose_entries(ledger_id, left, is_gone=kind == "gone")
    simulation.note(f"ledger {ledger_id} is {kind}, {left} entries are left")
    simulation.counts["lost_ledgers"] += 1
    simulation.open_broker()
    for each in simulation.sides:
        each.crash_and_recover()
        _check_backlog(each, len(numbered) - len(each.model.acked))


def _check_backlog(side: SimulatedSubscription, expected: int) -> None:
    found = f"after a ledger was lost the backlog is {side.cursor.backlog}, {expected} messages are unacked"
    hold(Promise.I4, side.cursor.backlog == expected, found)


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
