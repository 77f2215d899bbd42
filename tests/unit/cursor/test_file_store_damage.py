"""Findings of a file store at its opening: torn tails, damage, lost logs, other versions."""

import itertools
from contextlib import closing

import pytest

from ackstate.cursor import FileStore
from ackstate.cursor.store import ABSENT
from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.stores import file_log
from ackstate.stores.file_records import APPEND_SIZE, entry_records
from fake_directory import (
    CALLS,
    GOLDEN,
    LOG,
    FakeDirectory,
    FakeFile,
    copied,
    end_of,
    history_of_calls,
    opened,
    state_of,
)


@pytest.fixture(scope="module")
def history():
    return history_of_calls()


# Tears by a crash


def trimmed(files):
    """The files without the space laid out in advance, as after a cut."""
    return copied(files, **{LOG: files[LOG][: end_of(files[LOG])]})


def boundaries(history):
    return [end_of(files[LOG]) for files, _ in history]


def check_truncations(history):
    files, _ = history[-1]
    ends = boundaries(history)
    for length in range(ends[-1]):
        cut = copied(files)
        del cut[LOG][length:]
        if length < ends[0]:
            with pytest.raises(CorruptStateError, match=LOG):
                opened(cut)
            continue
        kept = max(number for number, end in enumerate(ends) if end <= length)
        with closing(opened(cut)) as store:
            torn = store.discarded
            assert state_of(store) == history[kept][1]
        assert (torn is None) == (length == ends[kept])
        assert torn is None or torn[:2] == (ends[kept], end_of(files[LOG][:length]) - ends[kept])
        assert len(cut[LOG]) == ends[kept]


@pytest.mark.slow
def test_a_log_cut_anywhere_holds_what_was_whole_and_says_what_it_discarded(history):
    check_truncations(history)


def test_the_check_catches_a_tail_that_is_left_in_place(history, monkeypatch):
    monkeypatch.setattr(FakeFile, "truncate", lambda *_: None)
    with pytest.raises(AssertionError):
        check_truncations(history)


@pytest.mark.parametrize("more", [1, 43, 44, 600, 2_000])
def test_any_number_of_zeros_behind_the_groups_is_their_end(history, more):
    files, state = history[-1]
    laid_out = trimmed(files)
    laid_out[LOG] += bytes(more)
    with closing(opened(laid_out)) as store:
        assert (store.discarded, state_of(store)) == (None, state)
        store.ledgers.append(3, b"later")
    with closing(opened(laid_out)) as store:
        assert store.ledgers.read(3, 2, 3) == [b"later"]


def check_short_writes(history):
    """Of the last group, which is written over zeros, any number of bytes may be there."""
    for number in range(1, len(history)):
        begin, end = boundaries(history)[number - 1 : number + 1]
        files, _ = history[number]
        for written in range(begin + 1, end):
            torn = copied(files)
            torn[LOG][written:end] = bytes(end - written)
            with closing(opened(torn)) as store:
                assert store.discarded[:2] == (begin, end_of(files[LOG][:written]) - begin)
                assert state_of(store) == history[number - 1][1]
            assert len(torn[LOG]) == begin


@pytest.mark.slow
def test_a_group_that_was_written_in_part_over_what_was_laid_out_is_discarded(history):
    check_short_writes(history)


def test_the_check_catches_a_write_in_part_that_counts_as_damage(history, monkeypatch):
    monkeypatch.setattr(file_log, "_ZERO", b"")
    with pytest.raises((CorruptStateError, AssertionError)):
        check_short_writes(history[:2])


def check_lost_sectors(history):
    """Every set of sectors of the last group may be missing, and the end of it too."""
    seen = 0
    for number in range(1, len(history)):
        files, state = history[number]
        begin, end = boundaries(history)[number - 1 : number + 1]
        pieces = [begin, *range(begin - begin % 512 + 512, end, 512), end]
        for lost in itertools.product([False, True], repeat=len(pieces) - 1):
            torn = copied(files)
            for is_lost, first, last in zip(lost, pieces, pieces[1:], strict=False):
                if is_lost:
                    torn[LOG][first:last] = bytes(last - first)
            is_changed, torn_group = torn[LOG] != files[LOG], torn[LOG][begin:end]
            with closing(opened(torn)) as store:
                assert state_of(store) == (history[number - 1][1] if is_changed else state)
                # Of a group that is missing as a whole there is nothing to be seen.
                assert (store.discarded is not None) == (is_changed and any(torn_group))
            seen += is_changed
    assert seen > 20


