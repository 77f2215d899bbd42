"""Events of producers and consumers; each is applied to the real subscription and to its model."""

from contextlib import suppress

from ackstate.analysis.crash.oracle import Promise
from ackstate.dispatch import SubscriptionType
from ackstate.dispatch.admission import AckRefusedError
from ackstate.message import NO_DELAY, Message
from ackstate.stores.base import PayloadTooLargeError
from crash.model import checks
from crash.model.numbered_log import words_of
from crash.model.settings import CONSUMERS, TICK_MS, Tracker
from crash.promises import hold


def publish(simulation, side, count=None):
    """Publish some messages: plain, delayed, batches, with keys."""
    draw, settings = simulation.random, simulation.settings
    count = min(count or draw.choice((1, 3, 10, 20, 20)), settings.count_max)
    messages = []
    for _ in range(count):
        delay_ms = draw.choice((1, 100, 3_000)) if draw.random() < settings.delay_share else None
        deliver_at_ms = NO_DELAY if delay_ms is None else simulation.now_ms + delay_ms
        message_count = draw.choice((2, 3, 7, 70)) if draw.random() < settings.batch_share else 1
        key = draw.choice((None, b"k", b"l", b"m", b"n"))
        messages.append(
            Message(
                b"",
                key=key,
                deliver_at_ms=deliver_at_ms,
                publish_time_ms=simulation.now_ms,
                message_count=message_count,
            )
        )
    append(simulation, messages)


def append(simulation, messages, *, log=None):
    first = len(simulation.log)
    simulation.log.append((log or simulation.message_log).publish(messages), messages)
    for each in simulation.sides:
        each.model.changed()
    simulation.note("publish", range(first, len(simulation.log)))
    delayed = {
        number: message.deliver_at_ms - simulation.now_ms
        for number, message in enumerate(messages, start=first)
        if message.deliver_at_ms != NO_DELAY
    }
    for delay_ms in sorted(set(delayed.values())):
        simulation.note(f"due in {delay_ms} ms", [number for number, each in delayed.items() if each == delay_ms])


def dispatch(simulation, side, consumer=None, count=None):
    consumer = consumer or simulation.random.choice(CONSUMERS[: simulation.settings.consumer_count])
    count = min(simulation.random.choice((1, 5, 20, 40)) if count is None else count, simulation.settings.count_max)
    before = checks.closed_for(side, consumer)
    sent = []
    if consumer not in side.subscription.consumers:
        side.subscription.consumer_opened(consumer)
    was_handed_over = False
    try:
        sent = side.subscription.dispatch(consumer, count, now_ms=simulation.now_ms)
    finally:
        was_handed_over = note_dead_letters(simulation, side)
    note_sent(simulation, side, consumer, sent)
    if simulation.settings.kind is SubscriptionType.KEY_SHARED:
        checks.check_keys(side)
    elif len(sent) < count and not side.is_writing and not was_handed_over:
        checks.check_shortage(side, consumer, before)
    return len(sent)


def note_dead_letters(simulation, side):
    """Record the dead letters of a dispatch as acked, and return whether there were any."""
    side.model.ack(side.handed_over)
    numbers, side.handed_over = side.handed_over, []
    if numbers:
        simulation.note("dead", numbers)
    return bool(numbers)


def note_sent(simulation, side, consumer, sent):
    log = simulation.log
    simulation.note(f"send {consumer}", [log.numbers[each.position] for each in sent])
    for each in sent:
        side.highest_sent = max(side.highest_sent, log.numbers[each.position])
        side.model.sent(log.numbers[each.position], consumer, each.redelivery_count, now_ms=simulation.now_ms)


def fall_behind(simulation, side):
    """Delayed messages passed by all readers fall due, but only the first subscription polls."""
    settings = simulation.settings
    if not settings.delay_share or settings.tracker is not Tracker.VIEW or len(simulation.sides) == 1:
        return
    append(
        simulation,
        [Message(b"", deliver_at_ms=simulation.now_ms + TICK_MS, publish_time_ms=simulation.now_ms)]
        * min(5, settings.count_max),
    )
    for each in simulation.sides:
        dispatch(simulation, each, count=40)
    simulation.now_ms += 3 * TICK_MS
    dispatch(simulation, simulation.sides[0], count=40)


