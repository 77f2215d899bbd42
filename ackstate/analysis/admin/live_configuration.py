"""Reports the settings of a broker's topics under the names of a ``broker.conf``, as a running Pulsar broker does."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from ackstate.cursor import pulsar_conf
from ackstate.cursor.config import RangeForm
from ackstate.cursor.journal.format import Format
from ackstate.limits.rules import Rule
from ackstate.wire.pulsar import LimitRule

if TYPE_CHECKING:
    from ackstate.cursor.config import CursorConfig
    from ackstate.limits.gate import GateLimits

_MOST = 2**31 - 1  # the largest number that Pulsar reads for these keys
_RELEASES = {LimitRule.PULSAR_4_2: "4.2.4", LimitRule.PULSAR_5_0: "5.0.0"}
# The release that counts ranges as the others here do: in a list it keeps the lowest ones within the limit.
_EXACT = "5.0.0-M1"


def live_version(config: CursorConfig) -> str:
    """Return the release of Pulsar whose limit on ranges the cursors follow, and the release of this library."""
    return f"{_RELEASES.get(config.range_limit_rule, _EXACT)} (ackstate {version('ackstate')})"


def live_configuration(config: CursorConfig, limits: GateLimits) -> dict[str, str]:
    """Return the settings that concern cursors and limits.

    A cursor of the native format is reported as one that writes a list, in which ranges are counted as well.
    """
    # One that counts acked entries does so in the words form alone.
    counts_entries = config.range_form is RangeForm.WORDS and config.range_limit_rule is not LimitRule.EXACT
    ranges = config.list_limits.range_count_max
    if ranges is not None and config.range_limit_rule is LimitRule.PULSAR_4_2:
        ranges -= 1  # A list of that release has one range more than the setting.
    metadata = config.metadata_range_count_max if config.format is Format.NATIVE else config.closing_range_count_max
    rate, flush_ms = config.mark_delete_rate_limit, config.flush_interval_ms
    if not rate and flush_ms:
        rate = 1_000 / flush_ms  # Pulsar has no interval without a rate.
    return {
        pulsar_conf.RANGES: _text(ranges),
        pulsar_conf.METADATA_RANGES: _text(metadata),
        pulsar_conf.AS_WORDS: "true" if counts_entries else "false",
        pulsar_conf.MARK_DELETE_RATE: f"{rate:.9f}",
        pulsar_conf.FLUSH_SECONDS: _text(max(1, -(-flush_ms // 1_000))),
        "maxMessageSize": _text(None),  # A record may span several entries.
        Rule.UNPERSISTED_ACK_RECORD_BYTES.value: _text(limits.max_unpersisted_ack_record_bytes),
        Rule.UNACKED_MESSAGES.value: _text(limits.max_unacked_messages),
        Rule.CONSUMER_UNACKED_MESSAGES.value: _text(limits.max_unacked_messages_per_consumer),
        "dispatcherPauseOnAckStatePersistentEnabled": "true" if limits.max_unacked_ranges else "false",
    }


def _text(limit: int | None) -> str:
    """Return a limit as text; None for none."""
    return str(_MOST if limit is None else min(limit, _MOST))
