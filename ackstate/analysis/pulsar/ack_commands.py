"""Applies ACK commands to a cursor's state in a Pulsar broker's memory, and recovers states from written records."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.pulsar.recorded_run import AckType, mask_of
from ackstate.batch_indexes import BatchIndexes
from ackstate.deleted_ranges import DeletedRanges
from ackstate.ledger_map import LedgerMap
from ackstate.position import Position
from ackstate.wire.pulsar import (
    CursorInfo,
    PositionInfo,
    decode_cursor_info,
    decode_position_info,
    encode_cursor_info,
    encode_position_info,
)
from ackstate.wire.pulsar.codec import NO_LEDGER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ackstate.analysis.pulsar.policy import BrokerPolicy
    from ackstate.analysis.pulsar.recorded_run import Ack, AckCommand, RecordedRun


class AckState(NamedTuple):
    """The state of a cursor; must not be changed.

    Attributes:
        mark_delete: Every entry up to it, inclusive, is acked.
        deleted: Entries acked above it.
        batch: Unacked messages of partly acked batches. They may include batches up to the mark-delete position: a
            broker that acks past a batch keeps its words until the next write.
    """

    mark_delete: Position
    deleted: DeletedRanges
    batch: BatchIndexes

    def copy(self) -> AckState:
        """Return an independent copy. Complexity: O(state)."""
        return AckState(self.mark_delete, self.deleted.copy(), self.batch.copy())


@final
class CursorMemory:
    """A cursor in a broker's memory, changed by ACK commands.

    Source: ``ManagedCursorImpl.asyncDelete`` and ``asyncMarkDelete`` of Apache Pulsar 4.2.
    """

    def __init__(self, run: RecordedRun, *, batch_index_acks: bool) -> None:
        self._positions = positions = run.positions
        self._batch_index_acks = batch_index_acks
        self._ledgers = LedgerMap.from_counts({position.ledger_id: position.entry_id + 1 for position in positions})
        before_all = Position(positions[0].ledger_id, positions[0].entry_id - 1)
        nothing = AckState(before_all, DeletedRanges(), BatchIndexes())
        self.state = nothing if run.initial is None else run.initial.copy()

    def ack(self, command: AckCommand) -> bool:
        """Apply a command and return whether the broker then requests a write from its limiter.

        It requests none for individual acks while no entry is acked above the mark-delete position: acks of only some
        messages of batches are neither written nor marked as unwritten (Apache Pulsar, issue 26498). It requests one
        for every cumulative ack that it does not refuse, even inside a batch.
        """
        if command.type is AckType.CUMULATIVE:
            return self._ack_up_to(command.acks[0])
        for entry, unacked_words in command.acks:
            self._ack(self._positions[entry], unacked_words)
        if not self.state.deleted:
            return False
        self._advance(self.state.mark_delete)
        return True

    def _ack(self, position: Position, unacked_words: tuple[int, ...]) -> None:
        mark_delete, deleted, batch = self.state
        if position <= mark_delete or position in deleted or not unacked_words:
            batch.discard(position)
            is_acked = position > mark_delete
        else:
            is_acked = self._batch_index_acks and batch.ack(position, unacked_words)
        if is_acked:
            deleted.add(position)

    def _ack_up_to(self, ack: Ack) -> bool:
        """Move the mark-delete position to an entry, or to the one before a batch that is partly acked."""
        position = self._positions[ack.entry]
        if ack.unacked_words:
            self._ack_start_of_batch(position, ack.unacked_words)
            position = self._ledgers.previous(position)
        if position < self.state.mark_delete:
            return False  # refused
        self._advance(position)
        return True

    def _ack_start_of_batch(self, position: Position, unacked_words: tuple[int, ...]) -> None:
        """Replace the words of a batch if the new ones ack more from its start, as a broker does."""
        batch = self.state.batch
        if not self._batch_index_acks:
            return
        if _first_unacked(unacked_words) > _first_unacked(batch.get(position, ())):
            batch.discard(position)
            batch.ack(position, unacked_words)
        before = self._ledgers.previous(position)
        # It removes the batches below the new mark-delete position, but not the batch at this position.
        batch.remove_at_most(Position(before.ledger_id, max(before.entry_id - 1, -1)))

    def _advance(self, mark_delete: Position) -> None:
        """Move the mark-delete position to an entry, and over the acked entries behind it, even across ledgers."""
        _, deleted, batch = self.state
        while (run := deleted.run_containing(self._ledgers.next_valid(mark_delete))) is not None:
            mark_delete = Position(run.ledger_id, run.end - 1)
        deleted.remove_at_most(mark_delete)
        self.state = AckState(mark_delete, deleted, batch)


def _first_unacked(words: Sequence[int]) -> int:
    """Return the first unacked message of some words, -1 for none."""
    mask = mask_of(words)
    return (mask & -mask).bit_length() - 1


def from_cursor_ledger(state: AckState, policy: BrokerPolicy) -> AckState:
    """Return the state recovered from a cursor ledger, by encoding and decoding it with all limits."""
    written = encode_position_info(PositionInfo(*state), form=policy.range_form, limits=policy.limits)
    info = decode_position_info(written)
    return AckState(info.position, info.deleted, info.batch if policy.batch_index_acks else BatchIndexes())


def from_metadata_store(state: AckState, policy: BrokerPolicy) -> AckState:
    """Return the state recovered from the metadata store.

    4.2 writes partly acked batches there and does not read them back (Apache Pulsar, issues 20585 and 26475).
    """
    written = encode_cursor_info(CursorInfo(NO_LEDGER, *state), limits=policy.limits)
    info = decode_cursor_info(written)
    assert info.mark_delete is not None
    return AckState(info.mark_delete, info.deleted, BatchIndexes())


def redelivered(run: RecordedRun, durable: AckState) -> tuple[int, ...]:
    """Return, in order, the messages that the client acknowledged and that a broker with this state delivers again."""
    return tuple(sorted(run.acked_messages.difference(_durable_messages(run, durable))))


def _durable_messages(run: RecordedRun, durable: AckState) -> Iterator[int]:
    mark_delete, deleted, batch = durable
    for index, position in enumerate(run.positions):
        first, end = run.first_messages[index], run.first_messages[index + 1]
        if position <= mark_delete or position in deleted:
            yield from range(first, end)
        elif batch and position in batch:
            unacked = mask_of(batch[position])
            yield from (message for message in range(first, end) if not unacked >> (message - first) & 1)
