"""A former owner is paused before any call of its store, resumes, and changes nothing of the present owner's (I14).

The same for cursors and message logs, in every store that two owners can have open. What the former owner has decided
before the takeover may still happen; after that each of its operations is refused.
"""

import contextlib
import itertools
from contextlib import closing, suppress
from operator import methodcaller

import pytest

from ackstate import (
    AckStateError,
    CursorConfig,
    Format,
    LedgerMap,
    ManagedCursor,
    MemoryStore,
    Message,
    Position,
    Start,
    Topic,
    TopicSettings,
)
from ackstate.stores.base import ABSENT, VersionMismatchError
from ackstate.stores.bookkeeper import BookKeeperStore
from ackstate.stores.memory import MemoryDisk
from ackstate.stores.pulsar import open_cluster
from crash.bookkeeper_cluster import bookkeeper_options
from pulsar_nodes import NODE, TOPIC
from wrapped_store import before_each_call

numbers = itertools.count()
CLUSTER = [
    pytest.param(kind, marks=[pytest.mark.slow, pytest.mark.bookkeeper_cluster]) for kind in ("native", "pulsar")
]


class Pause:
    """Something that happens before one of the calls of a store, counted from `begin`."""

    calls_left, act = -1, None

    def begin(self, calls_left, act):
        self.calls_left, self.act = calls_left, act

    def __call__(self, _name):
        self.calls_left -= 1
        if self.calls_left == -1:
            self.act()


@pytest.fixture
def opener(request):
    """Return a function that makes a new storage of a kind, and returns a function that opens it."""
    with contextlib.ExitStack() as stack:

        def in_cluster(kind):
            cluster, client = map(request.getfixturevalue, ("bookkeeper_cluster", "bookkeeper_client"))
            number = next(numbers)
            if kind == "native":
                settings = {"root": f"/former-{number}", "bookkeeper": bookkeeper_options(client)}
                return lambda: stack.enter_context(closing(BookKeeperStore(cluster.hosts, **settings)))
            url = f"pulsar+zk://{cluster.hosts}"
            return lambda: stack.enter_context(closing(open_cluster(url, bookkeeper=bookkeeper_options(client))))

        def new(kind):
            disk = MemoryDisk()
            return (lambda: MemoryStore(disk)) if kind == "memory" else in_cluster(kind)

        yield new


def paused(run, kind):
    """Pause a run before each call of its operation, in a cluster before each fifth, until it has no more."""
    for calls in itertools.count() if kind == "memory" else itertools.count(1, 5):
        if not run(calls):
            return


def refused(operation, owner):
    with pytest.raises(AckStateError):
        operation(owner)


# Cursors


def persist(cursor, *entries):
    for entry in entries:
        cursor.ack(Position(1, entry), now_ms=1)
        cursor.persist(now_ms=1)


CURSOR_OPERATIONS = {
    "appends": lambda cursor: persist(cursor, 30),
    "rolls over": lambda cursor: persist(cursor, 32, 34, 36),
    "puts its state into the record": methodcaller("close", now_ms=2),
    "puts properties": methodcaller("set_cursor_properties", {"owner": "former"}),
    "resets": methodcaller("reset", Position(1, 0), now_ms=2),
}


@pytest.mark.parametrize("does", CURSOR_OPERATIONS)
@pytest.mark.parametrize("kind", ["memory", *CLUSTER])
def test_a_former_owner_of_a_cursor_changes_nothing(opener, kind, does):
    form, operation = (Format.PULSAR if kind == "pulsar" else Format.NATIVE), CURSOR_OPERATIONS[does]
    config = CursorConfig(flush_interval_ms=0, ledger_entry_count_max=3, ledger_retry_ms=0, format=form)
    log = LedgerMap.from_counts({1: 50})

    def opened(store, name):
        return ManagedCursor.open(store, topic=TOPIC, subscription=name, ledgers=log, config=config, now_ms=0)

    open_storage = opener(kind)
    pause = Pause()
    formers, presents = before_each_call(open_storage(), pause), open_storage()
    if kind == "pulsar":
        for end in range(2, NODE.count("/") + 2):
            with suppress(VersionMismatchError):
                presents.nodes.put("/".join(NODE.split("/")[:end]), b"", expected_version=ABSENT)

    def run(calls):
        name, present = f"s{next(numbers)}", []
        former = opened(formers, name)
        persist(former, 5, 6)

        def take_over():
            present.append(opened(presents, name))
            persist(present[0], 20, 21)

        pause.begin(calls, take_over)
        with suppress(AckStateError):
            operation(former)
        if not present:
            return False
        before = str(present[0].deleted), dict(present[0].cursor_properties)
        refused(lambda owner: persist(owner, 40), former)
        refused(methodcaller("reset", Position(1, 2), now_ms=3), former)
        refused(methodcaller("set_cursor_properties", {"late": "1"}), former)
        found = opened(open_storage(), name)
        assert (str(found.deleted), dict(found.cursor_properties)) == before
        assert found.is_acked(Position(1, 20))
        assert not found.is_acked(Position(1, 40))
        return True

    paused(run, kind)


