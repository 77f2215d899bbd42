"""Checks that a subscription keeps its limits, has the model's counts, and blocks no message needlessly.

These are I4 and I8; `crash.model.written` checks the durable state.
"""

from ackstate.analysis.crash.oracle import Promise
from ackstate.cursor.formats import Format
from ackstate.limits.rules import Rule
from crash.model.numbered_log import indexes
from crash.model.settings import CONSUMERS, RETRY_MS, TICK_MS
from crash.promises import hold

NO_LIMIT = 2**62
NEW_RECORD_BYTES = 124
_ACK_STATE_RULES = (Rule.UNPERSISTED_ACK_RECORD_BYTES, Rule.UNACKED_RANGES)


def consumer_max(side):
    return side.gate.limits.max_unacked_messages_per_consumer or NO_LIMIT


def uses(side):
    model, limits, deliveries = side.model, side.gate.limits, side.subscription._admission.deliveries
    record_bytes, range_count = model.counted()
    for number in model.in_flight:
        sent = deliveries.get(model.log.positions[number])
        if sent is not None:
            record_bytes += sent.record_bytes
            range_count += sent.range_count
    yield Rule.UNPERSISTED_ACK_RECORD_BYTES, record_bytes, limits.max_unpersisted_ack_record_bytes or NO_LIMIT
    yield Rule.UNACKED_RANGES, range_count, limits.max_unacked_ranges or NO_LIMIT
    yield Rule.UNACKED_MESSAGES, model.unacked(), limits.max_unacked_messages or NO_LIMIT


def forgiven(side):
    """Return the allowed usage of each rule: a usage above the limit may stay, but not grow."""
    allowed = {rule: max(limit, used) for rule, used, limit in uses(side)}
    for consumer in CONSUMERS:
        allowed[consumer] = max(consumer_max(side), side.model.unacked(consumer))
    return allowed


def check(side):
    """Check that no limit is exceeded and the counters equal the model. Complexity: O(acked and in flight)."""
    model, cursor, subscription = side.model, side.cursor, side.subscription
    for rule, used, limit in uses(side):
        is_alone = rule is Rule.UNACKED_MESSAGES and len(model.in_flight) == 1
        hold(Promise.I4, used <= side.allowed[rule] or is_alone, f"{rule.name}: {used} of {limit}")
        if not side.is_writing:
            side.allowed[rule] = max(limit, min(used, side.allowed[rule]))
    _count(subscription.unacked_messages, model.unacked(), "unacked messages")
    _count(len(subscription._admission.deliveries), len(model.in_flight), "deliveries")
    range_count = len(cursor.deleted) if model.counts_entries else cursor.deleted.range_count
    _count(range_count, model.counted()[1], "ranges")
    for consumer in CONSUMERS:
        _check_consumer(side, consumer)
    side.receipts.check_none_lies(cursor, model, count_max=4)
    if side.is_writing:
        # After a failed write, the acks that it was to displace already count as lost.
        enough = side.has_failed or cursor.view.unpersisted_record_bytes >= model.counted()[0]
        hold(
            Promise.I4,
            enough,
            f"{cursor.view.unpersisted_record_bytes} bytes are un-persisted, not {model.counted()[0]}",
        )
        return
    _count(cursor.view.unpersisted_record_bytes, model.counted()[0], "un-persisted bytes")
    _check_gauge(side)
    _check_waiters(side)


def check_writing(side):
    """Check from the view of another thread during a persist; messages being sent at this moment may be invisible."""
    usage, allowed = side.subscription.usage(), side.allowed
    _count(side.cursor.stats().unpersisted_record_bytes, usage.unpersisted_record_bytes, "un-persisted bytes")
    used, limit = usage.unpersisted_record_bytes + usage.reserved_bytes, allowed[Rule.UNPERSISTED_ACK_RECORD_BYTES]
    hold(Promise.I4, used <= limit, f"{used} of {limit} while a persist writes")
    range_count = usage.range_count + usage.reserved_ranges
    fits = range_count <= allowed[Rule.UNACKED_RANGES]
    hold(Promise.I4, fits, f"{range_count} ranges of {allowed[Rule.UNACKED_RANGES]} while a persist writes")


