"""The stored policies: the valid values, their text, and that no writer overwrites another unseen."""

import random
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import AckStateError, CorruptStateError, MemoryStore, UnsupportedVersionError, VersionMismatchError
from ackstate.limits import DelayedDeliveryPolicies
from ackstate.limits.policies import (
    Policies,
    PolicyOwner,
    PolicyStore,
    VersionedPolicies,
    decode_policies,
    encode_policies,
)
from ackstate.stores.base import ABSENT

GOLDEN = Path(__file__).parents[2] / "golden" / "policies-v1.bin"
NAMESPACE = PolicyOwner("public", "default")
ORDERS = PolicyOwner("public", "default", "orders")
FULL = Policies(DelayedDeliveryPolicies(True, 100, None, 0), 60, 1_048_576)
NOTHING = VersionedPolicies(Policies(), ABSENT)


@pytest.fixture
def policies(store):
    return PolicyStore(store.metadata)


def test_owners_have_paths_of_their_own():
    assert NAMESPACE.path == "/policies/namespaces/public/default"
    assert ORDERS.path == "/policies/topics/public/default/orders"
    assert PolicyOwner("a:b", "c=d", "é ü%").path == "/policies/topics/a%3Ab/c%3Dd/%C3%A9%20%C3%BC%25"
    assert str(ORDERS) == "persistent://public/default/orders"
    assert ORDERS.of_namespace == NAMESPACE


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "é", "a\n", "a\0", "%2e", "x" * 256, "\ud800"])
def test_a_name_that_pulsar_refuses_is_refused(name):
    with pytest.raises(ValueError, match="tenant"):
        PolicyOwner(name, "default")
    with pytest.raises(ValueError, match="namespace"):
        PolicyOwner("public", name)


NO_TOPICS = ["", ".", "..", " ", "\u00a0 \u3000", "a/b", "a\nb", "\0", "\x7f", "\x85", "\u2028", "\ufffd", "é" * 513]


@pytest.mark.parametrize("topic", NO_TOPICS)
def test_a_topic_with_no_name_or_a_dangerous_one_is_refused(topic):
    with pytest.raises(ValueError, match="topic") as refused:
        PolicyOwner("public", "default", topic)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    "topic", ["orders-partition-0", "a b", "...", "日本", "👩‍🚀", "a%2Fb", "é" * 512, "?#", "a\u202eb"]
)
def test_any_other_topic_keeps_its_policies(policies, topic):
    owner = PolicyOwner("public", "default", topic)
    policies.update(owner, lambda _: FULL)
    assert policies.read(owner).policies == FULL
    assert policies.topics(NAMESPACE) == [owner]


