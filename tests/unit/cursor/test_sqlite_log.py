"""Write-ahead logs that must be refused for damage, and those that a crash may leave."""

import random
import shutil
import struct
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ackstate.errors import CorruptStateError
from ackstate.stores import sqlite_log
from ackstate.stores.base import ABSENT
from ackstate.stores.sqlite import SqliteStore
from ackstate.stores.sqlite_log import check_log
from tests.unit.cursor.test_sqlite import DATABASE, LOG

HEADER, FRAME = 32, 4120
ENTRIES = [b"%d" % number * 30 for number in range(6)]


@pytest.fixture
def killed(tmp_path):
    """A store as a kill leaves it: all but its tables is in the log."""
    with closing(SqliteStore(tmp_path / "open")) as store:
        ledger_id = store.ledgers.create("billing")
        for entry in ENTRIES:
            store.ledgers.append(ledger_id, [entry])
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    return tmp_path / "killed"


def entries_in(directory: Path) -> list[bytes]:
    with closing(SqliteStore(directory)) as store:
        return store.ledgers.read(1, 0, store.ledgers.last(1) + 1)


def commits(content: bytes) -> list[int]:
    """The indexes of the frames that end a transaction."""
    begins = range(HEADER, len(content) - FRAME + 1, FRAME)
    return [number for number, at in enumerate(begins) if content[at + 4 : at + 8] > bytes(4)]


def flipped(content: bytes, offset: int, bit: int = 0) -> bytes:
    return content[:offset] + bytes([content[offset] ^ 1 << bit]) + content[offset + 1 :]


def is_refused(directory: Path, content: bytes) -> bool:
    (directory / LOG).write_bytes(content)
    try:
        check_log(directory / LOG, directory / DATABASE)
    except CorruptStateError:
        return True
    return False


@pytest.mark.slow
def test_a_flipped_bit_before_the_last_transaction_is_refused_with_its_frame(killed):
    content = (killed / LOG).read_bytes()
    last = HEADER + FRAME * (commits(content)[-2] + 1)
    chance = random.Random(2)
    # Every bit of the header, and of the frame that ends the last transaction but one; some of the others.
    offsets = [*range(HEADER), *range(last - FRAME, last - FRAME + 24), *chance.sample(range(last), 150)]
    for offset in offsets:
        for bit in range(8) if offset < HEADER or last - FRAME <= offset < last - FRAME + 24 else [offset % 8]:
            assert is_refused(killed, flipped(content, offset, bit)), (offset, bit)
    (killed / LOG).write_bytes(flipped(content, HEADER + FRAME + 100))
    with pytest.raises(CorruptStateError, match=rf"{LOG}: at byte {HEADER + FRAME} expected a sound frame"):
        SqliteStore(killed)


def test_a_damaged_page_in_the_frame_that_ends_the_last_transaction_but_one_is_refused(killed):
    content = (killed / LOG).read_bytes()
    assert HEADER + FRAME * commits(content)[-2] % 512 <= 496
    page = HEADER + FRAME * commits(content)[-2] + 24
    for begin, damage in ((200, b"\x07\x70"), (488, b"\xee" * 512), (0, bytes(4096))):
        assert is_refused(killed, content[: page + begin] + damage + content[page + begin + len(damage) :]), begin


def test_a_frame_that_the_next_one_confirms_is_refused_without_its_checksum(tmp_path):
    """Nothing else tells that a transaction ended there: its header lies in two sectors."""
    with closing(SqliteStore(tmp_path / "open")) as store:
        ledger_id, version = store.ledgers.create("billing"), ABSENT
        while (tmp_path / "open" / LOG).stat().st_size < HEADER + FRAME * 42:
            version = store.metadata.put("/value", b"", expected_version=version)
        store.ledgers.append(ledger_id, [b"entry"])
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    content, begin = (tmp_path / "killed" / LOG).read_bytes(), HEADER + FRAME * 41
    assert (begin % 512, commits(content)[-2]) == (504, 41)
    assert is_refused(tmp_path / "killed", content[: begin + 16] + bytes(8) + content[begin + 24 :])


def test_a_size_in_another_sector_than_its_salts_is_not_believed(killed):
    """A crash may leave one of two sectors as it was before, and the other new."""
    content = bytes(HEADER + FRAME * 513)
    frames = sqlite_log._Frames(content, "<", 4096, np.zeros(2, np.uint32))
    assert frames.has_header_in_one_sector.tolist() == [
        (HEADER + FRAME * number) // 512 == (HEADER + FRAME * number + 15) // 512 for number in range(513)
    ]
    assert not frames.has_header_in_one_sector.all()


