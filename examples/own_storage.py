"""A broker with storage of its own: `AckLimiter` holds the ack state within limits, a file holds its bytes.

The messages are in a list. Consumers ack in random order, and some never ack: at the limit on ranges new messages stop,
the messages that fill holes are sent again, and it opens. Run it twice: the second run continues where the first ended.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from ackstate import LedgerMap, Position
from ackstate.limits import AckLimiter, GateLimits

MESSAGES = 1_000
LIMITS = GateLimits(max_unacked_messages=100, max_unacked_ranges=20, max_unpersisted_ack_record_bytes=4_096)


def write(path: Path, data: bytes) -> None:
    """Replace a file, so that a crash leaves the old bytes or the new ones."""
    draft = path.with_suffix(".new")
    with draft.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def main(path: Path) -> str:
    """Deliver half of the messages that are left, and return what happened."""
    log = [Position(1, number) for number in range(MESSAGES)]
    stored = path.read_bytes() if path.exists() else None
    limiter = AckLimiter(LedgerMap.from_counts({1: MESSAGES}), LIMITS, stored=stored)
    chance = random.Random(1)  # noqa: S311 - a seed
    begin = f"continues after {limiter.mark_delete}, acked above it: {limiter.deleted}"

    left = [position for position in log if not limiter.is_acked(position)]
    acked = refused = 0
    while acked < len(left) // 2:
        sent = limiter.admit(position for position in left if not limiter.is_acked(position))
        chance.shuffle(sent)
        done = [position for position in sent if chance.random() < 0.8]
        refused += len(limiter.ack(done))
        acked += len(done)
        limiter.give_back(sent)  # those that were not acked: they are sent again
        write(path, limiter.begin_persist())
        limiter.end_persist(written=True)
        assert limiter.deleted.range_count <= LIMITS.max_unacked_ranges
    return f"{begin}\nacked {acked} of {len(left)}, refused {refused}, ends after {limiter.mark_delete}\n"


if __name__ == "__main__":
    sys.stdout.write(main(Path(sys.argv[1])))
