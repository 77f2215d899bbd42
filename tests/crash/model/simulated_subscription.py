"""One subscription, real except for the disk, and its model: opened, crashed, recovered, and checked as it writes."""

from ackstate.analysis.crash.oracle import Promise
from ackstate.cursor.cursor import ManagedCursor
from ackstate.cursor.formats import Format
from ackstate.cursor.journal import cursor_path
from ackstate.cursor.results import CursorListener, PersistTarget
from ackstate.dispatch import Subscription, SubscriptionOptions
from ackstate.dispatch.options import DeadLetterPolicy
from ackstate.errors import AckStateError, CursorFencedError
from ackstate.limits.gate import DispatchGate
from ackstate.stores.base import StoreError
from ackstate.stores.memory import MemoryStore
from ackstate.wire.pulsar import LimitRule
from crash.model.ack_model import AckModel, Receipts
from crash.model.checks import forgiven
from crash.model.numbered_log import indexes
from crash.model.settings import CONSUMERS, RETRIES, RETRY_MS
from crash.model.written import (
    BYTES_MIN,
    Excluded,
    Work,
    Written,
    attempted_states,
    check_excluded,
    held_of,
    instant_of,
)
from crash.promises import PromiseBrokenError, hold

_HOUR = 3_600_000


class SimulatedSubscription(CursorListener):
    """One subscription of a simulation.

    Attributes:
        is_certain: Whether the state of the disk is known exactly: no write has failed since the last successful one.
        is_writing: Whether other threads check it while it writes.
        has_failed: Whether a write of the current persist has failed.
        persisted_ms: When the last persist that wrote ended, or the cursor was opened.
        rival: The previous owner, while the cursor is being opened; later it is `earlier`, which acts occasionally.
        left_ledgers_clean: Whether no ledger of another owner may remain after the cursor was opened.
        allowed: The allowed usage of each limit, which may exceed a lowered limit.
        excluded: The acks excluded by the last persist; None if unknown.
    """

    def __init__(self, simulation, name):
        self.simulation, self.name = simulation, name
        self.model = AckModel(simulation.log)
        self.disk = simulation.cursor_disk
        self.config, self.limits = simulation.settings.config, simulation.settings.limits
        self.cursor_path = cursor_path("t", name)
        self.written = Written(simulation.log, self.disk, self.cursor_path)
        self.is_certain = self.left_ledgers_clean = True
        self.is_writing = self.has_failed = False
        self.failed_ms = -RETRY_MS
        self.persisted_ms = self.epoch = 0
        self.rival = None
        self.earlier = None
        self.start = None
        self.waiters = []
        self.allowed = {}
        self.excluded = Excluded()
        self.instants, self.instants_of_counts = [], []
        self.open()

    def open(self, faults=()):
        """Open the cursor, again if a fault ends the first attempt, and the subscription on it."""
        self.handed_over = []
        self.waiters = []
        self.receipts = Receipts(self.simulation.log)
        try:
            self._open_cursor(faults)
        except StoreError:
            if not self.store.fired_fault_count:
                raise
            # Taking over a cursor changes no acks, unless Pulsar's format moves the mark-delete position.
            is_certain = self.is_certain and self.config.format is not Format.PULSAR
            self.may_have_written()
            self.is_certain = is_certain
            self.simulation.crash_count += 1
            self._open_cursor(faults := ())
        # A ledger that could not be deleted waits for the next open.
        if not faults and self.left_ledgers_clean:
            self.written.check_one_journal()
        self.persisted_ms, self.epoch = self.simulation.now_ms, self.written.epoch
        self.work = Work(self.config, now_ms=self.simulation.now_ms)
        self._open_subscription()

    def _open_cursor(self, faults):
        simulation = self.simulation
        self.store = MemoryStore(self.disk, faults=faults)
        self._attempted = []
        simulation.cursor_store.join(self, self.store)
        self.left_ledgers_clean = self.is_writing = True  # This write is not a persist.
        self.highest_sent = -1
        try:
            self.cursor = ManagedCursor.open(
                simulation.cursor_store, topic="t", subscription=self.name,
                ledgers=simulation.message_log.ledgers, config=self.config, start=self.start, now_ms=simulation.now_ms,
            )  # fmt: skip
            self.model.counts_entries = self.config.ledger_limits.rule is not LimitRule.EXACT
            self.model.changed()
        finally:
            self.is_writing = False
            self.store.forget_faults()

    def _open_subscription(self):
        simulation, settings = self.simulation, self.simulation.settings
        self.gate = DispatchGate(self.limits, broker=simulation.broker)
        tracker = simulation.open_tracker(self.cursor.is_acked)
        self.subscription = Subscription(
            simulation.message_log, self.cursor, gate=self.gate, delays=tracker,
            kind=settings.kind,
            options=SubscriptionOptions(
                promotes_young=settings.promotes_young,
                dead_letters=DeadLetterPolicy(2, self._hand_over) if settings.has_dead_letters else None,
                retries=RETRIES,
            ),
        )  # fmt: skip
        if tracker is not None:
            tracker.attach(CountedRequests(self.subscription._messages, simulation))
        self.cursor.remove_listener(self.subscription._listener)
        self.cursor.add_listener(self)
        self.forget_attempts()
        if settings.has_dead_letters:
            self.model.deliveries_max = 3
            self.model.is_counted = self.config.format is Format.NATIVE
        for consumer in CONSUMERS[: settings.consumer_count]:
            self.subscription.consumer_opened(consumer)

    def crash_and_recover(self, faults=(), *, rival=None):
        """Lose everything that is not on the disk, and check the recovered state."""
        self.receipts.check_survivors(self.cursor, self.model)
        before, self.rival = self.cursor, rival
        try:
            self.open(faults)
        except AckStateError as error:
            raise PromiseBrokenError(Promise.I10, f"it cannot be recovered: {error}") from error
        finally:
            self.rival = None
        self.judge(before.redelivery_if_crashed)

    def lost(self, numbers):
        """Go on with other numbers, right after a recovery: those of entries that the log has not lost."""
        model, self.earlier = self.model, None
        batches = {numbers[number]: left for number, left in model.unacked_of_batch.items() if number in numbers}
        counts = {numbers[number]: each for number, each in model.delivery_counts.items() if number in numbers}
        model.recovered({numbers[number] for number in model.acked if number in numbers}, batches)
        model.adopt(counts)
        self.written = Written(self.simulation.log, self.disk, self.cursor_path)

    def judge(self, gauge, *, keeps_counts=False):
        model, log = self.model, self.simulation.log
        found = {number for number, position in enumerate(log.positions) if self.cursor.is_acked(position)}
        parts = {
            log.numbers[each]: indexes(words) for each, words in self.cursor.view.batch.items() if each in log.numbers
        }
        if found not in model.resets:
            self._check_survived(found, parts)
        if gauge is not None:
            self._check_gauge(found, gauge)
        model.properties.recovered(self.cursor.view.properties, self.cursor.cursor_properties)
        counts = self.cursor.view.delivery_counts
        counts = {log.numbers[each]: count for each, count in counts.items() if each in log.numbers}
        model.recovered(found, parts, counts, is_closed=keeps_counts)
        self._check_kept(found)
        held = self.read_disk()
        # Opening it in Pulsar's format may write it, within limits.
        self.excluded = Excluded(cut=frozenset(found - held.acked))
        self.wrote(held)
        self.forgive()

    def _check_survived(self, found, parts):
        model, log = self.model, self.simulation.log
        lost, invented = model.durable - found, found - model.acked
        if lost:
            raise PromiseBrokenError(
                Promise.I2, f"a durable ack was forgotten: {log.text(lost)}", entry_count=len(lost)
            )
        if invented:
            found_text = f"an ack was invented: {log.text(invented)}"
            raise PromiseBrokenError(Promise.I1, found_text, entry_count=len(invented))
        for number, left in model.durable_unacked_of_batch.items():
            survived = number in found or parts.get(number, {-1}) <= left
            hold(Promise.I2, survived, f"acks in batch {log.positions[number]} were forgotten")
        for number, left in parts.items():
            acked = number in model.acked or left >= model.unacked_of_batch.get(number, {-1})
            hold(Promise.I1, acked, f"acks in batch {log.positions[number]} were invented")

    def _check_gauge(self, found, gauge):
        model, log = self.model, self.simulation.log
        back = model.acked - found
        is_kept = len(back) == gauge if self.is_certain else len(back) <= gauge
        hold(Promise.I3, is_kept, f"{gauge} were to be redelivered, {len(back)} are: {log.text(back)}")

    def _check_kept(self, recovered):
        """Check that the next recovery would find the same; Pulsar's format drops acks beyond its limits."""
        log = self.simulation.log
        if self.config.format is Format.NATIVE:
            kept = log.held_by(self.written.find(self.simulation.message_log.ledgers).recovered.content)
            found = f"recovered were {log.text(recovered)}, and the disk holds {log.text(kept)} then"
            hold(Promise.I5, kept == recovered, found)

    def read_disk(self):
        """Read the disk after an open or a reset; its state must not go back from now on."""
        found = self.written.find(self.simulation.message_log.ledgers)
        held = self.written.read(found)
        self.written.restarted(held)
        return held

    def forgive(self):
        """Recompute the allowed usage: usage above a limit may stay, but not grow."""
        self.allowed = forgiven(self)

    def restarted(self, first, epoch_before):
        self.receipts.check_void(self.cursor)
        self.model.restart(first)
        self.model.properties.reset(is_certain=True)
        self.persisted_ms, self.epoch = self.simulation.now_ms, self.written.epoch
        self.simulation.counts["resets"] += 1
        has_epochs = self.config.format is not Format.PULSAR
        hold(Promise.I13, not has_epochs or self.written.epoch > epoch_before, "a reset did not raise the epoch")
        held = self.read_disk()
        is_reset = held.acked == self.model.acked and not held.unacked_of_batch
        hold(Promise.I13, is_reset, f"after a reset the disk holds {self.simulation.log.text(held.acked)}")
        self.is_certain, self.excluded, self.highest_sent = True, Excluded(), -1
        self.work.begun(self.written.entry_sizes or None, now_ms=self.simulation.now_ms)
        self.forget_attempts()
        self.forgive()

    def record_bytes_max(self):
        return self.subscription._listener.record_bytes_max()

    def persisted(self, outcome):
        """Update the durable state: that of the disk, or after a failed write the part that it leaves."""
        if isinstance(outcome, AckStateError) or self.has_failed or not self.is_certain:
            self.work.failed()
        if isinstance(outcome, AckStateError):
            self.failed_ms = self.simulation.now_ms
            self.may_have_written()
            view, model = self.cursor.view, self.model
            is_due = isinstance(outcome, CursorFencedError) or view.is_persist_due(now_ms=self.failed_ms + _HOUR)
            # Acks of messages that were never sent since the cursor was opened stay young.
            stays_young = not view.is_dirty and min(model.acked - model.durable, default=0) > self.highest_sent
            hold(Promise.I15, is_due or stays_young, "a write that failed is not tried again")
        elif outcome.route is not PersistTarget.NOTHING:
            self._persisted(outcome)
        else:
            hold(Promise.I15, not self.cursor.view.is_dirty, "the waiting acks were not written")
        self.forget_attempts()
        self.model.changed()
        self.subscription._listener.persisted(outcome)

    def _persisted(self, result):
        found = self.written.find(self.simulation.message_log.ledgers)
        held = self.written.read(found)
        self._count(result, held)
        instants = [*self.instants, instant_of(self.model)]
        self.written.check_persist(found, held, result, instants, self.config)
        self.excluded = None
        is_of_one = all(instant == instants[0] for instant in instants)
        # The first persist may contain entries below the numbered ones.
        if is_of_one and self.model.acked and self.record_bytes_max() is None:
            self.excluded = check_excluded(self.model, held, result, self.config, has_failed=self.has_failed)
        self._check_counts(result, held)
        self._check_work(result)
        self._check_counters(result)
        self.model.properties.wrote(held.properties, [instant.properties for instant in instants])
        self.model.properties.check_attached(self.written.cursor_properties)
        is_kept = self.config.format is Format.PULSAR or self.written.epoch == self.epoch
        hold(Promise.I13, is_kept, f"the epoch went from {self.epoch} to {self.written.epoch} without a reset")
        self.wrote(held)
        self.receipts.check_none_lies(self.cursor, self.model)

    def _check_counts(self, result, held):
        if result.counts_cut or self.config.format is Format.PULSAR:
            hold(Promise.I15, not result.counts_cut or self.is_small, "a delivery count was left out for nothing")
            return
        possible = [
            {number: each for number, each in counts.items() if number not in self.model.acked}
            for counts in (held.counts, self.model.delivery_counts, *self.instants_of_counts)
        ]
        hold(Promise.I6, possible[0] in possible[1:], f"the disk has the counts {possible[0]}, not {possible[1:]}")

    def _check_work(self, result):
        if self.is_certain and not self.has_failed and result.route is PersistTarget.DELTA:
            self.work.check_delta(self.simulation.log, self._attempted[-1][1], self.model.durable)
        self.work.check(result, self._attempted, self.written.entry_sizes, now_ms=self.simulation.now_ms)

    def _check_counters(self, result):
        before, after = self._counted, self.cursor.stats()
        counted = (
            after.ledger_write_count - before.ledger_write_count,
            after.metadata_write_count - before.metadata_write_count,
            after.bytes_persisted - before.bytes_persisted,
        )
        is_metadata = result.route is PersistTarget.METADATA
        expected = (int(not is_metadata), int(is_metadata), result.bytes_written)
        found = f"{counted} ledger writes, metadata writes and bytes are counted, there were {expected}"
        hold(Promise.I4, counted == expected and result.bytes_written > 0, found)

    def took(self, receipt, numbers):
        self._check_newly_acked(receipt, len(set(numbers) - self.model.acked))
        self.model.ack(numbers)
        self.receipts.add(receipt, numbers)

    def took_part(self, receipt, number, left, *, below=()):
        """Record an ack of all but some messages of a batch, and of entries below it; see `took`."""
        model, was_acked = self.model, number in self.model.acked
        newly_acked = len(set(below) - model.acked) + (not left and not was_acked)
        self._check_newly_acked(receipt, newly_acked)
        model.ack(below)
        if not was_acked:
            model.ack_part(number, left)
        self.receipts.add(receipt, [number], left=left if left and not was_acked else None)

    def _check_newly_acked(self, receipt, expected):
        found = f"{receipt.newly_acked} entries are counted as newly acked, there are {expected}"
        hold(Promise.I4, receipt.newly_acked == expected, found)

    def _count(self, result, held):
        self.persisted_ms = self.simulation.now_ms
        counts = self.simulation.counts
        counts[result.route.name.lower()] += 1
        counts["cut"] += result.messages_cut > 0
        counts["held_back"] += result.messages_held_back > 0
        counts["batches"] += bool(held.unacked_of_batch)

    def wrote_before(self):
        self.wrote(self.written.read(self.written.find(self.simulation.message_log.ledgers)))

    @property
    def is_small(self):
        return self.config.metadata_bytes_max < BYTES_MIN

    @property
    def is_limited(self):
        config = self.config
        return self.is_small or config.metadata_range_count_max is not None or config.range_count_max is not None

    def wrote(self, held):
        self.model.wrote(held.acked, held.unacked_of_batch, held.counts)
        self.model.cut = self.model.delivery_counts.keys() - held.counts.keys() if self.is_small else ()
        self.is_certain = True

    def may_have_written(self):
        """Remove from the durable state everything excluded by a write that may have happened.

        A delta of the native format displaces no ack.
        """
        self.excluded = None
        # Acks displaced by a whole state of Pulsar's format count as lost from its first step on, the new ledger.
        may_have_written = bool(self._attempted) or (self.has_failed and self.config.format is Format.PULSAR)
        self.is_certain = self.is_certain and not may_have_written
        if self.is_small:  # It may have left them out.
            self.model.durable_counts, self.model.cut = {}, range(len(self.simulation.log))
        attempts = self._attempted if self.config.format is Format.PULSAR else ()
        for content in attempted_states(attempts, self.config.journal_format, self.simulation.message_log.ledgers):
            held = held_of(self.simulation.log, content)
            self.model.may_have_lost(held.acked, held.unacked_of_batch)

    def forget_attempts(self):
        """Clear the attempted writes: they were not a persist, or are already checked."""
        self._counted = self.cursor.stats()
        self._attempted.clear()
        self.instants.clear()
        self.instants_of_counts.clear()
        self.has_failed = False

    def attempt(self, encoded, data):
        self._attempted.append((encoded, data))

    def begins_write(self):
        """Run other threads' work before a write."""
        self.model.ack(self.handed_over)
        if not self.is_writing:
            instant = instant_of(self.model)
            if not self.instants or self.instants[-1] != instant:
                self.instants.append(instant)
            self.instants_of_counts.append(dict(self.model.delivery_counts))
        self.simulation.while_writing(self)

    def _hand_over(self, delivery):
        self.handed_over.append(self.simulation.log.numbers[delivery.position])


class Waiter:
    """Waits for a gate, and counts its calls."""

    def __init__(self, consumer):
        self.consumer, self.calls = consumer, 0

    def __call__(self):
        self.calls += 1


class CountedRequests:
    """Passes a delay view's requests to its subscription, and counts the requests for missed messages."""

    def __init__(self, subscription, simulation):
        self._subscription, self._simulation = subscription, simulation

    def discard_acked(self, ledger_id, entries):
        self._subscription.discard_acked(ledger_id, entries)

    def not_sent_between(self, first, end):
        missed = self._subscription.not_sent_between(first, end)
        self._simulation.counts["derived"] += len(missed) > 0
        return missed
