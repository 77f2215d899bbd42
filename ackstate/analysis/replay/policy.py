"""The policy of a replay: settings of the cursor and the broker, used instead of the recorded persists."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from ackstate.analysis.durations import Duration
from ackstate.checks import check_count, did_you_mean
from ackstate.cursor.config import CursorConfig
from ackstate.cursor.formats import Format
from ackstate.errors import AckStateError
from ackstate.limits.gate import GateLimits
from ackstate.selection import Keep
from ackstate.wire.pulsar import Compression, LimitRule, RangeForm

if TYPE_CHECKING:
    from collections.abc import Mapping

AS_RECORDED: Final = None
"""The policy of the recording itself: durability comes from its persist events."""


class Timing(Enum):
    """When a broker writes a cursor."""

    INTERVAL = "interval"
    """A flush interval after its last persist, or at acks that the rate limit admits; `ackstate.cursor` does so."""

    PULSAR = "pulsar"
    """As Apache Pulsar does; `ackstate.analysis.replay.pulsar_replay` describes it."""


class PolicyError(AckStateError):
    """A policy with an unknown key or a malformed value; the message names it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """When and how a broker persists a cursor."""

    cursor: CursorConfig = field(default_factory=CursorConfig)  # The cursor's own settings
    # The broker ticks each cursor when the time is a multiple of this, after the events of that millisecond; 1 ticks at
    # the very instant at which a persist is due.
    tick_ms: int = 1
    # Dispatch stops if the ranges that are acked and not durable, plus the most that acks of messages in flight may
    # add, would take more bytes; 0 for never. `ackstate.analysis.replay.gated_replay` describes the replay.
    max_unpersisted_ack_record_bytes: int = 0
    # False replays a broker that cannot write cursor ledgers, so that every persist goes to the metadata store, with
    # its own limits.
    ledger_writable: bool = True
    # When a cursor is written. A policy that Pulsar cannot have, because of its format, its ticks, or acks held back or
    # dispatch blocked, is replayed with INTERVAL.
    timing: Timing = Timing.INTERVAL
    # With PULSAR, the timer that flushes all cursors ticks when the time is a multiple of the flush interval and this
    # much more.
    flush_phase_ms: int = 0
    ledger_creation_ms: int = 0  # With PULSAR, how long the first write of an opened cursor waits for its ledger

    def __post_init__(self) -> None:
        check_count("tick_ms", self.tick_ms, least=1)
        check_count("max_unpersisted_ack_record_bytes", self.max_unpersisted_ack_record_bytes, least=0)
        if self.cursor.mark_delete_rate_limit < 0:
            raise ValueError(f"mark_delete_rate_limit must not be negative, got {self.cursor.mark_delete_rate_limit}")
        GateLimits(max_unpersisted_ack_record_bytes=self.max_unpersisted_ack_record_bytes)
        check_count("flush_phase_ms", self.flush_phase_ms, least=0)
        check_count("ledger_creation_ms", self.ledger_creation_ms, least=0)

    @property
    def is_paced_by_pulsar(self) -> bool:
        """Whether the timing is PULSAR, and everything else something that Pulsar can do."""
        config = self.cursor
        has_own_settings = self.tick_ms != 1 or config.become_old_ack_record_seconds != 0 or self.blocks
        return self.timing is Timing.PULSAR and config.format is Format.PULSAR and not has_own_settings

    @property
    def ignores_deliveries(self) -> bool:
        """Whether only acks matter, and only at persists."""
        return self.cursor.become_old_ack_record_seconds == 0 and not self.blocks

    @property
    def leaves_nothing_out(self) -> bool:
        """Whether each persist makes all acks durable."""
        config = self.cursor
        limits_nothing = config.format is Format.NATIVE and config.range_count_max is None
        holds_nothing_back = config.become_old_ack_record_seconds == 0
        return limits_nothing and holds_nothing_back and self.ledger_writable

    @property
    def blocks(self) -> bool:
        """Whether dispatch may stop."""
        return self.max_unpersisted_ack_record_bytes > 0

    @property
    def label(self) -> str:
        """The difference from the default policy, in the form of `from_mapping`: ``flush_interval_ms=5000``."""
        return " ".join(f"{key}={text}" for key, text in self.to_mapping().items()) or "default"

    @property
    def texts(self) -> dict[str, str]:
        """Every setting as text."""
        return {key: _text(self._value(key)) for key in KEYS}

    def to_mapping(self) -> dict[str, str]:
        """Return the settings that differ from the default policy; `from_mapping` reads them."""
        return {key: text for key, text in self.texts.items() if text != _DEFAULT_TEXTS[key]}

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any]) -> Policy:
        """Return the policy of some settings; missing settings have their defaults."""
        values = {str(key).strip().replace("-", "_"): value for key, value in settings.items()}
        for key in values:
            if key not in KEYS:
                hint = did_you_mean(key, KEYS) or f"; known keys are {', '.join(KEYS)}"
                raise PolicyError(f"policy: unknown key {key!r}{hint}")
        parsed = {key: _parsed(key, value) for key, value in values.items()}
        own = {key: parsed.pop(key) for key in _OWN_KEYS if key in parsed}
        try:
            return cls(CursorConfig(**parsed), **own)
        except (TypeError, ValueError) as error:
            raise PolicyError(f"policy: {error}") from None

    def _value(self, key: str) -> object:
        return getattr(self if key in _OWN_KEYS else self.cursor, key)