def check_all(side):
    """Do the same as `check`, and recount everything. Complexity: O(entries of the log)."""
    check(side)
    side.subscription.check_invariants()
    side.receipts.check_survivors(side.cursor, side.model)
    # That of a new cursor is written under any limit.
    size, size_max = side.written.state_bytes, max(side.config.metadata_bytes_max, NEW_RECORD_BYTES)
    hold(Promise.I4, size <= size_max, f"the record has {size} bytes of {size_max} at most")
    model, log, deliveries = side.model, side.simulation.log, side.subscription._admission.deliveries
    acked = {number for number, position in enumerate(log.positions) if side.cursor.is_acked(position)}
    if acked != model.acked:
        hold(Promise.I1, acked <= model.acked, f"{log.text(acked - model.acked)} counts as acked and is not")
        hold(Promise.I4, False, f"the ack of {log.text(model.acked - acked)} was forgotten")
    batches = {log.numbers[position]: indexes(words) for position, words in side.cursor.view.batch.items()}
    found = f"partly acked are the batches {batches}, and were {model.unacked_of_batch}"
    hold(Promise.I4, batches == model.unacked_of_batch, found)
    marked = model.properties.marked
    hold(
        Promise.I4,
        side.cursor.view.properties == marked,
        f"{side.cursor.view.properties} were marked, and {marked} were to be",
    )
    for number, consumer in model.in_flight.items():
        sent = deliveries.get(log.positions[number])
        is_right = sent is not None and sent.consumer == consumer and sent.record_bytes <= log.isolated_bytes(number)
        hold(Promise.I4, is_right, f"{consumer} has {log.positions[number]}, known is {sent}")
    _count(side.cursor.backlog, len(log) - len(model.acked), "backlog")


def check_keys(side):
    holders = {}
    for number, consumer in side.model.in_flight.items():
        message = side.model.log.messages[number]
        key = None if message is None else message.key
        hold(
            Promise.I12, key is None or holders.setdefault(key, consumer) == consumer, f"{key!r} is with two consumers"
        )


def closed_for(side, consumer):
    verdicts = side.gate.why_blocked(side.subscription.usage(consumer), consumer)
    return {verdict.rule: verdict.released_at for verdict in verdicts}


def check_shortage(side, consumer, closed_before, *, weight_elsewhere=0):
    """Check that a limit, truthfully, explains why a consumer did not receive more."""
    model, log, now_ms = side.model, side.model.log, side.simulation.now_ms
    waiting = list(model.sendable(now_ms=now_ms, tick_ms=TICK_MS))
    if side.simulation.settings.has_dead_letters and now_ms - side.failed_ms < RETRY_MS:
        # Their counts could not be written.
        waiting = [number for number in waiting if not model.sent_count.get(number)]
    if not waiting:
        return
    may_wait = list(model.sendable(now_ms=now_ms, tick_ms=0))
    is_plain = not model.sent_count.keys() & set(waiting) and not side.simulation.settings.delay_share
    cost = log.isolated_bytes(waiting[0]) if is_plain else max(map(log.isolated_bytes, may_wait))
    weight = max(map(model.weight, may_wait))
    binding = _binding(side, consumer, closed_before, cost=cost, weight=weight)
    if model.unacked(consumer) + weight_elsewhere > consumer_max(side):
        # A heavier message was refused. If the usage is low, the rule has opened since, and a waiter would be called.
        binding |= {Rule.CONSUMER_UNACKED_MESSAGES}
    what = f"{len(waiting)} messages from {log.positions[waiting[0]]} on"
    hold(Promise.I8, bool(binding), f"{what} were kept back for nothing")
    if binding == {Rule.UNPERSISTED_ACK_RECORD_BYTES} and side.simulation.settings.promotes_young and _works(side):
        limits, reserved = side.gate.limits, side.subscription.usage().reserved_bytes
        limit = limits.max_unpersisted_ack_record_bytes
        is_closed = Rule.UNPERSISTED_ACK_RECORD_BYTES in closed_before
        would_open = (
            reserved <= int(limit * limits.unpersisted_release_ratio) if is_closed else reserved + cost <= limit
        )
        is_by_young = would_open and side.cursor.view.has_young(now_ms=now_ms)
        hold(Promise.I8, not is_by_young, "young acks keep the gate shut")