def ack_some(simulation, side, *, only_covered=False, count=None):
    numbers = list(side.model.in_flight)
    simulation.random.shuffle(numbers)
    order = simulation.random.random()
    if order < 0.5:
        numbers.sort(key=lambda number: (number % 2, number))
    elif order < 0.7:
        numbers.sort(reverse=order < 0.6)
    count = min(count or simulation.random.choice((1, 3, 10, 40)), simulation.settings.count_max)
    whole = []
    for number in numbers[:count]:
        if only_covered and not checks.is_covered(side, number):
            continue
        if side.model.weight(number) > 1 and simulation.random.random() < 0.6:
            ack_part(simulation, side, number)
        elif simulation.step_count % 2:
            whole.append(number)
        else:
            ack(simulation, side, number)
    if whole:
        ack_at_once(simulation, side, whole)


def ack_lowest(simulation, side):
    """Ack the messages in flight right after the mark-delete position, so that it moves."""
    while (number := side.model.first_unacked()) in side.model.in_flight and checks.is_covered(side, number):
        ack(simulation, side, number)


def ack(simulation, side, number):
    position = simulation.log.positions[number]
    _ack(simulation, side, [number], lambda now_ms: side.subscription.ack(position, now_ms=now_ms))


def ack_at_once(simulation, side, numbers):
    """Ack entries, at least one, by one call."""
    positions = [simulation.log.positions[number] for number in numbers]
    _ack(simulation, side, numbers, lambda now_ms: side.subscription.ack_many(positions, now_ms=now_ms), "ack together")


def ack_part(simulation, side, number):
    known = side.model.unacked_of_batch.get(number) or set(range(simulation.log.message_count(number)))
    left = known - set(simulation.random.sample(sorted(known), simulation.random.randint(1, len(known))))
    position, words = simulation.log.positions[number], words_of(left)
    _ack(
        simulation,
        side,
        [number],
        lambda now_ms: side.subscription.ack_batch(position, words, now_ms=now_ms),
        f"ack all but {len(left)} messages of",
        took=lambda receipt: side.took_part(receipt, number, left),
    )


def _ack(simulation, side, numbers, call, what="ack", *, took=None):
    were_covered = all(checks.is_covered(side, number) for number in numbers)
    try:
        receipt = call(simulation.now_ms)
    except AckRefusedError:
        checks.check_refusal(side, numbers, were_covered=were_covered)
        return
    simulation.note(what, numbers)
    if took is None:
        side.took(receipt, numbers)
    else:
        took(receipt)


def ack_late(simulation, side):
    """Ack messages that are not in flight: given back, or sent before a crash."""
    model, draw = side.model, simulation.random
    numbers = [n for n in range(model.first_unacked(), len(simulation.log)) if n not in model.in_flight]
    count = min(len(numbers), draw.choice((1, 5, 30)), simulation.settings.count_max)
    chosen = draw.sample(numbers, count)
    if chosen and simulation.step_count % 2:
        ack_at_once(simulation, side, chosen)
        return
    for number in chosen:
        if number not in model.acked and model.weight(number) > 1 and draw.random() < 0.3:
            ack_part(simulation, side, number)
        else:
            ack(simulation, side, number)


def ack_cumulative(simulation, side):
    first = side.model.first_unacked()
    if first < len(simulation.log):
        last = min(first + 30, first + simulation.settings.count_max, len(simulation.log))
        ack_up_to(simulation, side, simulation.random.randrange(first, last))


def ack_up_to(simulation, side, last):
    properties = {"number": simulation.random.randrange(10)} if simulation.random.random() < 0.5 else None
    receipt = side.subscription.ack_cumulative(
        simulation.log.positions[last], now_ms=simulation.now_ms, properties=properties
    )
    if properties is not None:
        side.model.properties.mark(properties)
    covered = range(side.model.first_unacked(), last + 1)
    simulation.note("ack up to", [last])
    side.took(receipt, covered)


