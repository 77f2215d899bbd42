"""The limits as a Pulsar broker's properties give them."""

import pytest

from ackstate.limits import BrokerDelayedDelivery, BrokerLimit, DispatchGate, GateLimits, Rule, Usage

READERS = [GateLimits.from_pulsar_conf, BrokerLimit.from_pulsar_conf, BrokerDelayedDelivery.from_pulsar_conf]


def test_without_properties_the_defaults_hold():
    assert GateLimits.from_pulsar_conf({}) == GateLimits()
    assert GateLimits.from_pulsar_conf({"maxUnPersistAckRecordsBytes": " ", "brokerServicePort": "x"}) == GateLimits()


def test_each_limit_has_its_key():
    limits = GateLimits.from_pulsar_conf(
        {
            "maxUnPersistAckRecordsBytes": "2048",
            "dispatcherPauseOnAckStatePersistentEnabled": "true",
            "managedLedgerMaxUnackedRangesToPersist": "7",
            "maxUnackedMessagesPerSubscription": " 11 ",
            "maxUnackedMessagesPerConsumer": "5",
        }
    )
    assert limits == GateLimits(2048, 11, max_unacked_ranges=7, max_unacked_messages_per_consumer=5)


@pytest.mark.parametrize(
    ("properties", "ranges"),
    [
        ({"managedLedgerMaxUnackedRangesToPersist": "7"}, 0),
        ({"dispatcherPauseOnAckStatePersistentEnabled": "False", "managedLedgerMaxUnackedRangesToPersist": "7"}, 0),
        ({"dispatcherPauseOnAckStatePersistentEnabled": "TRUE"}, 10_000),
    ],
)
def test_ranges_limit_dispatch_only_where_the_pause_is_enabled(properties, ranges):
    assert GateLimits.from_pulsar_conf(properties).max_unacked_ranges == ranges


@pytest.mark.parametrize("off", ["0", "-1", "-9223372036854775808"])
def test_zero_and_below_is_off(off):
    keys = ("maxUnPersistAckRecordsBytes", "maxUnackedMessagesPerSubscription", "maxUnackedMessagesPerConsumer")
    limits = GateLimits.from_pulsar_conf(dict.fromkeys(keys, off))
    assert limits == GateLimits(0, 0, max_unacked_messages_per_consumer=0)


WHOLE_NUMBERS = {
    "max_unpersisted_ack_record_bytes": "maxUnPersistAckRecordsBytes",
    "max_unacked_messages": "maxUnackedMessagesPerSubscription",
    "max_unacked_ranges": "managedLedgerMaxUnackedRangesToPersist",
    "max_unacked_messages_per_consumer": "maxUnackedMessagesPerConsumer",
}


@pytest.mark.parametrize(("name", "key"), WHOLE_NUMBERS.items())
def test_a_whole_number_is_an_int_of_64_bits(name, key):
    for value in (2.5, float("nan"), float("inf"), True, "9", None):
        with pytest.raises(TypeError, match=rf"{name} \({key}\) must be a whole number, got {value!r}"):
            GateLimits(**{name: value})
    for value in (2**63, 10**400, 10**5000, -(2**63) - 1):
        with pytest.raises(ValueError, match=rf"{name} \({key}\) must fit 64 bits, got -?0x[0-9a-f]+"):
            GateLimits(**{name: value})
    assert getattr(GateLimits(**{name: 2**63 - 1}), name) == 2**63 - 1


@pytest.mark.parametrize("name", ["unpersisted_release_ratio", "unacked_release_ratio"])
def test_a_ratio_is_a_number_above_0_and_at_most_1(name):
    for value in ("0.5", None, True, [1]):
        with pytest.raises(TypeError, match=name):
            GateLimits(**{name: value})
    for value in (0, -0.5, 1.01, float("nan"), float("inf"), 10**400, 10**5000):
        with pytest.raises(ValueError, match=f"{name} must be above 0 and at most 1, got "):
            GateLimits(**{name: value})
    assert getattr(GateLimits(**{name: 1}), name) == 1


@pytest.mark.parametrize("limits", [None, {"max_unacked_messages": 1}, GateLimits])
def test_what_are_no_limits_is_refused_and_changes_nothing(limits):
    with pytest.raises(TypeError, match="GateLimits"):
        DispatchGate(limits)
    gate = DispatchGate(GateLimits(0, 4))
    with pytest.raises(TypeError, match="GateLimits"):
        gate.change_limits(limits)
    assert (gate.limits, gate.request([17] * 9, usage=Usage(0, 0, 0)).granted) == (GateLimits(0, 4), 4)


def test_what_is_no_rule_has_no_count():
    gate = DispatchGate(GateLimits())
    assert [gate.blocked_count(rule) for rule in Rule] == [0, 0, 0, 0, 0]
    with pytest.raises(TypeError, match="'x'"):
        gate.blocked_count("x")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("maxUnPersistAckRecordsBytes", "5 MiB"),
        ("maxUnPersistAckRecordsBytes", "1023"),
        ("maxUnPersistAckRecordsBytes", "9223372036854775808"),
        ("maxUnackedMessagesPerSubscription", "1e3"),
        ("maxUnackedMessagesPerConsumer", "1_000"),
        ("managedLedgerMaxUnackedRangesToPersist", "many"),
        ("dispatcherPauseOnAckStatePersistentEnabled", "yes"),
    ],
)
def test_a_malformed_value_is_refused_by_its_key(key, value):
    with pytest.raises(ValueError, match=key):
        GateLimits.from_pulsar_conf({key: value})


