"""A broker's own configuration sets up a cursor, and nothing in it that concerns a cursor is passed over in silence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ackstate import CursorConfig
from ackstate.pulsar_conf import parse_properties
from ackstate.wire.pulsar import Compression, RangeForm

RANGES = "managedLedgerMaxUnackedRangesToPersist"
ENTRIES = "managedLedgerCursorMaxEntriesPerLedger"
RATE = "managedLedgerDefaultMarkDeleteRateLimit"
FLUSH = "managedLedgerCursorPositionFlushSeconds"
OLD = "becomeOldAckRecordSeconds"
IN_METADATA = "managedLedgerMaxUnackedRangesToPersistInMetadataStore"
IN_ZOOKEEPER = "managedLedgerMaxUnackedRangesToPersistInZooKeeper"

# As the file has them: some set, some empty, one twice.
BROKER_CONF = """\
#
# Settings of the brokers of the cluster "bühne"
#

### --- General broker settings --- ###

zookeeperServers=zk1:2181,zk2:2181
brokerServicePort=6650
brokerServicePortTls=
webServicePort = 8080
advertisedListeners=internal:pulsar://b1:6650,\\
                    external:pulsar://b1.example:6651
allowAutoTopicCreationType=non-partitioned

### --- Managed Ledger --- ###
managedLedgerDefaultEnsembleSize=2
managedLedgerDigestType=CRC32C
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
persistentUnackedRangesWithMultipleEntriesEnabled=false
managedLedgerPersistIndividualAckAsLongArray=true
managedLedgerUnackedRangesOpenCacheSetEnabled=true
managedLedgerInfoCompressionType=LZ4
managedCursorInfoCompressionType=LZ4
managedCursorInfoCompressionThresholdInBytes=16384
managedLedgerCursorPositionFlushSeconds=60
acknowledgmentAtBatchIndexLevelEnabled=true
dispatcherPauseOnAckStatePersistentEnabled=false
autoSkipNonRecoverableData=false
maxUnackedMessagesPerConsumer=50000
maxUnackedMessagesPerSubscription=200000
maxUnackedMessagesPerBroker=0
maxUnackedMessagesPerSubscriptionOnBrokerBlocked=0.16
exposeManagedCursorMetricsInPrometheus=false
keySharedLookAheadMsgInReplayThresholdPerSubscription=40000

managedLedgerCursorMaxEntriesPerLedger=\\
    40000