# Message logs


def payloads(topic):
    counts = topic.log.ledgers.counts().items()
    positions = [Position(ledger_id, entry_id) for ledger_id, count in counts for entry_id in range(count)]
    return [message.payload for message in topic.log.read(positions)]


def publish(topic, *texts):
    for text in texts:
        topic.publish([Message(text)], now_ms=1)


def roll_over(topic):
    topic.log.end_ledger()
    publish(topic, b"late")


TOPIC_OPERATIONS = {
    "appends": lambda topic: publish(topic, b"late"),
    "rolls over": roll_over,
    "trims": lambda topic: topic.log.trim(topic.log.ledgers.current_ledger_id),
    "closes its ledger": lambda topic: topic.log._ownership.close_ledger(),
    "deletes the log": lambda topic: topic.log._ownership.delete(),
    "subscribes": lambda topic: topic.subscribe(f"new{next(numbers)}", start=Start.EARLIEST, now_ms=2),
    "opens a subscription": lambda topic: topic.subscribe("other", now_ms=2),
    "unsubscribes": lambda topic: topic.unsubscribe("s", now_ms=2),
}


@pytest.mark.parametrize("does", TOPIC_OPERATIONS)
@pytest.mark.parametrize("kind", ["memory", CLUSTER[0]])
def test_a_former_owner_of_a_log_changes_nothing(opener, kind, does):
    operation = TOPIC_OPERATIONS[does]
    config = CursorConfig(flush_interval_ms=0)
    settings = TopicSettings(entries_per_ledger_max=2, cursor=config)
    open_storage = opener(kind)
    pause = Pause()
    formers, presents = before_each_call(open_storage(), pause), open_storage()

    def run(calls):
        name, present = f"t{next(numbers)}", []
        former = Topic.open(formers, name, settings=settings, now_ms=0)
        former.subscribe("s", start=Start.EARLIEST, now_ms=0)
        publish(former, b"a", b"b", b"c", b"d", b"e")
        with Topic.open(presents, name, settings=settings, now_ms=0) as between:
            between.subscribe("other", start=Start.EARLIEST, now_ms=0)
        former = Topic.open(formers, name, settings=settings, now_ms=0)
        former.subscribe("s", now_ms=0)
        publish(former, b"f")

        def take_over():
            present.append(Topic.open(presents, name, settings=settings, now_ms=1))
            for each in ("s", "other"):
                present[0].subscribe(each, start=Start.EARLIEST, now_ms=1)
            publish(present[0], b"x", b"y", b"z")
            for each in present[0].subscriptions.values():
                each.ack(present[0].log.ledgers.last_confirmed, now_ms=1)
                each.cursor.persist(now_ms=1)

        pause.begin(calls, take_over)
        with suppress(AckStateError):
            operation(former)
        if not present:
            return False
        owner = present[0]
        before = payloads(owner)
        assert before[-3:] == [b"x", b"y", b"z"]
        # The others may have nothing left to do.
        for each in TOPIC_OPERATIONS.keys() - {"closes its ledger", "opens a subscription", does}:
            refused(TOPIC_OPERATIONS[each], former)
        assert payloads(owner) == before
        publish(owner, b"still the owner")
        for each in owner.subscriptions.values():
            assert each.cursor.is_acked(owner.log.ledgers.previous(owner.log.ledgers.last_confirmed))
            each.ack(owner.log.ledgers.last_confirmed, now_ms=3)
            assert each.cursor.persist(now_ms=3).messages_covered == 1
        found = Topic.open(open_storage(), name, settings=settings, now_ms=4)
        assert payloads(found) == [*before, b"still the owner"]
        assert sorted(each.name for each in found.stored_subscriptions() if "new" not in each.name) == ["other", "s"]
        return True

    paused(run, kind)
