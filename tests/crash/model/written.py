"""Checks a cursor's writes: its disk, read without changing it, against sets and against a plain replay."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ackstate.analysis.crash.oracle import Promise
from ackstate.cursor.formats import Format, content_of
from ackstate.cursor.journal import cursor_owner
from ackstate.cursor.recovery import Recovery, decode_record
from ackstate.cursor.results import PersistTarget
from ackstate.errors import AckStateError
from ackstate.position import Position
from ackstate.selection import Keep
from ackstate.stores.memory import MemoryStore
from ackstate.wire import native
from ackstate.wire.pulsar import LimitRule
from crash.model.numbered_log import indexes
from crash.model.settings import Encoded
from crash.promises import hold

if TYPE_CHECKING:
    from collections.abc import Mapping


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
    """The state of a disk: mark-delete position, acked entries, partly acked batches, properties, delivery counts."""

    mark_delete: Position
    acked: set[int]
    unacked_of_batch: dict[int, set[int]]
    properties: Mapping[str, int]
    counts: Mapping[int, tuple[int, int]]


class Written:
    """The disk of one cursor."""

    def __init__(self, log, disk, path):
        self._log = log
        self._disk = disk
        self._path = path
        self._replayed_ledger_id = None
        self._replayed_count = 0
        self._replayed = Held(Position(0, -1), set(), {}, {}, {})
        self._mark_delete = Position(0, -1)  # the durable one, below which it must not go
        self._durable = frozenset()  # acked entries that may stay, even beyond a lowered limit

    def raw(self):
        ledger_id = self.cursor_ledger_id
        entries = () if ledger_id is None else tuple(self._disk.ledgers[ledger_id].entries)
        return self._disk.values[self._path].data, entries

    @property
    def cursor_properties(self):
        return dict(decode_record(self._disk.values[self._path].data).record.cursor_properties)

    @property
    def epoch(self):
        return decode_record(self._disk.values[self._path].data).record.epoch

    @property
    def cursor_ledger_id(self):
        """The ledger in the record; None if the record has the state itself."""
        return decode_record(self._disk.values[self._path].data).record.cursor_ledger_id

    @property
    def state_bytes(self):
        """The size of the record if it has the state itself; 0 if it names a ledger."""
        return len(self._disk.values[self._path].data) if self.cursor_ledger_id is None else 0

    @property
    def entry_sizes(self):
        """The sizes of the entries of the record's ledger, in bytes; empty if the record has the state."""
        ledger_id = self.cursor_ledger_id
        return [] if ledger_id is None else [len(entry) for entry in self._disk.ledgers[ledger_id].entries]

    def find(self, ledgers):
        try:
            found = Recovery(MemoryStore(self._disk), self._path, ledgers).find(())
        except AckStateError as error:
            hold(Promise.I10, False, f"the written record cannot be read: {error}")
        hold(Promise.I10, found is not None, "a cursor that was made is taken for absent")
        assert found is not None
        return found

    def read(self, found):
        """Return the stored state by number, and check it against a replay of all records."""
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

    def restarted(self, held):
        """Set the state after a recovery or a reset, which must not go back from now on."""
        self._mark_delete, self._durable = held.mark_delete, held.acked

    def check_persist(self, found, held, result, instants, config):
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

    def check_one_journal(self):
        """Check that only the ledger in the record exists; after an open without a fault."""
        ledger_id = self.cursor_ledger_id
        owned = MemoryStore(self._disk).ledgers.owned_by(cursor_owner(self._path))
        named = [] if ledger_id is None else [ledger_id]
        hold(Promise.I11, owned == named, f"ledgers {owned} are kept, the record names {named}")

    def _check_instant(self, held, result, instants, *, has_young):
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

    def _check_limits(self, held, result, config):
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

    def _usage(self, acked, limits, *, floor):
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

    def _check_cut(self, result, instants, config):
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

    def _check_size(self, found, config):
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

    def _replay(self, found):
        ledger_id = found.record.cursor_ledger_id
        if ledger_id is None:
            # Decoded again: the found state belongs to the recovery.
            content = decode_record(self._disk.values[self._path].data).record.content
            assert content is not None
            self._replayed_ledger_id, self._replayed = None, self._held(content)
            return
        if ledger_id != self._replayed_ledger_id:
            self._replayed_ledger_id, self._replayed_count = ledger_id, 0
            self._replayed = Held(Position(0, -1), set(), {}, {}, {})
        entries = self._disk.ledgers[ledger_id].entries
        for entry in entries[self._replayed_count : found.entry_count]:
            self._take_in(self._held(content_of(native.decode(entry))))
        self._replayed_count = found.entry_count

    def _take_in(self, said):
        _, acked, batches, _, counts = self._replayed
        acked |= said.acked
        for number, left in said.unacked_of_batch.items():
            batches[number] = batches.get(number, left) & left
        remaining = {number: left for number, left in batches.items() if left and number not in acked}
        acked.update(number for number, left in batches.items() if not left)
        counts = {number: each for number, each in {**counts, **said.counts}.items() if each[0] and number not in acked}
        self._replayed = Held(said.mark_delete, acked, remaining, said.properties, counts)

    def _held(self, content):
        return held_of(self._log, content)