def test_a_group_with_sectors_that_never_reached_the_disk_is_discarded(history):
    check_lost_sectors(history)


def test_and_so_it_is_where_the_file_ends_with_it(history):
    check_lost_sectors([(trimmed(files), state) for files, state in history])


def test_the_check_catches_lost_sectors_that_count_as_damage(history, monkeypatch):
    monkeypatch.setattr(file_log, "_lost", lambda *_: "")
    with pytest.raises(CorruptStateError):
        check_lost_sectors(history)


def test_a_discarded_tail_is_cut_off_for_good_and_the_store_goes_on(history):
    files, _ = history[-1]
    torn = trimmed(files)
    del torn[LOG][-7:]
    with closing(opened(torn)) as store:
        assert "cut after" in store.discarded.reason
        store.ledgers.append(3, b"after the crash")
    with closing(opened(torn)) as store:
        assert store.discarded is None
        assert store.ledgers.read(3, 0, 1) == [b"after the crash"]


# Damage


def check_flipped_bits(files):
    for name, content in files.items():
        for offset, bit in itertools.product(range(end_of(content)), range(8)):
            damaged = copied(files)
            damaged[name][offset] ^= 1 << bit
            with pytest.raises(CorruptStateError):
                opened(damaged)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "seen"), [(3, trimmed), (4, copied)])
def test_no_flipped_bit_is_taken_for_a_torn_tail_or_overlooked(history, number, seen):
    # The third call wrote a few bytes, the fourth whole sectors of zeros.
    check_flipped_bits(seen(history[number][0]))


def check_flips_behind_the_end(files, state):
    """A bit that is flipped in the zeros behind the groups is reported or refused, and changes nothing."""
    end, size = end_of(files[LOG]), len(files[LOG])
    fates = set()
    for offset, bit in itertools.product([*range(end, end + 60), *range(end + 60, size, 61), size - 1], range(8)):
        damaged = copied(files)
        damaged[LOG][offset] ^= 1 << bit
        try:
            with closing(opened(damaged)) as store:
                assert state_of(store) == state
                assert store.discarded[:2] == (end, offset + 1 - end)
                fates.add("reported")
        except CorruptStateError as error:
            fates.add(f"refused at {error.offset}")
    assert fates == {"reported", f"refused at {end}"}


def test_a_flipped_bit_behind_the_groups_changes_nothing(history):
    check_flips_behind_the_end(*history[4])


def test_the_check_catches_zeros_of_the_caller_that_pass_for_lost_sectors(monkeypatch):
    monkeypatch.setattr(file_log, "_zero_sectors", lambda *_: 0)
    directory = FakeDirectory()
    with closing(FileStore.over(directory)) as store:
        store.ledgers.append(store.ledgers.create("billing"), bytes(2_000))
    with pytest.raises(pytest.fail.Exception):
        check_flipped_bits({name: directory.files[name] for name in (LOG, "MADE")})


def test_the_check_catches_a_group_whose_end_looks_like_what_is_laid_out(monkeypatch):
    """Without a byte that is not zero at its end, a changed group passes for one that was written in part."""
    monkeypatch.setattr(file_log, "_END", 0)
    directory = FakeDirectory()
    with closing(FileStore.over(directory)) as store:
        store.ledgers.create("billing")
    with pytest.raises(pytest.fail.Exception):
        check_flipped_bits({name: directory.files[name] for name in (LOG, "MADE")})


@pytest.mark.parametrize("number", range(1, len(CALLS)))
def test_zeros_before_a_good_group_are_damage_and_not_a_torn_tail(history, number):
    files, _ = history[-1]
    begin, end = boundaries(history)[number - 1 : number + 1]
    damaged = copied(files)
    damaged[LOG][begin:end] = bytes(end - begin)
    with pytest.raises(CorruptStateError) as caught:
        opened(damaged)
    assert caught.value.offset == begin


@pytest.mark.parametrize("more", [0, 1, 600])
@pytest.mark.parametrize("rest", [b"x", b"ACKX", bytes(40) + b"x", b"ACKL" * 20])
def test_bytes_after_the_end_are_damage(history, rest, more):
    files, _ = history[-1]
    damaged = trimmed(files)
    end = len(damaged[LOG])
    damaged[LOG] += rest + bytes(more)
    with pytest.raises(CorruptStateError) as caught:
        opened(damaged)
    assert caught.value.offset == end


