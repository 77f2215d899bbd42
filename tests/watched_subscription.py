"""One subscription, real but for the disk, and its model: compared after every event, and while a persist writes."""

from __future__ import annotations

from types import SimpleNamespace

from ack_model import AckModel
from cursor import Format, ManagedCursor, Route, StoreError, Subscription
from cursor.dispatch.delivery import DeadLetterPolicy
from cursor.journal import cursor_path
from cursor.persister import PersistWatcher
from cursor.recovery import Recovery, decode_record
from cursor.stores.memory import MemoryDisk, MemoryStore
from cursor.subscription import SubscriptionOptions
from limits import DispatchGate, Rule

TICK_MS = 10
NO_LIMIT = 2**62
CONSUMERS = ("a", "b", "c", "d")
RETRY_MS = 1_000  # after a promotion failed


class _Ledgers:
    """Lets the schedule look, before and after each write, and keep what was to be written."""

    def __init__(self, store, side):
        self._inner, self._side = store.ledgers, side

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def append(self, ledger_id, entry):
        self._side.attempted.append(entry)
        return self._side.watched(self._inner.append, ledger_id, entry)

    def append_all(self, entries):
        self._side.attempted += [entry for _, entry in entries]
        return self._side.watched(self._inner.append_all, entries)

    def create(self, owner):
        return self._side.watched(self._inner.create, owner)


class _Metadata:
    def __init__(self, store, side):
        self._inner, self._side = store.metadata, side

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def put(self, path, data, *, expected_version):
        self._side.attempted.append(data)
        return self._side.watched(self._inner.put, path, data, expected_version=expected_version)


