"""The rules by which a Pulsar 4 broker makes acks durable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ackstate.analysis.pulsar.policy_name import PolicyName
from ackstate.cursor.config import cursor_settings
from ackstate.pulsar_conf import FLUSH_SECONDS, MARK_DELETE_RATE, flag, number, whole_number
from ackstate.wire.pulsar import LimitRule, Limits, RangeForm

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BrokerPolicy", "PolicyName", "broker_policy"]

_SECOND_MS = 1_000
_LIMITS = Limits(10_000, 10_000, LimitRule.PULSAR_4_2)
_RANGES_CACHE = "managedLedgerUnackedRangesOpenCacheSetEnabled"


@dataclass(frozen=True, slots=True)
class BrokerPolicy:
    """The rules for when a broker writes a cursor's state, and how much of it; defaults are those of Apache Pulsar 4.2.

    Attributes:
        writes_per_second: Rate of the mark-delete limiter; 0 is no limiter.
        stored_ms_max: How long an idle limiter saves permits.
        flush_ms: Interval at which refused writes are flushed, counted from the start of the broker.
        range_form: The form of ranges in entries of a cursor ledger.
        limits: Limits on the contents of a record.
        metadata_range_count_max: A cursor closed with more ranges keeps its ledger.
        batch_index_acks: Whether acks of single messages of a batch count.
    """

    writes_per_second: float = 1.0
    stored_ms_max: int = _SECOND_MS
    flush_ms: int = 60 * _SECOND_MS
    range_form: RangeForm = RangeForm.WORDS
    limits: Limits = _LIMITS
    metadata_range_count_max: int = 1_000
    batch_index_acks: bool = True

    @property
    def permit_ms(self) -> float:
        """The time in which the limiter earns a permit."""
        return _SECOND_MS / self.writes_per_second if self.writes_per_second else 0.0


def broker_policy(config: Mapping[str, str], name: PolicyName = PolicyName.PULSAR_4) -> BrokerPolicy:
    """Return the policy of a broker.

    Raises:
        ValueError: A value is malformed or out of range, or a key looks like a misspelling of one that is read.
    """
    settings = cursor_settings(config)
    default = BrokerPolicy()
    form = settings.get("range_form", default.range_form)
    if flag(config, _RANGES_CACHE) is False:
        form = RangeForm.LIST
    rate = number(config, MARK_DELETE_RATE)
    flush_seconds = whole_number(config, FLUSH_SECONDS, least=1)
    policy = BrokerPolicy(
        writes_per_second=default.writes_per_second if rate is None else max(rate, 0),
        flush_ms=default.flush_ms if flush_seconds is None else flush_seconds * _SECOND_MS,
        range_form=form,
        limits=Limits(
            settings.get("range_count_max", default.limits.range_count_max),
            settings.get("batch_count_max", default.limits.batch_index_count_max),
            LimitRule.PULSAR_4_2,
        ),
        metadata_range_count_max=settings.get("metadata_range_count_max", default.metadata_range_count_max),
        batch_index_acks=settings.get("batch_index_acks", default.batch_index_acks),
    )
    return _wrong(policy, name)


def _wrong(policy: BrokerPolicy, name: PolicyName) -> BrokerPolicy:
    match name:
        case PolicyName.NO_STORED_PERMITS:
            return replace(policy, stored_ms_max=0)
        case PolicyName.NO_LIMITER:
            return replace(policy, writes_per_second=0)
        case PolicyName.NO_RANGE_LIMIT:
            return replace(policy, limits=replace(policy.limits, range_count_max=None))
        case PolicyName.PULSAR_4:
            return policy