def test_a_group_of_another_log_is_damage(history):
    ours = history[3][0]
    directory = FakeDirectory()
    with closing(FileStore.over(directory, identity=b"of calls")) as store:
        store.ledgers.create("billing")
        store.ledgers.append(1, b"other entry")
        store.metadata.put("/other", b"value", expected_version=ABSENT)
        begin = end_of(directory.files[LOG])
        store.ledgers.append(1, b"theirs")
    mixed = trimmed(ours)
    mixed[LOG] += directory.files[LOG][begin:]
    with pytest.raises(CorruptStateError, match="chain"):
        opened(mixed)


def test_the_log_of_another_store_in_this_ones_place_is_damage():
    ours, theirs = {}, {}
    for files in (ours, theirs):
        with closing(FileStore.over(FakeDirectory(files))) as store:
            store.ledgers.create("billing")
    assert len(ours[LOG]) == len(theirs[LOG])
    with pytest.raises(CorruptStateError, match="a group of store"):
        opened({"MADE": ours["MADE"], LOG: theirs[LOG]})


def torn_in_its_header(entry):
    """A log whose last group lost the sector with its header, and the length that it had before."""
    files = {}
    with closing(FileStore.over(FakeDirectory(files), identity=b"of calls")) as store:
        store.ledgers.create("billing")
        begin = end_of(files[LOG])
        store.ledgers.append(1, entry(bytes(files[LOG])))
    end = begin - begin % 512 + 512
    files[LOG][begin:end] = bytes(end - begin)
    return files, begin


def check_entry_of_groups(entry):
    files, begin = torn_in_its_header(entry)
    with closing(opened(files)) as store:
        assert (store.discarded.offset, store.ledgers.last(1)) == (begin, -1)


def log_of_another(_):
    files = {}
    with closing(FileStore.over(FakeDirectory(files))) as store:
        for number in range(40):
            store.ledgers.create(f"owner {number}")
    return bytes(files[LOG])


def log_of_its_own(log):
    return bytes([1]) * 600 + log


@pytest.mark.parametrize("entry", [log_of_another, log_of_its_own])
def test_bytes_of_a_log_in_an_entry_are_no_groups(entry):
    check_entry_of_groups(entry)


@pytest.mark.parametrize("entry", [log_of_another, log_of_its_own])
def test_the_check_catches_groups_that_count_wherever_they_stand(monkeypatch, entry):
    # Every group says the same of its place, as without any address.
    monkeypatch.setattr(file_log, "_address", lambda *_: 0)
    monkeypatch.setattr(file_log.LogReader, "_misplaced", lambda *_: None, raising=True)
    with pytest.raises((CorruptStateError, TypeError)):
        check_entry_of_groups(entry)


def whole_group_with_a_sector_of_zeros_up_to(trailer_bytes, monkeypatch):
    """A log whose last group ends with zeros, of which a sector ends some bytes into the trailer."""
    files = {}
    with closing(FileStore.over(FakeDirectory(files), identity=b"of calls")) as store:
        store.ledgers.create("billing")
        begin = end_of(files[LOG]) + file_log.HEADER.size + APPEND_SIZE
        size = (512 - trailer_bytes - begin) % 512 + 1_024
        with monkeypatch.context() as planted:
            # All bytes of the checksum are zero, so that a sector of zeros may reach into it.
            planted.setattr(file_log.google_crc32c, "extend", lambda *_: 0)
            store.ledgers.append(1, b"\1" * 5 + bytes(size - 5))
    return files, begin


@pytest.mark.parametrize("trailer_bytes", range(file_log.TRAILER.size + 1))
def test_zeros_up_to_the_trailer_do_not_make_a_changed_group_a_torn_one(monkeypatch, trailer_bytes):
    files, begin = whole_group_with_a_sector_of_zeros_up_to(trailer_bytes, monkeypatch)
    files[LOG][begin + 2] ^= 4
    with pytest.raises(CorruptStateError):
        opened(files)


def test_the_check_catches_a_trailer_that_begins_with_its_checksum(monkeypatch):
    monkeypatch.setattr(file_log, "_END", 0)
    with pytest.raises(pytest.fail.Exception):
        test_zeros_up_to_the_trailer_do_not_make_a_changed_group_a_torn_one(monkeypatch, 1)


def test_a_group_twice_is_damage(history):
    files, _ = history[-1]
    twice = trimmed(files)
    twice[LOG] += twice[LOG][boundaries(history)[-2] :]
    with pytest.raises(CorruptStateError, match="sequence"):
        opened(twice)


