"""Events of a broker: writes, limits, seeks, crashes; each is applied to the real broker and to the model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.journal.format import Format
from ackstate.cursor.managed import ManagedCursor, persist_all
from ackstate.cursor.results import PersistTarget
from ackstate.cursor.store import StoreError
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.stores.memory import FaultKind, MemoryDisk, MemoryStore
from crash.model import client_events
from crash.model.callbacks import Waiter
from crash.model.earlier_owner import EarlierOwner
from crash.model.settings import CONSUMERS, drawn_config, drawn_limits

if TYPE_CHECKING:
    from ackstate.cursor.config import CursorConfig
    from crash.model.simulated_subscription import SimulatedSubscription
    from crash.model.simulation import BrokerSimulation


def persist(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Persist while others use the subscription."""
    simulation.note("persist")
    simulation.interleave([side], lambda: side.cursor.persist(now_ms=simulation.now_ms))


def promote(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Persist young acks, too, while others use the subscription."""
    left = simulation.random.choice((0, 0, 100, 500))
    simulation.note(f"promote until {left} bytes are left")
    simulation.interleave([side], lambda: side.cursor.promote(left, now_ms=simulation.now_ms))


def persist_in_vain(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Persist, and retry held-back and cut-off acks: no write succeeds, and acks move the mark-delete."""
    # Acks to be displaced by a whole state count as lost even if no ledger was created for it; the sets do not model
    # that.
    if not simulation.settings.fault_share or (side.config.format is Format.PULSAR and side.is_limited):
        return
    client_events.publish(simulation, side, 5)
    client_events.dispatch(simulation, side, count=5)
    client_events.ack_some(simulation, side, count=3)
    side.cursor.persist(now_ms=simulation.now_ms)
    client_events.ack_some(simulation, side, count=1)
    before, write = simulation.meanwhile, simulation.random.choice((persist, promote))
    if write is persist:
        wait(simulation, side)
    kinds = FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.FULL
    simulation.script_faults(side, simulation.random.choice(kinds), count=6)
    simulation.meanwhile = client_events.ack_lowest
    try:
        write(simulation, side)
    except StoreError:
        simulation.counts["failed_persists"] += 1
        raise
    finally:
        simulation.meanwhile = before


def tick(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Persist if it is due, while others use the subscription."""
    simulation.note("tick")
    is_over = simulation.now_ms - side.persisted_ms >= side.config.flush_interval_ms
    is_due = is_over and side.cursor.view.is_dirty
    result = simulation.interleave([side], lambda: side.cursor.tick(now_ms=simulation.now_ms))
    has_written = result is not None and result.route is not PersistTarget.NOTHING
    hold(Promise.I15, has_written or not is_due, "the flush interval is over, and the waiting acks were not written")


def persist_together(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Ack entries and persist all subscriptions together, while others use them: new ledgers, then one sync."""
    if len(simulation.sides) == 1:
        persist(simulation, side)
        return
    for _ in range(2):
        for each in simulation.sides:
            client_events.ack_some(simulation, each, count=3)
        _persist_all(simulation)


def _persist_all(simulation: BrokerSimulation) -> None:
    sides = simulation.random.sample(simulation.sides, len(simulation.sides))
    simulation.note(f"persist all: {' '.join(each.name for each in sides)}")
    cursors = [each.cursor for each in sides]
    outcomes = simulation.interleave(sides, lambda: persist_all(cursors, now_ms=simulation.now_ms))
    appended = [
        outcome for outcome in outcomes if getattr(outcome, "route", None) in {PersistTarget.DELTA, PersistTarget.WHOLE}
    ]
    simulation.counts["group_persists"] += len(appended) > 1
    for each, outcome in zip(sides, outcomes, strict=True):
        if isinstance(outcome, StoreError):
            simulation.excuse(outcome, each, *sides)
        elif isinstance(outcome, AckStateError):
            raise outcome


def set_cursor_properties(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Set properties of the cursor."""
    properties = {"number": str(simulation.random.randrange(10))}
    simulation.note(f"cursor properties {properties}")
    is_set = False
    side.is_writing = True  # This write is not a persist.
    try:
        side.cursor.set_cursor_properties(properties)
        is_set = True
    finally:
        side.is_writing = False
        side.model.properties.attach(properties, is_certain=is_set)
        side.forget_attempts()
    hold(Promise.I6, side.written.cursor_properties == properties, "cursor properties that were set are not there")


def go_on_before(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Run an owner from before a crash."""
    simulation.go_on_before()
    if side.earlier is not None:
        side.earlier.go_on(side)


def wait(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Advance the clock."""
    passed_ms = simulation.random.choice((10, 100, 1_000, 3_000))
    simulation.note(f"wait {passed_ms} ms")
    simulation.now_ms += passed_ms


def change_limits(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Change the limits, but not the release ratio, which the checks of needless blocking use."""
    limits = drawn_limits(simulation.random)
    ratio = side.limits.unpersisted_release_ratio
    side.limits = replace(limits, unpersisted_release_ratio=ratio)
    simulation.note(_limits_text(side))
    side.subscription.change_limits(side.limits)
    side.forgive()


def change_broker_limit(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Change the limit shared by all subscriptions."""
    if simulation.broker is not None:
        simulation.broker_max = simulation.random.choice((6, 12, 30))
        simulation.note(f"limit of the broker: {simulation.broker_max} messages")
        simulation.broker.change_limit(simulation.broker_max)


def break_ledgers(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Make ledgers unwritable from now on."""
    if simulation.settings.fault_share:
        simulation.note("ledgers break")
        side.store.break_ledgers()


def mend_ledgers(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Make ledgers writable again."""
    if side.store.has_broken_ledgers:
        simulation.note("ledgers are mended")
        side.store.mend_ledgers()


def crash(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """The whole broker dies and is restarted, sometimes with other settings; it may die again meanwhile."""
    simulation.note("crash")
    is_second = simulation.random.random() < 0.25
    reconfigure(simulation, side)
    simulation.open_broker()
    for each in simulation.sides:
        simulation.crash_count += 1
        rival = EarlierOwner(
            each, race_count=simulation.random.choice((0, 0, *range(simulation.settings.race_count_max + 1)))
        )
        each.earlier = each.earlier if simulation.random.random() < 0.2 else rival
        each.crash_and_recover(simulation.drawn_faults(), rival=rival)
        note_known(simulation, each)
    if is_second:
        _crash_again(simulation)


def note_known(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Add the recovered acks of a subscription to the story."""
    known = sorted(side.model.acked)
    simulation.note(f"{side.name} knows" if known else f"{side.name} has nothing of it", known)


def _crash_again(simulation: BrokerSimulation) -> None:
    simulation.open_broker()
    for each in simulation.sides:
        simulation.crash_count += 1
        acked, parts = set(each.model.acked), dict(each.model.unacked_of_batch)
        # Pulsar's format drops acks beyond its limits.
        gives_up = not each.model.is_durable(acked) or each.model.durable_unacked_of_batch != parts
        each.crash_and_recover()
        is_same = each.model.acked == acked and each.model.unacked_of_batch == parts
        found = f"recovered again it is {simulation.log.text(each.model.acked)}, not {simulation.log.text(acked)}"
        hold(Promise.I5, is_same or gives_up, found)


def reconfigure(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Choose other settings for the next opening of a subscription, if the simulation reconfigures."""
    if not simulation.settings.reconfigures or simulation.random.random() < 0.6:
        return
    side.config, before = drawn_config(simulation.random), side.config
    side.limits = drawn_limits(simulation.random)
    if simulation.random.random() < 0.4:  # below the present number
        side.limits = replace(side.limits, max_unacked_ranges=1 + side.cursor.deleted.range_count // 3)
    if side.config.format is not before.format:
        simulation.note(f"from now on {side.config.format}")
    simulation.note(_limits_text(side))


def _limits_text(side: SimulatedSubscription) -> str:
    limits = side.limits
    return f"limits: {limits.max_unpersisted_ack_record_bytes} bytes, {limits.max_unacked_ranges} ranges"


def reopen(simulation: BrokerSimulation, side: SimulatedSubscription, *, config: CursorConfig | None = None) -> None:
    """Close one subscription gracefully: then everything is durable, except acks beyond a state limit."""
    simulation.note("close")
    try:
        side.subscription.close(now_ms=simulation.now_ms)
    except StoreError:
        side.failed_to_close()
        raise
    side.closed()
    is_limited, acked = side.is_limited, set(side.model.acked)
    reconfigure(simulation, side)
    side.config = config or side.config
    side.open()
    side.judge(None)
    note_known(simulation, side)
    if not is_limited:
        hold(Promise.I2, side.model.acked == acked, "closing lost acks")


def seek(simulation: BrokerSimulation, side: SimulatedSubscription, number: int | None = None) -> None:
    """Reset to some entry: earlier acks do not count after it."""
    if not simulation.log.kept:
        return
    number = simulation.random.choice(simulation.log.kept) if number is None else number
    simulation.note("seek", [number])
    side.is_writing, epoch = True, side.epoch
    try:
        side.subscription.seek(simulation.log.positions[number], now_ms=simulation.now_ms)
    except StoreError:
        side.is_certain = False
        side.model.may_have_restarted(number)
        side.model.properties.reset(is_certain=False)
        side.receipts.check_survivors(side.cursor, side.model)
        side.forget_attempts()
        side.forgive()
        simulation.counts["failed_resets"] += 1
        raise
    finally:
        side.is_writing = False
    side.restarted(number, epoch)


def seek_in_vain(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Reset to some entry while writes fail, before or after they take effect."""
    if simulation.settings.fault_share and simulation.log.kept:
        simulation.script_faults(side, simulation.random.choice((FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER)), count=6)
        seek(simulation, side)


def wait_for_gate(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Add a waiter for the gate to open."""
    waiter = Waiter(simulation.random.choice(CONSUMERS))
    side.waiters.append(waiter)
    side.subscription.when_open(waiter, waiter.consumer)


def open_damaged_copy(simulation: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Check that an unreadable record does not count as absent, and is not changed."""
    copy, path = MemoryDisk(), side.cursor_path
    copy.ledgers, copy.values = dict(side.disk.ledgers), dict(side.disk.values)
    copy.next_ledger_id = side.disk.next_ledger_id
    value, ledger_id = copy.values[path], side.written.cursor_ledger_id
    if ledger_id is None or simulation.random.random() < 0.5:
        cut = simulation.random.randrange(len(value.data))
        copy.values[path] = value._replace(data=value.data[:cut] + b"\xff" * (len(value.data) - cut))
        damage = f"a record damaged from byte {cut} on"
    else:
        damage = "a record whose journal is gone"
        del copy.ledgers[ledger_id]
    simulation.note(f"open a copy: {damage}")
    before = dict(copy.values)
    with suppress(CorruptStateError, UnsupportedVersionError):
        ManagedCursor.open(
            MemoryStore(copy), topic="t", subscription=side.name, ledgers=simulation.message_log.ledgers,
            config=side.config, now_ms=simulation.now_ms,
        )  # fmt: skip
        hold(Promise.I10, False, f"{damage} is read as a state")
    hold(Promise.I10, copy.values == before, "an unreadable value was changed")
