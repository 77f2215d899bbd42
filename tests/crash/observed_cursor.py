"""A cursor that reports its steps to an oracle: the request before each call, and the promise after it.

L1, L2 and L5 do the steps of `crash.steps` with it. They differ in the kind of crash.
"""

from serial import SerialExecutor

from ackstate.analysis.crash.oracle import Numbering, State
from ackstate.cursor.cursor import CursorOpening, ManagedCursor, open_cursors, persist_all
from ackstate.cursor.formats import Format, Repair
from ackstate.cursor.results import PersistTarget, RecoverySource
from ackstate.errors import AckStateError
from ackstate.ledger_map import LedgerMap
from crash.steps import BATCH_SIZE, LEDGERS, StepKind

TOPIC = "orders"
SUBSCRIPTIONS = ("billing", "shipping")
NUMBERING = Numbering(LEDGERS, batch_size=BATCH_SIZE)
"""The topic of the message log of all cursors."""
NEVER_OPENED = State(NUMBERING.nothing, NUMBERING.nothing, is_new=True)
_WHOLE_BATCH = (1 << BATCH_SIZE) - 1
_COUNTED = {
    PersistTarget.NOTHING: "idle_persists",
    PersistTarget.DELTA: "deltas",
    PersistTarget.WHOLE: "whole_states",
    PersistTarget.SNAPSHOT: "snapshots",
    PersistTarget.METADATA: "metadata_states",
}


def open_cursor(store, subscription, *, config=None, repair=Repair.NONE, now_ms=0):
    ledgers = LedgerMap.from_counts(LEDGERS)
    return ManagedCursor.open(
        store, topic=TOPIC, subscription=subscription, ledgers=ledgers, config=config, repair=repair, now_ms=now_ms
    )


def open_together(store, subscriptions, *, config, now_ms):
    openings = [
        CursorOpening(topic=TOPIC, subscription=each, ledgers=LedgerMap.from_counts(LEDGERS), config=config)
        for each in subscriptions
    ]
    cursors = []
    for outcome in open_cursors(store, openings, now_ms=now_ms, executor=SerialExecutor()):
        if isinstance(outcome, AckStateError):
            raise outcome
        cursors.append(outcome)
    return cursors


def state_of(cursor):
    """Return the state of a cursor, durable or not; `is_new` is whether opening it created it."""
    marked = NUMBERING.up_to(*cursor.mark_delete_position)
    acked = marked | NUMBERING.runs(cursor.deleted.runs())
    for position, words in cursor.view.batch.items():
        acked |= NUMBERING.messages(*position, _WHOLE_BATCH & ~(words[0] if words else 0))
    is_new = cursor.recovery_report.source is RecoverySource.NEW
    return State(acked, marked, _items(cursor.view.properties), _items(cursor.cursor_properties), is_new)


def _items(properties):
    return tuple(sorted(properties.items()))


