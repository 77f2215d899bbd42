"""Why does a subscription not get new messages, and what would change that?"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ackstate.errors import AckStateError
    from cursor.hole_report import HoleReport
    from limits.gate import Rule


class BlockReason(NamedTuple):
    """One rule that is closed.

    Attributes:
        rule: Which.
        used: What it counts now, with what is reserved.
        limit: What that may not pass.
        released_at: At this use the rule opens.
        since_ms: When it closed.
        consumer: Whose own limit it is; empty if it holds for all.
        store_error: Why the last persist failed, if it did: what is not durable stays so, and that is the cause.
        releases: The holes that cost most, for a limit on the ack state: acking them brings the use down.
        holders: Who has how many unacked messages, most first.
    """

    rule: Rule
    used: int
    limit: int
    released_at: int
    since_ms: int | None
    consumer: str
    store_error: AckStateError | None
    releases: tuple[HoleReport, ...]
    holders: tuple[tuple[str, int], ...]

    @property
    def detail(self) -> str:
        """The same as a sentence or two."""
        whose = f" of consumer {self.consumer!r}" if self.consumer else ""
        parts = [f"{self.rule.value}{whose} is {self.limit}, and {self.used} are used; at {self.released_at} it opens."]
        if self.store_error is not None:
            parts.append(f"The store is the cause: {self.store_error}")
        parts += [
            f"Acking {hole.first} to {hole.last} ({hole.detail}) frees {hole.freed_bytes} bytes."
            for hole in self.releases
        ]
        if self.holders and not self.releases:
            parts.append("Unacked: " + ", ".join(f"{name!r} has {count}" for name, count in self.holders) + ".")
        return " ".join(parts)
