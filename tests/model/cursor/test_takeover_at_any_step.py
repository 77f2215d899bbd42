"""A second owner opens the same disk between any two calls of the first, which then goes on and destroys nothing."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import pytest

from ackstate import (
    AckStateError,
    CursorConfig,
    Format,
    LedgerMap,
    LogFencedError,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    Start,
    Topic,
    TopicSettings,
)
from ackstate.cursor.journal import cursor_owner, cursor_path, delete_subscription
from ackstate.stores.memory import Fault, FaultKind, MemoryDisk
from ackstate.topic import Topics, delete_topic
from ackstate.topic.log import log_owner
from ackstate.topic_name import ROOT
from wrapped_store import before_each_call, copied

SUBSCRIPTION = "s"
PATH = cursor_path("t", SUBSCRIPTION)
NO_TAKEOVER = 10**9


def interrupted(disk, *, at, act, faults=()):
    """Open a store with something that happens before one of its calls, and perhaps a fault.

    It has two more attributes: `mutations`, for each call so far how many mutations came before it, and `begun_at`, the
    first call at which something may happen.
    """

    def before_call(_name):
        opened.mutations.append(store.mutation_count)
        if len(opened.mutations) == at + 1:
            act()

    store = MemoryStore(disk, faults=faults)
    opened = before_each_call(store, before_call)
    opened.mutations, opened.begun_at = [], 0
    return opened


def settings(form):
    config = CursorConfig(flush_interval_ms=0, ledger_entry_count_max=2, ledger_retry_ms=0, format=form)
    return TopicSettings(entries_per_ledger_max=2, cursor=config)


def messages(*payloads):
    return [Message(payload) for payload in payloads]


def ack_first(topic, now_ms):
    subscription = topic.subscriptions[SUBSCRIPTION]
    for delivery in subscription.dispatch("c", 1, now_ms=now_ms):
        subscription.ack(delivery.position, now_ms=now_ms)
    subscription.cursor.persist(now_ms=now_ms)


def own(store, form):
    """Do everything that an owner does, and continue after errors."""
    with suppress(AckStateError):
        topic = Topic.open(store, "t", settings=settings(form), now_ms=0)
        topic.subscribe(SUBSCRIPTION, start=Start.EARLIEST, now_ms=0)
        store.begun_at = len(store.mutations)
        for number in range(5):
            with suppress(AckStateError):
                topic.publish(messages(b"a%d" % number), now_ms=number)
            for act in (ack_first, ack_first, lambda topic, now_ms: topic.trim(now_ms=now_ms)):
                with suppress(AckStateError, KeyError):
                    act(topic, number)
        with suppress(AckStateError):
            topic.subscriptions[SUBSCRIPTION].seek(topic.log.ledgers.first_position, now_ms=6)
        with suppress(AckStateError):
            topic.close(now_ms=7)


class NextOwner:
    """Opens the topic, and works on it if it is active."""

    def __init__(self, disk, form, *, is_active):
        self.store, self.form, self.is_active = MemoryStore(disk), form, is_active
        self.topic = None

    def open(self):
        self.topic = Topic.open(self.store, "t", settings=settings(self.form), now_ms=10)
        self.subscription = self.topic.subscribe(SUBSCRIPTION, start=Start.EARLIEST, now_ms=10)
        if self.is_active:
            self.work()

    def work(self):
        for number in range(3):
            self.topic.publish(messages(b"b%d" % number), now_ms=11)
            ack_first(self.topic, 11)
            self.topic.trim(now_ms=11)


def payloads(log):
    counts = log.ledgers.counts().items()
    positions = [Position(ledger_id, entry_id) for ledger_id, count in counts for entry_id in range(count)]
    return [message.payload for message in log.read(positions)]


def acked(cursor, log):
    return log.ledgers.next_valid(cursor.mark_delete_position), str(cursor.deleted)


def check_alive(owner):
    """The owner has everything that its log and its cursor name, works on, and nothing is left behind in the end."""
    log, ledgers = owner.topic.log, owner.store.ledgers
    assert {each: ledgers.last(each) + 1 for each in log.ledgers} == log.ledgers.counts()
    owner.subscription.cursor._check()
    before = payloads(log)
    found = ManagedCursor.open(
        MemoryStore(copied(owner.store.disk)), topic="t", subscription=SUBSCRIPTION, ledgers=log.ledgers, now_ms=12
    )
    assert acked(found, log) == acked(owner.subscription.cursor, log)
    owner.topic.publish(messages(b"last"), now_ms=12)
    assert payloads(log) == [*before, b"last"]
    delivered = [each.message.payload for each in owner.subscription.dispatch("c", 100, now_ms=12)]
    assert delivered[-1] == b"last"
    ack_first(owner.topic, 12)

    last = NextOwner(owner.store.disk, owner.form, is_active=False)
    last.open()
    assert payloads(last.topic.log) == payloads(log)
    assert acked(last.subscription.cursor, log) == acked(owner.subscription.cursor, log)
    last.subscription.clear_backlog(now_ms=13)
    last.subscription.cursor.persist(now_ms=13)
    last.topic.publish(messages(b"end"), now_ms=13)
    last.subscription.clear_backlog(now_ms=13)
    last.subscription.cursor.persist(now_ms=13)
    last.topic.trim(now_ms=13)
    check_nothing_left_of(last.store, ledger_count=1, journals_max=1)


def check_nothing_left_of(store, *, ledger_count, journals_max):
    assert len(store.ledgers.owned_by(log_owner("t"))) == ledger_count
    assert len(store.ledgers.owned_by(cursor_owner(PATH))) <= journals_max


class Takeover(NamedTuple):
    at: int
    faults: tuple[Fault, ...]


@pytest.fixture(params=[1, pytest.param(3, marks=pytest.mark.soak)])
def at_every_step(request):
    """Run with a takeover before each call, alone, and after a fault of one of so many mutations before it."""

    def at_every_step(run):
        for takeover in takeovers(run, request.param):
            try:
                run(*takeover)
            except Exception as error:
                error.add_note(str(takeover))
                raise

    return at_every_step


def takeovers(run, reach):
    plain = run(NO_TAKEOVER, ())
    for at, count in enumerate(plain.mutations):
        if at < plain.begun_at:
            continue
        yield Takeover(at, ())
        for number in range(max(count - reach, 0), count):
            for kind in (FaultKind.FAIL_AFTER, FaultKind.FAIL_BEFORE):
                yield Takeover(at, (Fault(number, kind),))


@pytest.mark.parametrize("is_active", [True, False])
@pytest.mark.parametrize("form", Format)
def test_a_topic_that_is_taken_over_is_the_next_owner_s_alone(form, is_active, at_every_step):
    def run(at, faults):
        disk = MemoryDisk()
        after = NextOwner(disk, form, is_active=is_active)
        store = interrupted(disk, at=at, act=after.open, faults=faults)
        own(store, form)
        if after.topic is not None:
            check_alive(after)
        return store

    at_every_step(run)


@pytest.mark.parametrize("rolls", [True, False])
@pytest.mark.parametrize("form", Format)
def test_an_owner_that_goes_on_while_the_next_one_opens_loses_nothing_to_it(form, rolls, at_every_step):
    config = CursorConfig(format=form, ledger_entry_count_max=1 if rolls else 50, ledger_retry_ms=0)
    log = LedgerMap.from_counts({1: 9})

    def opened(store):
        return ManagedCursor.open(store, topic="t", subscription=SUBSCRIPTION, ledgers=log, config=config, now_ms=0)

    def run(at, faults):
        disk = MemoryDisk()
        before = opened(MemoryStore(disk))
        before.ack(Position(1, 2), now_ms=0)
        before.persist(now_ms=0)
        is_durable = False

        def go_on():
            nonlocal is_durable
            is_durable = acks(before, Position(1, 5))

        store = interrupted(disk, at=at, act=go_on, faults=faults)
        newer = None
        with suppress(AckStateError):
            newer = opened(store)
        if newer is not None:
            assert newer.is_acked(Position(1, 5)) or not is_durable
            assert not acks(before, Position(1, 6))
            assert acks(newer, Position(1, 7))
            assert faults or len(MemoryStore(disk).ledgers.owned_by(cursor_owner(PATH))) == 1
        assert opened(MemoryStore(disk)).is_acked(Position(1, 5)) or not is_durable
        return store

    at_every_step(run)


@pytest.mark.parametrize("is_active", [True, False])
def test_a_topic_that_is_opened_while_it_is_deleted_is_whole_or_gone(is_active, at_every_step):
    def run(at, faults):
        disk = MemoryDisk()
        first = NextOwner(disk, Format.NATIVE, is_active=True)
        first.open()
        after = NextOwner(disk, Format.NATIVE, is_active=is_active)
        store = interrupted(disk, at=at, act=after.open, faults=faults)
        is_fenced = False
        try:
            delete_topic(store, "t")
        except LogFencedError:
            is_fenced = True
        except AckStateError:
            assert faults
        with suppress(AckStateError):
            first.work()
        is_kept = after.topic is not None and (is_fenced or is_owner(after))
        if is_kept:
            check_alive(after)
        if is_kept or faults:
            delete_topic(MemoryStore(disk), "t")
        check_nothing_left(MemoryStore(disk))
        return store

    at_every_step(run)


def is_owner(owner):
    try:
        owner.topic.publish(messages(b"x"), now_ms=11)
    except LogFencedError:
        return False
    return True


def check_nothing_left(store):
    check_nothing_left_of(store, ledger_count=0, journals_max=0)
    assert Topics(store).stored() == store.metadata.children(ROOT) == []


@pytest.mark.parametrize("form", Format)
def test_the_owner_of_a_topic_that_was_deleted_leaves_nothing(form, at_every_step):
    def run(at, faults):
        disk = MemoryDisk()
        store = interrupted(disk, at=at, act=lambda: delete_topic(MemoryStore(disk), "t"), faults=faults)
        own(store, form)
        if at < NO_TAKEOVER:
            if faults:  # What an owner does not know of is left to the next deletion, or the next owner.
                delete_topic(MemoryStore(disk), "t")
            check_nothing_left(MemoryStore(disk))
        return store

    at_every_step(run)


def create(store, form, start):
    return ManagedCursor.open(
        store, topic="t", subscription=SUBSCRIPTION, ledgers=LedgerMap.from_counts({1: 9}),
        config=CursorConfig(flush_interval_ms=0, format=form, metadata_bytes_max=1_000), start=start, now_ms=0,
    )  # fmt: skip


@pytest.mark.parametrize("start", [None, Position(1, 2)])
@pytest.mark.parametrize("form", Format)
@pytest.mark.parametrize("is_deleted_before", [True, False])
@pytest.mark.parametrize(
    "meanwhile", ["created", "created and acked", "created without a ledger", "created and deleted", "deleted"]
)
def test_of_two_that_create_a_subscription_one_has_it(form, start, is_deleted_before, meanwhile, at_every_step):
    def run(at, faults):
        disk, cursors = MemoryDisk(), []
        if is_deleted_before:
            create(MemoryStore(disk), form, start)
            delete_subscription(MemoryStore(disk), topic="t", subscription=SUBSCRIPTION)

        def act():
            other = MemoryStore(disk)
            if meanwhile == "created without a ledger":
                other.break_ledgers()
            if "created" in meanwhile:
                cursors.append(create(other, form, start))
            if meanwhile in {"created and acked", "created without a ledger"}:
                assert acks(cursors[0], Position(1, 5))
            if "deleted" in meanwhile:
                delete_subscription(MemoryStore(disk), topic="t", subscription=SUBSCRIPTION)

        store = interrupted(disk, at=at, act=act, faults=faults)
        with suppress(AckStateError):
            cursors.append(create(store, form, start))
        if at >= len(store.mutations):
            return store
        assert create(MemoryStore(copied(disk)), form, start).is_acked(Position(1, 5)) == any(
            each.is_acked(Position(1, 5)) for each in cursors
        )
        owners = [each for each in cursors if acks(each, Position(1, 7))]
        assert len(owners) <= 1
        found = create(MemoryStore(disk), form, start)
        for each in owners:
            assert found.is_acked(Position(1, 7))
            assert not acks(each, Position(1, 8))
        delete_subscription(MemoryStore(disk), topic="t", subscription=SUBSCRIPTION)
        check_nothing_left(MemoryStore(disk))
        return store

    at_every_step(run)


def acks(cursor, position):
    cursor.ack(position, now_ms=0)
    try:
        cursor.persist(now_ms=0)
    except AckStateError:
        return False
    return True
