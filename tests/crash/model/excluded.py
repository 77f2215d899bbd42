"""Computes which acks a persist may exclude: the rules of the settings, run by run, without code of the product."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.results import PersistTarget
from ackstate.selection import Keep
from ackstate.wire.pulsar import LimitRule

if TYPE_CHECKING:
    from collections.abc import Set

    from ackstate.cursor.config import CursorConfig
    from ackstate.cursor.results import PersistResult
    from ackstate.cursor.state.persist_limits import PersistLimits
    from crash.model.ack_model import AckModel
    from crash.model.numbered_log import NumberedLog
    from crash.model.written import Held


class Excluded(NamedTuple):
    """The acks excluded by the last persist: young ones, and those beyond a limit."""

    young: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()


def check_excluded(
    model: AckModel, held: Held, result: PersistResult, config: CursorConfig, *, has_failed: bool
) -> Excluded:
    """Check that a persist without concurrent acks wrote the acks that fit the settings, and return the others.

    Args:
        model: The model at the start of the persist.
        held: The state of the disk.
        result: The result of the persist.
        config: Configuration of the cursor.
        has_failed: Whether a ledger write failed before.

    Raises:
        PromiseBrokenError: It excluded other acks, or returned other counts.
    """
    log, covered = model.log, set(range(model.first_unacked()))
    before, keep = model.durable - covered, config.keep
    waiting = sorted(model.acked - model.durable - covered)
    candidates = set(waiting[: len(waiting) - result.messages_held_back])
    durable = model.durable
    if has_failed and result.route is PersistTarget.METADATA:
        # The ledger may have the written state, and the acks that it displaced are then lost.
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
    """Return the acks that fit into a durable state, among durable ones and candidates, all above the mark-delete."""
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
    """Return the acks kept by Pulsar's words form: whole ledgers, up to the first excluded one."""
    kept: set[int] = set()
    for ledger_id in sorted({log.positions[number].ledger_id for number in acked}):
        entries = {number for number in acked if log.positions[number].ledger_id == ledger_id}
        if len(kept) + len(entries) * (rule is LimitRule.PULSAR_5_0) > limit:
            break
        kept |= entries
    return kept
