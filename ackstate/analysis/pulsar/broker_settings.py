"""Reads the settings of a broker that affect redelivery after a crash."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ackstate import pulsar_conf
from ackstate.analysis.pulsar.internal_stats import SnapshotError
from ackstate.cursor.config import cursor_settings
from ackstate.pulsar_conf import flag, whole_number
from ackstate.wire.pulsar import LimitRule, Limits, RangeForm

if TYPE_CHECKING:
    from collections.abc import Mapping

PAUSE = "dispatcherPauseOnAckStatePersistentEnabled"
MESSAGE_BYTES = "maxMessageSize"
UNPERSISTED_BYTES = "maxUnPersistAckRecordsBytes"

_FRAME_PADDING_BYTES = 10 * 1024  # of BookKeeper's frames besides the largest message
_VERSION = re.compile(r"(\d+)\.(\d+)")
_LATEST = "4.2.4"


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The settings of a broker. The defaults are those of Pulsar 4.2."""

    version: str = _LATEST  # Version of the broker
    form: RangeForm = RangeForm.WORDS  # The form of acked entries in a cursor-ledger entry
    range_count_max: int = 10_000  # ``managedLedgerMaxUnackedRangesToPersist``; its unit depends on `rule`
    metadata_range_count_max: int = 1_000  # The same limit in the metadata store
    record_bytes_max: int = 5 * 1024 * 1024 + _FRAME_PADDING_BYTES  # The largest entry that BookKeeper accepts
    unpersisted_bytes_max: int | None = None  # ``maxUnPersistAckRecordsBytes``; None for a broker without this setting
    can_have_words: bool = True  # Whether the broker has a setting for `form`
    is_paused_by_ranges: bool = False  # Whether dispatch pauses above `range_count_max` ranges
    # The metadata store, if it is ZooKeeper, as ``zk:HOST:PORT``; empty if it is not, or unknown.
    metadata_url: str = ""
    # The reason why some settings are Pulsar's defaults instead of the broker's; empty if all are known.
    assumed: str = ""

    @property
    def rule(self) -> LimitRule:
        """The unit of the limit on ranges in this version."""
        return LimitRule.of_release(self.version)

    @property
    def limits(self) -> Limits:
        """The limits on a record in the cursor ledger."""
        return Limits(range_count_max=self.range_count_max, rule=self.rule)

    @property
    def ranges_kept_max(self) -> int:
        """The most ranges in a record of the list form."""
        return self.range_count_max + (self.rule is LimitRule.PULSAR_4_2)


def broker_settings(configuration: Mapping[str, str] | None, version: str = "", *, assumed: str = "") -> BrokerSettings:
    """Return the settings of a broker."""
    defaults = _defaults(version, assumed=assumed)
    try:
        return replace(defaults, **_given(configuration)) if configuration is not None else defaults
    except (ValueError, TypeError) as error:
        raise SnapshotError(f"configuration of the broker: {error}") from None


def _defaults(version: str, *, assumed: str) -> BrokerSettings:
    known = BrokerSettings(version=version or _LATEST, assumed=assumed)
    if _numbers(known.version) >= (5, 0):
        return replace(known, range_count_max=200_000, metadata_range_count_max=200_000)
    if _numbers(known.version) < (4, 1):
        return replace(known, form=RangeForm.LIST, can_have_words=False)
    return known


def _given(configuration: Mapping[str, str]) -> dict[str, Any]:
    ours = cursor_settings({key: configuration[key] for key in _CURSOR_KEYS if key in configuration})
    message_bytes = whole_number(configuration, MESSAGE_BYTES, least=1)
    found: dict[str, Any] = {
        "form": ours.get("range_form"),
        "range_count_max": ours.get("range_count_max"),
        "metadata_range_count_max": ours.get("metadata_range_count_max"),
        "record_bytes_max": message_bytes and message_bytes + _FRAME_PADDING_BYTES,
        "unpersisted_bytes_max": whole_number(configuration, UNPERSISTED_BYTES, least=-1),
        "is_paused_by_ranges": flag(configuration, PAUSE),
        "can_have_words": True if pulsar_conf.AS_WORDS in configuration else None,
        "metadata_url": _zookeeper(configuration),
    }
    return {name: value for name, value in found.items() if value is not None}


def _zookeeper(configuration: Mapping[str, str]) -> str:
    """Return the metadata store if it is named as ``zk:...`` or, in the old form, by hosts and ports alone."""
    places = (configuration.get(key, "").strip() for key in ("metadataStoreUrl", "zookeeperServers"))
    place = next((each for each in places if each not in {"", "null"}), "")
    name, _, rest = place.partition(":")
    if name == "zk":
        return place
    return f"zk:{place}" if rest.partition("/")[0].partition(",")[0].isdigit() else ""


def _numbers(version: str) -> tuple[int, int]:
    found = _VERSION.match(version)
    if found is None:
        raise SnapshotError(f"the version of Pulsar must look like {_LATEST}, got {version[:40]!r}")
    return int(found[1]), int(found[2])


# Other keys are read here, or are irrelevant.
_CURSOR_KEYS = (
    pulsar_conf.RANGES, pulsar_conf.METADATA_RANGES, pulsar_conf.METADATA_RANGES_ALIAS, pulsar_conf.AS_WORDS,
)  # fmt: skip
