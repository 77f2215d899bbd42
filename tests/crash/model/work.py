"""Checks that a persist does no more work than its state requires: its writes, snapshots and bytes, one at a time.

Every bound is a rule of the settings, computed from the entries on the disk: a new ledger needs a reason, a delta
repeats no durable ack, and each target has its number of writes. So the writes of a whole schedule are bounded, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.journal.format import Format
from ackstate.cursor.journal.native import content_of
from ackstate.cursor.results import PersistTarget
from ackstate.wire import native
from crash.model.settings import Encoded

if TYPE_CHECKING:
    from collections.abc import Sequence, Set

    from ackstate.cursor.config import CursorConfig
    from ackstate.cursor.results import PersistResult
    from crash.model.numbered_log import NumberedLog

_WRITES = {
    PersistTarget.NOTHING: [],
    PersistTarget.DELTA: [Encoded.ENTRY],
    PersistTarget.WHOLE: [Encoded.ENTRY],
    PersistTarget.SNAPSHOT: [Encoded.ENTRY, Encoded.RECORD],
    PersistTarget.METADATA: [Encoded.RECORD],
}
_COMPACTION_RATIO = 4  # As `CursorConfig.compaction_bytes_min` documents it.


@final
class Work:
    """The work of one cursor's persists.

    Args:
        config: Configuration of the cursor.
        now_ms: The current time, at which the cursor was opened.
    """

    def __init__(self, config: CursorConfig, *, now_ms: int) -> None:
        self._config = config
        self._begun_ms = now_ms
        self._sizes: Sequence[int] | None = None  # of the ledger's entries, if it may be appended to
        self._has_failed = False  # whether a write has failed since a ledger was last written

    def begun(self, sizes: Sequence[int] | None, *, now_ms: int) -> None:
        """Record a reset: the sizes of the entries of its new ledger; None without one."""
        self._sizes, self._has_failed = sizes, sizes is None
        self._begun_ms = now_ms if sizes else self._begun_ms

    def failed(self) -> None:
        """Record a failed write."""
        self._has_failed = True

    def check(
        self, result: PersistResult, attempted: Sequence[tuple[Encoded, bytes]], sizes: Sequence[int], *, now_ms: int
    ) -> None:
        """Check that a completed persist did no more than necessary.

        Args:
            result: The result of the persist.
            attempted: Its writes, in order, including failed attempts.
            sizes: Sizes of the entries in its ledger now.
            now_ms: The current time.

        Raises:
            PromiseBrokenError: It did more.
        """
        if not self._has_failed:
            self._check_writes(result, attempted)
        if result.route is PersistTarget.SNAPSHOT:
            hold(Promise.I16, self._needs_ledger(now_ms=now_ms), f"a whole state was written after {self._sizes} bytes")
            self._begun_ms = now_ms
        is_ledger = result.route is not PersistTarget.METADATA
        self._sizes, self._has_failed = (sizes if is_ledger else None), not is_ledger

    def check_delta(self, log: NumberedLog, entry: bytes, durable: Set[int]) -> None:
        """Check that a delta repeats no durable ack."""
        content = content_of(native.decode(entry))
        repeated = (log.held_by(content) - set(range(log.count_up_to(content.mark_delete)))) & durable
        hold(Promise.I16, not repeated, f"a delta repeats {log.text(repeated)}, which is durable")

    def _check_writes(self, result: PersistResult, attempted: Sequence[tuple[Encoded, bytes]]) -> None:
        kinds, route = [encoded for encoded, _ in attempted], result.route
        hold(Promise.I16, kinds == _WRITES[route], f"{route.name} wrote {[kind.value for kind in kinds]}")
        is_needed = route is not PersistTarget.METADATA or self._config.format is Format.PULSAR
        hold(Promise.I16, is_needed, "the metadata store was written, and no ledger had failed")
        size = len(attempted[0][1]) if attempted else 0
        hold(Promise.I4, result.bytes_written == size, f"{result.bytes_written} bytes are counted, {size} were written")

    def _needs_ledger(self, *, now_ms: int) -> bool:
        """Return whether a persist has a reason to start a new ledger."""
        config, sizes = self._config, self._sizes
        if sizes is None or self._has_failed or len(sizes) >= config.ledger_entry_count_max:
            return True
        is_old = 0 < config.ledger_rollover_ms <= now_ms - self._begun_ms
        outgrown = max(_COMPACTION_RATIO * sizes[0], config.compaction_bytes_min)
        return is_old or (config.format is Format.NATIVE and sum(sizes[1:]) > outgrown)
