"""A broker's own configuration sets up a cursor, a gate and the rest, and nothing in it is passed over in silence."""

from dataclasses import asdict, replace

import pytest

from ackstate import CursorConfig
from ackstate.limits import BrokerDelayedDelivery, BrokerLimit, DispatchGate, GateLimits, Rule, Usage
from ackstate.pulsar_conf import parse_properties
from ackstate.wire.pulsar import Compression, RangeForm

RANGES = "managedLedgerMaxUnackedRangesToPersist"
ENTRIES = "managedLedgerCursorMaxEntriesPerLedger"
ROLLOVER = "managedLedgerCursorRolloverTimeInSeconds"
RATE = "managedLedgerDefaultMarkDeleteRateLimit"
FLUSH = "managedLedgerCursorPositionFlushSeconds"
OLD = "becomeOldAckRecordSeconds"
IN_METADATA = "managedLedgerMaxUnackedRangesToPersistInMetadataStore"
IN_ZOOKEEPER = "managedLedgerMaxUnackedRangesToPersistInZooKeeper"
BYTES = "maxUnPersistAckRecordsBytes"
UNACKED, OF_CONSUMER = "maxUnackedMessagesPerSubscription", "maxUnackedMessagesPerConsumer"
PAUSE = "dispatcherPauseOnAckStatePersistentEnabled"
OF_BROKER, SHARE = "maxUnackedMessagesPerBroker", "maxUnackedMessagesPerSubscriptionOnBrokerBlocked"
TICK, MAX_DELAY = "delayedDeliveryTickTimeMillis", "delayedDeliveryMaxDelayInMillis"
KINDS = [CursorConfig, GateLimits, BrokerLimit, BrokerDelayedDelivery]

# As the file has them: some set, some empty, one twice.
BROKER_CONF = """\
#
# Settings of the brokers of the cluster "bühne"
#

zookeeperServers=zk1:2181,zk2:2181
brokerServicePortTls=
webServicePort = 8080
advertisedListeners=internal:pulsar://b1:6650,\\
                    external:pulsar://b1.example:6651

### --- Managed Ledger --- ###
managedLedgerDefaultEnsembleSize=2
managedLedgerPassword=
managedLedgerDefaultMarkDeleteRateLimit=4.0
managedLedgerMaxEntriesPerLedger=50001
managedLedgerCursorMaxEntriesPerLedger=1
managedLedgerCursorRolloverTimeInSeconds=14400
managedLedgerCursorBackloggedThreshold=1000
! the alias of old releases
managedLedgerMaxUnackedRangesToPersistInZooKeeper=-1
managedLedgerMaxUnackedRangesToPersistInMetadataStore=1000
managedLedgerMaxBatchDeletedIndexToPersist=10000
managedLedgerMaxUnackedRangesToPersist : 20000
managedLedgerPersistIndividualAckAsLongArray=true
managedLedgerInfoCompressionType=LZ4
managedCursorInfoCompressionType=LZ4
managedCursorInfoCompressionThresholdInBytes=16384
managedLedgerCursorPositionFlushSeconds=60
acknowledgmentAtBatchIndexLevelEnabled=true
dispatcherPauseOnAckStatePersistentEnabled=true
maxUnackedMessagesPerConsumer=11
maxUnackedMessagesPerSubscription=12
maxUnackedMessagesPerBroker=13
maxUnackedMessagesPerSubscriptionOnBrokerBlocked=0.1
delayedDeliveryTickTimeMillis=7
keySharedLookAheadMsgInReplayThresholdPerSubscription=40000

managedLedgerCursorMaxEntriesPerLedger=\\
    40000
"""


def fields(settings):
    if isinstance(settings, BrokerLimit):
        return {"max_unacked_messages": settings.max_unacked_messages, "blocked_share": settings.blocked_share}
    return asdict(settings)