@pytest.mark.parametrize(
    ("numbers", "error", "naming"),
    [
        ({"become_old_ack_record_seconds": -1}, ValueError, "becomeOldAckRecordSeconds"),
        ({"become_old_ack_record_seconds": 2**31}, ValueError, "becomeOldAckRecordSeconds"),
        ({"become_old_ack_record_seconds": True}, TypeError, "whole number"),
        ({"max_unpersisted_ack_record_bytes": 1}, ValueError, "maxUnPersistAckRecordsBytes.* is 1: below 1024"),
        ({"max_unpersisted_ack_record_bytes": 1023}, ValueError, "maxUnPersistAckRecordsBytes.* is 1023: below 1024"),
        ({"max_unpersisted_ack_record_bytes": 2**63}, ValueError, "maxUnPersistAckRecordsBytes"),
        ({"max_unpersisted_ack_record_bytes": -(2**63) - 1}, ValueError, "maxUnPersistAckRecordsBytes"),
        ({"max_unpersisted_ack_record_bytes": 2048.0}, TypeError, "whole number"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_name(numbers, error, naming):
    with pytest.raises(error, match=naming):
        Policies(**numbers)


def test_the_ends_of_the_bounds_are_kept():
    for seconds in (0, 2**31 - 1):
        for limit_bytes in (-(2**63), 0, 1024, 2**63 - 1):
            policies = Policies(DelayedDeliveryPolicies(), seconds, limit_bytes)
            assert decode_policies(encode_policies(policies)) == policies


def test_the_golden_file_is_what_is_written_and_read():
    golden = GOLDEN.read_bytes()
    assert golden == (
        b'{"version":1,"delayedDelivery":{"active":true,"tickTime":100,"fixedDeliveryDelayInMillis":0},'
        b'"becomeOldAckRecordSeconds":60,"maxUnPersistAckRecordsBytes":1048576}'
    )
    assert decode_policies(golden) == FULL
    assert encode_policies(FULL) == golden


@pytest.mark.parametrize("version", [b"2", b"99", b"1" * 4000])
def test_what_a_newer_release_wrote_is_not_guessed_at(version):
    with pytest.raises(UnsupportedVersionError, match="reads up to 1"):
        decode_policies(b'{"version":' + version + b',"new":[]}')


NO_VERSIONS = [b"0", b"-1", b"true", b"1.0", b'"1"', b"1e999", b"1" * 5000, b" 1"]
NO_FIELDS = [
    b'"version":1',
    b'"unknown":1',
    b'"delayedDelivery":null',
    b'"delayedDelivery":{}',
    b'"delayedDelivery":{"active":null}',
    b'"delayedDelivery":{"active":1}',
    b'"delayedDelivery":{"tickTime":0}',
    b'"delayedDelivery":{"tickTime":1,"active":true}',
    b'"delayedDelivery":{"\\ud800":1}',
    b'"becomeOldAckRecordSeconds":-1',
    b'"becomeOldAckRecordSeconds":NaN',
    b'"becomeOldAckRecordSeconds":"1"',
    b'"maxUnPersistAckRecordsBytes":1023',
]
NO_POLICIES = [b"", b"null", b"[]", b"1", b"{}", b'{"version":1}\n', b"[" * 4000, b"\xff\xfe"]


@pytest.mark.parametrize(
    "damaged",
    [
        *NO_POLICIES,
        '{"version":1}'.encode("utf-16"),
        *(b'{"version":' + version + b"}" for version in NO_VERSIONS),
        *(b'{"version":1,' + field + b"}" for field in NO_FIELDS),
    ],
)
def test_anything_else_is_damage(damaged):
    with pytest.raises(CorruptStateError) as found:
        decode_policies(damaged, what="policies of another owner")
    assert found.value.what == "policies of another owner"
    assert len(str(found.value)) < 500


@pytest.mark.parametrize(
    ("damaged", "offset"), [(b'{"version":1,"becomeOldAckRecordSeconds":007}', 42), (b'{"version":1 }', 12)]
)
def test_damage_is_found_where_it_begins(damaged, offset):
    with pytest.raises(CorruptStateError) as found:
        decode_policies(damaged)
    assert found.value.offset == offset


def test_whatever_bytes_come_gives_the_same_bytes_back_or_our_own_error():
    choose, golden, outcomes = random.Random(7), encode_policies(FULL), set()
    for _ in range(3_000):
        data = bytearray(golden[: choose.choice([len(golden), choose.randrange(len(golden))])])
        for _ in range(choose.randrange(3)):
            at = choose.randrange(len(data) + 1)
            data[at : at + choose.randrange(3)] = choose.choice([b"", b"9", b"-", b'"', b"{", b"\x00", b"\xff", b","])
        try:
            assert encode_policies(decode_policies(bytes(data))) == data
            outcomes.add("read")
        except AckStateError as error:
            outcomes.add(type(error).__name__)
    assert outcomes == {"read", "CorruptStateError", "UnsupportedVersionError"}


def test_an_update_writes_what_changes_and_deletes_what_says_nothing_any_more(policies, store):
    assert policies.read(ORDERS) == NOTHING
    assert policies.update(ORDERS, lambda _: FULL) == policies.read(ORDERS) == VersionedPolicies(FULL, 0)
    assert policies.update(ORDERS, lambda _: FULL).version == 0
    assert policies.update(NAMESPACE, lambda _: Policies()) == policies.read(NAMESPACE) == NOTHING
    with pytest.raises(ZeroDivisionError):
        policies.update(ORDERS, lambda _: 1 // 0)
    assert policies.read(ORDERS) == VersionedPolicies(FULL, 0)
    assert policies.update(ORDERS, lambda _: Policies()) == NOTHING
    assert store.metadata.get(ORDERS.path) is None
    assert policies.update(ORDERS, lambda _: FULL).version == 1


def test_a_stale_expectation_is_refused_before_the_change(policies):
    policies.update(ORDERS, lambda _: FULL)
    with pytest.raises(VersionMismatchError, match="at version 0, not -1"):
        policies.update(ORDERS, lambda _: 1 // 0, expected_version=ABSENT)
    with pytest.raises(VersionMismatchError, match="at version -1, not 0"):
        policies.update(NAMESPACE, lambda _: FULL, expected_version=0)
    assert policies.update(ORDERS, lambda _: Policies(), expected_version=0).version == ABSENT


def test_owners_are_listed_by_level_and_namespace(policies, store):
    assert policies.namespaces() == policies.topics() == []
    other = PolicyOwner("a", "b", "c")
    for owner in (NAMESPACE, ORDERS, other, PolicyOwner("public", "other")):
        policies.update(owner, lambda _: FULL)
    assert policies.namespaces() == [NAMESPACE, PolicyOwner("public", "other")]
    assert policies.topics() == [other, ORDERS]
    assert policies.topics(NAMESPACE) == [ORDERS]
    assert policies.topics(PolicyOwner("a", "x")) == []
    store.metadata.put("/policies/topics/public/default/a%00", b"", expected_version=ABSENT)
    with pytest.raises(CorruptStateError, match="metadata below /policies/topics/public/default"):
        policies.topics()


def test_a_damaged_value_is_neither_read_nor_overwritten_and_can_be_discarded(policies, store):
    assert policies.discard_unreadable(ORDERS) is False
    store.metadata.put(ORDERS.path, b'{"version":1', expected_version=ABSENT)
    for call in (policies.read, lambda owner: policies.update(owner, lambda _: FULL)):
        with pytest.raises(CorruptStateError, match="policies of persistent://public/default/orders"):
            call(ORDERS)
    assert store.metadata.get(ORDERS.path).data == b'{"version":1'
    assert policies.discard_unreadable(ORDERS) is True
    assert policies.read(ORDERS) == NOTHING
    policies.update(ORDERS, lambda _: FULL)
    assert policies.discard_unreadable(ORDERS) is False
    assert policies.read(ORDERS).policies == FULL


def test_what_somebody_repairs_meanwhile_is_not_discarded(policies, store, monkeypatch):
    version = store.metadata.put(ORDERS.path, b"{", expected_version=ABSENT)
    delete = type(store.metadata).delete

    def and_somebody_writes(metadata, path, *, expected_version):
        metadata.put(path, encode_policies(FULL), expected_version=version)
        delete(metadata, path, expected_version=expected_version)

    monkeypatch.setattr(type(store.metadata), "delete", and_somebody_writes)
    with pytest.raises(VersionMismatchError):
        policies.discard_unreadable(ORDERS)
    assert policies.read(ORDERS).policies == FULL


FIELDS = ("become_old_ack_record_seconds", "max_unpersisted_ack_record_bytes")
NUMBERS = st.integers(1024, 1030)


def setting(field, number):
    return lambda old: Policies(
        old.delayed_delivery, *[number if each == field else getattr(old, each) for each in FIELDS]
    )


class Writers(RuleBasedStateMachine):
    """Two writers of the same policies, one of which may write while the other one decides."""

    @initialize()
    def begin(self):
        self.policies = PolicyStore(MemoryStore().metadata)
        self.model, self.seen = {}, ABSENT

    @rule(field=st.sampled_from(FIELDS), number=st.none() | NUMBERS)
    def alone(self, field, number):
        self.policies.update(ORDERS, setting(field, number))
        self.model[field] = number

    @rule()
    def look(self):
        self.seen = self.policies.read(ORDERS).version

    @rule(number=NUMBERS)
    def with_what_was_seen(self, number):
        is_current = self.policies.read(ORDERS).version == self.seen
        try:
            self.policies.update(ORDERS, setting(FIELDS[0], number), expected_version=self.seen)
        except VersionMismatchError:
            assert not is_current
        else:
            assert is_current
            self.model[FIELDS[0]] = number

    @rule(fields=st.permutations(FIELDS), numbers=st.lists(NUMBERS, min_size=2, max_size=2, unique=True))
    def at_the_same_time(self, fields, numbers):
        (mine, other), (my_number, other_number) = fields, numbers

        def change(old):
            before = self.policies.read(ORDERS).version
            self.policies.update(ORDERS, setting(other, other_number))
            self.interfered = self.policies.read(ORDERS).version != before
            self.model[other] = other_number
            return setting(mine, my_number)(old)

        try:
            self.policies.update(ORDERS, change)
        except VersionMismatchError:
            assert self.interfered
        else:
            self.model[mine] = my_number

    @invariant()
    def nothing_is_lost(self):
        found = self.policies.read(ORDERS)
        assert [getattr(found.policies, field) for field in FIELDS] == [self.model.get(field) for field in FIELDS]
        assert (found.version == ABSENT) == (found.policies == Policies())


TestWritersModel = pytest.mark.slow(Writers.TestCase)