def held_of(log, content):
    batches = {log.numbers[each]: indexes(words) for each, words in content.batch.items() if each in log.numbers}
    counts = {log.numbers[each]: count for each, count in content.counts.items() if each in log.numbers}
    return Held(content.mark_delete, log.held_by(content), batches, dict(content.properties), counts)


def instant_of(model):
    return AckSnapshot(
        model.first_unacked(), frozenset(model.acked), model.properties.marked, dict(model.unacked_of_batch)
    )


def attempted_states(attempts, form, ledgers):
    for encoded, data in attempts:
        if encoded is Encoded.RECORD:
            content = decode_record(data, ledgers).record.content
        else:
            content = form.recover(lambda *_, data=data: [data], 1, what="", epoch=0, ledgers=ledgers).content
        if content is not None:
            yield content


class Excluded(NamedTuple):
    """The acks excluded by the last persist: young ones, and those beyond a limit."""

    young: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()


def check_excluded(model, held, result, config, *, has_failed):
    """Check that a persist without concurrent acks wrote the acks that fit the settings, and return the others."""
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


def fitting(log, durable, candidates, limits, keep):
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


def _whole_ledgers(log, acked, limit, rule):
    """Return the acks kept by Pulsar's words form: whole ledgers, up to the first excluded one."""
    kept = set()
    for ledger_id in sorted({log.positions[number].ledger_id for number in acked}):
        entries = {number for number in acked if log.positions[number].ledger_id == ledger_id}
        if len(kept) + len(entries) * (rule is LimitRule.PULSAR_5_0) > limit:
            break
        kept |= entries
    return kept


_WRITES = {
    PersistTarget.NOTHING: [],
    PersistTarget.DELTA: [Encoded.ENTRY],
    PersistTarget.WHOLE: [Encoded.ENTRY],
    PersistTarget.SNAPSHOT: [Encoded.ENTRY, Encoded.RECORD],
    PersistTarget.METADATA: [Encoded.RECORD],
}
_COMPACTION_RATIO = 4  # As `CursorConfig.compaction_bytes_min` documents it.


class Work:
    """The work of one cursor's persists."""

    def __init__(self, config, *, now_ms):
        self._config = config
        self._begun_ms = now_ms
        self._sizes = None  # of the ledger's entries, if it may be appended to
        self._has_failed = False  # whether a write has failed since a ledger was last written

    def begun(self, sizes, *, now_ms):
        """Record a reset: the sizes of the entries of its new ledger; None without one."""
        self._sizes, self._has_failed = sizes, sizes is None
        self._begun_ms = now_ms if sizes else self._begun_ms

    def failed(self):
        self._has_failed = True

    def check(self, result, attempted, sizes, *, now_ms):
        if not self._has_failed:
            self._check_writes(result, attempted)
        if result.route is PersistTarget.SNAPSHOT:
            hold(Promise.I16, self._needs_ledger(now_ms=now_ms), f"a whole state was written after {self._sizes} bytes")
            self._begun_ms = now_ms
        is_ledger = result.route is not PersistTarget.METADATA
        self._sizes, self._has_failed = (sizes if is_ledger else None), not is_ledger

    def check_delta(self, log, entry, durable):
        content = content_of(native.decode(entry))
        repeated = (log.held_by(content) - set(range(log.count_up_to(content.mark_delete)))) & durable
        hold(Promise.I16, not repeated, f"a delta repeats {log.text(repeated)}, which is durable")

    def _check_writes(self, result, attempted):
        kinds, route = [encoded for encoded, _ in attempted], result.route
        hold(Promise.I16, kinds == _WRITES[route], f"{route.name} wrote {[kind.value for kind in kinds]}")
        is_needed = route is not PersistTarget.METADATA or self._config.format is Format.PULSAR
        hold(Promise.I16, is_needed, "the metadata store was written, and no ledger had failed")
        size = len(attempted[0][1]) if attempted else 0
        hold(Promise.I4, result.bytes_written == size, f"{result.bytes_written} bytes are counted, {size} were written")

    def _needs_ledger(self, *, now_ms):
        """Return whether a persist has a reason to start a new ledger."""
        config, sizes = self._config, self._sizes
        if sizes is None or self._has_failed or len(sizes) >= config.ledger_entry_count_max:
            return True
        is_old = 0 < config.ledger_rollover_ms <= now_ms - self._begun_ms
        outgrown = max(_COMPACTION_RATIO * sizes[0], config.compaction_bytes_min)
        return is_old or (config.format is Format.NATIVE and sum(sizes[1:]) > outgrown)
