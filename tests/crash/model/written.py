"""Checks a cursor's writes: its disk, read without changing it, against sets and against a plain replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from ackstate.analysis.crash.promises import Promise, hold
from ackstate.cursor.journal.format import Format
from ackstate.cursor.journal.journal import cursor_owner
from ackstate.cursor.journal.native import content_of
from ackstate.cursor.journal.recovery import Recovery, decode_record
from ackstate.cursor.results import PersistTarget
from ackstate.errors import AckStateError
from ackstate.position import Position
from ackstate.stores.memory import MemoryStore
from ackstate.wire import native
from ackstate.wire.pulsar import LimitRule
from crash.model.numbered_log import indexes
from crash.model.settings import Encoded

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

    from ackstate.cursor.config import CursorConfig
    from ackstate.cursor.journal.format import CursorState, JournalFormat
    from ackstate.cursor.journal.recovery import StoredCursor
    from ackstate.cursor.results import PersistResult
    from ackstate.cursor.state.persist_limits import PersistLimits
    from ackstate.ledger_map import LedgerMap
    from ackstate.stores.memory import MemoryDisk
    from crash.model.ack_model import AckModel
    from crash.model.numbered_log import NumberedLog


BYTES_MIN = 10_000
"""If the metadata store accepts less than this many bytes, a state may be too large for it."""


class AckSnapshot(NamedTuple):
    """The acks at one instant, the number of entries at or below the mark-delete position, and its properties.

    For each partly acked batch, it has the unacked messages.
    """

    floor: int
    acked: frozenset[int]
    properties: Mapping[str, int]
    unacked_of_batch: Mapping[int, set[int]]


class Held(NamedTuple):
    """The state of a disk: mark-delete position, acked entries, partly acked batches, properties."""

    mark_delete: Position
    acked: set[int]
    unacked_of_batch: dict[int, set[int]]
    properties: Mapping[str, int]


@final
class Written:
    """The disk of one cursor.

    Args:
        log: The message log by number.
        disk: The disk.
        path: The path of the cursor.
    """

    def __init__(self, log: NumberedLog, disk: MemoryDisk, path: str) -> None:
        self._log = log
        self._disk = disk
        self._path = path
        self._replayed_ledger_id: int | None = None
        self._replayed_count = 0
        self._replayed = Held(Position(0, -1), set(), {}, {})
        self._mark_delete = Position(0, -1)  # the durable one, below which it must not go
        self._durable: Set[int] = frozenset()  # acked entries that may stay, even beyond a lowered limit

    def raw(self) -> tuple[bytes, tuple[bytes, ...]]:
        """Return the raw record and the raw entries of the ledger that it names."""
        ledger_id = self.cursor_ledger_id
        entries = () if ledger_id is None else tuple(self._disk.ledgers[ledger_id].entries)
        return self._disk.values[self._path].data, entries

    @property
    def cursor_properties(self) -> Mapping[str, str]:
        """The cursor properties in the record."""
        return dict(decode_record(self._disk.values[self._path].data).record.cursor_properties)

    @property
    def epoch(self) -> int:
        """The epoch in the record."""
        return decode_record(self._disk.values[self._path].data).record.epoch

    @property
    def cursor_ledger_id(self) -> int | None:
        """The ledger in the record; None if the record has the state itself."""
        return decode_record(self._disk.values[self._path].data).record.cursor_ledger_id

    @property
    def state_bytes(self) -> int:
        """The size of the record if it has the state itself; 0 if it names a ledger."""
        return len(self._disk.values[self._path].data) if self.cursor_ledger_id is None else 0

    @property
    def entry_sizes(self) -> list[int]:
        """The sizes of the entries of the record's ledger, in bytes; empty if the record has the state."""
        ledger_id = self.cursor_ledger_id
        return [] if ledger_id is None else [len(entry) for entry in self._disk.ledgers[ledger_id].entries]

    def find(self, ledgers: LedgerMap) -> StoredCursor:
        """Read the state from which a recovery would start.

        Raises:
            PromiseBrokenError: It cannot be read.
        """
        try:
            found = Recovery(MemoryStore(self._disk), self._path, ledgers).find(())
        except AckStateError as error:
            hold(Promise.I10, False, f"the written record cannot be read: {error}")
        hold(Promise.I10, found is not None, "a cursor that was made is taken for absent")
        assert found is not None
        return found

    def read(self, found: StoredCursor) -> Held:
        """Return the stored state by number, and check it against a replay of all records.

        Raises:
            PromiseBrokenError: The journal differs.
        """
        content = found.recovered.content
        held = self._held(content)
        if found.form.name is Format.NATIVE:
            self._replay(found)
            replayed = self._replayed
            if replayed.acked != held.acked:
                found_texts = self._log.text(held.acked), self._log.text(replayed.acked)
                hold(Promise.I6, False, "the journal holds {}, replayed it is {}".format(*found_texts))
            hold(Promise.I6, replayed.unacked_of_batch == held.unacked_of_batch, "its batches differ from a replay's")
            hold(Promise.I6, replayed.properties == held.properties, "its properties differ from a replay's")
        return held

    def restarted(self, held: Held) -> None:
        """Set the state after a recovery or a reset, which must not go back from now on."""
        self._mark_delete, self._durable = held.mark_delete, held.acked

    def check_persist(
        self,
        found: StoredCursor,
        held: Held,
        result: PersistResult,
        instants: Sequence[AckSnapshot],
        config: CursorConfig,
    ) -> None:
        """Check that a completed persist wrote the expected acks.

        Args:
            found: The state of the disk after it.
            held: The same state by number.
            result: The result of the persist.
            instants: Possible states when it was planned, several if others acked meanwhile; the last is the present
                one.
            config: Configuration of the cursor.
        """
        hold(
            Promise.I7,
            held.mark_delete >= self._mark_delete,
            f"the durable mark-delete position went back from {self._mark_delete} to {held.mark_delete}",
        )
        self._mark_delete = held.mark_delete
        self._check_instant(held, result, instants, has_young=config.become_old_ack_record_seconds != 0)
        self._check_limits(held, result, config)
        self._check_cut(result, instants, config)
        self._check_size(found, config)

    def check_one_journal(self) -> None:
        """Check that only the ledger in the record exists; after an open without a fault."""
        ledger_id = self.cursor_ledger_id
        owned = MemoryStore(self._disk).ledgers.owned_by(cursor_owner(self._path))
        named = [] if ledger_id is None else [ledger_id]
        hold(Promise.I11, owned == named, f"ledgers {owned} are kept, the record names {named}")

    def _check_instant(
        self, held: Held, result: PersistResult, instants: Sequence[AckSnapshot], *, has_young: bool
    ) -> None:
        floor, log = self._log.count_up_to(held.mark_delete), self._log
        left_out = result.messages_held_back + result.messages_cut
        acked = set().union(*(instant.acked for instant in instants))
        hold(Promise.I1, held.acked <= acked, f"an ack was invented: {log.text(held.acked - acked)} is on the disk")
        # Held-back acks no longer count once a mark-delete covers them that came during the write.
        covered_end = instants[-1].floor if has_young else 0
        for instant in instants:
            missing = instant.acked - held.acked
            least = sum(number >= covered_end for number in missing)
            if floor == instant.floor and held.acked <= instant.acked and least <= left_out <= len(missing):
                return
        instant = instants[0]
        hold(
            Promise.I9,
            False,
            f"written were {log.text(held.acked)} with mark-delete {held.mark_delete} and {left_out} left out, "
            f"acked were {log.text(instant.acked)}",
        )

    def _check_limits(self, held: Held, result: PersistResult, config: CursorConfig) -> None:
        floor = self._log.count_up_to(held.mark_delete)
        limits = config.metadata_limits if result.route is PersistTarget.METADATA else config.ledger_limits
        # Durable acks are not displaced if the gate would be exceeded by that, or in the native format.
        may_stay = () if result.route is PersistTarget.METADATA else self._durable
        allowed, self._durable = self._usage(may_stay, limits, floor=floor), held.acked
        limit, counted = limits.range_count_max, self._usage(held.acked, limits, floor=floor)
        hold(
            Promise.I4,
            limit is None or counted <= max(limit, allowed),
            f"{counted} ranges are durable, or entries by a rule of Pulsar's, {limit} may be",
        )
        batch_limit = limits.batch_count_max
        batch_count = len(held.unacked_of_batch)
        hold(
            Promise.I4,
            batch_limit is None or batch_count <= batch_limit,
            f"{batch_count} batches are durable, {batch_limit} may be",
        )

    def _usage(self, acked: Iterable[int], limits: PersistLimits, *, floor: int) -> int:
        """Return the usage of a limit on ranges: ranges or, in Pulsar's words form, entries."""
        above = sorted(number for number in acked if number >= floor)
        ranges = len(self._log.runs(above))
        if limits.rule is LimitRule.EXACT:
            return ranges
        ledger_ids = [self._log.positions[number].ledger_id for number in above]
        if limits.rule is not LimitRule.PULSAR_5_0:
            return sum(ledger_id < ledger_ids[-1] for ledger_id in ledger_ids)
        is_list = (
            limits.range_count_max is not None and ledger_ids.count(min(ledger_ids, default=0)) > limits.range_count_max
        )
        return ranges if is_list else len(above)

    def _check_cut(self, result: PersistResult, instants: Sequence[AckSnapshot], config: CursorConfig) -> None:
        """Check that no ack is cut if all fit."""
        limits = config.metadata_limits if result.route is PersistTarget.METADATA else config.ledger_limits
        if not result.messages_cut or (
            result.route is PersistTarget.METADATA and config.metadata_bytes_max < BYTES_MIN
        ):
            return
        counted = (self._usage(now.acked, limits, floor=now.floor) for now in instants)
        # A young entry may join two durable ranges.
        most, limit = max(counted) + result.messages_held_back, limits.range_count_max
        found = f"{result.messages_cut} messages were cut of at most {most} ranges, {limit} may be durable"
        hold(Promise.I15, limit is not None and most > limit, found)

    def _check_size(self, found: StoredCursor, config: CursorConfig) -> None:
        """Check that deltas exceed four times the snapshot, or a minimum, by at most one delta; also count entries."""
        ledger_id = found.record.cursor_ledger_id
        if ledger_id is None:
            return
        sizes = self.entry_sizes
        hold(
            Promise.I11,
            len(sizes) <= config.ledger_entry_count_max,
            f"the journal has {len(sizes)} entries of {config.ledger_entry_count_max}",
        )
        if found.form.name is Format.PULSAR:
            return
        snapshot, *deltas = sizes
        bound = snapshot + max(4 * snapshot, config.compaction_bytes_min) + max(deltas, default=0)
        hold(Promise.I11, sum(sizes) <= bound, f"the journal has {sum(sizes)} bytes, a snapshot {snapshot}")

    def _replay(self, found: StoredCursor) -> None:
        """Replay every new record, one by one."""
        ledger_id = found.record.cursor_ledger_id
        if ledger_id is None:
            # Decoded again: the found state belongs to the recovery.
            content = decode_record(self._disk.values[self._path].data).record.content
            assert content is not None
            self._replayed_ledger_id, self._replayed = None, self._held(content)
            return
        if ledger_id != self._replayed_ledger_id:
            self._replayed_ledger_id, self._replayed_count = ledger_id, 0
            self._replayed = Held(Position(0, -1), set(), {}, {})
        entries = self._disk.ledgers[ledger_id].entries
        for entry in entries[self._replayed_count : found.entry_count]:
            self._take_in(self._held(content_of(native.decode(entry))))
        self._replayed_count = found.entry_count

    def _take_in(self, said: Held) -> None:
        _, acked, batches, _ = self._replayed
        acked |= said.acked
        for number, left in said.unacked_of_batch.items():
            batches[number] = batches.get(number, left) & left
        remaining = {number: left for number, left in batches.items() if left and number not in acked}
        acked.update(number for number, left in batches.items() if not left)
        self._replayed = Held(said.mark_delete, acked, remaining, said.properties)

    def _held(self, content: CursorState) -> Held:
        return held_of(self._log, content)


def held_of(log: NumberedLog, content: CursorState) -> Held:
    """Return a durable state by number."""
    batches = {log.numbers[each]: indexes(words) for each, words in content.batch.items() if each in log.numbers}
    return Held(content.mark_delete, log.held_by(content), batches, dict(content.properties))


def instant_of(model: AckModel) -> AckSnapshot:
    """Return the present acks."""
    return AckSnapshot(
        model.first_unacked(), frozenset(model.acked), model.properties.marked, dict(model.unacked_of_batch)
    )


def attempted_states(
    attempts: Iterable[tuple[Encoded, bytes]], form: JournalFormat, ledgers: LedgerMap
) -> Iterator[CursorState]:
    """Yield the whole states among attempted writes."""
    for encoded, data in attempts:
        content: CursorState | None
        if encoded is Encoded.RECORD:
            content = decode_record(data, ledgers).record.content
        else:
            content = form.recover(lambda *_, data=data: [data], 1, what="", epoch=0, ledgers=ledgers).content
        if content is not None:
            yield content
