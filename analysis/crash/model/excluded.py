"""Which acks a persist may exclude: the rules of the settings, run by run, without code of the product."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.results import PersistTarget
from ackstate.selection import Keep
from ackstate.wire.pulsar import LimitRule

if TYPE_CHECKING:
    from collections.abc import Set

    from ackstate.analysis.crash.model.ack_model import AckModel
    from ackstate.analysis.crash.model.numbered_log import NumberedLog
    from ackstate.analysis.crash.model.written import Held
    from ackstate.cursor.config import CursorConfig
    from ackstate.cursor.results import PersistResult
    from ackstate.cursor.state.persist_limits import PersistLimits


class Excluded(NamedTuple):
    """What the last persist excluded: acks that were too young, and those that a limit had no room for."""

    young: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()


def check_excluded(
    model: AckModel, held: Held, result: PersistResult, config: CursorConfig, *, has_failed: bool
) -> Excluded:
    """See that a persist, while which nothing was acked, wrote what the settings have room for, and return the rest.

    Args:
        model: As it was when the persist began.
        held: What is on the disk.
        result: What the persist returned.
        config: Of the cursor.
        has_failed: Whether a ledger could not be written before.

    Raises:
        PromiseBrokenError: It excluded other acks, or returned other counts.
    """
    log, covered = model.log, set(range(model.first_unacked()))
    before, keep = model.durable - covered, config.keep
    waiting = sorted(model.acked - model.durable - covered)
    candidates = set(waiting[: len(waiting) - result.messages_held_back])
    durable = model.durable
    if has_failed and result.route is PersistTarget.METADATA:
        # The ledger may hold what was written to it, and what that displaced is gone then.
        tried = fitting(log, before, candidates, config.ledger_limits, keep)
        before, durable = before & tried, durable & (covered | tried)
        waiting = sorted(model.acked - durable - covered)
        candidates = set(waiting[: len(waiting) - result.messages_held_back])
    limits = config.metadata_limits if result.route is PersistTarget.METADATA else config.ledger_limits
    kept = fitting(log, before, candidates, limits, keep)
    excluded = Excluded(frozenset(waiting) - candidates, frozenset((candidates | before) - kept))
    found = f"written were {log.text(held.acked - covered)} above the mark-delete, {log.text(kept)} were to be"
    hold(Promise.I15, held.acked == covered | kept, found)
    counted = result.messages_covered, result.messages_cut
    expected = len(held.acked) - len(durable), len(excluded.cut)
    hold(Promise.I4, counted == expected, f"{counted} messages are counted as covered and cut, there are {expected}")
    left_out = {number: model.last_unacked_of_batch.get(number) for number in (*excluded.young, *excluded.cut)}
    batches = model.unacked_of_batch | {number: left for number, left in left_out.items() if left is not None}
    within = dict(sorted(batches.items())[: limits.batch_count_max])
    found = f"written were the batches {held.unacked_of_batch}, {within} were to be"
    hold(Promise.I15, held.unacked_of_batch == within, found)
    return excluded


def fitting(log: NumberedLog, durable: Set[int], candidates: Set[int], limits: PersistLimits, keep: Keep) -> set[int]:
    """Return what a durable state has room for, of what is durable and of what is to be: all above the mark-delete."""
    everything = set(durable | candidates)
    if limits.range_count_max is None:
        return everything
    if limits.rule is not LimitRule.EXACT:
        kept = _whole_ledgers(log, everything, limits.range_count_max, limits.rule)
        if kept or limits.rule is not LimitRule.PULSAR_5_0:
            return kept
    runs = log.runs(sorted(everything))
    others = [run for run in runs if limits.displaces or durable.isdisjoint(range(run.first, run.last + 1))]
    room = max(limits.range_count_max - (len(runs) - len(others)), 0)
    if keep is Keep.WIDEST:
        others.sort(key=lambda run: (run.first - run.last, run.first))
    return everything.difference(*(range(run.first, run.last + 1) for run in others[room:]))


def _whole_ledgers(log: NumberedLog, acked: Set[int], limit: int, rule: LimitRule) -> set[int]:
    """Return what Pulsar's words form keeps: ledgers by their acked entries, up to the first that is excluded."""
    kept: set[int] = set()
    for ledger_id in sorted({log.positions[number].ledger_id for number in acked}):
        entries = {number for number in acked if log.positions[number].ledger_id == ledger_id}
        if len(kept) + len(entries) * (rule is LimitRule.PULSAR_5_0) > limit:
            break
        kept |= entries
    return kept