"""

# Keys of Pulsar 2.7 to 5.0 that begin like ours.
PULSARS_KEYS = [
    "managedLedgerInfoCompressionType",
    "managedLedgerInfoCompressionThresholdInBytes",
    "managedLedgerCursorBackloggedThreshold",
    "managedLedgerMaxEntriesPerLedger",
    "managedLedgerMaxSizePerLedgerMbytes",
    "managedLedgerMaxLedgerRolloverTimeMinutes",
    "managedLedgerDefaultAckQuorum",
    "managedLedgerReadEntryTimeoutSeconds",
    "managedLedgerStatsPeriodSeconds",
    "managedLedgerConcurrentLedgerDeletions",
    "managedLedgerMaxBacklogBetweenCursorsForCaching",
]


@pytest.fixture
def conf(tmp_path):
    def write(content):
        path = tmp_path / "broker.conf"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def test_a_broker_conf_sets_what_concerns_a_cursor_and_leaves_the_rest(conf):
    config = CursorConfig.from_pulsar_conf(conf(BROKER_CONF))
    assert config == CursorConfig(
        flush_interval_ms=60_000,
        mark_delete_rate_limit=4.0,
        ledger_entry_count_max=40_000,
        ledger_rollover_ms=14_400_000,
        range_count_max=20_000,
        batch_count_max=10_000,
        metadata_range_count_max=1_000,
        range_form=RangeForm.WORDS,
        compression=Compression.LZ4,
        compression_bytes_min=16_384,
        batch_index_acks=True,
    )
    assert CursorConfig.from_pulsar_conf(str(conf(BROKER_CONF))) == config
    assert CursorConfig.from_pulsar_conf(parse_properties(BROKER_CONF)) == config


def test_nothing_set_is_the_default(conf):
    assert CursorConfig.from_pulsar_conf({}) == CursorConfig()
    assert CursorConfig.from_pulsar_conf(conf(b"")) == CursorConfig()
    assert CursorConfig.from_pulsar_conf({RANGES: "", ENTRIES: " ", RATE: "", FLUSH: "\t", OLD: ""}) == CursorConfig()


@pytest.mark.parametrize(
    ("rate", "flush", "limit", "interval_ms"),
    [
        ("1.0", "60", 1, 60_000),
        ("0.01", "60", 0.01, 60_000),
        ("0", "60", 0, 0),
        ("-1", "60", 0, 0),
        ("0.1", None, 0.1, 60_000),  # Pulsar's period
        (None, "5", 1, 5_000),  # Pulsar's rate
        ("1e9", "1", 1e9, 1_000),
        (".5", "60", 0.5, 60_000),
    ],
)
def test_rate_and_period_are_pulsars(rate, flush, limit, interval_ms):
    given = {key: value for key, value in ((RATE, rate), (FLUSH, flush)) if value is not None}
    config = CursorConfig.from_pulsar_conf(given)
    assert (config.mark_delete_rate_limit, config.flush_interval_ms) == (limit, interval_ms)


@pytest.mark.parametrize(("alias", "limit"), [("-1", 7), ("0", 7), ("", 7), ("5", 5)])
def test_the_old_name_of_the_metadata_limit_wins_where_it_is_set(alias, limit):
    assert CursorConfig.from_pulsar_conf({IN_METADATA: "7", IN_ZOOKEEPER: alias}).metadata_range_count_max == limit


@pytest.mark.parametrize(
    ("key", "value", "name", "expected"),
    [
        ("managedLedgerCursorRolloverTimeInSeconds", "7", "ledger_rollover_ms", 7_000),
        ("managedLedgerMaxBatchDeletedIndexToPersist", "9", "batch_count_max", 9),
        ("managedLedgerPersistIndividualAckAsLongArray", "False", "range_form", RangeForm.LIST),
        ("managedLedgerUnackedRangesOpenCacheSetEnabled", "false", "range_form", RangeForm.LIST),
        ("acknowledgmentAtBatchIndexLevelEnabled", "false", "batch_index_acks", False),
        ("managedCursorInfoCompressionType", "ZSTD", "compression", Compression.ZSTD),
        ("managedCursorInfoCompressionThresholdInBytes", "0", "compression_bytes_min", 0),
        (IN_ZOOKEEPER, "5", "metadata_range_count_max", 5),
    ],
)
def test_each_key_sets_its_own(key, value, name, expected):
    assert CursorConfig.from_pulsar_conf({key: value}) == replace(CursorConfig(), **{name: expected})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("managedLedgerPersistIndividualAckAsLongArray", "yes"),
        ("acknowledgmentAtBatchIndexLevelEnabled", "1"),
        ("managedCursorInfoCompressionType", "lz5"),
        ("managedLedgerCursorRolloverTimeInSeconds", "-1"),
        (IN_ZOOKEEPER, "-2"),
    ],
)
def test_a_malformed_value_is_refused_with_its_key(key, value):
    with pytest.raises(ValueError, match=key):
        CursorConfig.from_pulsar_conf({key: value})


def test_the_age_of_issue_19966_and_a_range_limit_of_0_are_taken():
    config = CursorConfig.from_pulsar_conf({OLD: " 30 ", RANGES: "+0"})
    assert (config.become_old_ack_record_seconds, config.range_count_max) == (30, 0)


@pytest.mark.parametrize("key", PULSARS_KEYS)
@pytest.mark.parametrize("value", ["-1", "1000", "whatever"])
def test_other_keys_of_pulsar_are_ignored(key, value):
    assert CursorConfig.from_pulsar_conf({key: value, key.lower(): value}) == CursorConfig()


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("managedLedgerMaxUnackRangesToPersist", RANGES),
        ("managedLedgerMaxUnackedRangeToPersist", RANGES),
        ("managedledgerMaxUnackedRangesToPersist", RANGES),
        ("MANAGEDLEDGERMAXUNACKEDRANGESTOPERSIST", RANGES),
        ("managedLedgerCursorMaxEntryPerLedger", ENTRIES),
        ("managedLedgerDefaultMarkDeleteRate", RATE),
        ("managedLedgerCursorPositionFlushSecond", FLUSH),
        ("managedLedgerCursorPositionFlushInSeconds", FLUSH),
        ("becomeOldAckRecordsSeconds", OLD),
        (RANGES + " ", RANGES),
    ],
)
def test_a_misspelt_key_is_named_with_what_was_meant(misspelt, meant):
    with pytest.raises(ValueError) as refused:
        CursorConfig.from_pulsar_conf({misspelt: "1"})
    assert repr(misspelt) in str(refused.value)
    assert repr(meant) in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (RANGES, "many"),
        (RANGES, "-1"),
        (RANGES, "10_000"),
        (RANGES, "1.5"),
        (RANGES, "2147483648"),
        (RANGES, "9" * 5_000),
        (RANGES, "\u0661"),
        (ENTRIES, "0"),
        (ENTRIES, "0x10"),
        (RATE, "fast"),
        (RATE, "nan"),
        (RATE, "Infinity"),
        (RATE, "1e999"),
        (RATE, "1_0"),
        (FLUSH, "0"),
        (FLUSH, "60s"),
        (OLD, "-3"),
    ],
)
def test_a_malformed_value_is_named_with_its_key(key, value):
    with pytest.raises(ValueError) as refused:
        CursorConfig.from_pulsar_conf({key: value})
    assert str(refused.value).startswith(key)
    assert repr(value) in str(refused.value)


def test_a_value_that_is_not_text_is_refused():
    with pytest.raises(TypeError, match=f"{RANGES}.*10000"):
        CursorConfig.from_pulsar_conf({RANGES: 10_000})


def test_a_file_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        CursorConfig.from_pulsar_conf(tmp_path / "broker.conf")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_each_encoding_that_is_in_use_is_read(conf, encoding):
    content = f"{RANGES}=7\n# größer\nclusterName=bühne\n".encode(encoding)
    assert CursorConfig.from_pulsar_conf(conf(content)).range_count_max == 7


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


@pytest.mark.parametrize("text", ["a=\\u12", "a=\\u12g4", "\\u=1"])
def test_a_malformed_escape_is_refused(text):
    with pytest.raises(ValueError, match=r"malformed \\u escape"):
        parse_properties(text)
