"""How a file store reads its log: groups in runs and one by one, and however much at once, say the same."""

import struct
from contextlib import closing

import google_crc32c
import pytest

from ackstate.cursor import FileStore
from ackstate.cursor.store import ABSENT
from ackstate.errors import AckStateError, CorruptStateError
from ackstate.stores import file_log
from ackstate.stores.file_log import BASE_END, CHANGES, HEADER, LogOffset, LogReader, encode_group
from ackstate.stores.file_records import (
    APPEND_SIZE,
    IndexedLedger,
    begin_record,
    create_record,
    entry_records,
    put_record,
)
from fake_directory import LOG, FakeDirectory, FakeFile, copied, end_of, history_of_calls, opened, state_of


@pytest.fixture(scope="module")
def history():
    return history_of_calls()


def outcome_of(files):
    """The result of an opening, or its refusal, to the word."""
    try:
        with closing(opened(copied(files))) as store, store._log.reading() as index:
            columns = {number: (led.offsets, led.sizes, led.checksums) for number, led in index.ledgers.items()}
            place, end = store._log._generation.place, store._log._generation.end
            return columns, index.live_size, dict(index.values), place, end, store.discarded
    except AckStateError as error:
        # Without the name of the directory.
        return type(error), str(error).partition(f"/{LOG}")[2]


