"""The report of an inspection: the same numbers as those of a recovery, without touching the store."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ackstate import CursorConfig, Format, LedgerMap, ManagedCursor, MemoryStore, Message, Repair
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.inspect import Status, find_cursors, inspect_cursor, inspect_store
from ackstate.stores.base import Versioned
from ackstate.topic import MessageLog
from ackstate.topic.log import log_path
from ackstate.wire import native

TOPIC, SUBSCRIPTION = "persistent://a/b/orders", "billing/eu"
PATH = cursor_path(TOPIC, SUBSCRIPTION)
ROUNDS = 6


class DamagedStore:
    """A store with one cursor that persisted six times, whose bytes a test damages."""

    def __init__(self, form=Format.NATIVE, *, has_log=True):
        store = MemoryStore()
        self.disk = store.disk
        self.config = CursorConfig(format=form)
        self.log = LedgerMap.from_counts({40: 100, 50: 200})
        if has_log:
            log = MessageLog.open(store, topic=TOPIC)
            log.publish([Message(b"")] * 200)
            self.log = log.ledgers
        ledger_id = self.log.current_ledger_id
        self.cursor = self.open()
        self.acked_by = []  # the acks that each record added
        for number in range(ROUNDS):
            entries = [10 * number + 5, 10 * number + 7]
            self.cursor.ack_entries(ledger_id, entries, now_ms=0)
            self.cursor.persist(now_ms=0)
            self.acked_by.append(set(entries))

    def open(self, **options):
        store = MemoryStore(self.disk)
        return ManagedCursor.open(
            store, topic=TOPIC, subscription=SUBSCRIPTION, ledgers=self.log, config=self.config, now_ms=0, **options
        )

    @property
    def journal_id(self):
        (ledger_id,) = MemoryStore(self.disk).ledgers.owned_by(cursor_owner(PATH))
        return ledger_id

    @property
    def entries(self):
        return self.disk.ledgers[self.journal_id].entries

    def flip(self, sequence, byte=-1):
        self.entries[sequence] = flipped(self.entries[sequence], byte)

    def inspect(self):
        """Look at it, and see that nothing was written."""
        store = MemoryStore(self.disk)
        (found,) = inspect_store(store)
        assert store.mutation_count == 0
        assert found.name == (PATH, TOPIC, SUBSCRIPTION)
        return found


def flipped(data, byte=-1, bit=0x10):
    changed = bytearray(data)
    changed[byte] ^= bit
    return bytes(changed)


def damage_record(planted):
    value = planted.disk.values[PATH]
    planted.disk.values[PATH] = Versioned(b"ACKP" + b"\xff" * 3, value.version)


def lose_record(planted):
    del planted.disk.values[PATH]


def lose_journal(planted):
    del planted.disk.ledgers[planted.journal_id]


def damage_middle(planted):
    planted.flip(3)


def damage_all(planted):
    for number in range(len(planted.entries)):
        planted.flip(number, 0)


def misplace(planted):
    planted.entries[2], planted.entries[3] = planted.entries[3], planted.entries[2]


def damage_last_two(planted):
    planted.flip(-1, 0)
    planted.flip(-2, 0)


DAMAGES = [damage_record, lose_record, lose_journal, damage_middle, damage_all, misplace]
CASES = [(Format.NATIVE, damage) for damage in DAMAGES] + [
    (Format.PULSAR, damage) for damage in (damage_record, lose_record, lose_journal, damage_all, damage_last_two)
]


# --- notes


def test_a_torn_tail_is_a_note():
    planted = DamagedStore()
    planted.entries[-1] = planted.entries[-1][:-7]
    found = planted.inspect()
    (note,) = found.notes
    assert (found.status, found.records_replayed) == (Status.NOTE, ROUNDS)
    report = planted.open().recovery_report
    assert (note.offset, note.size_bytes) == (report.discarded_offset, report.bytes_discarded)
    assert found.records[-1].damage
    assert "torn" in note.text
    older = DamagedStore(Format.PULSAR)
    older.flip(1, 0)
    found = older.inspect()
    (note,) = found.notes
    assert (found.status, note.offset) == (Status.NOTE, found.records[1].offset)
    assert older.open().recovery_report.bytes_discarded == 0


def test_a_leftover_of_a_crash_is_a_note_and_goes_with_the_next_open():
    planted = DamagedStore()
    left = MemoryStore(planted.disk).ledgers.create(cursor_owner(PATH))
    found = planted.inspect()
    assert (found.status, found.leftovers) == (Status.NOTE, (left,))
    planted.open()
    assert left not in planted.disk.ledgers


@pytest.mark.parametrize("has_log", [True, False])
def test_what_a_crash_left_of_the_creation_of_a_cursor_is_no_lost_journal(has_log):
    planted = DamagedStore(has_log=has_log)
    lose_record(planted)
    planted.entries[1:] = []
    found = planted.inspect()
    assert (found.status, found.leftovers, found.content) == (Status.NOTE, (planted.journal_id,), None)
    assert planted.open().recovery_report.repair is Repair.NONE


# --- problems and the effect of repairs


@pytest.mark.parametrize(("form", "damage"), CASES)
def test_each_repair_does_what_was_announced(form, damage):
    planted = DamagedStore(form)
    damage(planted)
    found = planted.inspect()
    (problem,) = found.problems
    assert (found.status, found.content) == (Status.PROBLEM, None)
    with pytest.raises(CorruptStateError) as refused:
        planted.open()
    assert [outcome.repair for outcome in problem.repairs] == list(refused.value.repairs)
    assert problem.repairs
    assert (problem.what, problem.offset) == (refused.value.what, refused.value.offset)
    for outcome in problem.repairs:
        again = DamagedStore(form)
        damage(again)
        cursor = again.open(repair=outcome.repair)
        report = cursor.recovery_report
        assert (outcome.records_replayed, outcome.bytes_discarded) == (report.records_replayed, report.bytes_discarded)
        assert (outcome.mark_delete, outcome.range_count) == (report.mark_delete, report.range_count)
        assert again.inspect().status is Status.OK


def test_without_the_message_log_only_where_a_new_start_stands_is_unknown():
    planted = DamagedStore(has_log=False)
    damage_record(planted)
    ((orphan, anew),) = (problem.repairs for problem in planted.inspect().problems)
    assert (anew.repair, anew.mark_delete, orphan.mark_delete) == (Repair.START_ANEW, None, planted.log.first_position)


def test_the_repair_that_keeps_more_comes_first_and_says_so():
    planted = DamagedStore()
    damage_middle(planted)
    first, *others = planted.inspect().problems[0].repairs
    assert (first.repair, first.records_replayed, first.record_count) == (
        Repair.DISCARD_DAMAGED_RECORDS, 3, ROUNDS + 1,
    )  # fmt: skip
    # The acks of the damaged record are unknown; the others add up.
    known = set().union(*(added for number, added in enumerate(planted.acked_by) if number != 2))
    kept = set().union(*planted.acked_by[:2])
    assert first.acks_given_up_min == len(known - kept) == 6
    assert [outcome.acks_given_up_min for outcome in others] == [len(known)] * 2


def test_a_state_beyond_the_end_of_the_log_is_a_problem_that_no_repair_helps():
    planted = DamagedStore()
    entries = planted.disk.ledgers[planted.log.current_ledger_id].entries
    entries[50:] = []
    (problem,) = planted.inspect().problems
    assert problem.repairs == ()
    assert "1:49" in problem.expected
    value = planted.disk.values.pop(PATH)
    (lost,) = planted.inspect().problems
    assert [outcome.repair for outcome in lost.repairs] == [Repair.START_ANEW]
    planted.disk.values[PATH] = value
    planted.log = LedgerMap.from_counts({planted.log.current_ledger_id: 50})
    with pytest.raises(AckStateError, match="1:57"):
        planted.open()


def test_a_newer_version_is_a_problem_that_no_repair_helps():
    planted = DamagedStore()
    planted.entries[2] = native.MAGIC + bytes([native.VERSION + 1]) + planted.entries[2][5:]
    (problem,) = planted.inspect().problems
    assert problem.repairs == ()
    assert f"version {native.VERSION + 1}" in problem.found
    misplaced = DamagedStore()
    misplace(misplaced)
    assert [bool(record.damage) for record in misplaced.inspect().records] == [False] * 2 + [True] + [False] * 4


def test_a_record_that_names_anothers_ledger_is_a_problem():
    planted = DamagedStore()
    planted.disk.ledgers[planted.journal_id].owner = "cursor /managed-ledgers/orders/other"
    other, mine = inspect_store(MemoryStore(planted.disk))
    assert (other.name.subscription, mine.name.subscription) == ("other", SUBSCRIPTION)
    assert "another's" in mine.problems[0].found
    assert other.status is Status.PROBLEM  # a journal without a record


# --- a store that others go on writing


def test_a_log_that_grew_since_it_was_read_is_read_again():
    planted = DamagedStore()
    (name,) = find_cursors(MemoryStore(planted.disk))
    before = LedgerMap.from_counts({planted.log.current_ledger_id: 10})
    assert inspect_cursor(MemoryStore(planted.disk), name, read_log=lambda topic: before).status is Status.OK


# --- any damage


def damaged(form, which, at, bit):
    """A planted store with one bit flipped."""
    planted = DamagedStore(form)
    places = [(planted.disk.values, path) for path in sorted(planted.disk.values)]
    places += [(planted.entries, number) for number in range(len(planted.entries))]
    holder, key = places[which % len(places)]
    value = holder[key]
    if isinstance(value, Versioned):
        holder[key] = value._replace(data=flipped(value.data, at % len(value.data), bit))
    else:
        holder[key] = flipped(value, at % len(value), bit)
    return planted


@given(st.sampled_from(Format), st.integers(0, 20), st.integers(0, 200), st.sampled_from([1 << n for n in range(8)]))
@example(Format.PULSAR, 0, 1, 1)
@example(Format.PULSAR, ROUNDS, 1, 0x40)
@example(Format.NATIVE, 4, 4, 0x80)
def test_a_cursor_opens_if_and_only_if_no_problem_is_found(form, which, at, bit):
    planted = damaged(form, which, at, bit)
    for found in inspect_store(MemoryStore(planted.disk)):
        try:
            cursor = planted.open()
        except AckStateError:
            assert found.status is Status.PROBLEM
            return
        if found.status is Status.PROBLEM:
            # It would open, onto a ledger that is not its own, or, in Pulsar's format, where the log ends.
            assert all(problem.found.endswith("another's") or "message log" in problem.expected + problem.found
                       for problem in found.problems)  # fmt: skip
        else:
            report = cursor.recovery_report
            assert (found.content.mark_delete, found.records_replayed) == (report.mark_delete, report.records_replayed)


@pytest.mark.parametrize(
    ("damage", "status"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), Status.NOTE),
        (lambda data: b"", Status.NOTE),
        (lambda data: data[:4] + b"\x63" + data[5:], Status.PROBLEM),
    ],
    ids=["damaged", "empty", "newer"],
)
def test_a_message_log_record_that_cannot_be_read_is_reported(damage, status):
    store, path = MemoryStore(), log_path("t")
    log = MessageLog.open(store, topic="t")
    log.publish([Message(b"")])
    ManagedCursor.open(store, topic="t", subscription="s", ledgers=log.ledgers, now_ms=0)
    (sound,) = inspect_store(store)
    assert sound.status is Status.OK
    found = store.metadata.get(path)
    store.metadata.put(path, damage(found.data), expected_version=found.version)
    (cursor,) = inspect_store(store)
    assert cursor.status is status
    told = cursor.notes[0].text if status is Status.NOTE else str(cursor.problems[0])
    assert path in told
    assert (status is Status.NOTE) == ("the next open of the message log replaces" in told)
    if status is Status.NOTE:
        MessageLog.open(store, topic="t")
    else:
        with pytest.raises(UnsupportedVersionError):
            MessageLog.open(store, topic="t")