def test_a_lost_frame_is_refused_where_short_transactions_follow_it(tmp_path):
    """The one right behind it does not check out for its sake: three were dropped without a word."""
    with closing(SqliteStore(tmp_path / "open")) as store:
        ledger_id = store.ledgers.create("billing")
        versions = [store.metadata.put("/value", b"0", expected_version=-1)]
        for number in range(1, 4):
            versions.append(store.metadata.put("/value", b"%d" % number, expected_version=versions[-1]))
        store.ledgers.append(ledger_id, [b"entry"])
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    content = (tmp_path / "killed" / LOG).read_bytes()
    *_, lost, following, _ = ends = commits(content)
    assert following == lost + 1
    begin = HEADER + FRAME * lost
    for gone in (bytes(FRAME), random.Random(3).randbytes(FRAME), content[HEADER : HEADER + FRAME]):
        assert is_refused(tmp_path / "killed", content[:begin] + gone + content[begin + FRAME :])
    # Nothing is known about the last two.
    begin = HEADER + FRAME * following
    assert not is_refused(tmp_path / "killed", content[:begin] + bytes(FRAME) + content[begin + FRAME :])
    assert ends[-1] > following + 1


def test_what_writes_that_found_no_room_left_behind_the_last_transaction_is_no_damage(killed):
    """Each left the header of a frame that ends a transaction, and no page; a shorter one came after them."""
    content = (killed / LOG).read_bytes()
    salts, chance = content[16:24], random.Random(4)
    left = [struct.pack(">II", 2, size) + salts + chance.randbytes(8) + bytes(4096) for size in (0, 9, 0, 0, 9)]
    assert not is_refused(killed, content + b"".join(left))
    assert not any(is_refused(killed, content[:size]) for size in range(HEADER + 4))
    (killed / LOG).write_bytes(content + b"".join(left))
    assert entries_in(killed) == ENTRIES


@pytest.mark.slow
def test_a_last_transaction_may_be_torn_anywhere(killed):
    content = (killed / LOG).read_bytes()
    begin = HEADER + FRAME * (commits(content)[-2] + 1)
    for lost in range(begin // 512 * 512, len(content), 512):
        # A sector that never reached the disk, and all of the others that did.
        start, end = max(begin, lost), min(len(content), lost + 512)
        assert not is_refused(killed, content[:start] + bytes(end - start) + content[end:])
    for size in (*range(0, len(content), 1_000), *range(HEADER, len(content), FRAME)):
        assert not is_refused(killed, content[:size])
    (killed / LOG).write_bytes(content[:begin] + bytes(700) + content[begin + 700 :])
    assert entries_in(killed) == ENTRIES[:-1]


def test_frames_of_older_logs_behind_the_newest_are_no_damage(tmp_path):
    """After a checkpoint the log restarts at its beginning, with other salts, and does not cut the frames behind."""
    with closing(SqliteStore(tmp_path / "open")) as store:
        ledger_id = store.ledgers.create("billing")
        for _ in range(30):
            store.ledgers.append(ledger_id, [bytes(3_000)])
        store._database._connection.execute("PRAGMA wal_checkpoint(RESTART)").fetchall()
        for entry in ENTRIES[:3]:
            store.ledgers.append(ledger_id, [entry])
        shutil.copytree(tmp_path / "open", tmp_path / "killed")
    content = (tmp_path / "killed" / LOG).read_bytes()
    salts = {content[at + 8 : at + 16] for at in range(HEADER, len(content), FRAME)}
    assert len(salts) == 2
    assert not is_refused(tmp_path / "killed", content)
    assert is_refused(tmp_path / "killed", flipped(content, HEADER + 200))
    (tmp_path / "killed" / LOG).write_bytes(content)
    assert len(entries_in(tmp_path / "killed")) == 33


def test_a_torn_header_hides_nothing_that_the_database_has(tmp_path):
    with closing(SqliteStore(tmp_path / "open")) as store:
        store.ledgers.append(store.ledgers.create("billing"), [b"entry"])
        for name in ("before", "after"):
            directory = Path(shutil.copytree(tmp_path / "open", tmp_path / name))
            content = (directory / LOG).read_bytes()
            assert is_refused(directory, content[:12] + b"\xff" * 4 + content[16:]) == (name == "before")
            store._database._connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    assert entries_in(tmp_path / "after") == [b"entry"]


def test_checksums_of_big_endian_words_are_read(killed):
    """As a machine of that kind writes them: the same frames with other checksums."""
    content = bytearray((killed / LOG).read_bytes())
    struct.pack_into(">I", content, 0, 0x377F0683)
    struct.pack_into(">2I", content, 24, *(checksum := summed((0, 0), content[:24])))
    for at in range(HEADER, len(content), FRAME):
        checksum = summed(checksum, content[at : at + 8] + content[at + 24 : at + FRAME])
        struct.pack_into(">2I", content, at + 16, *checksum)
    assert not is_refused(killed, bytes(content))
    assert is_refused(killed, flipped(bytes(content), HEADER + FRAME + 100))
    (killed / LOG).write_bytes(content)
    assert entries_in(killed) == ENTRIES


def summed(checksum, data):
    first, second = checksum
    for even, odd in struct.iter_unpack(">II", data):
        first = (first + even + second) % 2**32
        second = (second + odd + first) % 2**32
    return first, second