def test_a_broker_conf_sets_what_concerns_each_and_leaves_the_rest(tmp_path):
    path = tmp_path / "broker.conf"
    path.write_text(BROKER_CONF)
    for source in (path, str(path), parse_properties(BROKER_CONF)):
        assert CursorConfig.from_pulsar_conf(source) == CursorConfig(
            flush_interval_ms=60_000, mark_delete_rate_limit=4.0, ledger_entry_count_max=40_000,
            ledger_rollover_ms=14_400_000, range_count_max=20_000, batch_count_max=10_000,
            metadata_range_count_max=1_000, range_form=RangeForm.WORDS, compression=Compression.LZ4,
            compression_bytes_min=16_384, batch_index_acks=True,
        )  # fmt: skip
        assert GateLimits.from_pulsar_conf(source) == replace(
            GateLimits(), max_unacked_ranges=20_000, max_unacked_messages=12, max_unacked_messages_per_consumer=11
        )
        assert fields(BrokerLimit.from_pulsar_conf(source)) == {"max_unacked_messages": 13, "blocked_share": 0.1}
        assert BrokerDelayedDelivery.from_pulsar_conf(source) == BrokerDelayedDelivery(tick_time_ms=7)


SETS = [
    (CursorConfig, {RATE: "1.0", FLUSH: "60"}, {"mark_delete_rate_limit": 1, "flush_interval_ms": 60_000}),
    (CursorConfig, {RATE: "0"}, {"mark_delete_rate_limit": 0, "flush_interval_ms": 0}),
    (CursorConfig, {RATE: "-1", FLUSH: "60"}, {"mark_delete_rate_limit": 0, "flush_interval_ms": 0}),
    # Pulsar's period, and its rate
    (CursorConfig, {RATE: ".1"}, {"mark_delete_rate_limit": 0.1, "flush_interval_ms": 60_000}),
    (CursorConfig, {FLUSH: "5"}, {"mark_delete_rate_limit": 1, "flush_interval_ms": 5_000}),
    (CursorConfig, {RATE: "1e9", FLUSH: "1"}, {"mark_delete_rate_limit": 1e9, "flush_interval_ms": 1_000}),
    *(
        (CursorConfig, {IN_METADATA: "7", IN_ZOOKEEPER: alias}, {"metadata_range_count_max": limit})
        for alias, limit in [("-1", 7), ("0", 7), ("", 7), ("5", 5)]
    ),
    (CursorConfig, {IN_ZOOKEEPER: "5"}, {"metadata_range_count_max": 5}),
    (CursorConfig, {ROLLOVER: "7"}, {"ledger_rollover_ms": 7_000}),
    (CursorConfig, {"managedLedgerMaxBatchDeletedIndexToPersist": "9"}, {"batch_count_max": 9}),
    (CursorConfig, {"managedLedgerPersistIndividualAckAsLongArray": "False"}, {"range_form": RangeForm.LIST}),
    (CursorConfig, {"managedLedgerUnackedRangesOpenCacheSetEnabled": "false"}, {"range_form": RangeForm.LIST}),
    (CursorConfig, {"acknowledgmentAtBatchIndexLevelEnabled": "false"}, {"batch_index_acks": False}),
    (CursorConfig, {"managedCursorInfoCompressionType": "ZSTD"}, {"compression": Compression.ZSTD}),
    (CursorConfig, {"managedCursorInfoCompressionThresholdInBytes": "0"}, {"compression_bytes_min": 0}),
    (CursorConfig, {OLD: " 30 ", RANGES: "+0"}, {"become_old_ack_record_seconds": 30, "range_count_max": 0}),
    (GateLimits, {BYTES: "2048"}, {"max_unpersisted_ack_record_bytes": 2048}),
    *(
        (GateLimits, {key: off}, {field: 0})
        for off in ("0", "-1", "-9223372036854775808")
        for key, field in [
            (BYTES, "max_unpersisted_ack_record_bytes"),
            (UNACKED, "max_unacked_messages"),
            (OF_CONSUMER, "max_unacked_messages_per_consumer"),
        ]
    ),
    (GateLimits, {PAUSE: "true", RANGES: "7"}, {"max_unacked_ranges": 7}),
    (GateLimits, {RANGES: "7"}, {}),  # limits dispatch only where the pause is enabled
    (GateLimits, {PAUSE: "False", RANGES: "7"}, {}),
    (GateLimits, {PAUSE: "TRUE"}, {"max_unacked_ranges": 10_000}),
    (BrokerLimit, {OF_BROKER: "200"}, {"max_unacked_messages": 200}),
    (BrokerLimit, {OF_BROKER: "200", SHARE: "0.1"}, {"max_unacked_messages": 200, "blocked_share": 0.1}),
    (BrokerLimit, {OF_BROKER: "-1", SHARE: "0.1"}, {}),
    (BrokerLimit, {OF_BROKER: "0", SHARE: "0.1"}, {}),
    (BrokerLimit, {OF_BROKER: "-9223372036854775808"}, {}),
    (BrokerLimit, {OF_BROKER: "200", SHARE: "0.0"}, {}),
    (BrokerDelayedDelivery, {"delayedDeliveryEnabled": " FALSE "}, {"active": False}),
    (BrokerDelayedDelivery, {TICK: "5"}, {"tick_time_ms": 5}),
    (BrokerDelayedDelivery, {MAX_DELAY: "+60000"}, {"max_delivery_delay_ms": 60_000}),
    (BrokerDelayedDelivery, {MAX_DELAY: "-1"}, {}),
]


