"""The keys of a Pulsar `broker.conf` that ackstate reads, with Pulsar's defaults.

Source: `ServiceConfiguration` of Apache Pulsar 4.2.4 and 5.0.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class PulsarKey:
    """One key.

    Attributes:
        name: As in a `broker.conf`.
        default: Pulsar's default in 4.2.
        other_value: A valid value other than the default of ackstate.
        default_5: The default in 5.0, if it is another one.
        remark: A deviation or condition, one sentence.
        needs: Other keys without which this one has no effect.
    """

    name: str
    default: str
    other_value: str
    default_5: str = ""
    remark: str = ""
    needs: Mapping[str, str] = field(default_factory=dict)


_NO_RELEASE = "From Pulsar's issue 19966; no release of Pulsar reads it."
_BUCKETS = "org.apache.pulsar.broker.delayed.BucketDelayedDeliveryTrackerFactory"
_UNNEEDED = "From PIP-448. Read and checked, without effect: the shared index holds nothing that must be pruned."
_RATE = "managedLedgerDefaultMarkDeleteRateLimit"
_PAUSE = "dispatcherPauseOnAckStatePersistentEnabled"

KEYS = (
    PulsarKey("managedLedgerMaxUnackedRangesToPersist", "10,000", "77", "200,000",
              f"A limit of the gate only if {_PAUSE} is true.", {_PAUSE: "true"}),
    PulsarKey("managedLedgerMaxBatchDeletedIndexToPersist", "10,000", "77", "200,000"),
    PulsarKey("managedLedgerMaxUnackedRangesToPersistInMetadataStore", "1,000", "77", "200,000"),
    PulsarKey("managedLedgerMaxUnackedRangesToPersistInZooKeeper", "-1", "77",
              remark="The older name of the key above; above 0 it takes precedence."),
    PulsarKey("managedLedgerCursorMaxEntriesPerLedger", "50,000", "77"),
    PulsarKey("managedLedgerCursorRolloverTimeInSeconds", "14,400", "77"),
    PulsarKey(_RATE, "1.0", "7",
              remark="At 0 or below, each tick writes. If only one of this and the next key is given, the other one "
                     "has Pulsar's default."),
    PulsarKey("managedLedgerCursorPositionFlushSeconds", "60", "7"),
    PulsarKey("managedLedgerPersistIndividualAckAsLongArray", "true", "false"),
    PulsarKey("managedLedgerUnackedRangesOpenCacheSetEnabled", "true", "false",
              remark="If false, a list of ranges is written."),
    PulsarKey("managedCursorInfoCompressionType", "NONE", "ZSTD", "LZ4"),
    PulsarKey("managedCursorInfoCompressionThresholdInBytes", "16,384", "77"),
    PulsarKey("acknowledgmentAtBatchIndexLevelEnabled", "true", "false"),
    PulsarKey("becomeOldAckRecordSeconds", "none", "7", remark=_NO_RELEASE),
    PulsarKey("maxUnPersistAckRecordsBytes", "none", "7777", remark=_NO_RELEASE),
    PulsarKey("maxUnackedMessagesPerSubscription", "200,000", "77"),
    PulsarKey("maxUnackedMessagesPerConsumer", "50,000", "77"),
    PulsarKey("maxUnackedMessagesPerBroker", "0", "77"),
    PulsarKey("maxUnackedMessagesPerSubscriptionOnBrokerBlocked", "0.16", "0.5",
              needs={"maxUnackedMessagesPerBroker": "77"}),
    PulsarKey(_PAUSE, "false", "true"),
    PulsarKey("delayedDeliveryEnabled", "true", "false"),
    PulsarKey("delayedDeliveryTrackerFactoryClassName", "InMemoryDelayedDeliveryTrackerFactory", _BUCKETS,
              remark="One of three classes of the package org.apache.pulsar.broker.delayed."),
    PulsarKey("delayedDeliveryTickTimeMillis", "1,000", "77"),
    PulsarKey("isDelayedDeliveryDeliverAtTimeStrict", "false", "true"),
    PulsarKey("delayedDeliveryFixedDelayDetectionLookahead", "50,000", "77"),
    PulsarKey("delayedDeliveryMaxDelayInMillis", "0", "77"),
    PulsarKey("delayedDeliveryMinIndexCountPerBucket", "50,000", "77"),
    PulsarKey("delayedDeliveryMaxTimeStepPerBucketSnapshotSegmentSeconds", "300", "77"),
    PulsarKey("delayedDeliveryMaxIndexesPerBucketSnapshotSegment", "5,000", "77"),
    PulsarKey("delayedDeliveryMaxNumBuckets", "-1", "77"),
    PulsarKey("delayedDeliveryLedgerStepPerBucket", "none", "7",
              remark="From the first text of PIP-195; no release of Pulsar reads it."),
    PulsarKey("delayedDeliveryPruneMinIntervalMillis", "none", "77", remark=_UNNEEDED),
    PulsarKey("delayedDeliveryPruneEligibleRatio", "none", "0.7", remark=_UNNEEDED),
    PulsarKey("delayedDeliveryTopicManagerIdleMillis", "none", "77", remark=_UNNEEDED),
)  # fmt: skip