def ack_many(simulation, side):
    """Ack entries that are not in flight in one call of the cursor itself, which has no gate."""
    model, log, draw = side.model, simulation.log, simulation.random
    numbers = [n for n in range(model.first_unacked(), len(log)) if n not in model.in_flight and n not in model.acked]
    numbers = draw.sample(numbers, min(len(numbers), draw.choice((1, 5, 30)), simulation.settings.count_max))
    if not numbers:
        return
    if draw.random() < 0.5:
        ledger_id = log.positions[numbers[0]].ledger_id
        numbers = [number for number in numbers if log.positions[number].ledger_id == ledger_id]
        entry_ids = [log.positions[number].entry_id for number in numbers]
        receipt = side.cursor.ack_entries(ledger_id, entry_ids, now_ms=simulation.now_ms)
    else:
        receipt = side.cursor.ack_many([log.positions[number] for number in numbers], now_ms=simulation.now_ms)
    simulation.note("ack at once", numbers)
    side.took(receipt, numbers)
    _acked_directly(simulation, side)


def ack_into_batch(simulation, side):
    model, log = side.model, simulation.log
    first = model.first_unacked()
    batches = [number for number in range(first, min(first + 30, len(log))) if log.message_count(number) > 1]
    batches = [number for number in batches if number not in model.acked][: simulation.settings.count_max]
    if not batches:
        return
    number = simulation.random.choice(batches)
    begin = simulation.random.randrange(1, log.message_count(number))
    rest = set(range(begin, log.message_count(number)))
    words = words_of(rest)
    receipt = side.cursor.mark_delete(log.positions[number], unacked_words=words, now_ms=simulation.now_ms)
    left = model.unacked_of_batch.get(number, rest) & rest
    simulation.note(f"ack up to all but {len(left)} messages of", [number])
    side.took_part(receipt, number, left, below=range(first, number))
    side.subscription.ack_batch(log.positions[number], words, now_ms=simulation.now_ms)  # counts its remaining messages
    _acked_directly(simulation, side)


def _acked_directly(simulation, side):
    side.subscription.skip(0, now_ms=simulation.now_ms)
    side.model.changed()
    side.forgive()


def nack(simulation, side):
    """Give some messages back, with a delay or without."""
    numbers, draw = list(side.model.in_flight), simulation.random
    delay_ms = draw.choice((0, None, 100, 2_000))
    count = min(len(numbers), draw.choice((1, 5, 20)), simulation.settings.count_max)
    give_back(simulation, side, draw.sample(numbers, count), delay_ms=delay_ms)


def give_back(simulation, side, numbers, *, delay_ms=0):
    for number in numbers:
        position, wait_ms = simulation.log.positions[number], delay_ms
        was_sent = side.subscription.nack(position, delay_ms=delay_ms, now_ms=simulation.now_ms)
        if delay_ms is None:
            sent_count = side.model.sent_count[number]
            wait_ms = min(100 * 2 ** (sent_count - 1), 300) if sent_count < side.model.deliveries_max else 0
        hold(Promise.I4, was_sent, f"{position} was on its way, and its return was for nothing")
        side.model.give_back(number, until_ms=simulation.now_ms + wait_ms if wait_ms else 0)
        simulation.note(f"nack for {wait_ms} ms" if wait_ms else "nack", [number])


def close_consumer(simulation, side):
    """Close a consumer; it returns with the next dispatch."""
    consumer = simulation.random.choice(CONSUMERS[: simulation.settings.consumer_count])
    held = [number for number, holder in side.model.in_flight.items() if holder == consumer]
    unacked = side.model.unacked(consumer)
    returned = side.subscription.consumer_closed(consumer)
    hold(Promise.I4, returned == unacked, f"{consumer} had {unacked} messages, {returned} were returned")
    for number in held:
        side.model.give_back(number)
    simulation.note(f"{consumer} goes, and gives back", held)


