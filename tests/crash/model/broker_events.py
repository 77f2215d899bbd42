"""Events of a broker: writes, limits, seeks, crashes; each is applied to the real broker and to the model."""

from contextlib import suppress
from dataclasses import replace

from serial import SerialExecutor

from ackstate.analysis.crash.oracle import Promise
from ackstate.cursor.cursor import ManagedCursor, persist_all
from ackstate.cursor.formats import Format
from ackstate.cursor.journal import cursor_owner, delete_subscription
from ackstate.cursor.results import PersistTarget, RecoverySource
from ackstate.errors import AckStateError, CorruptStateError, CursorFencedError, UnsupportedVersionError
from ackstate.stores.base import StoreError
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk, MemoryStore
from ackstate.topic.retention import Retention, trim_log
from crash.model import client_events
from crash.model.earlier import EarlierOwner
from crash.model.settings import CONSUMERS, drawn_config, drawn_limits
from crash.model.simulated_subscription import Waiter
from crash.promises import hold


def persist(simulation, side):
    simulation.note("persist")
    simulation.interleave([side], lambda: side.cursor.persist(now_ms=simulation.now_ms))


def promote(simulation, side):
    left = simulation.random.choice((0, 0, 100, 500))
    simulation.note(f"promote until {left} bytes are left")
    simulation.interleave([side], lambda: side.cursor.promote(left, now_ms=simulation.now_ms))


def persist_in_vain(simulation, side):
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


def tick(simulation, side):
    simulation.note("tick")
    is_over = simulation.now_ms - side.persisted_ms >= side.config.flush_interval_ms
    is_due = is_over and side.cursor.view.is_dirty
    result = simulation.interleave([side], lambda: side.cursor.tick(now_ms=simulation.now_ms))
    has_written = result is not None and result.route is not PersistTarget.NOTHING
    hold(Promise.I15, has_written or not is_due, "the flush interval is over, and the waiting acks were not written")


def persist_together(simulation, side):
    """Ack entries and persist all subscriptions together, while others use them: new ledgers, then one sync."""
    if len(simulation.sides) == 1:
        persist(simulation, side)
        return
    for _ in range(2):
        for each in simulation.sides:
            client_events.ack_some(simulation, each, count=3)
        _persist_all(simulation)


def _persist_all(simulation):
    sides = simulation.random.sample(simulation.sides, len(simulation.sides))
    simulation.note(f"persist all: {' '.join(each.name for each in sides)}")
    cursors = [each.cursor for each in sides]
    outcomes = simulation.interleave(
        sides, lambda: persist_all(cursors, now_ms=simulation.now_ms, executor=SerialExecutor())
    )
    appended = [
        outcome for outcome in outcomes if getattr(outcome, "route", None) in {PersistTarget.DELTA, PersistTarget.WHOLE}
    ]
    simulation.counts["group_persists"] += len(appended) > 1
    for each, outcome in zip(sides, outcomes, strict=True):
        if isinstance(outcome, StoreError):
            simulation.excuse(outcome, each, *sides)
        elif isinstance(outcome, AckStateError):
            raise outcome


def set_cursor_properties(simulation, side):
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


def go_on_before(simulation, side):
    """Run an owner from before a crash."""
    simulation.go_on_before()
    if side.earlier is not None:
        side.earlier.go_on(side)


def wait(simulation, side):
    passed_ms = simulation.random.choice((10, 100, 1_000, 3_000))
    simulation.note(f"wait {passed_ms} ms")
    simulation.now_ms += passed_ms


def change_limits(simulation, side):
    """Change the limits, but not the release ratio, which the checks of needless blocking use."""
    limits = drawn_limits(simulation.random)
    ratio = side.limits.unpersisted_release_ratio
    side.limits = replace(limits, unpersisted_release_ratio=ratio)
    simulation.note(_limits_text(side))
    side.subscription.change_limits(side.limits)
    side.forgive()


def change_broker_limit(simulation, side):
    if simulation.broker is not None:
        simulation.broker_max = simulation.random.choice((6, 12, 30))
        simulation.note(f"limit of the broker: {simulation.broker_max} messages")
        simulation.broker.change_limit(simulation.broker_max)


def break_ledgers(simulation, side):
    if simulation.settings.fault_share:
        simulation.note("ledgers break")
        side.store.break_ledgers()


def mend_ledgers(simulation, side):
    """Make ledgers writable again."""
    if side.store.has_broken_ledgers:
        simulation.note("ledgers are mended")
        side.store.mend_ledgers()


def crash(simulation, side):
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


def note_known(simulation, side):
    known = sorted(side.model.acked)
    simulation.note(f"{side.name} knows" if known else f"{side.name} has nothing of it", known)


def _crash_again(simulation):
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