class WatchedSubscription(PersistWatcher):
    """One subscription and its model."""

    def __init__(self, schedule, name):
        self.schedule, self.name = schedule, name
        self.model = AckModel(schedule.log)
        self.disk = MemoryDisk()
        self.config, self.limits = schedule.config, schedule.limits
        self.resets = []  # what the disk may hold instead: resets whose outcome is unknown
        self.is_writing = self.has_failed = False
        self.failed_ms = -RETRY_MS
        self.waiters = []
        self.allowed = {}
        self.open()

    def open(self):
        schedule = self.schedule
        self.store = MemoryStore(self.disk)
        self.attempted = []
        watched = SimpleNamespace(ledgers=_Ledgers(self.store, self), metadata=_Metadata(self.store, self), close=None)
        self.is_writing = True  # what is written now is no persist
        self.cursor = ManagedCursor.open(
            watched, topic="t", subscription=self.name, ledgers=schedule.message_log.ledgers, config=self.config,
            now_ms=schedule.now_ms,
        )  # fmt: skip
        self.gate = DispatchGate(self.limits, broker=schedule.broker)
        delays = schedule.delays.open_view(self.cursor.is_acked) if schedule.delays is not None else None
        self.subscription = Subscription(
            schedule.message_log, self.cursor, gate=self.gate, delays=delays, kind=schedule.kind,
            options=SubscriptionOptions(
                promotes_young=schedule.promotes_young,
                hole_tries_max=schedule.hole_tries_max,
                dead_letters=DeadLetterPolicy(2, self.hand_over) if schedule.has_dead_letters else None,
            ),
        )  # fmt: skip
        self.cursor.unwatch(self.subscription)
        self.cursor.watch(self)
        self.is_writing = False
        self.attempted.clear()
        self.handed_over = []
        self.waiters = []
        for consumer in CONSUMERS[: schedule.consumer_count]:
            self.subscription.consumer_opened(consumer)

    def recover(self):
        """Compare what was found on the disk with what may be there, and go on from it."""
        model, log = self.model, self.schedule.log
        found = {number for number, position in enumerate(log.positions) if self.cursor.is_acked(position)}
        if found not in self.resets:
            assert model.durable <= found, "a durable ack was forgotten"
            assert found <= model.acked, "an ack was invented"
        parts = {log.numbers[p]: _indexes(words) for p, words in self.cursor.batch.items() if p in log.numbers}
        for number, left in parts.items():
            assert found in self.resets or number in model.acked or left >= model.unacked_of_batch[number]
        model.recovered(found)
        model.begin_reading()
        model.unacked_of_batch = parts
        self.resets = []
        self.forgive()

    def forgive(self):
        """Begin anew to watch that nothing grows beyond its limit: what is above it may stay, and not grow."""
        self.allowed = {}
        for rule, used, limit in self.uses():
            self.allowed[rule] = max(limit, used)
        for consumer in CONSUMERS:
            self.allowed[consumer] = max(self.consumer_max, self.model.unacked(consumer))

    @property
    def consumer_max(self):
        return self.gate.limits.max_unacked_messages_per_consumer or NO_LIMIT

    def uses(self):
        """Yield each limit on what is acked or on its way with its use, recounted; 0 is no limit."""
        model, limits = self.model, self.gate.limits
        record_bytes, range_count = model.counted()
        sent = self.subscription._admission.deliveries._sent.values()
        record_bytes += sum(each.record_bytes for each in sent)
        range_count += sum(each.range_count for each in sent)
        yield Rule.UNPERSISTED_ACK_RECORD_BYTES, record_bytes, limits.max_unpersisted_ack_record_bytes or NO_LIMIT
        yield Rule.UNACKED_RANGES, range_count, limits.max_unacked_ranges or NO_LIMIT
        yield Rule.UNACKED_MESSAGES, model.unacked(), limits.max_unacked_messages or NO_LIMIT

    def check(self):
        model, cursor, subscription = self.model, self.cursor, self.subscription
        for rule, used, limit in self.uses():
            assert used <= self.allowed[rule] or (rule is Rule.UNACKED_MESSAGES and len(model.in_flight) == 1), (
                f"{rule.name}: {used} of {limit}"
            )
            if not self.is_writing:
                self.allowed[rule] = max(limit, min(used, self.allowed[rule]))
        assert subscription.unacked_messages == model.unacked()
        assert len(subscription._admission.deliveries) == len(model.in_flight)
        assert cursor.deleted.range_count == model.counted()[1]
        for consumer in CONSUMERS:
            self.check_consumer(consumer)
        if self.is_writing:
            # After a failed write what it was to displace counts as gone already.
            assert self.has_failed or cursor.unpersisted_record_bytes >= model.counted()[0]
            return
        assert cursor.unpersisted_record_bytes == model.counted()[0]
        assert cursor.redelivery_if_crashed == len(model.acked) - len(model.durable)
        for waiter in self.waiters:
            assert waiter.calls == (not self.gate._is_closed_for(waiter.consumer)) or waiter.calls == 1
            assert waiter.calls or self.gate._is_closed_for(waiter.consumer), "nobody was told that the gate is open"
        self.waiters = [waiter for waiter in self.waiters if not waiter.calls]

    def check_writing(self):
        """As another thread sees it, which may not see what is being sent at this very moment."""
        stats, usage = self.cursor.stats(), self.subscription._usage()
        assert stats.unpersisted_record_bytes == usage.unpersisted_record_bytes
        used, allowed = (
            usage.unpersisted_record_bytes + usage.reserved_bytes,
            self.allowed[Rule.UNPERSISTED_ACK_RECORD_BYTES],
        )
        assert used <= allowed, f"{used} of {allowed} while a persist writes"
        assert usage.range_count + usage.reserved_ranges <= self.allowed[Rule.UNACKED_RANGES]

    def check_consumer(self, consumer):
        used, allowed = self.model.unacked(consumer), self.allowed[consumer]
        assert used <= allowed or list(self.model.in_flight.values()).count(consumer) == 1, f"{consumer} has {used}"
        self.allowed[consumer] = max(self.consumer_max, min(used, allowed))

    def check_all(self):
        """As `check`, and what takes longer."""
        self.check()
        self.subscription._admission.deliveries._check()
        self.subscription._dispatcher.waiting._check()
        self.cursor._check()
        model, log = self.model, self.schedule.log
        for number, position in enumerate(log.positions):
            assert self.cursor.is_acked(position) == (number in model.acked)
            sent = self.subscription._admission.deliveries.get(position)
            assert (sent and sent.consumer) == model.in_flight.get(number)
            assert sent is None or sent.record_bytes <= log.isolated_bytes(number)
        assert self.cursor.backlog == len(log) - len(model.acked)

    def check_keys(self):
        holders = {}
        for number, consumer in self.model.in_flight.items():
            message = self.model.log.messages[number]
            key = message.key if message else None
            assert key is None or holders.setdefault(key, consumer) == consumer, f"{key} is with two consumers"

    def closed_for(self, consumer):
        """Return the rules that are closed for a consumer, and at which use each opens."""
        usage = self.subscription._admission.usage(consumer)
        return {verdict.rule: verdict.released_at for verdict in self.gate.why_blocked(usage, consumer)}

    def check_shortage(self, consumer, closed_before):
        """Whoever wanted more must be told by a limit that there is no room, and be told the truth."""
        model, log, schedule = self.model, self.model.log, self.schedule
        waiting = list(model.sendable(now_ms=schedule.now_ms, tick_ms=TICK_MS))
        if not waiting:
            return
        may_wait = list(model.sendable(now_ms=schedule.now_ms, tick_ms=0))
        is_plain = not model.sent_count.keys() & set(waiting) and not schedule.delay_share
        cost = log.isolated_bytes(waiting[0]) if is_plain else max(map(log.isolated_bytes, may_wait))
        weight = max(map(model.weight, may_wait))
        uses = [
            *zip(self.uses(), (cost, 1, weight), strict=True),
            ((Rule.CONSUMER_UNACKED_MESSAGES, model.unacked(consumer), self.consumer_max), weight),
        ]
        binding = {
            rule
            for (rule, used, limit), needed in uses
            if used + needed > limit or used > closed_before.get(rule, NO_LIMIT)
        }
        if schedule.broker is not None:
            total = schedule.broker.unacked_messages + weight
            if schedule.broker.is_blocked or total > schedule.broker_max:
                binding.add(Rule.BROKER_UNACKED_MESSAGES)
        assert binding, f"{len(waiting)} messages from {log.positions[waiting[0]]} on were kept back for nothing"
        if binding == {Rule.UNPERSISTED_ACK_RECORD_BYTES} and schedule.promotes_young and self.works():
            limits, reserved = self.gate.limits, self.subscription._usage().reserved_bytes
            limit = limits.max_unpersisted_ack_record_bytes
            is_closed = Rule.UNPERSISTED_ACK_RECORD_BYTES in closed_before
            would_open = (
                reserved <= int(limit * limits.unpersisted_release_ratio) if is_closed else reserved + cost <= limit
            )
            is_by_young = would_open and self.cursor.has_young(now_ms=schedule.now_ms)
            assert not is_by_young, "young acks keep the gate shut"

    def works(self):
        """Tell whether a promotion would make young acks durable now."""
        cuts = self.config.range_count_max is not None or self.config.metadata_range_count_max is not None
        failed = self.schedule.now_ms - self.failed_ms < RETRY_MS or self.store._session.has_broken_ledgers
        return not cuts and not failed

    def is_covered(self, number):
        """Tell whether the worst that an ack can add is reserved for it."""
        sent = self.subscription._admission.deliveries.get(self.model.log.positions[number])
        return sent is not None and sent.range_count == 1 and sent.record_bytes == self.model.log.isolated_bytes(number)

    def check_refusal(self, number, was_covered):
        """An ack that is refused must have had nothing reserved for it, and have passed a limit."""
        position = self.model.log.positions[number]
        assert not was_covered, f"the ack of {position} was refused, although it was reserved for"
        sent = self.subscription._admission.deliveries.get(position)
        reserved = (sent.record_bytes, sent.range_count) if sent else (0, 0)
        uses = list(self.uses())[:2]
        before, after = self.model.counted(), self.model.counted(also=number)
        grown = [
            used - own + after - before
            for (_, used, _), own, before, after in zip(uses, reserved, before, after, strict=True)
        ]
        assert any(
            after > before and use > limit
            for (_, _, limit), use, before, after in zip(uses, grown, before, after, strict=True)
        ), f"the ack of {position} was refused for nothing"

    def record_bytes_max(self):
        return self.subscription.record_bytes_max()

    def persisted(self, outcome):
        """See what is durable now: what is on the disk, or of what was durable all that a failed write leaves."""
        if isinstance(outcome, Exception):
            self.failed_ms = self.schedule.now_ms
            self.forget_displaced()
        elif outcome.route is not Route.NOTHING:
            self.read_disk()
            self.resets = []
        self.attempted.clear()
        self.has_failed = False
        self.model.changed()
        self.subscription.persisted(outcome)

    def forget_displaced(self):
        """Take nothing for durable any more that a write which may have happened leaves out."""
        for content in self.attempts():
            self.model.durable &= self.schedule.log.held_by(content)

    def attempts(self):
        """Yield the whole states that were to be written; a delta of the native format displaces nothing."""
        if self.config.format is not Format.PULSAR:
            return
        ledgers = self.schedule.message_log.ledgers
        form = self.config.journal_format
        for data in self.attempted:
            try:
                content = form.recover(lambda *_, data=data: [data], 1, what="", epoch=0, ledgers=ledgers).content
            except Exception:
                content = decode_record(data, ledgers).record.content
            if content is not None:
                yield content

    def read_disk(self):
        recovery = Recovery(MemoryStore(self.disk), cursor_path("t", self.name), self.schedule.message_log.ledgers)
        durable = self.schedule.log.held_by(recovery.find(()).recovered.content)
        assert durable <= self.model.acked, "an ack was invented"
        self.model.durable = durable
        self.model.changed()

    def watched(self, write, *args, **named):
        """Write, and let others work before and after."""
        self.schedule.while_writing(self)
        try:
            result = write(*args, **named)
        except StoreError:
            self.has_failed = True
            raise
        self.schedule.while_writing(self)
        return result

    def hand_over(self, delivery):
        self.handed_over.append(self.schedule.log.numbers[delivery.position])


def _indexes(words):
    return {64 * word + bit for word, bits in enumerate(words) for bit in range(64) if bits >> bit & 1}


class Waiter:
    def __init__(self, consumer):
        self.consumer, self.calls = consumer, 0

    def __call__(self):
        self.calls += 1
