"""The reasons why a subscription receives no new messages, and the usage at which each ends."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ackstate.dispatch.live_holes import releasing_holes
from ackstate.limits.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ackstate.ack_hole import AckHole
    from ackstate.dispatch.admission import Admission
    from ackstate.dispatch.hole_report import HoleReport
    from ackstate.dispatch.live_holes import HoleContext
    from ackstate.errors import AckStateError
    from ackstate.limits.gate import DispatchGate
    from ackstate.limits.rules import Verdict


class BlockReason(NamedTuple):
    """One rule that is closed.

    Attributes:
        rule: The rule.
        used: Its present usage, reservations included.
        limit: The most that `used` may be.
        released_at: The usage at which the rule opens.
        since_ms: When it closed; after a restart above the limit, when the cursor was opened.
        consumer: The consumer whose own limit it is; empty if the rule holds for all.
        store_error: Why the last persist failed, if it did: then the failing store is the cause.
        releases: For a limit on the ack state, the holes that reduce the usage when they are filled, by most first.
        frees: By how much each of them does: in bytes that are not durable, or in ranges.
        holders: The consumers with their numbers of unacked messages, most first.
        delayed_ranges: For a limit on ranges, how many are freed when holes that consist of delayed messages alone are
            filled: those are sent when they are due, also while the rule is closed.
    """

    rule: Rule
    used: int
    limit: int
    released_at: int
    since_ms: int | None
    consumer: str
    store_error: AckStateError | None
    releases: tuple[HoleReport, ...]
    frees: tuple[int, ...]
    holders: tuple[tuple[str, int], ...]
    delayed_ranges: int = 0

    @property
    def detail(self) -> str:
        """The same as a sentence or two."""
        whose = f" of consumer {self.consumer!r}" if self.consumer else ""
        parts = [f"{self.rule.value}{whose} is {self.limit}, and {self.used} are used; at {self.released_at} it opens."]
        if self.store_error is not None:
            parts.append(f"The store is the cause: {self.store_error}")
        unit = "ranges" if self.rule is Rule.UNACKED_RANGES else "bytes"
        parts += [
            f"Acking {hole.first} to {hole.last} ({hole.detail}) frees {freed} {unit}."
            for hole, freed in zip(self.releases, self.frees, strict=True)
        ]
        if self.delayed_ranges:
            parts.append(f"Delayed messages part {self.delayed_ranges} of the ranges until they are due.")
        if self.holders and not self.releases:
            parts.append("Unacked: " + ", ".join(f"{name!r} has {count}" for name, count in self.holders) + ".")
        return " ".join(parts)


def explain_blocks(  # noqa: PLR0913 - the parts of the reasons
    gate: DispatchGate,
    admission: Admission,
    where: HoleContext,
    *,
    consumers: Sequence[str],
    top: int,
    now_ms: int,
) -> tuple[BlockReason, ...]:
    """Explain each rule that is closed, those of single consumers last.

    Complexity: O(holes) for a limit on the ack state.
    """
    closed = [("", verdict) for verdict in gate.why_blocked(admission.usage.of())]
    for consumer in gate.closed_consumers:
        verdicts = gate.why_blocked(admission.usage.of(consumer), consumer)
        closed += [(consumer, each) for each in verdicts if each.rule is Rule.CONSUMER_UNACKED_MESSAGES]
    explain = partial(
        _explain_block, where=where, store_error=admission.store_error, consumers=consumers, top=top, now_ms=now_ms
    )
    return tuple(explain(verdict, consumer) for consumer, verdict in closed)


def _explain_block(  # noqa: PLR0913 - the parts of the reason
    verdict: Verdict,
    consumer: str,
    *,
    where: HoleContext,
    store_error: AckStateError | None,
    consumers: Sequence[str],
    top: int,
    now_ms: int,
) -> BlockReason:
    """Explain a closed rule: the cause, and the acks that would open it. An empty consumer stands for all consumers."""
    rule, cursor = verdict.rule, where.cursor
    assert rule is not None
    counted = ((name, where.deliveries.unacked_of(name)) for name in consumers)
    holders = sorted((each for each in counted if each[1]), key=lambda each: -each[1])
    released: list[tuple[HoleReport, int]] = []
    delayed_ranges = 0
    if rule is Rule.UNPERSISTED_ACK_RECORD_BYTES:
        released = releasing_holes(where, cursor.view.unpersisted_bytes_freed, top=top, now_ms=now_ms)
    elif rule is Rule.UNACKED_RANGES:
        released = releasing_holes(where, _ranges_freed, top=top, now_ms=now_ms)
        delayed_ranges = sum(max(hole.freed_ranges, 0) for hole in cursor.view.holes() if where.is_delayed(hole))
    else:
        store_error = None
    return BlockReason(
        rule, verdict.used, verdict.limit, verdict.released_at, verdict.since_ms, consumer, store_error,
        tuple(hole for hole, _ in released), tuple(freed for _, freed in released), tuple(holders[:top]),
        delayed_ranges,
    )  # fmt: skip


def _ranges_freed(hole: AckHole) -> int:
    return hole.freed_ranges
