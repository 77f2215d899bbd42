"""Events of a broker: writes, limits, seeks, crashes; each is applied to the real broker and to the model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ackstate.analysis.crash.model import client_events
from ackstate.analysis.crash.model.earlier_owner import EarlierOwner
from ackstate.analysis.crash.model.settings import CONSUMERS, drawn_config, drawn_limits
from ackstate.analysis.crash.model.simulated_subscription import Waiter
from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.journal.format import Format
from ackstate.cursor.managed import ManagedCursor, persist_all
from ackstate.cursor.results import PersistTarget
from ackstate.cursor.store import StoreError
from ackstate.cursor.stores.memory import FaultKind, MemoryDisk, MemoryStore
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError

if TYPE_CHECKING:
    from ackstate.analysis.crash.model.simulated_subscription import SimulatedSubscription
    from ackstate.analysis.crash.model.simulation import BrokerSimulation
    from ackstate.cursor.config import CursorConfig


def persist(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Persist while others use the subscription."""
    schedule.note("persist")
    schedule.interleave([side], lambda: side.cursor.persist(now_ms=schedule.now_ms))


def promote(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Persist young acks, too, while others use the subscription."""
    left = schedule.random.choice((0, 0, 100, 500))
    schedule.note(f"promote until {left} bytes are left")
    schedule.interleave([side], lambda: side.cursor.promote(left, now_ms=schedule.now_ms))


def persist_in_vain(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Persist, and retry held-back and cut-off acks: no write succeeds, and acks move the mark-delete."""
    # Acks to be displaced by a whole state count as lost even if no ledger was created for it; the sets do not model
    # that.
    if not schedule.settings.fault_share or (side.config.format is Format.PULSAR and side.is_limited):
        return
    client_events.publish(schedule, side, 5)
    client_events.dispatch(schedule, side, count=5)
    client_events.ack_some(schedule, side, count=3)
    side.cursor.persist(now_ms=schedule.now_ms)
    client_events.ack_some(schedule, side, count=1)
    before, write = schedule.meanwhile, schedule.random.choice((persist, promote))
    if write is persist:
        wait(schedule, side)
    kinds = FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.FULL
    schedule.script_faults(side, schedule.random.choice(kinds), count=6)
    schedule.meanwhile = client_events.ack_lowest
    try:
        write(schedule, side)
    except StoreError:
        schedule.counts["failed_persists"] += 1
        raise
    finally:
        schedule.meanwhile = before


def tick(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Persist if it is due, while others use the subscription."""
    schedule.note("tick")
    is_over = schedule.now_ms - side.persisted_ms >= side.config.flush_interval_ms
    is_due = is_over and side.cursor.view.is_dirty
    result = schedule.interleave([side], lambda: side.cursor.tick(now_ms=schedule.now_ms))
    has_written = result is not None and result.route is not PersistTarget.NOTHING
    hold(Promise.I15, has_written or not is_due, "the flush interval is over, and what waits was not written")


def persist_together(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Ack entries and persist all subscriptions together, while others use them: new ledgers, then one sync."""
    if len(schedule.sides) == 1:
        persist(schedule, side)
        return
    for _ in range(2):
        for each in schedule.sides:
            client_events.ack_some(schedule, each, count=3)
        _persist_all(schedule)


def _persist_all(schedule: BrokerSimulation) -> None:
    sides = schedule.random.sample(schedule.sides, len(schedule.sides))
    schedule.note(f"persist all: {' '.join(each.name for each in sides)}")
    cursors = [each.cursor for each in sides]
    outcomes = schedule.interleave(sides, lambda: persist_all(cursors, now_ms=schedule.now_ms))
    appended = [
        outcome for outcome in outcomes if getattr(outcome, "route", None) in {PersistTarget.DELTA, PersistTarget.WHOLE}
    ]
    schedule.counts["group_persists"] += len(appended) > 1
    for each, outcome in zip(sides, outcomes, strict=True):
        if isinstance(outcome, StoreError):
            schedule.excuse(outcome, each, *sides)
        elif isinstance(outcome, AckStateError):
            raise outcome


def set_cursor_properties(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Set properties of the cursor."""
    properties = {"number": str(schedule.random.randrange(10))}
    schedule.note(f"cursor properties {properties}")
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


def go_on_before(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Run an owner from before a crash."""
    schedule.go_on_before()
    if side.earlier is not None:
        side.earlier.go_on(side)


def wait(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:  # noqa: ARG001 - as every event
    """Let time pass."""
    passed_ms = schedule.random.choice((10, 100, 1_000, 3_000))
    schedule.note(f"wait {passed_ms} ms")
    schedule.now_ms += passed_ms


def change_limits(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Change the limits, but not the release ratio, which the checks of needless blocking use."""
    limits = drawn_limits(schedule.random)
    ratio = side.limits.unpersisted_release_ratio
    side.limits = replace(limits, unpersisted_release_ratio=ratio, accounting=side.limits.accounting)
    schedule.note(_limits_text(side))
    side.subscription.change_limits(side.limits)
    side.forgive()


def change_broker_limit(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:  # noqa: ARG001 - as every event
    """Change the limit shared by all subscriptions."""
    if schedule.broker is not None:
        schedule.broker_max = schedule.random.choice((6, 12, 30))
        schedule.note(f"limit of the broker: {schedule.broker_max} messages")
        schedule.broker.change_limit(schedule.broker_max)


def break_ledgers(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Make ledgers unwritable from now on."""
    if schedule.settings.fault_share:
        schedule.note("ledgers break")
        side.store.break_ledgers()


def mend_ledgers(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Make ledgers writable again."""
    if side.store.has_broken_ledgers:
        schedule.note("ledgers are mended")
        side.store.mend_ledgers()


def crash(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """The whole broker dies and is restarted, sometimes with other settings; it may die again meanwhile."""
    schedule.note("crash")
    is_second = schedule.random.random() < 0.25
    reconfigure(schedule, side)
    schedule.open_broker()
    for each in schedule.sides:
        schedule.crash_count += 1
        rival = EarlierOwner(
            each, race_count=schedule.random.choice((0, 0, *range(schedule.settings.race_count_max + 1)))
        )
        each.earlier = each.earlier if schedule.random.random() < 0.2 else rival
        each.crash_and_recover(schedule.drawn_faults(), rival=rival)
        note_known(schedule, each)
    if is_second:
        _crash_again(schedule)


def note_known(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Add the recovered acks of a subscription to the story."""
    known = sorted(side.model.acked)
    schedule.note(f"{side.name} knows" if known else f"{side.name} knows nothing", known)


def _crash_again(schedule: BrokerSimulation) -> None:
    schedule.open_broker()
    for each in schedule.sides:
        schedule.crash_count += 1
        acked, parts = set(each.model.acked), dict(each.model.unacked_of_batch)
        # Pulsar's format drops acks beyond its limits.
        gives_up = not each.model.is_durable(acked) or each.model.durable_unacked_of_batch != parts
        each.crash_and_recover()
        is_same = each.model.acked == acked and each.model.unacked_of_batch == parts
        found = f"recovered again it is {schedule.log.text(each.model.acked)}, not {schedule.log.text(acked)}"
        hold(Promise.I5, is_same or gives_up, found)


def reconfigure(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Choose other settings for the next opening of a subscription, if the schedule reconfigures."""
    if not schedule.settings.reconfigures or schedule.random.random() < 0.6:
        return
    side.config, before = drawn_config(schedule.random), side.config
    side.limits = drawn_limits(schedule.random)
    if schedule.random.random() < 0.4:  # below the present number
        side.limits = replace(side.limits, max_unacked_ranges=1 + side.cursor.deleted.range_count // 3)
    if side.config.format is not before.format:
        schedule.note(f"from now on {side.config.format}")
    schedule.note(_limits_text(side))


def _limits_text(side: SimulatedSubscription) -> str:
    limits = side.limits
    return f"limits: {limits.max_unpersisted_ack_record_bytes} bytes, {limits.max_unacked_ranges} ranges"


def reopen(schedule: BrokerSimulation, side: SimulatedSubscription, *, config: CursorConfig | None = None) -> None:
    """Close one subscription gracefully: then everything is durable, except acks beyond a state limit."""
    schedule.note("close")
    try:
        side.subscription.close(now_ms=schedule.now_ms)
    except StoreError:
        side.failed_to_close()
        raise
    side.closed()
    is_limited, acked = side.is_limited, set(side.model.acked)
    reconfigure(schedule, side)
    side.config = config or side.config
    side.open()
    side.judge(None)
    note_known(schedule, side)
    if not is_limited:
        hold(Promise.I2, side.model.acked == acked, "closing lost acks")


def seek(schedule: BrokerSimulation, side: SimulatedSubscription, number: int | None = None) -> None:
    """Reset to some entry: earlier acks do not count after it."""
    if not len(schedule.log):
        return
    number = schedule.random.randrange(len(schedule.log)) if number is None else number
    schedule.note("seek", [number])
    side.is_writing, epoch = True, side.epoch
    try:
        side.subscription.seek(schedule.log.positions[number], now_ms=schedule.now_ms)
    except StoreError:
        side.is_certain = False
        side.model.may_have_begun_anew(number)
        side.model.properties.reset(is_certain=False)
        side.receipts.check_survivors(side.cursor, side.model)
        side.forget_attempts()
        side.forgive()
        schedule.counts["failed_resets"] += 1
        raise
    finally:
        side.is_writing = False
    side.begun_anew(number, epoch)


def seek_in_vain(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Reset to some entry while writes fail, before or after they take effect."""
    if schedule.settings.fault_share and len(schedule.log):
        schedule.script_faults(side, schedule.random.choice((FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER)), count=6)
        seek(schedule, side)


def wait_for_gate(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Add a waiter for the gate to open."""
    waiter = Waiter(schedule.random.choice(CONSUMERS))
    side.waiters.append(waiter)
    side.subscription.when_open(waiter, waiter.consumer)


def open_damaged_copy(schedule: BrokerSimulation, side: SimulatedSubscription) -> None:
    """Check that an unreadable record does not count as absent, and is not changed."""
    copy, path = MemoryDisk(), side.cursor_path
    copy.ledgers, copy.values = dict(side.disk.ledgers), dict(side.disk.values)
    copy.next_ledger_id = side.disk.next_ledger_id
    value, ledger_id = copy.values[path], side.written.cursor_ledger_id
    if ledger_id is None or schedule.random.random() < 0.5:
        cut = schedule.random.randrange(len(value.data))
        copy.values[path] = value._replace(data=value.data[:cut] + b"\xff" * (len(value.data) - cut))
        damage = f"a record damaged from byte {cut} on"
    else:
        damage = "a record whose journal is gone"
        del copy.ledgers[ledger_id]
    schedule.note(f"open a copy: {damage}")
    before = dict(copy.values)
    with suppress(CorruptStateError, UnsupportedVersionError):
        ManagedCursor.open(
            MemoryStore(copy), topic="t", subscription=side.name, ledgers=schedule.message_log.ledgers,
            config=side.config, now_ms=schedule.now_ms,
        )  # fmt: skip
        hold(Promise.I10, False, f"{damage} is read as a state")
    hold(Promise.I10, copy.values == before, "what cannot be read was changed")
