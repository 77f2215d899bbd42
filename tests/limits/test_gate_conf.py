"""The limits as a Pulsar broker's properties give them."""

import pytest

from limits import BrokerLimit, GateLimits


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


@pytest.mark.parametrize("off", ["0", "-1"])
def test_zero_and_below_is_off(off):
    keys = ("maxUnPersistAckRecordsBytes", "maxUnackedMessagesPerSubscription", "maxUnackedMessagesPerConsumer")
    limits = GateLimits.from_pulsar_conf(dict.fromkeys(keys, off))
    assert limits == GateLimits(0, 0, max_unacked_messages_per_consumer=0)


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
