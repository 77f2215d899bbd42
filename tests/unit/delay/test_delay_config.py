"""A broker's properties of delayed delivery."""

from dataclasses import replace

import pytest

from ackstate.delay import DelayConfig
from ackstate.delay.config import TrackerKind

PACKAGE = "org.apache.pulsar.broker.delayed."
STEP = "delayedDeliveryMaxTimeStepPerBucketSnapshotSegmentSeconds"


def read(**properties):
    return DelayConfig.from_pulsar_conf(properties)


@pytest.mark.parametrize(
    ("key", "text", "name", "value"),
    [
        ("delayedDeliveryEnabled", "false", "enabled", False),
        ("delayedDeliveryTickTimeMillis", "100", "tick_time_ms", 100),
        ("isDelayedDeliveryDeliverAtTimeStrict", "true", "is_deliver_at_time_strict", True),
        ("delayedDeliveryFixedDelayDetectionLookahead", "7", "fixed_delay_detection_lookahead", 7),
        ("delayedDeliveryFixedDelayDetectionLookahead", "0", "fixed_delay_detection_lookahead", 0),
        ("delayedDeliveryFixedDelayDetectionLookahead", "-1", "fixed_delay_detection_lookahead", 0),
        ("delayedDeliveryMaxDelayInMillis", "60000", "max_delivery_delay_ms", 60_000),
        ("delayedDeliveryMaxDelayInMillis", "-5", "max_delivery_delay_ms", 0),
        ("delayedDeliveryMinIndexCountPerBucket", "5", "min_index_count_per_bucket", 5),
        (STEP, "60", "max_time_step_per_segment_ms", 60_000),
        ("delayedDeliveryMaxIndexesPerBucketSnapshotSegment", "9", "max_indexes_per_segment", 9),
        ("delayedDeliveryMaxIndexesPerBucketSnapshotSegment", "-1", "max_indexes_per_segment", None),
        ("delayedDeliveryMaxNumBuckets", "20", "max_bucket_count", 20),
        ("delayedDeliveryMaxNumBuckets", "-1", "max_bucket_count", None),
        ("delayedDeliveryMaxNumBuckets", "0", "max_bucket_count", None),
        ("delayedDeliveryLedgerStepPerBucket", "5", "ledger_step_per_bucket", 5),
    ],
)
def test_each_key_sets_its_field(key, text, name, value):
    expected = replace(DelayConfig(), **{name: value})
    assert read(**{key: text}) == expected
    assert read(**{key: f" {text} "}) == expected
    assert read(**{key: ""}) == DelayConfig()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("InMemoryDelayedDeliveryTrackerFactory", TrackerKind.IN_MEMORY),
        ("InMemoryTopicDelayedDeliveryTrackerFactory", TrackerKind.TOPIC),
        ("BucketDelayedDeliveryTrackerFactory", TrackerKind.BUCKETED),
    ],
)
def test_each_of_pulsars_trackers(name, kind):
    assert read(delayedDeliveryTrackerFactoryClassName=PACKAGE + name).tracker is kind


def test_the_keys_of_pip_448_have_no_effect():
    assert (
        read(
            delayedDeliveryPruneMinIntervalMillis="50",
            delayedDeliveryPruneEligibleRatio="0.5",
            delayedDeliveryTopicManagerIdleMillis="60000",
            # Nor do those that do not concern delays.
            managedLedgerMaxUnackedRangesToPersist="many",
            brokerServicePort=None,
        )
        == read()
        == DelayConfig()
    )


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("delayedDeliveryTrackerFactoryClassName", "BucketDelayedDeliveryTrackerFactory", ValueError),
        ("delayedDeliveryTrackerFactoryClassName", PACKAGE + "Mine", ValueError),
        ("delayedDeliveryEnabled", "yes", ValueError),
        ("delayedDeliveryTickTimeMillis", "0", ValueError),
        ("delayedDeliveryTickTimeMillis", str(2**63), ValueError),
        pytest.param("delayedDeliveryTickTimeMillis", "9" * 4_000, ValueError, id="very long"),
        ("delayedDeliveryTickTimeMillis", 100, TypeError),
        ("delayedDeliveryTickTimeMillis", None, TypeError),
        ("delayedDeliveryTickTimeMillis", b"100", TypeError),
        (STEP, "0", ValueError),
        ("delayedDeliveryMaxIndexesPerBucketSnapshotSegment", "0", ValueError),
        ("delayedDeliveryMaxNumBuckets", str(2**31), ValueError),
        ("delayedDeliveryLedgerStepPerBucket", "0", ValueError),
        ("delayedDeliveryPruneMinIntervalMillis", "soon", ValueError),
    ],
)
def test_a_malformed_value_is_refused_by_its_key(key, value, error):
    with pytest.raises(error, match=key):
        read(**{key: value})


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("delayedDeliveryTickTimeMilis", "delayedDeliveryTickTimeMillis"),
        ("DelayedDeliveryEnabled", "delayedDeliveryEnabled"),
        ("isDelayedDeliveryDeliverAtTimeStric", "isDelayedDeliveryDeliverAtTimeStrict"),
    ],
)
def test_a_misspelt_key_is_refused(key, meant):
    with pytest.raises(ValueError, match=f"unknown key of Pulsar '{key}'; did you mean '{meant}'"):
        read(**{key: "1"})


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("enabled", "true", TypeError),
        ("is_deliver_at_time_strict", 1, TypeError),
        ("tracker", "InMemory", TypeError),
        ("tick_time_ms", 0, ValueError),
        ("tick_time_ms", 1.0, TypeError),
        ("tick_time_ms", True, TypeError),
        ("tick_time_ms", None, TypeError),
        ("fixed_delay_detection_lookahead", -1, ValueError),
        ("max_delivery_delay_ms", -1, ValueError),
        ("min_index_count_per_bucket", -1, ValueError),
        ("max_time_step_per_segment_ms", 0, ValueError),
        ("max_indexes_per_segment", 0, ValueError),
        ("max_bucket_count", -1, ValueError),
        ("ledger_step_per_bucket", 0, ValueError),
        ("tick_time_ms", 2**63, ValueError),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_its_name(name, value, error):
    with pytest.raises(error, match=rf"{name} \(\w+\)"):
        DelayConfig(**{name: value})