def test_a_log_under_the_name_of_another_generation_is_damage(history):
    files = copied(history[-1][0])
    files["log-0000000000000002"] = files.pop(LOG)
    with pytest.raises(CorruptStateError, match="generation 2"):
        opened(files)


@pytest.mark.parametrize("content", [None, b"", b"ACKL", bytes(4_096)])
def test_a_store_that_lost_its_log_is_no_new_store(history, content):
    files = copied(history[-1][0])
    del files[LOG]
    if content is not None:
        files[LOG] = bytearray(content)
    before = copied(files)
    with pytest.raises(CorruptStateError):
        opened(files)
    assert files == before


@pytest.mark.parametrize(
    "record",
    [
        b"\x09",
        b"\x03" + bytes(16),
        b"\x02" + bytes(3),
        b"\x06" + b"\xff" * 16,
        b"\0",
        entry_records(3, [bytes(100)], [0])[0] + b"less than that",
    ],
)
def test_a_record_that_says_what_cannot_be_is_damage(history, record):
    files = trimmed(history[-1][0])
    reader = file_log.LogReader(FakeFile(None, LOG, files[LOG]), LOG)
    for _ in reader.groups():
        pass
    files[LOG] += file_log.encode_group(file_log.CHANGES, reader.place, record, offset=reader.end)[0]
    with pytest.raises(CorruptStateError) as caught:
        opened(files)
    assert caught.value.offset >= reader.end + file_log.HEADER.size


def test_an_entry_that_changed_beneath_an_open_store_is_damage(history):
    files = trimmed(history[-1][0])
    with closing(opened(files)) as store:
        offset = files[LOG].index(b"first entry")
        files[LOG][offset + 2] ^= 1
        with pytest.raises(CorruptStateError) as caught:
            store.ledgers.read(1, 0, 3)
        assert caught.value.offset == offset
        assert store.ledgers.read(1, 1, 3) == [b"", bytes(1_300)]
        del files[LOG][-9:]
        with pytest.raises(CorruptStateError):
            store.ledgers.read(3, 1, 2)


# Versions


def test_a_newer_log_is_refused_and_left_alone(history, monkeypatch):
    monkeypatch.setattr(file_log, "VERSION", 2)
    directory = FakeDirectory()
    FileStore.over(directory).close()
    monkeypatch.undo()
    before = copied(directory.files)
    with pytest.raises(UnsupportedVersionError, match=r"version 2.* version 1"):
        opened(directory.files)
    assert directory.files == before


def test_a_newer_mark_is_refused(history):
    files = copied(history[-1][0])
    head = b"ACKM" + (2).to_bytes(4, "little")
    files["MADE"] = bytearray(head + file_log.google_crc32c.value(head).to_bytes(4, "little"))
    with pytest.raises(UnsupportedVersionError, match="version 2"):
        opened(files)


@pytest.mark.parametrize("name", ["file-store-v1.bin", "file-store-v1-laid-out.bin"])
def test_the_golden_log_reads_as_it_says(name):
    files = {LOG: bytearray((GOLDEN / name).read_bytes()), "MADE": golden_mark()}
    with closing(opened(files)) as store:
        assert state_of(store) == ({1: [b"one", b"", b"three"]}, {"orders": (b"pointer", 1)})
        assert store.ledgers.owned_by("billing") == [1]
        with pytest.raises(AckStateError, match="fenced"):
            store.ledgers.append(1, b"late")
        assert store.ledgers.create("billing") == 3
        assert store.metadata.put("/gone", b"", expected_version=ABSENT) == 1


def golden_mark():
    return bytearray((GOLDEN / "file-store-v1-made.bin").read_bytes())


def write_golden(files):
    """The program that wrote the golden files."""
    with closing(FileStore.over(FakeDirectory(files), identity=b"identity")) as store:
        store.ledgers.create("billing")
        store.ledgers.append_all([(1, b"one"), (1, b""), (1, b"three")])
        store.ledgers.delete(store.ledgers.create("shipping"))
        store.metadata.put("/orders", b"", expected_version=ABSENT)
        store.metadata.put("/orders", b"pointer", expected_version=0)
        store.metadata.put("/gone", b"x", expected_version=ABSENT)
        store.metadata.delete("/gone", expected_version=0)
        store.ledgers.fence(1)


def test_the_golden_files_are_still_what_is_written():
    files = {}
    write_golden(files)
    assert files == {LOG: (GOLDEN / "file-store-v1-laid-out.bin").read_bytes(), "MADE": golden_mark()}
    assert trimmed(files)[LOG] == (GOLDEN / "file-store-v1.bin").read_bytes()
