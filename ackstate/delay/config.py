"""How a broker delays messages: the settings, with their units in their names.

Source: ``ServiceConfiguration`` of Apache Pulsar, PIP-195 and PIP-448.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ackstate.checks import LONG_MAX, check_within
from ackstate.pulsar_conf import DELAY_TRACKER, SETTINGS, fields_of, read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_PACKAGE = "org.apache.pulsar.broker.delayed."


class TrackerKind(Enum):
    """Which of Pulsar's three trackers, by the class name of its factory."""

    IN_MEMORY = _PACKAGE + "InMemoryDelayedDeliveryTrackerFactory"
    TOPIC = _PACKAGE + "InMemoryTopicDelayedDeliveryTrackerFactory"
    BUCKETED = _PACKAGE + "BucketDelayedDeliveryTrackerFactory"


@dataclass(frozen=True, slots=True)
class DelayConfig:
    """The settings of delayed delivery; the defaults are Pulsar's.

    Each tracker acts on those that concern it. `enabled`, `tracker` and `max_delivery_delay_ms` are for the code that
    makes the trackers, or none, and publishes.

    >>> DelayConfig.from_pulsar_conf({"delayedDeliveryTickTimeMillis": "100"}).tick_time_ms
    100

    Whole numbers are at least 1, or 0 where it has a meaning of its own, and fit 64 bits.

    Attributes:
        enabled: Whether messages are delayed at all. Pulsar: ``delayedDeliveryEnabled``.
        tracker: The kind of tracker. Pulsar: ``delayedDeliveryTrackerFactoryClassName``, one of three classes, of which
            PIP-448 names ``InMemoryTopicDelayedDeliveryTrackerFactory``.
        tick_time_ms: How exactly they are delivered. Pulsar: ``delayedDeliveryTickTimeMillis``.
        is_deliver_at_time_strict: Whether none is delivered before its time, else up to a tick before.
            Pulsar: ``isDelayedDeliveryDeliverAtTimeStrict``.
        fixed_delay_detection_lookahead: In memory: how many messages of one fixed delay must wait for deliveries to
            pause; 0 for never. Pulsar: ``delayedDeliveryFixedDelayDetectionLookahead``.
        max_delivery_delay_ms: The longest delay that a producer may request; 0 for any. Pulsar:
            ``delayedDeliveryMaxDelayInMillis``.
        min_index_count_per_bucket: Bucketed: a bucket is sealed at a ledger's end once it has this many messages; 0 is
            as 1. Pulsar: ``delayedDeliveryMinIndexCountPerBucket``.
        max_time_step_per_segment_ms: Bucketed: the times of a segment span less than this.
            Pulsar: ``delayedDeliveryMaxTimeStepPerBucketSnapshotSegmentSeconds``.
        max_indexes_per_segment: Bucketed: most messages of a segment; None for any number, Pulsar's -1.
            Pulsar: ``delayedDeliveryMaxIndexesPerBucketSnapshotSegment``.
        max_bucket_count: Bucketed: with more, buckets are merged; None for any number, Pulsar's -1.
            Pulsar: ``delayedDeliveryMaxNumBuckets``.
        ledger_step_per_bucket: Bucketed: a bucket is also sealed once it spans this many ledgers; None, the default,
            for any number. ``delayedDeliveryLedgerStepPerBucket`` of PIP-195's first text, which no release reads.

    Raises:
        ValueError: A number is out of its bounds.
        TypeError: A field is of another type; True and False are no numbers.
    """

    enabled: bool = True
    tracker: TrackerKind = TrackerKind.IN_MEMORY
    tick_time_ms: int = 1_000
    is_deliver_at_time_strict: bool = False
    fixed_delay_detection_lookahead: int = 50_000
    max_delivery_delay_ms: int = 0
    min_index_count_per_bucket: int = 50_000
    max_time_step_per_segment_ms: int = 300_000
    max_indexes_per_segment: int | None = 5_000
    max_bucket_count: int | None = None
    ledger_step_per_bucket: int | None = None

    def __post_init__(self) -> None:
        for name in ("enabled", "is_deliver_at_time_strict"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} ({_KEYS[name]}) must be a boolean, got {getattr(self, name)!r}")
        if not isinstance(self.tracker, TrackerKind):
            raise TypeError(f"tracker ({DELAY_TRACKER}) must be a TrackerKind, got {self.tracker!r}")
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None or name not in _NULLABLE:
                check_within(f"{name} ({_KEYS[name]})", value, least=least, most=LONG_MAX)

    @classmethod
    def from_pulsar_conf(cls, source: Mapping[str, str] | str | Path) -> DelayConfig:
        """Return the settings in a broker's properties; a key that is missing or blank has Pulsar's default.

        Where 0 means off, so do values below 0, as in Pulsar; ``delayedDeliveryMaxNumBuckets`` is off at 0, too. A tick
        of 0 is refused: a broker with it does not start. Keys that do not concern delays are ignored.

        PIP-448's ``delayedDeliveryPruneMinIntervalMillis``, ``delayedDeliveryPruneEligibleRatio`` and
        ``delayedDeliveryTopicManagerIdleMillis`` are read and have no effect: our index holds nothing that would have
        to be pruned, and goes with its last subscription.

        Args:
            source: The keys and their values, or the path of a ``broker.conf``.

        Raises:
            ValueError: A value is malformed or out of range, or a key looks like a misspelling; the text names the key.
            TypeError: A key or a value is not text.
            OSError: The file cannot be read.
        """
        found = fields_of(read_settings(source, "DelayConfig"), "DelayConfig")
        if "tracker" in found:
            found["tracker"] = _tracker(found["tracker"])
        if found.get("max_indexes_per_segment") == -1:
            found["max_indexes_per_segment"] = None
        if found.get("max_bucket_count", 1) < 1:
            found["max_bucket_count"] = None
        return cls(**found)


_LEAST = {
    "tick_time_ms": 1,
    "fixed_delay_detection_lookahead": 0,
    "max_delivery_delay_ms": 0,
    "min_index_count_per_bucket": 0,
    "max_time_step_per_segment_ms": 1,
    "max_indexes_per_segment": 1,
    "max_bucket_count": 1,
    "ledger_step_per_bucket": 1,
}
_NULLABLE = ("max_indexes_per_segment", "max_bucket_count", "ledger_step_per_bucket")


def _tracker(name: str) -> TrackerKind:
    try:
        return TrackerKind(name)
    except ValueError:
        kinds = ", ".join(each.value for each in TrackerKind)
        raise ValueError(f"{DELAY_TRACKER} must be one of {kinds}, got {name!r}") from None


_KEYS = {each.field: each.key for each in SETTINGS if each.kind == "DelayConfig"}
