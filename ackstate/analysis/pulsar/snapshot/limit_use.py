"""Computes how close a cursor is to each limit, how many more ack holes fit, and which setting to change."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.pulsar.snapshot import broker_settings
from ackstate.cursor import pulsar_conf
from ackstate.wire.pulsar import CursorInfo, PositionInfo, RangeForm, encode_cursor_info, encode_position_info

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ackstate.analysis.pulsar.snapshot.bounds import CursorLook
    from ackstate.analysis.pulsar.snapshot.broker_settings import BrokerSettings
    from ackstate.analysis.pulsar.snapshot.internal_stats import SubscriptionStats

_ZOOKEEPER_BYTES_MAX = 0xFFFFF  # jute.maxbuffer, which a request passes with its path and headers


class LimitUse(NamedTuple):
    """The use of one limit.

    Attributes:
        setting: Pulsar's name of the setting.
        unit: The counted unit.
        used: The used amount.
        limit: The limit.
        holes_left: Number of further ack holes of one entry that fit; None if the limit does not count holes.
        advice: The remedy if it is close.
    """

    setting: str
    unit: str
    used: int
    limit: int
    holes_left: int | None
    advice: str

    @property
    def percent(self) -> float:
        """Used of the limit, in percent."""
        return 100 * self.used / self.limit if self.limit else 100.0


def limit_uses(look: CursorLook, stats: SubscriptionStats | None, settings: BrokerSettings) -> list[LimitUse]:
    """Return the limits that affect a cursor, the closest first; limits that are off are omitted.

    The limit of the metadata store is last, because exceeding it loses nothing: a closing cursor then keeps its ledger.

    Complexity: O(bytes of the acked ranges in either form).
    """
    found = [*_of_ranges(look, settings), *_of_bytes(look, settings), *_of_unacked(stats, settings)]
    return sorted(found, key=lambda use: (use.setting == pulsar_conf.METADATA_RANGES, -use.percent))


def _of_ranges(look: CursorLook, settings: BrokerSettings) -> Iterator[LimitUse]:
    ranges, limit = look.deleted.range_count, settings.range_count_max
    if settings.form is RangeForm.LIST:
        kept = settings.ranges_kept_max
        advice = f"raise it, or set {pulsar_conf.AS_WORDS}=true"
        yield LimitUse(pulsar_conf.RANGES, "ranges", ranges, kept, max(kept - ranges, 0), advice)
    else:
        # Whole ledgers up to the limit: acked entries use it, and holes save it.
        advice = "raise it above the acked entries: in this form it counts them"
        yield LimitUse(pulsar_conf.RANGES, "acked entries", len(look.deleted), limit, None, advice)
        if settings.is_paused_by_ranges:
            advice = f"raise {pulsar_conf.RANGES}: above it dispatch pauses"
            yield LimitUse(broker_settings.PAUSE, "ranges", ranges, limit, max(limit - ranges, 0), advice)
    metadata = settings.metadata_range_count_max
    advice = "nothing is lost: with more ranges a closing cursor writes to its ledger, not to the metadata store"
    yield LimitUse(pulsar_conf.METADATA_RANGES, "ranges", ranges, metadata, max(metadata - ranges, 0), advice)


def _of_bytes(look: CursorLook, settings: BrokerSettings) -> Iterator[LimitUse]:
    info = PositionInfo(look.mark_delete, look.deleted, properties=dict(look.properties))
    record = len(encode_position_info(info, form=settings.form, limits=settings.limits))
    limit = settings.record_bytes_max
    is_list = settings.form is RangeForm.LIST
    advice = f"raise it on brokers and bookies{f', or set {pulsar_conf.AS_WORDS}=true' if is_list else ''}"
    left = _holes_left(limit - record, look) if is_list else None
    yield LimitUse(broker_settings.MESSAGE_BYTES, "bytes of the cursor record", record, limit, left, advice)
    if settings.has_zookeeper:
        fallback = CursorInfo(-1, look.mark_delete, look.deleted, properties=dict(look.properties))
        size = len(encode_cursor_info(fallback, limits=settings.limits))
        left = _holes_left(_ZOOKEEPER_BYTES_MAX - size, look)
        advice = "raise it on ZooKeeper and brokers: above it there is no way out when the cursor ledger fails"
        yield LimitUse("jute.maxbuffer", "bytes in the metadata store", size, _ZOOKEEPER_BYTES_MAX, left, advice)
    gate = settings.unpersisted_bytes_max
    if gate is not None and gate > 0:
        left = _holes_left(gate - look.deleted.record_bytes, look)
        advice = "raise it, or write more often: at most this much is not durable"
        name = broker_settings.UNPERSISTED_BYTES
        yield LimitUse(name, "bytes of ranges, if none is durable", look.deleted.record_bytes, gate, left, advice)


def _holes_left(bytes_left: int, look: CursorLook) -> int:
    """Return the number of further ranges of the present mean size that fit."""
    ranges = look.deleted.range_count
    mean = look.deleted.record_bytes / ranges if ranges else 24.0  # for ledger ids up to 3,000,000 and 50,000 entries
    return max(int(bytes_left / mean), 0)


def _of_unacked(stats: SubscriptionStats | None, settings: BrokerSettings) -> Iterator[LimitUse]:
    if stats is None:
        return
    most = max((consumer.unacked_messages for consumer in stats.consumers), default=0)
    of_consumer, of_all = settings.consumer_unacked_max, settings.subscription_unacked_max
    advice = "ack delivered messages, or raise it"
    if of_consumer:
        yield LimitUse(broker_settings.CONSUMER_UNACKED, "unacked of a consumer", most, of_consumer, None, advice)
    if of_all:
        used = stats.unacked_messages
        yield LimitUse(broker_settings.SUBSCRIPTION_UNACKED, "unacked messages", used, of_all, None, advice)
