"""Shapes of traffic for generated traces, crashed subjects and calibration, named after situations.

The last four are the scenarios of Pulsar's issue 19966, "Max Un-Persist Ack Limitation and Generational Ack
Persistent": holes left by clients, many consumers, delayed messages of mixed length, heavy traffic.

A shape processes entries by blocks of a fixed size. The entries of a block are assigned, in a seeded order, one each to
the block's classes; a class defines how long its entries wait for their delivery, and then for their ack. So the whole
history of an entry follows from its id.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

HOUR_MS = 3_600_000
MESSAGES_PER_SECOND = 5_000.0
"""The default rate of a topic."""
# As Pulsar's `maxUnackedMessagesPerConsumer`: a consumer with this many unacked messages receives no more.
UNACKED_MAX = 50_000
_BLOCK_MAX = 2_048


@dataclass(frozen=True, slots=True)
class Traffic:
    """The treatment of the entries of a block, class by class.

    Attributes:
        about: The situation, in a line.
        ack_ms: For each class, the time until its ack; None: it is never acked. Its length is that of a block, a power
            of 2.
        delay_ms: For each class, the delay of its messages; empty: none is delayed.
        consumers: Number of consumers that share the work; a single one receives whole runs of entries at once.
        stuck: Whether the first class belongs to a consumer that never acks; when it holds `UNACKED_MAX`, the others
            get its share.
    """

    about: str
    ack_ms: tuple[float | None, ...]
    delay_ms: tuple[float, ...] = ()
    consumers: int = 1
    stuck: bool = False

    def __post_init__(self) -> None:
        block = len(self.ack_ms)
        if not 2 <= block <= _BLOCK_MAX or block & (block - 1):
            raise ValueError(f"the block size must be a power of 2 from 2 to {_BLOCK_MAX}, got {block}")
        if self.delay_ms and len(self.delay_ms) != block:
            raise ValueError(f"{len(self.delay_ms)} delays for {block} classes")
        if self.is_in_runs and self.delay_ms:
            raise ValueError("a lone consumer gets runs of entries, which cannot be delayed one by one")

    @property
    def block(self) -> int:
        """The number of entries in a block."""
        return len(self.ack_ms)

    @property
    def is_in_runs(self) -> bool:
        """Whether entries are delivered in runs."""
        return self.consumers == 1

    def ack_order(self, entry_count: int, chance: Random) -> list[int]:
        """Return the acked ones of the first entries, in order of ack, at a rate of `MESSAGES_PER_SECOND`."""
        acked: list[tuple[float, int]] = []
        for begin in range(0, entry_count, self.block):
            classes = chance.sample(range(self.block), self.block)
            for entry, which in enumerate(classes[: entry_count - begin], start=begin):
                takes_ms = None if self.stuck and which == 0 else self.ack_ms[which]
                if takes_ms is not None:
                    delay_ms = self.delay_ms[which] if self.delay_ms else 0.0
                    acked.append((entry * 1_000 / MESSAGES_PER_SECOND + delay_ms + takes_ms, entry))
        return [entry for _, entry in sorted(acked)]


WORKLOADS = {
    "in_order": Traffic("one consumer acks as it reads", (0.0,) * 16),
    "key_shared": Traffic(
        "eight consumers of unequal speed, each with its keys",
        tuple(5.0 * 2**speed for speed in range(8)),
        consumers=8,
    ),
    "one_stuck_consumer": Traffic(
        f"one of eight consumers takes messages until it holds {UNACKED_MAX} and acks none",
        (2.0, *(5.0 + speed for speed in range(7))),
        consumers=8,
        stuck=True,
    ),
    "client_holes": Traffic(
        "one message in 128 fails and is never acked: holes that stay",
        (None, *(20.0 * slot / 128 for slot in range(127))),
    ),
    "many_consumers": Traffic(
        "512 consumers, the slowest 2 s behind the fastest", tuple(4.0 * slot for slot in range(512)), consumers=512
    ),
    "mixed_delays": Traffic(
        "half at once, others delayed by 1 to 10 s, one in eight by an hour",
        (5.0,) * 8,
        delay_ms=(0.0, 0.0, 0.0, 0.0, 1_000.0, 3_000.0, 10_000.0, float(HOUR_MS)),
        consumers=4,
    ),
    "heavy_traffic": Traffic(
        "every second message is acked at once, those between 3 s later", (1.0, 3_000.0), consumers=2
    ),
}


def workload_named(name: str) -> Traffic:
    """Return the workload of a name.

    Raises:
        ValueError: The name is unknown; the message has all names.
    """
    try:
        return WORKLOADS[name]
    except KeyError:
        raise ValueError(f"the workload must be one of {', '.join(WORKLOADS)}, got {name!r}") from None
