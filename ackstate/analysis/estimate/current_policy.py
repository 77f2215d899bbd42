"""Finds the policy in force when a trace was recorded: as given, read from a broker, or inferred from the persists."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ackstate.analysis.estimate.results import RECORDED
from ackstate.analysis.replay.policy import Policy, PolicyError
from ackstate.analysis.trace.chunks import events_of, packed_columns
from ackstate.analysis.trace.events import EventKind
from ackstate.analysis.trace.parquet import days_of, opened_parquet, trace_files
from ackstate.cursor.config import cursor_settings
from ackstate.pulsar_conf import decode_properties

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ackstate.analysis.location import Location

_FILES_MAX, _CHUNKS_MAX, _CHUNKS_AT_ONCE = 8, 256, 16
_GAPS_MIN = 3
# The shortest intervals belong to busy subscriptions; idle ones persist later than the policy allows.
_BUSY_SHARE = 0.1
_TOLERANCE = 0.1
# A policy persists at least this much more rarely than the recording, or more often, if the two do not match.
_MISMATCH = 1.25
_USUAL_MS = tuple(
    sorted({step * 10**power for power in range(6) for step in (1, 2, 5)} | {15_000, 30_000, 60_000, 120_000, 300_000})
)
PULSAR_4_2 = {
    "format": "PULSAR", "range_limit_rule": "PULSAR_4_2", "mark_delete_rate_limit": "1", "flush_interval_ms": "60000",
    "range_count_max": "10000", "timing": "PULSAR",
}  # fmt: skip
"""The policy of a Pulsar 4.2 broker with its default settings; see `Policy.from_mapping`."""
BROKER_SETTINGS = "_broker.json"
"""In the directory of a trace of polls: the settings of the broker that was recorded."""


class PersistRhythm(NamedTuple):
    """The time between persists in a recording."""

    interval_ms: int  # The time between two persists of a busy subscription
    gap_count: int  # Number of intervals seen
    regular_share: float  # Share of them within a tenth of `interval_ms`

    @property
    def text(self) -> str:
        """The interval in words."""
        return f"{self.interval_ms / 1_000:g} s"


@dataclass(frozen=True, slots=True)
class CurrentPolicy:
    """The policy in force."""

    policy: Policy | None  # The policy; None for the recording itself
    source: str  # Where it is known from, in words
    warnings: tuple[str, ...] = ()  # Reasons to doubt it, as sentences
    is_inferred: bool = False  # Whether no one named it

    @property
    def label(self) -> str:
        """The name of the policy among results."""
        return RECORDED if self.policy is None else self.policy.label

    @classmethod
    def given(cls, policy: Policy, source: str, rhythm: PersistRhythm | None) -> CurrentPolicy:
        """Return a policy that the operator names, with a warning if the recording contradicts it."""
        return cls(policy, source, tuple(_contradictions(policy, rhythm)))

    @classmethod
    def of_recorded_broker(cls, trace: Location) -> CurrentPolicy | None:
        """Return the policy of the Pulsar broker that was recorded; None if the trace does not name it."""
        # Of several days, those of the last.
        path = days_of(trace)[-1] / BROKER_SETTINGS
        if not path.exists():
            return None
        policy = read_broker_policy(path)
        if _properties(path):
            return cls(policy, "read from the broker while it was recorded")
        doubt = "The broker's settings could not be read while it was recorded. Name them with --broker-conf"
        return cls(policy, "the defaults of Pulsar 4.2", (doubt,))

    @classmethod
    def inferred(cls, rhythm: PersistRhythm) -> CurrentPolicy:
        """Return the policy that persists at the interval of a recording."""
        source = f"inferred from {rhythm.gap_count:,} intervals between persists"
        policy = Policy.from_mapping({"flush_interval_ms": rhythm.interval_ms})
        if rhythm.regular_share >= 0.5:
            return cls(policy, source, is_inferred=True)
        doubt = (
            f"Only {rhythm.regular_share:.0%} of the intervals between persists are near {rhythm.text}: the policy in "
            "force may not be a flush interval. Name it with --current-policy or --broker-conf"
        )
        return cls(policy, source, (doubt,), is_inferred=True)


def recorded_rhythm(path: Location) -> PersistRhythm | None:
    """Return the time between persists in the first chunks of a trace's files; None if there are too few persists."""
    files = [file for day in days_of(path) for file in trace_files(day)]
    step = -(-len(files) // _FILES_MAX)
    chosen = files[::step]
    gaps = [gap for file in chosen for gap in _gaps(file, _CHUNKS_MAX // len(chosen))]
    if len(gaps) < _GAPS_MIN:
        return None
    shortest = int(np.quantile(gaps, _BUSY_SHARE, method="lower"))
    interval_ms = _usual(shortest)
    near = sum(abs(gap - interval_ms) <= _TOLERANCE * interval_ms for gap in gaps)
    return PersistRhythm(interval_ms, len(gaps), near / len(gaps))


def read_broker_policy(path: Location) -> Policy:
    """Return the policy of a Pulsar 4.2 broker."""
    try:
        settings = cursor_settings(_properties(path))
        default = Policy.from_mapping(PULSAR_4_2)
        return Policy.from_mapping({**default.to_mapping(), **settings})
    except (ValueError, TypeError, RecursionError) as error:
        raise PolicyError(f"{path}: {error}") from None


def _properties(path: Location) -> Mapping[str, str]:
    with path.open("rb") as file:
        data = file.read()
    if data.lstrip()[:1] != b"{":
        return decode_properties(data)
    found = json.loads(data)
    return {key: str(value) for key, value in found.items() if value is not None}


def _gaps(file: Location, chunks_max: int) -> Iterator[int]:
    """Yield the milliseconds between persists of one life of a subscription, from the first chunks of a file."""
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for topic, subscription, chunk, ts_ms, kind in _chunks(file, chunks_max):
        key = (topic, subscription)
        before_chunk, before_ms = last.get(key, (-2, -1))
        last_ms = before_ms if before_chunk == chunk - 1 else -1
        marks = np.isin(kind, _MARKS)
        for at_ms, mark in zip(ts_ms[marks].tolist(), kind[marks].tolist(), strict=True):
            if mark != EventKind.PERSIST_BEGUN:
                last_ms = -1
                continue
            if last_ms >= 0:
                yield at_ms - last_ms
            last_ms = at_ms
        last[key] = (chunk, last_ms)


_MARKS = (EventKind.PERSIST_BEGUN, EventKind.CRASH, EventKind.RECOVER, EventKind.RESET)
_NAMES = ("topic", "subscription", "chunk")


def _chunks(file: Location, chunks_max: int) -> Iterator[tuple[str, str, int, np.ndarray, np.ndarray]]:
    read = 0
    with opened_parquet(file) as parquet:
        columns = packed_columns(("ts_ms", "kind"))
        for batch in parquet.iter_batches(_CHUNKS_AT_ONCE, columns=[*_NAMES, *columns]):
            offsets, (ts_ms, kind) = events_of(batch, ("ts_ms", "kind"))
            names = zip(*(batch[name].to_pylist() for name in _NAMES), strict=True)
            ends = zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)
            for (topic, subscription, chunk), (begin, end) in zip(names, ends, strict=True):
                yield topic, subscription, chunk, ts_ms[begin:end], kind[begin:end]
            read += batch.num_rows
            if read >= chunks_max:
                return


def _usual(interval_ms: int) -> int:
    """Return a usual interval if one is near, else the interval with two digits."""
    for usual in _USUAL_MS:
        if abs(interval_ms - usual) <= _TOLERANCE / 2 * usual:
            return usual
    digits = len(str(interval_ms))
    return round(interval_ms, 2 - digits) if digits > 2 else interval_ms


def _contradictions(policy: Policy, rhythm: PersistRhythm | None) -> Iterator[str]:
    if rhythm is None:
        return
    config = policy.cursor
    rate = config.mark_delete_rate_limit
    shortest_ms = min(config.flush_interval_ms, 1_000 / rate) if rate else config.flush_interval_ms
    often, rarely = rhythm.interval_ms * _MISMATCH < shortest_ms, rhythm.interval_ms > _MISMATCH * shortest_ms
    # Persists that follow acks are as rare as the acks.
    if often or (rarely and not rate and shortest_ms):
        yield (
            f"The recording does not match the current policy: it persists every {rhythm.text}, and the policy every "
            f"{shortest_ms / 1_000:g} s"
        )