def reconfigure(simulation, side):
    if not simulation.settings.reconfigures or simulation.random.random() < 0.6:
        return
    side.config, before = drawn_config(simulation.random), side.config
    side.limits = drawn_limits(simulation.random)
    if simulation.random.random() < 0.4:  # below the present number
        side.limits = replace(side.limits, max_unacked_ranges=1 + side.cursor.deleted.range_count // 3)
    if side.config.format is not before.format:
        simulation.note(f"from now on {side.config.format}")
    simulation.note(_limits_text(side))


def _limits_text(side):
    limits = side.limits
    return f"limits: {limits.max_unpersisted_ack_record_bytes} bytes, {limits.max_unacked_ranges} ranges"


def reopen(simulation, side, *, config=None):
    """Close one subscription gracefully: then everything is durable, except acks beyond a state limit."""
    simulation.note("close")
    side.model.delivery_counts |= {number: (side.model.sent_count[number], 0) for number in side.model.in_flight}
    try:
        side.subscription.close(now_ms=simulation.now_ms)
    except StoreError:
        side.may_have_written()
        raise
    side.wrote(side.read_disk())
    is_limited, acked = side.is_limited, set(side.model.acked)
    keeps_counts = side.config.format is Format.NATIVE and not is_limited
    reconfigure(simulation, side)
    side.config = config or side.config
    side.open()
    side.judge(None, keeps_counts=keeps_counts)
    note_known(simulation, side)
    if not is_limited:
        hold(Promise.I2, side.model.acked == acked, "closing lost acks")


def seek(simulation, side, number=None):
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


def seek_in_vain(simulation, side):
    """Reset to some entry while writes fail, before or after they take effect."""
    if simulation.settings.fault_share and simulation.log.kept:
        simulation.script_faults(side, simulation.random.choice((FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER)), count=6)
        seek(simulation, side)


def wait_for_gate(simulation, side):
    waiter = Waiter(simulation.random.choice(CONSUMERS))
    side.waiters.append(waiter)
    side.subscription.when_open(waiter, waiter.consumer)


def open_damaged_copy(simulation, side):
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


_KINDS = (FaultKind.FAIL_BEFORE, FaultKind.FAIL_AFTER, FaultKind.FULL)


def trim(simulation, side):
    """Trim the log; if a write of the trim fails, the broker dies, and its log may have been trimmed."""
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


def lose_ledger(simulation, side):
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


def _check_backlog(side, expected):
    found = f"after a ledger was lost the backlog is {side.cursor.backlog}, {expected} messages are unacked"
    hold(Promise.I4, side.cursor.backlog == expected, found)


def _trim(simulation):
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


def _check_rest(simulation, acked):
    """Check that a subscription needs the first ledger, unless it is the last one."""
    ledgers, numbered = simulation.message_log.ledgers, simulation.log
    lowest = ledgers.first_ledger_id
    inside = {number for number, position in enumerate(numbered.positions) if position.ledger_id == lowest}
    is_needed = lowest == ledgers.current_ledger_id or not inside <= acked
    hold(Promise.I11, is_needed, f"a trim left ledger {lowest}, which every subscription has acked durably")


def delete(simulation, side, number=None):
    """Delete a subscription, and create it again at some entry.

    A deletion that fails has happened or not, and the next open finds out; its owner writes meanwhile.
    """
    if not simulation.log.kept:
        return
    number = simulation.random.choice(simulation.log.kept) if number is None else number
    simulation.note("delete, and create at", [number])
    _close_parts(side)
    is_deleted = False
    side.is_writing, side.rival = True, _Owner(side)
    try:
        delete_subscription(simulation.cursor_store, topic="t", subscription=side.name)
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


def _close_parts(side):
    delayed = side.subscription._messages.delayed
    delayed.clear()
    delayed.close()
    side.gate.close()


def _check_fenced(side):
    """Check that the owner of the deleted subscription cannot write, not even a whole state in a new ledger."""
    side.store.forget_faults()
    try:
        side.cursor.reset(side.simulation.log.positions[0], now_ms=side.simulation.now_ms)
    except CursorFencedError:
        return
    hold(Promise.I14, False, "the owner of a deleted subscription could write")


def _check_nothing_left(side):
    owned = MemoryStore(side.disk).ledgers.owned_by(cursor_owner(side.cursor_path))
    is_recorded = side.cursor_path in side.disk.values
    hold(Promise.I17, not owned and not is_recorded, f"ledgers {owned} are left, and a record: {is_recorded}")


class _Owner:
    """The owner of the subscription that is being deleted: it writes if it can, also a new ledger."""

    def __init__(self, side):
        self._is_over = False
        side.cursor.remove_listener(side)
        # As of another broker: its faults are its own, and its writes are not those of this one.
        side.cursor._persister.journal.store = MemoryStore(side.disk)

    def race(self, side):
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


EVENTS = {
    "publish": (14, client_events.publish),
    "fall_behind": (4, client_events.fall_behind),
    "dispatch": (34, client_events.dispatch_some),
    "ack_some": (34, client_events.ack_some),
    "ack_late": (3, client_events.ack_late),
    "ack_cumulative": (1, client_events.ack_cumulative),
    "ack_many": (2, client_events.ack_many),
    "ack_into_batch": (3, client_events.ack_into_batch),
    "nack": (6, client_events.nack),
    "close_consumer": (2, client_events.close_consumer),
    "persist": (7, persist),
    "persist_in_vain": (5, persist_in_vain),
    "promote": (2, promote),
    "tick": (6, tick),
    "persist_together": (5, persist_together),
    "set_cursor_properties": (2, set_cursor_properties),
    "go_on_before": (3, go_on_before),
    "wait": (8, wait),
    "change_limits": (2, change_limits),
    "change_broker_limit": (1, change_broker_limit),
    "break_ledgers": (1.5, break_ledgers),
    "mend_ledgers": (3, mend_ledgers),
    "crash": (0, crash),
    "reopen": (1, reopen),
    "seek": (1, seek),
    "seek_in_vain": (2, seek_in_vain),
    "skip": (1, client_events.skip),
    "clear_backlog": (0.3, client_events.clear_backlog),
    "wait_for_gate": (2, wait_for_gate),
    "open_damaged_copy": (1, open_damaged_copy),
    "delete": (0.7, delete),
    "trim": (2, trim),
    "lose_ledger": (0.4, lose_ledger),
    "ack": (0, client_events.ack),
    "ack_up_to": (0, client_events.ack_up_to),
    "give_back": (0, client_events.give_back),
}
"""The events by name, with their relative frequency; those of weight 0 are only called by explicit stories."""