class ObservedCursor:
    """An open cursor, and the oracle that follows it."""

    def __init__(self, cursor, config, account, count):
        self.cursor = cursor
        self._account, self._count = account, count
        self._is_native = config.format is Format.NATIVE
        is_limited = config.range_count_max is not None
        self._excludes = is_limited or config.become_old_ack_record_seconds != 0
        self._displaces = is_limited and not self._is_native
        self._has_ledger = False  # written since it was opened
        self._waiting = []

    def do(self, step, *, now_ms):
        """Do a step that concerns one cursor."""
        match step.kind:
            case StepKind.ACK | StepKind.ACK_BATCH | StepKind.MARK_DELETE:
                self._ack(step, now_ms=now_ms)
            case StepKind.PERSIST:
                self.persist(now_ms=now_ms)
            case StepKind.RESET:
                self._reset(step.position, now_ms=now_ms)
            case StepKind.PROPERTIES:
                self._name({"number": str(step.amount), "note": "x" * (step.amount % 60)})
            case _:
                raise AssertionError(f"no step of one cursor: {step}")

    def persist(self, *, now_ms):
        self.begin_write()
        result = self.cursor.persist(now_ms=now_ms)
        self.end_write(result)
        return result

    def close(self, *, now_ms):
        self.begin_write()
        result = self.cursor.close(now_ms=now_ms)
        if result is not None:
            self.end_write(result)

    def begin_write(self):
        state = state_of(self.cursor)._replace(is_new=False)
        self._account.writing(state, excludes=self._excludes, displaces=self._displaces)

    def end_write(self, result):
        self._account.written()
        self._count_write(result)
        self.look()

    def look(self):
        waiting = []
        for receipt, acked in self._waiting:
            is_durable = self.cursor.durable(receipt)
            if is_durable:
                self._account.durable(acked)
            # Durable state may be displaced; then it has to be reported again.
            if self._displaces or not is_durable:
                waiting.append((receipt, acked))
        self._waiting = waiting
        self._account.gauged(self.cursor.redelivery_if_crashed)
        self._account.marked(NUMBERING.up_to(*self.cursor.persisted_mark_delete_position))

    def _ack(self, step, *, now_ms):
        # With other steps left out, or acks lost, the position may be further on; it never goes back.
        if step.kind is StepKind.MARK_DELETE and step.position < self.cursor.mark_delete_position:
            return
        ledger_id, entry_id = step.position
        match step.kind:
            case StepKind.ACK:
                entry_ids = step.entry_ids(LEDGERS[ledger_id])
                acked = NUMBERING.runs((ledger_id, each, each + 1) for each in entry_ids)
            case StepKind.ACK_BATCH:
                acked = NUMBERING.messages(ledger_id, entry_id, step.amount)
            case _:
                acked = NUMBERING.up_to(ledger_id, entry_id)
        self._account.requested(acked)
        self.cursor.delivered(step.position, now_ms=now_ms)
        receipt = self._asked(step, now_ms=now_ms)
        self._account.accepted(acked)
        self._waiting.append((receipt, acked))
        self.look()

    def _asked(self, step, *, now_ms):
        cursor, position = self.cursor, step.position
        match step.kind:
            case StepKind.ACK if step.amount <= 1:
                self._count("acks")
                return cursor.ack(position, now_ms=now_ms)
            case StepKind.ACK:
                self._count("acks")
                entry_ids = step.entry_ids(LEDGERS[position.ledger_id])
                return cursor.ack_entries(position.ledger_id, entry_ids, now_ms=now_ms)
            case StepKind.ACK_BATCH:
                self._count("batches")
                unacked = _WHOLE_BATCH & ~step.amount
                return cursor.ack_batch(position, [unacked] if unacked else [], now_ms=now_ms)
            case _:
                self._count("mark_deletes")
                properties = {"n": step.amount} if step.amount else None
                return cursor.mark_delete(position, properties=properties, now_ms=now_ms)

    def _reset(self, position, *, now_ms):
        marked = NUMBERING.up_to(position.ledger_id, position.entry_id - 1)
        self._account.resetting(State(marked, marked))
        result = self.cursor.reset(position, now_ms=now_ms)
        self._account.reset()
        self._waiting = []
        self._count("resets")
        self._count_write(result)
        self.look()

    def _count_write(self, result):
        route = result.route
        self._count(_COUNTED[route])
        if route is PersistTarget.METADATA and self._is_native:
            self._count("fallbacks")
        if route is PersistTarget.SNAPSHOT and self._has_ledger:
            self._count("journal_compactions")  # It could have appended to the previous ledger.
        if route is not PersistTarget.NOTHING:
            self._has_ledger = route is not PersistTarget.METADATA

    def _name(self, names):
        self._account.naming(_items(names))
        self.cursor.set_cursor_properties(names)
        self._account.named(_items(names))
        self._count("properties")


def persist_together(observed, count, *, now_ms):
    for each in observed:
        each.begin_write()
    routes, errors = [], []
    outcomes = persist_all([each.cursor for each in observed], now_ms=now_ms, executor=SerialExecutor())
    for each, outcome in zip(observed, outcomes, strict=True):
        if isinstance(outcome, AckStateError):
            errors.append(outcome)
        else:
            routes.append(outcome.route)
            each.end_write(outcome)
    if len([route for route in routes if route in {PersistTarget.DELTA, PersistTarget.WHOLE}]) > 1:
        count("group_persists")
    if len(routes) > 1 and PersistTarget.METADATA in routes:
        count("group_fallbacks")
    if errors:
        raise errors[0]