def is_covered(side, number):
    """Return whether the worst case of an ack is reserved."""
    log = side.model.log
    sent = side.subscription._admission.deliveries.get(log.positions[number])
    return sent is not None and sent.range_count == 1 and sent.record_bytes == log.isolated_bytes(number)


def check_refusal(side, numbers, *, were_covered):
    position, model = side.model.log.positions[numbers[0]], side.model
    hold(Promise.I8, not were_covered, f"the ack of {position} was refused, although it was reserved for")
    sent = [side.subscription._admission.deliveries.get(model.log.positions[number]) for number in numbers]
    reserved = [sum(each.record_bytes for each in sent if each), sum(each.range_count for each in sent if each)]
    before, after = model.counted(), model.counted(also=numbers)
    limited = [(used, limit) for rule, used, limit in uses(side) if rule in _ACK_STATE_RULES]
    passes = any(
        grown > held and used - own + grown - held > limit
        for (used, limit), own, held, grown in zip(limited, reserved, before, after, strict=True)
    )
    hold(Promise.I8, passes, f"the ack of {position} was refused for nothing")


def _count(kept, recounted, what):
    hold(Promise.I4, kept == recounted, f"{what}: {kept} are counted, there are {recounted}")


def _check_gauge(side):
    model, stats = side.model, side.cursor.stats()
    _count(stats.redelivery_if_crashed, model.lost_count, "messages that a crash brings back")
    causes = stats.redelivery_unwritten, stats.redelivery_young, stats.redelivery_cut
    of_causes = f"of {stats.redelivery_if_crashed} messages {causes} are unwritten, young, cut"
    hold(Promise.I4, sum(causes) == stats.redelivery_if_crashed and min(causes) >= 0, of_causes)
    if side.excluded is not None:
        floor = model.first_unacked()
        expected = tuple(sum(number >= floor for number in numbers) for numbers in side.excluded)
        hold(Promise.I4, causes[1:] == expected, f"{causes[1:]} are counted as young and cut, there are {expected}")
    # The metadata store has the narrower limit.
    hold(Promise.I4, not stats.redelivery_cut or side.is_limited or side.config.format is Format.PULSAR, of_causes)
    hold(Promise.I4, not stats.redelivery_young or side.config.become_old_ack_record_seconds != 0, of_causes)


def _check_waiters(side):
    for waiter in side.waiters:
        is_closed = side.gate.is_closed_for(waiter.consumer)
        hold(Promise.I8, waiter.calls <= 1, f"a waiter was told {waiter.calls} times")
        hold(Promise.I8, waiter.calls > 0 or is_closed, "no waiter was notified that the gate is open")
    side.waiters = [waiter for waiter in side.waiters if not waiter.calls]


def _check_consumer(side, consumer):
    used, allowed = side.model.unacked(consumer), side.allowed[consumer]
    is_alone = used > allowed and list(side.model.in_flight.values()).count(consumer) == 1
    hold(Promise.I4, used <= allowed or is_alone, f"{consumer} has {used} of {allowed}")
    side.allowed[consumer] = max(consumer_max(side), min(used, allowed))


def _binding(side, consumer, closed_before, *, cost, weight):
    needs = {
        Rule.UNPERSISTED_ACK_RECORD_BYTES: cost,
        Rule.UNACKED_RANGES: 1,
        Rule.UNACKED_MESSAGES: weight,
        Rule.CONSUMER_UNACKED_MESSAGES: weight,
    }
    of_consumer = Rule.CONSUMER_UNACKED_MESSAGES, side.model.unacked(consumer), consumer_max(side)
    binding = {
        rule
        for rule, used, limit in (*uses(side), of_consumer)
        if used + needs[rule] > limit or used > closed_before.get(rule, NO_LIMIT)
    }
    broker = side.simulation.broker
    if broker is not None:
        used, waits_for = broker.unacked_messages, closed_before.get(Rule.BROKER_UNACKED_MESSAGES, NO_LIMIT)
        # A subscription without a message in flight never waits.
        if (
            broker.is_blocked
            or used + weight > side.simulation.broker_max
            or (side.model.unacked() and used > waits_for)
        ):
            binding.add(Rule.BROKER_UNACKED_MESSAGES)
    return binding


def _works(side):
    """Return whether a promotion would make young acks durable now."""
    failed = side.simulation.now_ms - side.failed_ms < RETRY_MS or side.store.has_broken_ledgers
    return not side.is_limited and not failed