def one_by_one(files):
    """The result of an opening that reads each group with the care that names the damage."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LogReader, "_changes_at", lambda *_: [])
        return outcome_of(files)


def group(place, offset, body, **changed):
    """A group whose checksums are right, whatever its header says."""
    identity, sequence, chain = place
    said = {
        "magic": file_log.MAGIC,
        "version": file_log.VERSION,
        "kind": CHANGES,
        "reserved": 0,
        "address": (identity + offset) % (1 << 64),
        "sequence": sequence,
        "chain": chain,
        "length": len(body),
        "zero_sectors": 0,
    }
    assert changed.keys() <= said.keys()
    header = HEADER.pack(*(said | changed).values(), 0)[:-4]
    checksum = google_crc32c.value(header)
    end = struct.pack("<BIB", 0xA5, google_crc32c.extend(checksum, body), 0xA5)
    return header + checksum.to_bytes(4, "little") + body + end


def log_with(history, **changed):
    """A log with one more group, of which the header says something else."""
    files = copied(history[-1][0])
    reader = LogReader(FakeFile(None, LOG, files[LOG]), LOG)
    for _ in reader.groups():
        pass
    del files[LOG][reader.end :]
    body = b"".join(entry_records(3, [b"late"], [google_crc32c.value(b"late")]))
    files[LOG] += group(reader.place, reader.end, body, **{name: of(reader.place) for name, of in changed.items()})
    return files


HEADERS = {
    "magic": lambda _: b"ACKM",
    "version": lambda _: 2,
    "kind": lambda _: file_log.BASE_END,
    "reserved": lambda _: 1,
    "address": lambda _: 7,
    "sequence": lambda place: place.sequence + 1,
    "chain": lambda place: place.chain ^ 1,
    "length": lambda _: 1 << 62,
}


def check_headers(history):
    files = log_with(history)
    assert outcome_of(files) == one_by_one(files)
    assert outcome_of(files)[4] == len(files[LOG])
    for name, of in HEADERS.items():
        files = log_with(history, **{name: of})
        found = outcome_of(files)
        assert found == one_by_one(files), name
        # A length that is too large says that the group was cut.
        assert issubclass(found[0], AckStateError) if name != "length" else found[-1] is not None


def test_a_header_that_says_what_cannot_be_is_refused_in_a_run_as_it_is_alone(history):
    check_headers(history)


def test_the_check_catches_a_chain_that_is_believed_in_a_run(history, monkeypatch):
    changes_at = LogReader._changes_at

    def believing(reader, buffer, at):
        reader._chain = int.from_bytes(buffer[at + 24 : at + 28], "little")
        return changes_at(reader, buffer, at)

    monkeypatch.setattr(LogReader, "_changes_at", believing)
    with pytest.raises(AssertionError):
        check_headers(history)


def test_a_number_from_which_there_is_no_counting_on_is_refused_in_a_run_as_it_is_alone():
    files = {}
    FileStore.over(FakeDirectory(files)).close()
    identity, last = int.from_bytes(files["MADE"][8:16], "little"), (1 << 63) - 1
    for count in (2, 3):
        place, log = LogOffset(identity, last - 1, 0), b""
        for kind, body in [(BASE_END, begin_record(1, 1, 0)), *[(CHANGES, create_record(9, b"owner"))] * (count - 1)]:
            data, place = encode_group(kind, place, body, offset=len(log))
            log += data
        files[LOG] = bytearray(log)
        found = outcome_of(files)
        assert found == one_by_one(files)
        assert (found[0] is CorruptStateError) == (count == 3)


def check_runs(count, identity):
    """Groups of a log are read in runs: out of this many, a few are read alone."""
    files, alone = {}, []
    with closing(FileStore.over(FakeDirectory(files), identity=identity)) as store:
        store.ledgers.create("billing")
        for _ in range(count):
            store.ledgers.append(1, b"entry")
    group_at = LogReader._group_at
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LogReader, "_group_at", lambda *given: alone.append(given) or group_at(*given))
        opened(files).close()
    # The first, and the one in which the bytes read at once end.
    assert len(alone) <= 2 + len(files[LOG]) // file_log._WINDOW


# The address of a group starts over at zero, too.
@pytest.mark.parametrize("identity", [bytes(8), ((1 << 64) - 50_000).to_bytes(8, "little")])
def test_a_log_of_many_small_groups_is_read_in_runs(identity):
    check_runs(2_000, identity)


def test_the_check_catches_groups_that_are_read_one_by_one(monkeypatch):
    monkeypatch.setattr(LogReader, "_changes_at", lambda *_: [])
    with pytest.raises(AssertionError):
        check_runs(20, bytes(8))


def check_flips_and_cuts(history):
    """One bit of each byte flipped, and cut before each byte: a run ends where the care begins."""
    whole = history[-1][0]
    found = set()
    for offset in range(end_of(whole[LOG])):
        flipped, cut = copied(whole), copied(whole)
        flipped[LOG][offset] ^= 1 << offset % 8
        del cut[LOG][offset:]
        for files in (flipped, cut):
            outcome = outcome_of(files)
            assert outcome == one_by_one(files)
            found.add(outcome[0] if isinstance(outcome[0], type) else "opened")
    assert found == {CorruptStateError, "opened"}


@pytest.mark.slow
def test_damage_and_torn_ends_are_told_in_the_same_words_in_a_run(history):
    check_flips_and_cuts(history)


def test_the_check_catches_a_run_that_loses_its_last_group(history, monkeypatch):
    changes_at = LogReader._changes_at
    monkeypatch.setattr(LogReader, "_changes_at", lambda *given: changes_at(*given)[:-1])
    with pytest.raises((AssertionError, CorruptStateError)):
        check_flips_and_cuts(history)


def check_windows(history):
    """Groups may end with the bytes read at once, go beyond them, or be larger: all are held, and damage is found."""
    files, state = history[-1]
    damaged = copied(files)
    at = damaged[LOG].index(b"after the zeros")
    damaged[LOG][at] ^= 1
    expected, told = outcome_of(files), outcome_of(damaged)
    assert told[0] is CorruptStateError
    for size in range(1, end_of(files[LOG]) + 100, 5):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(file_log, "_WINDOW", size)
            assert outcome_of(files) == expected
            assert outcome_of(damaged) == told
            with closing(opened(copied(files))) as store:
                assert state_of(store) == state


def test_a_log_holds_the_same_however_much_is_read_at_once(history):
    check_windows(history)


def test_the_check_catches_a_group_of_which_no_more_is_read(history, monkeypatch):
    monkeypatch.setattr(file_log, "_size_at", lambda *_: HEADER.size)
    with pytest.raises(AssertionError):
        check_windows(history)


def check_live_size():
    """The live part of a log is as large as a log of nothing else, before and after an opening."""
    files, alive = {}, {1: [b"one", b"", bytes(700)], 3: [b"three"]}
    with closing(FileStore.over(FakeDirectory(files))) as store:
        for _ in range(3):
            store.ledgers.create("billing")
        store.ledgers.append_all([(number, entry) for number, entries in alive.items() for entry in entries])
        store.ledgers.append_all([(2, b"dead"), (2, bytes(900))])
        store.metadata.put("/a", b"dead, too", expected_version=ABSENT)
        store.metadata.put("/a", b"alive", expected_version=0)
        store.metadata.put("/b", b"dead", expected_version=ABSENT)
        store.metadata.delete("/b", expected_version=0)
        store.ledgers.fence(1)
        store.ledgers.delete(2)
        value = store.metadata.get("/a")
        sizes = [store._log._generation.index.live_size]
    with closing(opened(files)) as store:
        sizes.append(store._log._generation.index.live_size)
    records = [create_record(number, b"billing") for number in alive] + [put_record("/a", value)]
    entries = [entry for entries in alive.values() for entry in entries]
    assert sizes == [sum(map(len, records + entries)) + APPEND_SIZE * len(entries)] * 2


def test_what_is_alive_is_counted_the_same_as_it_is_written_and_as_it_is_read():
    check_live_size()


def test_the_check_catches_a_deleted_ledger_whose_entries_count_as_alive(monkeypatch):
    monkeypatch.setattr(IndexedLedger, "live_size", property(lambda ledger: ledger.record_size))
    with pytest.raises(AssertionError):
        check_live_size()