@pytest.mark.parametrize(("kind", "properties", "expected"), SETS)
def test_each_key_sets_its_own(kind, properties, expected):
    assert fields(kind.from_pulsar_conf(properties)) == fields(kind()) | expected


@pytest.mark.parametrize(
    ("kind", "properties", "saying"),
    [
        (GateLimits, {PAUSE: "true", RANGES: "0"}, f"{RANGES} is 0"),
        (BrokerLimit, {OF_BROKER: "9", SHARE: "1.5"}, SHARE),
    ],
)
def test_values_that_do_not_fit_together_are_refused(kind, properties, saying):
    with pytest.raises(ValueError, match=saying):
        kind.from_pulsar_conf(properties)


@pytest.mark.parametrize(
    ("kind", "misspelt", "meant"),
    [
        (CursorConfig, "managedLedgerMaxUnackRangesToPersist", RANGES),
        (CursorConfig, "managedLedgerMaxUnackedRangeToPersist", RANGES),
        (CursorConfig, "MANAGEDLEDGERMAXUNACKEDRANGESTOPERSIST", RANGES),
        (CursorConfig, "managedLedgerCursorMaxEntryPerLedger", ENTRIES),
        (CursorConfig, "managedLedgerDefaultMarkDeleteRate", RATE),
        (CursorConfig, "managedLedgerCursorPositionFlushInSeconds", FLUSH),
        (CursorConfig, "becomeOldAckRecordsSeconds", OLD),
        (CursorConfig, RANGES + " ", RANGES),
        (GateLimits, "maxUnpersistAckRecordsBytes", BYTES),
        (GateLimits, "maxUnackedMessagePerSubscription", UNACKED),
        (GateLimits, "dispatcherPauseOnAckStatePersistent", PAUSE),
        (GateLimits, "max_unacked_messages", UNACKED),
        (GateLimits, "max_unacked_ranges", RANGES),
        (BrokerDelayedDelivery, "delayedDeliveryMaxDeliveryDelayInMillis", MAX_DELAY),
    ],
)
def test_a_misspelt_key_is_named_with_what_was_meant(kind, misspelt, meant):
    with pytest.raises(ValueError, match=f"'{misspelt}'; did you mean '{meant}'"):
        kind.from_pulsar_conf({misspelt: "1"})