def skip(simulation, side):
    model = side.model
    count = simulation.random.choice((0, 1, 5, 20))
    receipt = side.subscription.skip(count, now_ms=simulation.now_ms)
    unacked = [number for number in range(model.first_unacked(), len(simulation.log)) if number not in model.acked]
    if unacked[:count]:
        covered = range(unacked[:count][-1] + 1)
        simulation.note(f"skip {count}, acked up to", [covered[-1]])
        side.took(receipt, covered)


def clear_backlog(simulation, side):
    simulation.note("clear the backlog")
    receipt = side.subscription.clear_backlog(now_ms=simulation.now_ms)
    side.took(receipt, range(len(simulation.log)))


def work_meanwhile(simulation, side):
    settings = simulation.settings
    for _ in range(simulation.random.randrange(4)):
        choice = simulation.random.random()
        if choice < 0.6:
            ack_some(simulation, side, only_covered=True)
        elif choice < 0.75:
            nack(simulation, side)
        elif choice < 0.8:
            close_consumer(simulation, side)
        elif not settings.has_dead_letters and not (
            settings.promotes_young and side.config.become_old_ack_record_seconds
        ):
            dispatch(simulation, side)


def drain(simulation):
    """Make consumers ack all deliveries until no message is left."""
    for side in simulation.sides:
        side.store.mend_ledgers()
    idle_count = 0
    while any(side.cursor.backlog for side in simulation.sides):
        before = _progress(simulation)
        for side in simulation.sides:
            _drain_once(simulation, side)
        idle_count = idle_count + 1 if _progress(simulation) == before else 0
        left = {side.name: side.cursor.backlog for side in simulation.sides}
        hold(Promise.I8, idle_count < 4, f"stuck with {left}")
        simulation.now_ms += 5_000


def _progress(simulation):
    return [(len(side.model.acked), len(side.model.durable)) for side in simulation.sides]


def _drain_once(simulation, side):
    for consumer in CONSUMERS[: simulation.settings.consumer_count]:
        dispatch(simulation, side, consumer, 50)
        for number in list(side.model.in_flight):
            ack(simulation, side, number)
    with suppress(PayloadTooLargeError):  # until the ledger is tried again
        side.cursor.tick(now_ms=simulation.now_ms)
    checks.check(side)


_ROUND_EVERY = 3


def dispatch_some(simulation, side, consumer=None, count=None):
    """Dispatch to one consumer or, if none is given, now and then to all; return the number of entries."""
    if consumer is None and simulation.step_count % _ROUND_EVERY == 0:
        return dispatch_all(simulation, side)
    return dispatch(simulation, side, consumer, count)


def dispatch_all(simulation, side):
    subscription, count_max = side.subscription, simulation.settings.count_max
    for consumer in CONSUMERS[: simulation.settings.consumer_count]:
        if consumer not in subscription.consumers:
            subscription.consumer_opened(consumer)
        if count := min(simulation.random.choice((0, 5, 20)), count_max):
            subscription.add_permits(consumer, count)
    before = {consumer: checks.closed_for(side, consumer) for consumer in subscription.consumers}
    deliveries = []
    was_handed_over = False
    try:
        deliveries, _ = subscription.dispatch_all(now_ms=simulation.now_ms)
    finally:
        was_handed_over = note_dead_letters(simulation, side)
    for consumer, sent in deliveries:
        note_sent(simulation, side, consumer, sent)
    if simulation.settings.kind is SubscriptionType.KEY_SHARED:
        checks.check_keys(side)
    elif not was_handed_over:
        for consumer, closed_before in before.items():
            if subscription.permits(consumer) > 0:
                sent_elsewhere = [each for other, sent in deliveries if other != consumer for each in sent]
                weight = max(
                    (side.model.weight(side.model.log.numbers[each.position]) for each in sent_elsewhere), default=0
                )
                checks.check_shortage(side, consumer, closed_before, weight_elsewhere=weight)
    return sum(len(sent) for _, sent in deliveries)