DEFAULT: Final = Policy()
"""The default policy; `Policy.to_mapping` returns the differences from it."""

_OWN_KEYS = (
    "tick_ms", "max_unpersisted_ack_record_bytes", "ledger_writable", "timing", "flush_phase_ms", "ledger_creation_ms",
)  # fmt: skip
KEYS = (*(each.name for each in fields(CursorConfig)), *_OWN_KEYS)
"""The keys that `Policy.from_mapping` accepts."""

_ENUMS: Mapping[str, type[Enum]] = {
    "format": Format, "keep": Keep, "range_limit_rule": LimitRule, "range_form": RangeForm, "compression": Compression,
    "timing": Timing,
}  # fmt: skip
_BOOLEANS = ("batch_index_acks", "ledger_writable")
_NULLABLE = ("range_count_max", "batch_count_max", "metadata_range_count_max")
_TRUTH = {"true": True, "false": False}


def _text(value: object) -> str:
    match value:
        case bool():
            return str(value).lower()
        case Enum():
            return value.name
        case float() if value.is_integer():
            return str(int(value))
        case None:
            return "none"
    return str(value)


_DEFAULT_TEXTS = Policy().texts


def _parsed(key: str, value: Any) -> Any:
    """Return a setting's value; a value that is not text is left unchecked here, except members of enums."""
    if isinstance(value, bool) and key not in _BOOLEANS:
        raise PolicyError(f"policy: {key} must not be a boolean, got {value}")
    if not isinstance(value, str):
        if key in _BOOLEANS and not isinstance(value, bool):
            raise PolicyError(f"policy: {key} must be true or false, got {value!r}")
        return value
    text = value.strip()
    if key in _ENUMS:
        return _chosen(key, text.upper(), {member.name: member for member in _ENUMS[key]})
    if key in _BOOLEANS:
        return _chosen(key, text.lower(), _TRUTH)
    if key in _NULLABLE and text.lower() == "none":
        return None
    return _number(key, text)


def _chosen(key: str, text: str, values: Mapping[str, Any]) -> Any:
    if text not in values:
        raise PolicyError(f"policy: {key} must be one of {', '.join(values)}, got {text!r}")
    return values[text]


def _number(key: str, text: str) -> int | float:
    unit = "ms" if key.endswith("_ms") else "s" if key.endswith("_seconds") else ""
    try:
        if unit:
            return Duration.parse(text, plain_unit=unit).in_whole(unit)
        return float(text) if key == "mark_delete_rate_limit" else int(text)
    except ValueError as error:
        rule = str(error) if unit else f"must be a number, got {text!r}"
        raise PolicyError(f"policy: {key} {rule}") from None