def test_a_pause_at_no_range_at_all_is_refused():
    properties = {
        "dispatcherPauseOnAckStatePersistentEnabled": "true",
        "managedLedgerMaxUnackedRangesToPersist": "0",
    }
    with pytest.raises(ValueError, match="managedLedgerMaxUnackedRangesToPersist is 0"):
        GateLimits.from_pulsar_conf(properties)


def test_a_value_that_is_no_text_is_refused():
    with pytest.raises(TypeError, match="maxUnackedMessagesPerConsumer"):
        GateLimits.from_pulsar_conf({"maxUnackedMessagesPerConsumer": 5})


MAXIMUM, SHARE = "maxUnackedMessagesPerBroker", "maxUnackedMessagesPerSubscriptionOnBrokerBlocked"


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, (0, 0.16)),
        ({MAXIMUM: "200"}, (200, 0.16)),
        ({MAXIMUM: "200", SHARE: "0.1"}, (200, 0.1)),
        ({MAXIMUM: "-1", SHARE: "0.1"}, (0, 0.16)),
        ({MAXIMUM: "-9223372036854775808"}, (0, 0.16)),
        ({MAXIMUM: "200", SHARE: "0.0"}, (0, 0.16)),
    ],
)
def test_the_limit_of_a_broker_has_two_keys(properties, expected):
    limit = BrokerLimit.from_pulsar_conf(properties)
    assert (limit.max_unacked_messages, limit.blocked_share) == expected


@pytest.mark.parametrize(
    ("properties", "key"), [({MAXIMUM: "x"}, MAXIMUM), ({SHARE: "x"}, SHARE), ({MAXIMUM: "9", SHARE: "1.5"}, SHARE)]
)
def test_a_malformed_limit_of_a_broker_is_refused_by_its_key(properties, key):
    with pytest.raises(ValueError, match=key):
        BrokerLimit.from_pulsar_conf(properties)


def test_a_path_is_read_as_a_broker_does(tmp_path):
    path = tmp_path / "broker.conf"
    path.write_bytes(
        b"\xef\xbb\xbf# limits\nbrokerServicePort=6650\nmaxUnPersistAckRecordsBytes = 20\\\n  48\n"
        b"maxUnackedMessagesPerSubscription:11\nmaxUnackedMessagesPerBroker=9\ndelayedDeliveryTickTimeMillis=7\n"
    )
    for source in (path, str(path)):
        assert GateLimits.from_pulsar_conf(source) == GateLimits(2048, 11)
        assert BrokerLimit.from_pulsar_conf(source).max_unacked_messages == 9
        assert BrokerDelayedDelivery.from_pulsar_conf(source).tick_time_ms == 7


@pytest.mark.parametrize("read", READERS)
def test_a_path_that_is_none_is_named(read, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(tmp_path / "nowhere")
    with pytest.raises(TypeError):
        read(5)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("maxUnpersistAckRecordsBytes", "maxUnPersistAckRecordsBytes"),
        ("maxUnackedMessagePerSubscription", "maxUnackedMessagesPerSubscription"),
        ("maxUnackedMessagesPerConsumers", "maxUnackedMessagesPerConsumer"),
        ("dispatcherPauseOnAckStatePersistent", "dispatcherPauseOnAckStatePersistentEnabled"),
        ("managedLedgerMaxUnackedRangeToPersist", "managedLedgerMaxUnackedRangesToPersist"),
        *(
            ("max_unacked_messages", "maxUnackedMessagesPerSubscription"),
            ("max_unacked_ranges", Rule.UNACKED_RANGES.value),
        ),
    ],
)
def test_a_misspelt_key_is_refused_and_the_right_one_named(key, meant, tmp_path):
    (tmp_path / "broker.conf").write_text(f"{key}=5\n")
    for source in ({key: "5"}, tmp_path / "broker.conf"):
        with pytest.raises(ValueError, match=f"unknown key of Pulsar '{key}'; did you mean '{meant}'"):
            GateLimits.from_pulsar_conf(source)


@pytest.mark.parametrize("read", READERS)
def test_keys_of_pulsar_that_concern_others_are_ignored(read):
    keys = [
        *(
            "maxUnackedMessagesPerBroker",
            "maxUnackedMessagesPerSubscriptionOnBrokerBlocked",
            "maxConsumersPerSubscription",
        ),
        *("managedLedgerMaxUnackedRangesToPersistInMetadataStore", "managedLedgerMaxUnackedRangesToPersistInZooKeeper"),
        *("managedLedgerMaxBatchDeletedIndexToPersist", "persistentUnackedRangesWithMultipleEntriesEnabled"),
        *("dispatcherDispatchMessagesInSubscriptionThread", "dispatcherPausedByLimit", "delayedDeliveryMaxNumBuckets"),
        *("isDelayedDeliveryDeliverAtTimeStrict", "delayedDeliveryTrackerFactoryClassName", "maxMessageSize"),
    ]
    for key in keys:
        read({key: ""})


@pytest.mark.parametrize("read", READERS)
def test_a_key_that_is_no_text_is_refused(read):
    with pytest.raises(TypeError, match="the name of a setting must be text, got 5"):
        read({5: "1"})
