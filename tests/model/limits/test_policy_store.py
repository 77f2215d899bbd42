"""The stored policies: the valid values, their text, and that no writer overwrites another unseen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ackstate import (
    AckStateError,
    CorruptStateError,
    MemoryStore,
    StoreError,
    UnsupportedVersionError,
    VersionMismatchError,
)
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

GOLDEN = Path(__file__).parents[2] / "golden"
NAMESPACE = PolicyOwner("public", "default")
ORDERS = PolicyOwner("public", "default", "orders")
FULL = Policies(DelayedDeliveryPolicies(True, 100, None, 0), 60, 1_048_576)


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def policies(store):
    return PolicyStore(store.metadata)


class TestNamesInStore:
    def test_owners_have_paths_of_their_own(self):
        assert NAMESPACE.path == "/policies/namespaces/public/default"
        assert ORDERS.path == "/policies/topics/public/default/orders"
        assert PolicyOwner("a:b", "c=d", "é ü%").path == "/policies/topics/a%3Ab/c%3Dd/%C3%A9%20%C3%BC%25"
        assert str(ORDERS) == "persistent://public/default/orders"
        assert ORDERS.of_namespace == NAMESPACE

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "é", "a\n", "a\0", "%2e", "x" * 256, "\ud800"])
    def test_a_name_that_pulsar_refuses_is_refused(self, name):
        with pytest.raises(ValueError, match="tenant"):
            PolicyOwner(name, "default")
        with pytest.raises(ValueError, match="namespace"):
            PolicyOwner("public", name)

    @pytest.mark.parametrize(
        "topic",
        [
            "",
            ".",
            "..",
            " ",
            "\u00a0 \u3000",
            "a/b",
            "a\nb",
            "\0",
            "\x7f",
            "\x85",
            "\u2028",
            "\ufffd",
            "é" * 513,
        ],
    )
    def test_a_topic_with_no_name_or_a_dangerous_one_is_refused(self, topic):
        with pytest.raises(ValueError, match="topic") as refused:
            PolicyOwner("public", "default", topic)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 300

    @pytest.mark.parametrize(
        "topic", ["orders-partition-0", "a b", "...", "日本", "👩‍🚀", "a%2Fb", "é" * 512, "?#", "a\u202eb"]
    )
    def test_any_other_topic_keeps_its_policies(self, policies, topic):
        owner = PolicyOwner("public", "default", topic)
        policies.update(owner, lambda _: FULL)
        assert policies.read(owner).policies == FULL
        assert policies.topics(NAMESPACE) == [owner]


class TestBounds:
    @pytest.mark.parametrize(
        ("numbers", "naming"),
        [
            ({"become_old_ack_record_seconds": -1}, "becomeOldAckRecordSeconds"),
            ({"become_old_ack_record_seconds": 2**31}, "becomeOldAckRecordSeconds"),
            ({"max_unpersisted_ack_record_bytes": 1}, "maxUnPersistAckRecordsBytes.* is 1: below 1024"),
            ({"max_unpersisted_ack_record_bytes": 1023}, "maxUnPersistAckRecordsBytes.* is 1023: below 1024"),
            ({"max_unpersisted_ack_record_bytes": 2**63}, "maxUnPersistAckRecordsBytes"),
            ({"max_unpersisted_ack_record_bytes": -(2**63) - 1}, "maxUnPersistAckRecordsBytes"),
        ],
    )
    def test_a_number_out_of_bounds_is_refused_by_its_name(self, numbers, naming):
        with pytest.raises(ValueError, match=naming):
            Policies(**numbers)

    @pytest.mark.parametrize("name", ["become_old_ack_record_seconds", "max_unpersisted_ack_record_bytes"])
    @pytest.mark.parametrize("value", [True, 2048.0, "2048"])
    def test_what_is_no_integer_is_refused(self, name, value):
        with pytest.raises(TypeError, match="whole number"):
            Policies(**{name: value})

    def test_the_ends_of_the_bounds_are_kept(self):
        for seconds in (0, 2**31 - 1):
            for limit_bytes in (-(2**63), 0, 1024, 2**63 - 1):
                policies = Policies(DelayedDeliveryPolicies(), seconds, limit_bytes)
                assert decode_policies(encode_policies(policies)) == policies


class TestBytes:
    def test_the_golden_file_is_what_is_written_and_read(self):
        golden = (GOLDEN / "policies-v1.bin").read_bytes()
        assert golden == (
            b'{"version":1,"delayedDelivery":{"active":true,"tickTime":100,"fixedDeliveryDelayInMillis":0},'
            b'"becomeOldAckRecordSeconds":60,"maxUnPersistAckRecordsBytes":1048576}'
        )
        assert decode_policies(golden) == FULL
        assert encode_policies(FULL) == golden

    @pytest.mark.parametrize("version", [b"2", b"99", b"1" * 4000])
    def test_what_a_newer_release_wrote_is_not_guessed_at(self, version):
        with pytest.raises(UnsupportedVersionError, match="reads up to 1"):
            decode_policies(b'{"version":' + version + b',"new":[]}')

    @pytest.mark.parametrize(
        "damaged",
        [
            b"",
            b"null",
            b"[]",
            b"1",
            b"{}",
            b'{"version":0}',
            b'{"version":-1}',
            b'{"version":true}',
            b'{"version":1.0}',
            b'{"version":"1"}',
            b'{"version":1e999}',
            b'{"version":' + b"1" * 5000 + b"}",
            b'{"version": 1}',
            b'{"version":1}\n',
            b'{"version":1,"version":1}',
            b'{"version":1,"unknown":1}',
            b'{"version":1,"delayedDelivery":null}',
            b'{"version":1,"delayedDelivery":{}}',
            b'{"version":1,"delayedDelivery":{"active":null}}',
            b'{"version":1,"delayedDelivery":{"active":1}}',
            b'{"version":1,"delayedDelivery":{"tickTime":0}}',
            b'{"version":1,"delayedDelivery":{"tickTime":1,"active":true}}',
            b'{"version":1,"delayedDelivery":{"\\ud800":1}}',
            b'{"version":1,"becomeOldAckRecordSeconds":-1}',
            b'{"version":1,"becomeOldAckRecordSeconds":NaN}',
            b'{"version":1,"becomeOldAckRecordSeconds":"1"}',
            b'{"version":1,"maxUnPersistAckRecordsBytes":1023}',
            b"[" * 4000,
            b"\xff\xfe",
            '{"version":1}'.encode("utf-16"),
        ],
    )
    def test_anything_else_is_damage(self, damaged):
        with pytest.raises(CorruptStateError) as found:
            decode_policies(damaged, what="policies of another owner")
        assert found.value.what == "policies of another owner"
        assert len(str(found.value)) < 500

    def test_damage_is_told_where_it_begins(self):
        with pytest.raises(CorruptStateError) as found:
            decode_policies(b'{"version":1,"becomeOldAckRecordSeconds":007}')
        assert found.value.offset == 42
        with pytest.raises(CorruptStateError) as found:
            decode_policies(b'{"version":1 }')
        assert found.value.offset == 12

    def test_whatever_bytes_come_fuzz_gives_the_same_bytes_back_or_our_own_error(self):
        choose = random.Random(7)
        golden = encode_policies(FULL)
        outcomes = set()
        for _ in range(3_000):
            data = bytearray(golden[: choose.choice([len(golden), choose.randrange(len(golden))])])
            for _ in range(choose.randrange(3)):
                at = choose.randrange(len(data) + 1)
                data[at : at + choose.randrange(3)] = choose.choice(
                    [b"", b"9", b"-", b'"', b"{", b"\x00", b"\xff", b","]
                )
            try:
                assert encode_policies(decode_policies(bytes(data))) == data
                outcomes.add("read")
            except AckStateError as error:
                outcomes.add(type(error).__name__)
        assert outcomes == {"read", "CorruptStateError", "UnsupportedVersionError"}


class TestUpdates:
    def test_what_nobody_set_says_nothing(self, policies):
        assert policies.read(ORDERS) == VersionedPolicies(Policies(), ABSENT)
        assert policies.namespaces() == policies.topics() == []

    def test_an_update_is_read_back_with_its_version(self, policies):
        assert policies.update(ORDERS, lambda _: FULL) == VersionedPolicies(FULL, 0)
        assert policies.read(ORDERS) == VersionedPolicies(FULL, 0)
        assert policies.read(NAMESPACE).policies == Policies()

    def test_an_update_that_changes_nothing_writes_nothing(self, policies):
        policies.update(ORDERS, lambda _: FULL)
        assert policies.update(ORDERS, lambda old: old).version == 0
        assert policies.update(NAMESPACE, lambda _: Policies()) == VersionedPolicies(Policies(), ABSENT)

    def test_policies_that_say_nothing_any_more_are_deleted(self, policies, store):
        policies.update(ORDERS, lambda _: FULL)
        assert policies.update(ORDERS, lambda _: Policies()) == VersionedPolicies(Policies(), ABSENT)
        assert store.metadata.get(ORDERS.path) is None
        assert policies.update(ORDERS, lambda _: FULL).version == 1

    def test_a_refused_change_changes_nothing(self, policies):
        policies.update(ORDERS, lambda _: FULL)
        with pytest.raises(ZeroDivisionError):
            policies.update(ORDERS, lambda _: 1 // 0)
        assert policies.read(ORDERS) == VersionedPolicies(FULL, 0)

    def test_a_stale_expectation_is_refused_before_the_change(self, policies):
        policies.update(ORDERS, lambda _: FULL)
        with pytest.raises(VersionMismatchError, match="at version 0, not -1"):
            policies.update(ORDERS, lambda _: 1 // 0, expected_version=ABSENT)
        with pytest.raises(VersionMismatchError, match="at version -1, not 0"):
            policies.update(NAMESPACE, lambda _: FULL, expected_version=0)
        assert policies.update(ORDERS, lambda _: Policies(), expected_version=0).version == ABSENT

    def test_owners_are_listed_by_level_and_namespace(self, policies):
        other = PolicyOwner("a", "b", "c")
        for owner in (NAMESPACE, ORDERS, other, PolicyOwner("public", "other")):
            policies.update(owner, lambda _: FULL)
        assert policies.namespaces() == [NAMESPACE, PolicyOwner("public", "other")]
        assert policies.topics() == [other, ORDERS]
        assert policies.topics(NAMESPACE) == [ORDERS]
        assert policies.topics(PolicyOwner("a", "x")) == []

    def test_a_damaged_value_is_neither_read_nor_overwritten(self, policies, store):
        store.metadata.put(ORDERS.path, b'{"version":1', expected_version=ABSENT)
        for call in (policies.read, lambda owner: policies.update(owner, lambda _: FULL)):
            with pytest.raises(CorruptStateError, match="policies of persistent://public/default/orders"):
                call(ORDERS)
        assert store.metadata.get(ORDERS.path).data == b'{"version":1'

    def test_only_what_cannot_be_read_is_discarded(self, policies, store):
        assert policies.discard_unreadable(ORDERS) is False
        store.metadata.put(ORDERS.path, b'{"version":2}', expected_version=ABSENT)
        assert policies.discard_unreadable(ORDERS) is True
        assert policies.read(ORDERS) == VersionedPolicies(Policies(), ABSENT)
        policies.update(ORDERS, lambda _: FULL)
        assert policies.discard_unreadable(ORDERS) is False
        assert policies.read(ORDERS).policies == FULL

    def test_what_somebody_repairs_meanwhile_is_not_discarded(self, policies, store, monkeypatch):
        version = store.metadata.put(ORDERS.path, b"{", expected_version=ABSENT)
        delete = type(store.metadata).delete

        def and_somebody_writes(metadata, path, *, expected_version):
            metadata.put(path, encode_policies(FULL), expected_version=version)
            delete(metadata, path, expected_version=expected_version)

        monkeypatch.setattr(type(store.metadata), "delete", and_somebody_writes)
        with pytest.raises(VersionMismatchError):
            policies.discard_unreadable(ORDERS)
        assert policies.read(ORDERS).policies == FULL

    def test_a_damaged_name_is_no_owner(self, policies, store):
        store.metadata.put("/policies/topics/public/default/a%00", b"", expected_version=ABSENT)
        with pytest.raises(CorruptStateError, match="metadata below /policies/topics/public/default"):
            policies.topics()


FIELDS = ("become_old_ack_record_seconds", "max_unpersisted_ack_record_bytes")


def setting(field, number):
    return lambda old: Policies(
        old.delayed_delivery, *[number if each == field else getattr(old, each) for each in FIELDS]
    )


class Writers(RuleBasedStateMachine):
    """Two writers of the same policies, one of which may write while the other one decides."""

    update = PolicyStore.update

    @initialize()
    def begin(self):
        self.policies = PolicyStore(MemoryStore().metadata)
        self.model = {}
        self.versions = {ABSENT}
        self.seen = ABSENT

    def write(self, change, **expected):
        return type(self).update(self.policies, ORDERS, change, **expected)

    def note(self, field, number):
        self.model[field] = number

    @rule(field=st.sampled_from(FIELDS), number=st.none() | st.integers(1024, 1030))
    def alone(self, field, number):
        self.write(setting(field, number))
        self.note(field, number)

    @rule()
    def look(self):
        self.seen = self.policies.read(ORDERS).version

    @rule(number=st.integers(1024, 1030))
    def with_what_was_seen(self, number):
        is_current = self.policies.read(ORDERS).version == self.seen
        try:
            self.write(setting(FIELDS[0], number), expected_version=self.seen)
        except VersionMismatchError:
            assert not is_current
        else:
            assert is_current
            self.note(FIELDS[0], number)

    @rule(
        fields=st.permutations(FIELDS), numbers=st.lists(st.integers(1024, 1030), min_size=2, max_size=2, unique=True)
    )
    def at_the_same_time(self, fields, numbers):
        (mine, other), (my_number, other_number) = fields, numbers

        def change(old):
            before = self.policies.read(ORDERS).version
            self.write(setting(other, other_number))
            self.interfered = self.policies.read(ORDERS).version != before
            self.note(other, other_number)
            return setting(mine, my_number)(old)

        try:
            self.write(change)
        except VersionMismatchError:
            assert self.interfered
        else:
            self.note(mine, my_number)

    @invariant()
    def nothing_is_lost(self):
        found = self.policies.read(ORDERS)
        assert {field: getattr(found.policies, field) for field in FIELDS} == {
            field: self.model.get(field) for field in FIELDS
        }
        assert (found.version == ABSENT) == (found.policies == Policies())


TestWritersModel = pytest.mark.slow(Writers.TestCase)


def test_a_store_that_fails_is_told():
    store = MemoryStore()
    policies = PolicyStore(store.metadata)
    policies.update(ORDERS, lambda _: FULL)
    store.close()
    with pytest.raises(StoreError):
        policies.read(ORDERS)
