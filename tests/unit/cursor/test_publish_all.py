"""`publish_all`: the messages of many topics with one sync."""

from __future__ import annotations

import pytest

from ackstate import LedgerFencedError, MemoryStore, Message, SqliteStore, StoreError
from ackstate.delay import TopicDelayIndex
from ackstate.errors import CorruptStateError
from ackstate.limits.policies import (
    BrokerDelayedDelivery,
    DelayedDeliveryPolicies,
    DeliveryDelayExceededError,
    effective,
)
from ackstate.message import NO_DELAY
from ackstate.stores.memory import Fault, FaultKind
from ackstate.topic import MessageLog, PublishCounters, TopicPublisher, publish_all
from ackstate.topic.log import LogFencedError
from ackstate.topic.publish import OVERRIDDEN, REJECTED


def messages(*payloads, deliver_at_ms=NO_DELAY):
    return [Message(payload, deliver_at_ms=deliver_at_ms) for payload in payloads]


def payloads(log):
    positions = [
        (ledger_id, entry_id) for ledger_id, count in log.ledgers.counts().items() for entry_id in range(count)
    ]
    return [message.payload for message in log.read(positions)]


class CountingLedgers:
    """Passes on to a store's ledgers, and counts the entries appended together."""

    def __init__(self, ledgers):
        self._ledgers = ledgers
        self.appended = []

    def append_many(self, appends):
        self.appended.append(sum(len(entries) for _, entries in appends))
        return self._ledgers.append_many(appends)

    def __getattr__(self, name):
        return getattr(self._ledgers, name)


@pytest.fixture(params=[MemoryStore, SqliteStore])
def store(request, tmp_path):
    made = MemoryStore() if request.param is MemoryStore else SqliteStore(tmp_path / "store")
    yield made
    made.close()


def logs_of(store, *topics):
    return [MessageLog.open(store, topic=topic, entries_per_ledger_max=3) for topic in topics]


def test_topics_share_one_append(store, monkeypatch):
    one, two, three = logs_of(store, "one", "two", "three")
    ledgers = CountingLedgers(store.ledgers)
    monkeypatch.setattr(type(store), "ledgers", ledgers)
    outcomes = publish_all([(one, messages(b"a", b"b")), (two, messages(b"c")), (three, [])])
    assert ledgers.appended == [3]
    assert [len(each) for each in outcomes] == [2, 1, 0]
    assert [payloads(each) for each in (one, two, three)] == [[b"a", b"b"], [b"c"], []]
    assert [log.ledgers.last_confirmed for log in (one, two)] == [outcomes[0][-1], outcomes[1][-1]]
    # The next batches begin a ledger where they do not fit.
    outcomes = publish_all([(two, messages(b"d")), (one, messages(b"e", b"f"))])
    assert [payloads(each) for each in (one, two)] == [[b"a", b"b", b"e", b"f"], [b"c", b"d"]]
    assert outcomes[1][0].ledger_id > outcomes[0][0].ledger_id
    for log in (one, two):
        assert MessageLog.find(store, topic=log.topic).ledgers.counts() == log.ledgers.counts()


def test_a_log_that_another_owner_has_does_not_keep_the_others_back(store):
    one, two = logs_of(store, "one", "two")
    MessageLog.open(store, topic="one")
    refused, stored = publish_all([(one, messages(b"a")), (two, messages(b"b"))])
    assert isinstance(refused, LogFencedError)
    assert isinstance(refused.__cause__, LedgerFencedError)
    assert payloads(two) == [b"b"]
    assert [position.ledger_id for position in stored] == [two.ledgers.current_ledger_id]
    with pytest.raises(LogFencedError):
        one.publish(messages(b"a"))


def test_logs_of_two_stores_and_one_log_twice_are_refused(store):
    one, two = logs_of(store, "one", "two")
    (other,) = logs_of(MemoryStore(), "other")
    for batches in ([(one, messages(b"a")), (other, messages(b"b"))], [(one, messages(b"a")), (one, messages(b"b"))]):
        with pytest.raises(ValueError, match="must share a store, and each must come once"):
            publish_all(batches)
    with pytest.raises(TypeError, match=r"messages\[0\] must be a Message"):
        publish_all([(one, messages(b"a")), (two, [b"b"])])
    assert payloads(one) == payloads(two) == []


def test_a_failed_append_is_the_error_of_each_and_counts_nothing():
    store = MemoryStore()
    one, two = logs_of(store, "one", "two")
    for mutation in range(2):
        store.inject(Fault(store.mutation_count + mutation, FaultKind.FULL))
    errors = publish_all([(one, messages(b"a")), (two, messages(b"b"))])
    assert [isinstance(error, StoreError) for error in errors] == [True, True]
    assert errors[0] is not errors[1]
    assert [log.ledgers.counts() for log in (one, two)] == [{1: 0}, {2: 0}]
    publish_all([(one, messages(b"c")), (two, messages(b"d"))])
    assert [payloads(each) for each in (one, two)] == [[b"c"], [b"d"]]


def test_policies_apply_and_are_counted():
    store = MemoryStore()
    one, two = logs_of(store, "one", "two")
    counters = PublishCounters(cluster="c")
    limited = effective(
        DelayedDeliveryPolicies(max_delivery_delay_ms=10), DelayedDeliveryPolicies(), BrokerDelayedDelivery()
    )
    fixed = effective(
        DelayedDeliveryPolicies(fixed_delivery_delay_ms=5), DelayedDeliveryPolicies(), BrokerDelayedDelivery()
    )
    first = TopicPublisher(one, topic="one", policies=lambda: limited, counters=counters)
    second = TopicPublisher(two, topic="two", policies=lambda: fixed, counters=counters)
    refused, stored = publish_all([
        (first, messages(b"a", deliver_at_ms=11)),
        (second, messages(b"b", b"c", deliver_at_ms=3)),
    ])  # fmt: skip
    assert isinstance(refused, DeliveryDelayExceededError)
    assert [message.deliver_at_ms for message in two.read(stored)] == [5, 5]
    values = {(each.name, each.attributes["pulsar.topic"]): each.value for each in counters.samples()}
    assert values == {(REJECTED, "one"): 1, (OVERRIDDEN, "one"): 0, (REJECTED, "two"): 0, (OVERRIDDEN, "two"): 2}
    assert payloads(one) == []


def test_a_damaged_store_answers_each_topic_with_its_own_error(monkeypatch):
    store = MemoryStore()
    logs = [MessageLog.open(store, topic=topic) for topic in "ab"]
    damage = CorruptStateError("log", offset=7, expected="a record", found="zeros")

    def fail(*_):
        raise damage

    monkeypatch.setattr(type(store.ledgers), "_append_many", fail)
    first, second = publish_all([(log, messages(b"x")) for log in logs])
    assert str(first) == str(second) == str(damage)
    assert first is not second
    assert (first.offset, first.expected) == (7, "a record")