# Keys of Pulsar 2.7 to 5.0 that begin like ours.
PULSARS_KEYS = [
    *("managedLedgerInfoCompressionType", "managedLedgerInfoCompressionThresholdInBytes", "maxMessageSize"),
    *("managedLedgerCursorBackloggedThreshold", "managedLedgerMaxEntriesPerLedger", "managedLedgerDefaultAckQuorum"),
    *("managedLedgerMaxSizePerLedgerMbytes", "managedLedgerMaxLedgerRolloverTimeMinutes", "maxConsumersPerTopic"),
    *("managedLedgerReadEntryTimeoutSeconds", "managedLedgerConcurrentLedgerDeletions", "delayedDeliveryMaxNumBuckets"),
    *("managedLedgerMaxBacklogBetweenCursorsForCaching", "persistentUnackedRangesWithMultipleEntriesEnabled"),
    *("dispatcherDispatchMessagesInSubscriptionThread", "dispatcherPausedByLimit"),
    *("isDelayedDeliveryDeliverAtTimeStrict", "delayedDeliveryTrackerFactoryClassName"),
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_other_keys_of_pulsar_are_ignored(kind):
    for key in PULSARS_KEYS:
        for value in ("", "-1", "whatever"):
            assert fields(kind.from_pulsar_conf({key: value})) == fields(kind())
    with pytest.raises(TypeError, match="the name of a setting must be text, got 5"):
        kind.from_pulsar_conf({5: "1"})


@pytest.mark.parametrize(
    ("text", "properties"),
    [
        ("a=b", {"a": "b"}),
        ("a:b\r\nc d\re\n", {"a": "b", "c": "d", "e": ""}),
        ("  a  =  b  ", {"a": "b  "}),
        ("a==b", {"a": "=b"}),
        ("a = = b", {"a": "= b"}),
        ("\fa\t:\tb", {"a": "b"}),
        ("a=1\na=2", {"a": "2"}),
        ("#a=1\n !b=2\n\t\n", {}),
        ("# not continued\\\na=1", {"a": "1"}),
        ("a=1\\\n  #2", {"a": "1#2"}),
        ("a=1,\\\r\n   2,\\\r   3", {"a": "1,2,3"}),
        ("a=1\\\n\nb=2", {"a": "1", "b": "2"}),
        ("\\\n#a=1\nb=2", {"b": "2"}),  # nothing is continued yet
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\\\\\\n2", {"a": "1\\2"}),
        ("a=1\\", {"a": "1"}),
        ("a\\ b\\=c\\:d=\\t\\n\\r\\f\\z", {"a b=c:d": "\t\n\r\fz"}),
        ("\\u0061=\\u00e9\\u20AC", {"a": "é€"}),
        ("a=\\\\u0041", {"a": "\\u0041"}),
        ("a=1\x0bb\x85c\u2028d", {"a": "1\x0bb\x85c\u2028d"}),
        ("=b", {"": "b"}),
        ("", {}),
    ],
)
def test_text_is_read_as_java_reads_properties(text, properties):
    assert parse_properties(text) == properties


# The same fields, given as values

WHOLE_NUMBERS = {
    "max_unpersisted_ack_record_bytes": BYTES,
    "max_unacked_messages": UNACKED,
    "max_unacked_ranges": RANGES,
    "max_unacked_messages_per_consumer": OF_CONSUMER,
}


@pytest.mark.parametrize(("name", "key"), WHOLE_NUMBERS.items())
def test_a_limit_of_a_gate_is_an_int_of_64_bits(name, key):
    for value in (2.5, float("nan"), True, "9", None):
        with pytest.raises(TypeError, match=rf"{name} \({key}\) must be a whole number, got {value!r}"):
            GateLimits(**{name: value})
    for value in (2**63, 10**5000, -(2**63) - 1):
        with pytest.raises(
            ValueError, match=rf"{name} \({key}\) must be in -?[0-9]+\.\.{2**63 - 1}, got -?(0x[0-9a-f]+|922[0-9]+)"
        ):
            GateLimits(**{name: value})
    refused, saying = (1023, "is 1023: below 1024") if key is BYTES else (-3, "must be in 0.*, got -3")
    with pytest.raises(ValueError, match=rf"{name} \({key}\) {saying}|{key}.* {saying}"):
        GateLimits(**{name: refused})
    assert getattr(GateLimits(**{name: 2**63 - 1}), name) == 2**63 - 1


@pytest.mark.parametrize("limits", [None, {"max_unacked_messages": 1}, GateLimits])
def test_what_are_no_limits_is_refused_and_changes_nothing(limits):
    with pytest.raises(TypeError, match="GateLimits"):
        DispatchGate(limits)
    gate = DispatchGate(GateLimits(0, 4))
    with pytest.raises(TypeError, match="GateLimits"):
        gate.change_limits(limits)
    assert (gate.limits, gate.request([17] * 9, usage=Usage(0, 0, 0)).granted) == (GateLimits(0, 4), 4)
    assert [gate.blocked_count(rule) for rule in Rule] == [0, 0, 0, 0, 0]
    with pytest.raises(TypeError, match="'x'"):
        gate.blocked_count("x")
