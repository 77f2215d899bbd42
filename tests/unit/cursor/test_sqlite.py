"""Events that only a store on a real disk meets: foreign directories, other processes, kills, damage, no room."""

import contextlib
import errno
import gc
import itertools
import os
import random
import resource
import shutil
import signal
import sqlite3
import stat
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest

from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.sealed import seal
from ackstate.stores import sqlite_database
from ackstate.stores.base import (
    ABSENT,
    DamagedValueError,
    StoreError,
    StoreFullError,
    StoreLockedError,
    Versioned,
    call_each,
)
from ackstate.stores.sqlite import SqliteStore
from forked import status_of_child
from store_directories import append_until, assert_works, contents_of, hold, names_in, start

DATABASE = "ackstate.sqlite3"
LOG = f"{DATABASE}-wal"
UNFINISHED = "ackstate.sqlite3.new"
WHOLE = ["LOCK", "MADE", DATABASE]
OPENINGS = (SqliteStore, SqliteStore.open_copy)


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def changed(directory: Path, statement: str) -> Path:
    """Change a row behind the store's back; the pages are sound."""
    with closing(sqlite3.connect(directory / DATABASE, isolation_level=None)) as connection:
        connection.execute(statement)
    return directory


# Directories that may be opened


def test_a_store_is_made_where_it_is_named_and_its_database_is_the_whole_of_it(tmp_path, monkeypatch):
    directory = tmp_path / "a" / "b ?#%" / "c"
    assert_works(directory)
    assert names_in(directory) == WHOLE
    (tmp_path / "new").mkdir()
    shutil.copy(directory / DATABASE, tmp_path / "new")
    changed(tmp_path / "new", "VACUUM")
    monkeypatch.chdir(tmp_path)
    with closing(SqliteStore("new")) as store:
        monkeypatch.chdir("a")
        assert store.ledgers.read(1, 0, 1) == [b"entry"]
        store.ledgers.append(store.ledgers.create("billing"), [b"x"])
    assert names_in(tmp_path / "a") == ["b ?#%"]
    assert_works(tmp_path / "new")


def headed(start, size, **fields):
    header = bytearray(start.ljust(size, b"\0"))
    for offset, number in (("_68", b"acks"), *((name, value.to_bytes(4, "big")) for name, value in fields.items())):
        header[int(offset[1:]) : int(offset[1:]) + 4] = number
    return bytes(header)


MAGIC = b"SQLite format 3\0"
FOREIGN = [
    ({"notes.txt": b"mine"}, StoreError, "is not an ackstate store: it holds notes.txt"),
    ({"LOCK": b"mine", "notes.txt": b""}, StoreError, "is not an ackstate store: it holds notes.txt"),
    ({UNFINISHED: b"mine"}, StoreError, "is not an ackstate store"),
    ({LOG: b"mine"}, StoreError, "is not an ackstate store"),
    ({DATABASE: b""}, CorruptStateError, "at byte 0"),
    ({DATABASE: MAGIC}, CorruptStateError, "at byte 16"),
    ({DATABASE: MAGIC.ljust(99, b"\0")}, CorruptStateError, "at byte 99"),
    ({DATABASE: b"not a database".ljust(100)}, CorruptStateError, "at byte 0"),
    ({DATABASE: MAGIC.ljust(200, b"\0")}, CorruptStateError, "at byte 68 expected application id"),
    ({DATABASE: headed(MAGIC, 200)}, CorruptStateError, "at byte 60 expected format version 3"),
    ({DATABASE: headed(MAGIC, 200, _60=1)}, UnsupportedVersionError, "has format version 1; .* reads version 3"),
    ({DATABASE: headed(MAGIC, 200, _60=7)}, UnsupportedVersionError, "has format version 7; .* reads version 3"),
    ({"MADE": b"mine", "notes.txt": b""}, StoreError, "is not an ackstate store"),
]


@pytest.mark.parametrize(("content", "error", "words"), FOREIGN)
def test_what_is_no_store_of_ours_is_refused_and_left_alone(tmp_path, content, error, words):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error, match=f"{tmp_path}.*{words}"):
        SqliteStore(tmp_path)
    assert contents_of(tmp_path) == content
    for below in ("file", "file/below"):
        (tmp_path / "file").write_bytes(b"mine")
        with pytest.raises(StoreError, match=f"^{tmp_path / below}: cannot open the store: Not a directory$"):
            SqliteStore(tmp_path / below)


def in_schema(column, new, name):
    return f"UPDATE sqlite_master SET {column} = {new} WHERE name = '{name}'"


_AS_IF = "INSERT INTO sqlite_master (type, name, tbl_name, rootpage, sql) "
OTHER_SCHEMAS = {
    "an index is missing": "DROP INDEX ledgers_by_owner",
    "a trigger": "CREATE TRIGGER sqliteX AFTER INSERT ON metadata BEGIN UPDATE metadata SET path = '/x' || path; END",
    "a table": "CREATE TABLE sqlitetable (x)",
    "another collation": in_schema("sql", "replace(sql, 'path TEXT', 'path TEXT COLLATE NOCASE')", "metadata"),
    "another name of a column": in_schema("sql", "replace(sql, ' data BLOB', ' date BLOB')", "entries"),
    "one more column": "ALTER TABLE first_version ADD COLUMN more",
    "other blanks": in_schema("sql", "replace(sql, 'owner TEXT', 'owner  TEXT')", "ledgers"),
    "two tables in one place": in_schema(
        "rootpage", "(SELECT rootpage FROM sqlite_master WHERE name = 'identity')", "first_version"
    ),
    "a table listed twice": f"{_AS_IF} SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master LIMIT 1",
    "a row that is no object": f"{_AS_IF} VALUES ('table', 'sqlite_x', 'sqlite_x', 0, NULL)",
}


@pytest.mark.parametrize("check_pages", [True, False])
@pytest.mark.parametrize("schema", OTHER_SCHEMAS)
def test_our_ids_with_another_schema_are_corrupt(tmp_path, schema, check_pages):
    assert_works(tmp_path)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute(OTHER_SCHEMAS[schema])
    for opening in OPENINGS:
        with pytest.raises(CorruptStateError, match=r"expected our tables|malformed database schema"):
            opening(tmp_path, check_pages=check_pages)


def test_a_foreign_schema_is_not_trusted(tmp_path):
    """A function that a schema must not call is refused even while the schema is looked at."""
    with closing(SqliteStore(tmp_path)) as store, store._database.reading() as connection:
        assert connection.execute("PRAGMA trusted_schema").fetchall() == [(0,)]
        assert connection.execute("PRAGMA cell_size_check").fetchall() == [(1,)]


@pytest.mark.parametrize("name", ["LOCK", "MADE", *(f"{DATABASE}{end}" for end in ("", "-wal", "-shm", "-journal"))])
def test_a_link_in_the_place_of_a_file_is_refused_and_its_target_left_alone(tmp_path, name):
    directory, victim = tmp_path / "store", tmp_path / "victim"
    assert_works(directory)
    victim.write_bytes(b"keep me")
    for target in (victim, tmp_path / "gone", directory / name):
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to(target)
        for opening in OPENINGS:
            with pytest.raises(StoreError, match=f"{directory / name} must be a plain file, got a symbolic link"):
                opening(directory)
    assert victim.read_bytes() == b"keep me"


@pytest.mark.parametrize("name", ["MADE.new", *(f"{UNFINISHED}{end}" for end in ("", "-journal", "-wal", "-shm"))])
def test_an_unfinished_file_is_replaced_and_what_it_links_to_is_left_alone(tmp_path, name):
    directory, victim = tmp_path / "store", tmp_path / "victim"
    victim.write_bytes(b"keep me")
    SqliteStore(directory).close()
    (directory / "MADE").unlink()
    if name != "MADE.new":
        (directory / DATABASE).unlink()
    (directory / name).symlink_to(victim)
    assert_works(directory)
    assert names_in(directory) == WHOLE
    assert victim.read_bytes() == b"keep me"


def test_only_the_owner_may_read_what_a_store_creates_and_the_modes_of_what_is_there_stay(tmp_path):
    directory = tmp_path / "store"

    def modes(of=directory):
        return stat.S_IMODE(of.stat().st_mode), {stat.S_IMODE(path.stat().st_mode) for path in of.iterdir()}

    before = os.umask(0)
    try:
        with closing(SqliteStore(directory)) as store:
            store.metadata.put("/one", bytes(2_000_000), expected_version=ABSENT)
            assert names_in(directory) == [*WHOLE, LOG]
            assert modes() == (0o700, {0o600})
        with closing(SqliteStore.open_copy(directory)) as copy:
            assert modes(copy._path) == (0o700, {0o600})
    finally:
        os.umask(before)
    directory.chmod(0o750)
    for path in directory.iterdir():
        path.chmod(0o640)
    assert_works(directory)
    assert modes() == (0o750, {0o640})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path, monkeypatch, number):
    def no_room(_directory):
        raise OSError(number, "no room")

    monkeypatch.setattr(sqlite_database, "_create", no_room)
    with pytest.raises(StoreFullError):
        SqliteStore(tmp_path)


# A store that lost its database is no new store

MARK = b"ACKQ\x01\0\0\0\xfa\x30\x3f\x1a"


@pytest.mark.parametrize("others", [[], [LOG], [UNFINISHED], ["notes.txt"]])
def test_a_lost_database_is_no_new_store(tmp_path, others):
    assert_works(tmp_path)
    (tmp_path / DATABASE).unlink()
    for name in others:
        (tmp_path / name).write_bytes(b"what a crash left")
    before = contents_of(tmp_path)
    for opening in OPENINGS:
        with pytest.raises(CorruptStateError, match=f"{tmp_path / DATABASE}: .*the database of a store that was made"):
            opening(tmp_path)
    assert contents_of(tmp_path) == before


def test_a_store_without_a_mark_is_marked_and_a_damaged_or_newer_mark_is_refused_by_name(tmp_path):
    assert_works(tmp_path)
    mark = tmp_path / "MADE"
    mark.unlink()
    assert_works(tmp_path)
    assert mark.read_bytes() == MARK
    for bit in range(8 * len(MARK)):
        content = bytearray(MARK)
        content[bit // 8] ^= 1 << bit % 8
        for damaged in (content, MARK[: bit // 8], MARK + b"x"):
            mark.write_bytes(damaged)
            with pytest.raises((CorruptStateError, UnsupportedVersionError), match=str(mark)):
                sqlite_database._is_marked(tmp_path)
    for version, error in ((0, CorruptStateError), (2, UnsupportedVersionError)):
        mark.write_bytes(seal(b"ACKQ", bytes([version, 0, 0, 0])))
        with pytest.raises(error, match=str(mark)):
            SqliteStore(tmp_path)


# One process at a time


def test_a_second_opener_in_this_process_is_refused_by_any_path(tmp_path):
    directory = tmp_path / "store"
    (tmp_path / "link").symlink_to(directory)
    with closing(SqliteStore(directory)) as store:
        ledger_id = store.ledgers.create("billing")
        for path in (directory, tmp_path / "link"):
            with pytest.raises(StoreLockedError, match=f"{path} is open in process {os.getpid()}"):
                SqliteStore(path)
        # The refused one must not have released the claim of the first one.
        store.ledgers.append(ledger_id, [b"x"])
        (directory / "LOCK").unlink()
        with pytest.raises(StoreLockedError, match="is open in process unknown"):
            SqliteStore(directory)
        assert not (directory / "LOCK").exists()
        assert store.ledgers.append(ledger_id, [b"x"]) == 1
    assert_works(tmp_path / "link")


def test_a_store_that_is_dropped_unlocks_and_leaves_no_descriptor(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    SqliteStore(tmp_path)
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert_works(tmp_path)


@pytest.mark.slow
def test_another_process_holds_the_lock_until_it_is_killed(tmp_path):
    with hold(tmp_path) as holder:
        with pytest.raises(StoreLockedError, match=f"{tmp_path} is open in process {holder.pid}"):
            SqliteStore(tmp_path)
        holder.kill()
    assert_works(tmp_path)


def test_a_foreign_reader_of_the_database_counts_as_a_lock(tmp_path):
    assert_works(tmp_path)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM ledgers").fetchall()
        with pytest.raises(StoreLockedError, match="another program"):
            SqliteStore(tmp_path)
    assert_works(tmp_path)


# The cost of a call


@contextlib.contextmanager
def statements_of(store):
    """Collect the first word of each statement that is executed; the pragma asks for the size of the database."""
    found = []
    store._database._connection.set_trace_callback(lambda statement: found.append(statement.split()[0]))
    yield found
    store._database._connection.set_trace_callback(None)


@pytest.mark.parametrize("count", [1, 100])
def test_an_append_is_one_row_and_many_are_one_transaction(tmp_path, count):
    with closing(SqliteStore(tmp_path)) as store:
        ledger_id, *others = [store.ledgers.create("billing") for _ in range(4)]
        entries = [b"entry %d" % number for number in range(count)]
        for number in range(2):
            with statements_of(store) as found:
                assert store.ledgers.append(ledger_id, entries) == (number + 1) * count - 1
            assert found == ["BEGIN", "UPDATE", "INSERT", "PRAGMA", "COMMIT"]
        with statements_of(store) as found:
            assert store.ledgers.read(ledger_id, 0, 2 * count) == entries * 2
        assert found == ["SELECT", "SELECT"]
        with statements_of(store) as found:
            assert store.ledgers.append_many([(each, [b"a", b"b"]) for each in others]) == [1] * 3
        assert (found.count("BEGIN"), found.count("COMMIT"), found.count("INSERT")) == (1, 1, 3)


def test_any_part_of_rows_of_many_entries_is_read(tmp_path):
    with closing(SqliteStore(tmp_path)) as store:
        ledger_id = store.ledgers.create("billing")
        entries = [b"%d" % number * (number % 5) for number in range(20)]
        for first, end in ((0, 7), (7, 8), (8, 20)):
            store.ledgers.append(ledger_id, entries[first:end])
        for first, end in itertools.combinations_with_replacement(range(21), 2):
            assert store.ledgers.read(ledger_id, first, end) == entries[first:end]


# Kills


APPENDER = """
import sys
from ackstate.stores.sqlite import SqliteStore
store = SqliteStore(sys.argv[1])
ledger_id = store.ledgers.create("billing")
print(ledger_id, flush=True)
while True:
    print(store.ledgers.append(ledger_id, b"%d" % (store.ledgers.last(ledger_id) + 1)), flush=True)
"""


@pytest.mark.slow
def test_appends_that_returned_survive_a_kill(tmp_path):
    with start(APPENDER, tmp_path) as appender:
        ids = [int(line) for line in itertools.islice(appender.stdout, 500)]
        appender.kill()
        # A line that the kill cut short was not printed.
        ids += [int(line) for line in appender.stdout if line.endswith("\n")]
    assert ids == list(range(len(ids)))
    with closing(SqliteStore(tmp_path)) as store:
        (ledger_id,) = store.ledgers.owned_by("billing")
        count = store.ledgers.last(ledger_id) + 1
        # The kill may have hit between an append and its print.
        assert count in {len(ids), len(ids) + 1}
        assert store.ledgers.read(ledger_id, 0, count) == [b"%d" % entry_id for entry_id in range(count)]


def opened_in_child(directory: Path, before_line) -> int:
    """Open a store in a child that calls a function before each line of the store's code; return its wait status."""
    lines = itertools.count()

    def trace(frame, event, _):
        if not Path(frame.f_code.co_filename).name.startswith("sqlite"):
            return None
        if event == "line":
            before_line(next(lines))
        return trace

    return status_of_child(lambda: (sys.settrace(trace), SqliteStore(directory)))


def lines_after_changes(directory: Path) -> list[int]:
    """Return the lines of the store's code before which the files of a new store have changed, and the first one."""
    reading, writing = os.pipe()
    seen = None

    def compare(number):
        nonlocal seen
        found = contents_of(directory) if directory.exists() else {}
        if found != seen:
            seen = found
            os.write(writing, b"%d\n" % number)

    assert opened_in_child(directory, compare) == 0
    os.close(writing)
    with os.fdopen(reading) as lines:
        return [int(line) for line in lines]


@pytest.mark.slow
def test_a_creator_killed_at_any_line_leaves_a_store_or_nothing(tmp_path):
    left: set[tuple[str, ...]] = set()
    numbers = lines_after_changes(tmp_path / "whole" / "0")  # as deep as the others
    # Between two changes, every kill leaves the same files.
    for number in numbers:
        directory = tmp_path / "parent" / str(number)
        kill = lambda line, number=number: line == number and os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
        assert opened_in_child(directory, kill) == signal.SIGKILL
        left.add(tuple(names_in(directory)) if directory.exists() else ())
        assert_works(directory)
        assert names_in(directory) == WHOLE
    # The kills did hit before, amid and after the making of the database.
    assert {(), ("LOCK",), ("LOCK", UNFINISHED), ("LOCK", DATABASE), ("LOCK", "MADE.new", DATABASE)} <= left


@pytest.mark.parametrize("is_settled", [True, False])
def test_opening_takes_what_the_disk_has_of_the_log_and_not_what_the_cache_has(tmp_path, monkeypatch, is_settled):
    """The log is 40 bytes shorter on the disk than in the cache, after a failed sync; unsettled, that is missed."""

    def live():
        store = SqliteStore(tmp_path)
        ledger_id = store.ledgers.create("orders")
        for entry in (b"kept", b"lost by a failed sync"):
            store.ledgers.append(ledger_id, [entry])
        os._exit(0)

    def advised(descriptor, offset, size, advice):
        if advice == os.POSIX_FADV_DONTNEED:
            assert Path(f"/proc/self/fd/{descriptor}").readlink().name == LOG
            assert (offset, size) == (0, 0)
            os.truncate(tmp_path / LOG, (tmp_path / LOG).stat().st_size - 40)

    assert status_of_child(live) == 0
    monkeypatch.setattr(os, "posix_fadvise", advised)
    if not is_settled:
        monkeypatch.setattr(sqlite_database, "_settle", lambda _log: None)
    with closing(SqliteStore(tmp_path)) as store:
        assert (tmp_path / LOG).stat().st_size == 0
        assert store.ledgers.last(1) == (0 if is_settled else 1)


# Damage


@pytest.fixture
def damaged(tmp_path):
    """Put a fresh copy of a store's files in place and return where they are."""
    with closing(SqliteStore(tmp_path / "sound")) as store:
        # Some dozens of pages, overflow pages among them.
        for number in range(4):
            ledger_id = store.ledgers.create(f"owner-{number % 2}")
            for size in range(0, 400, 20):
                store.ledgers.append(ledger_id, [b"%d-%d" % (number, size) * size])
            store.ledgers.append(ledger_id, [bytes(20_000)])
            store.metadata.put(f"/values/{number}", b"value" * 300, expected_version=ABSENT)
        store.ledgers.delete(3)
        store.ledgers.fence(2)
        # Copied while open: some of the content is in the log only.
        shutil.copytree(tmp_path / "sound", tmp_path / "open")
    shutil.copytree(tmp_path / "sound", tmp_path / "closed")

    def copy(state: str = "closed") -> Path:
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        return Path(shutil.copytree(tmp_path / state, tmp_path / "damaged"))

    return copy


def survives(directory: Path) -> bool:
    """Read all of a damaged store, and write; whatever is raised must be ours. Say whether it opened."""
    try:
        store = SqliteStore(directory)
    except AckStateError:
        return False
    calls = [lambda name=name: store.metadata.get(f"/values/{name}") for name in range(4)]
    calls += [lambda: store.metadata.children("/"), lambda: store.metadata.children("/values")]
    for ledger_id in range(1, 5):
        calls.append(lambda ledger_id=ledger_id: store.ledgers.read(ledger_id, 0, 21))
        calls.append(lambda ledger_id=ledger_id: store.ledgers.append(ledger_id, [b"more"]))
    calls += [
        lambda: store.ledgers.owned_by("owner-0"),
        lambda: store.ledgers.create("owner-0"),
        lambda: store.metadata.delete("/values/1", expected_version=0),
        lambda: store.metadata.put("/values/0", b"changed", expected_version=0),
        lambda: store.ledgers.delete(1),
    ]
    for call in calls:
        with suppress(AckStateError):
            call()
    store.close()
    return True


@pytest.mark.slow
@pytest.mark.parametrize("flips", [150, pytest.param(2_000, marks=pytest.mark.soak)])
def test_flipped_bits_raise_nothing_but_our_errors(damaged, flips):
    chance = random.Random(0)
    opened = 0
    for _ in range(flips):
        database = damaged() / DATABASE
        content = database.read_bytes()
        # Half of them in the first pages, where the schema and the roots of the tables are.
        offset = chance.randrange(chance.choice([8 * 4096, len(content)]))
        overwrite(database, offset, bytes([content[offset] ^ 1 << chance.randrange(8)]))
        opened += survives(database.parent)
    assert 0 < opened < flips


@pytest.mark.slow
def test_a_truncated_database_is_refused_when_it_is_opened(damaged):
    size = (damaged() / DATABASE).stat().st_size
    for length in (*range(0, size, 4096), *range(50, size, 4999), size - 1):
        database = damaged() / DATABASE
        os.truncate(database, length)
        with pytest.raises(CorruptStateError, match=DATABASE):
            SqliteStore(database.parent)


def pages_of(directory: Path) -> dict[str, list[int]]:
    """Which pages belong to which table or index, the first at 1."""
    with closing(sqlite3.connect(directory / DATABASE)) as connection:
        roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
    content = (directory / DATABASE).read_bytes()
    return {name: list(subtree(content, root)) for name, root in roots.items()}


def subtree(content: bytes, page: int):
    """The pages of a b-tree, as https://www.sqlite.org/fileformat2.html section 1.6 draws them."""
    yield page
    begin = (page - 1) * 4096
    if content[begin] in {2, 5}:
        cell_count = int.from_bytes(content[begin + 3 : begin + 5], "big")
        for number in range(cell_count):
            at = begin + 12 + 2 * number
            cell = begin + int.from_bytes(content[at : at + 2], "big")
            yield from subtree(content, int.from_bytes(content[cell : cell + 4], "big"))
        yield from subtree(content, int.from_bytes(content[begin + 8 : begin + 12], "big"))


@pytest.mark.slow
@pytest.mark.parametrize("wiped", [bytes(4096), bytes(range(256)) * 16, b"\xff" * 4096])
def test_a_wiped_page_is_found_when_the_store_is_opened_unless_it_holds_but_one_entry(damaged, wiped):
    directory = damaged()
    trees = {1, *itertools.chain(*pages_of(directory).values())}
    for page in range(1, (directory / DATABASE).stat().st_size // 4096 + 1):
        overwrite(damaged() / DATABASE, (page - 1) * 4096, wiped)
        before = (directory / DATABASE).read_bytes()
        if page in trees:
            with pytest.raises(CorruptStateError):
                SqliteStore(directory)
            assert (directory / DATABASE).read_bytes() == before
        else:
            survives(directory)


def test_without_the_check_of_pages_damage_is_found_when_it_is_read(damaged):
    page = pages_of(damaged())["entries"][-1]
    directory = damaged()
    overwrite(directory / DATABASE, (page - 1) * 4096 + 1, b"\xff" * 16)
    with pytest.raises(CorruptStateError, match=r"sound pages"):
        SqliteStore(directory)
    with closing(SqliteStore(directory, check_pages=False)) as store:
        assert len(store.ledgers.read(1, 0, 5)) == 5
        with pytest.raises(CorruptStateError):
            store.ledgers.read(4, 0, 21)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (sqlite3.SQLITE_IOERR_CORRUPTFS, StoreError),  # EIO
        (sqlite3.SQLITE_IOERR_READ, StoreError),
        (sqlite3.SQLITE_CORRUPT, CorruptStateError),
    ],
)
def test_a_page_that_cannot_be_read_is_no_damage(code, error):
    with closing(sqlite3.connect(":memory:")) as connection:
        found = f"Tree 3 page 3: unable to get the page. error code={code}"
        connection.execute(f"CREATE TABLE found AS SELECT '{found}'")

        class Says:
            def execute(self, _check):
                return connection.execute("SELECT * FROM found")

        with pytest.raises(error, match="error code"):
            sqlite_database._check_pages(Path("x"), Says())


# Damaged rows

FIFTH = "WHERE ledger_id = 1 AND last_id = 4"
SALT = "UPDATE identity SET salt = x'0011223344556677'"


@pytest.mark.parametrize(
    ("statement", "sound", "found"),
    [
        (f"UPDATE entries SET data = CAST(x'00' || substr(data, 2) AS BLOB) {FIFTH}", 4, "entry 4 of ledger 1, which"),
        (f"UPDATE entries SET data = x'' {FIFTH}", 4, "entry 4 of ledger 1, which is not as it was written"),
        (
            "UPDATE entries SET data = (SELECT data FROM entries WHERE ledger_id = 2 AND last_id = 4)" + FIFTH,
            4, "entry 4 of ledger 1, which is not as it was written",
        ),
        (SALT, 0, "entry 0 of ledger 1, which is not as it was written"),
        (f"DELETE FROM entries {FIFTH}", 4, "entries missing in ledger 1"),
    ],
)  # fmt: skip
def test_a_row_that_is_not_as_it_was_written_is_found_when_it_is_read(damaged, statement, sound, found):
    with closing(SqliteStore(changed(damaged(), statement))) as store:
        assert len(store.ledgers.read(1, 0, sound)) == sound
        with pytest.raises(CorruptStateError, match=found):
            store.ledgers.read(1, 0, 21)
        assert statement == SALT or len(store.ledgers.read(4, 0, 21)) == 21


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        ("DELETE FROM entries WHERE last_id = 4", "5 entries, the last one 3"),
        ("UPDATE entries SET last_id = 7 WHERE last_id = 4", "5 entries, the last one 7"),
        ("UPDATE entries SET last_id = 'x' WHERE last_id = 4", "5 entries, the last one 'x'"),
        ("UPDATE entries SET last_id = x'34' WHERE last_id = 4", "5 entries, the last one b'4'"),
        ("UPDATE ledgers SET entry_count = 6", "6 entries, the last one 4"),
        ("UPDATE ledgers SET entry_count = x'35'", "b'5' entries, the last one 4"),
        ("UPDATE ledgers SET fenced = 2", "5 entries, the last one 4"),
    ],
)
def test_a_ledger_whose_entries_are_not_those_that_it_counts_is_damage(tmp_path, damage, found):
    """Also for the opening that has appended them, and appends without a look."""
    with closing(SqliteStore(tmp_path)) as store:
        ledger_id = store.ledgers.create("billing")
        assert [store.ledgers.append(ledger_id, [b"entry"]) for _ in range(5)] == list(range(5))
        store._database._connection.execute(damage)
        for call in (
            lambda store: store.ledgers.append(ledger_id, [b"a"]),
            lambda store: store.ledgers.append(ledger_id, [b"a", b"b"]),
            lambda store: store.ledgers.last(ledger_id),
            lambda store: store.ledgers.fence(ledger_id),
        ):
            with pytest.raises(CorruptStateError, match=f"ledger {ledger_id} with {found}"):
                call(store)


def test_a_damaged_value_may_be_replaced_or_deleted_at_the_version_that_it_has(damaged):
    statement = "UPDATE metadata SET data = CAST(x'00' || substr(data, 2) AS BLOB) WHERE path < '/values/2'"
    with closing(SqliteStore(changed(damaged(), statement))) as store:
        with pytest.raises(DamagedValueError, match="the value of /values/0, which is not") as caught:
            store.metadata.get("/values/0")
        assert store.metadata.put("/values/0", b"anew", expected_version=caught.value.version) == 1
        assert store.metadata.get("/values/0") == Versioned(b"anew", 1)
        store.metadata.delete("/values/1", expected_version=0)
        assert store.metadata.get("/values/1") is None


# A damaged key of an index


def replaced(directory: Path, old: bytes, new: bytes, tree: str = "") -> Path:
    """Change bytes of a closed store's database, which holds them once, or of the first page of a tree."""
    data, begin = (directory / DATABASE).read_bytes(), 0
    if tree:
        begin = (pages_of(directory)[tree][0] - 1) * 4096
        assert old in data[begin : begin + 4096]
    else:
        assert data.count(old) == 1
    overwrite(directory / DATABASE, data.index(old, begin), new)
    return directory


def test_an_index_that_disagrees_with_its_table_is_refused(damaged):
    """A changed bit in an index entry: SQLite's quick check passes, and the value looks absent."""
    directory = replaced(damaged(), b"/values/2", b"/valuer/2", "sqlite_autoindex_metadata_1")
    with pytest.raises(CorruptStateError, match=r"sound pages.*metadata"):
        SqliteStore(directory)
    with closing(SqliteStore(directory, check_pages=False)) as store:
        assert store.metadata.get("/values/2") is None


def test_a_ledger_that_a_damaged_index_gives_to_another_owner_is_damage(damaged):
    """Its owner would delete it."""
    directory = replaced(damaged(), b"owner-1\x02", b"owner-0", "ledgers_by_owner")
    with closing(SqliteStore(directory, check_pages=False)) as store:
        with pytest.raises(CorruptStateError, match="ledger 2 of 'owner-1' where one of owner-0 belongs"):
            store.ledgers.owned_by("owner-0")
        assert store.ledgers.owned_by("owner-1") == [4]


def test_a_complaint_that_quotes_damaged_bytes_is_damage(tmp_path):
    """SQLite says which table it cannot make sense of, and Python cannot read the name."""
    SqliteStore(tmp_path).close()
    replaced(tmp_path, b"tableidentityidentity", b"tableiden\xf4ityidentity")
    with pytest.raises(CorruptStateError, match="sound pages"):
        SqliteStore(tmp_path)


def two_ledgers(directory: Path, count: int, *, before: int = 0) -> tuple[int, int]:
    with closing(SqliteStore(directory)) as store:
        one, other = [store.ledgers.create("owner") for _ in range(before + 2)][-2:]
        for number in range(count):
            for ledger_id in (one, other):
                store.ledgers.append(ledger_id, [b"entry %d" % number])
    return one, other


def test_a_ledger_is_deleted_without_a_row_of_another_that_a_damaged_index_names(tmp_path):
    one, other = two_ledgers(tmp_path, 4, before=4)
    # An entry of the index: four bytes of header, ledger id, entry id, row id.
    replaced(tmp_path, bytes([4, 1, 1, 1, one, 2, 5]), bytes([4, 1, 1, 1, one, 2, 6]))
    with closing(SqliteStore(tmp_path, check_pages=False)) as store:
        store.ledgers.delete(one)
        assert store.ledgers.read(other, 0, 4) == [b"entry %d" % number for number in range(4)]


def test_a_damaged_index_is_refused_before_anything_is_written_beside_it(tmp_path):
    """An entry appended there was synced, and could not be read once the ledger of the damaged key was deleted."""
    _, other = two_ledgers(tmp_path, 2)
    replaced(tmp_path, bytes([4, 1, 9, 1, other, 4]), bytes([4 ^ 8, 1, 9, 1, other, 4]))
    shutil.copytree(tmp_path, tmp_path / "as it was")
    with closing(SqliteStore(tmp_path, check_pages=False)) as store:
        following = store.ledgers.create("owner")
        store.ledgers.append(following, [b"entry"])
        store.ledgers.delete(other)
        with pytest.raises(CorruptStateError, match="malformed"):
            store.ledgers.read(following, 0, 1)
    with pytest.raises(CorruptStateError, match=r"sound pages.*sqlite_autoindex_entries_1"):
        SqliteStore(tmp_path / "as it was")


# No room


@contextlib.contextmanager
def file_size_limit(size: int):
    """Let the kernel refuse to make a file larger; SQLite sees it as an I/O error."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_a_store_whose_write_failed_refuses_all_until_it_is_reopened(tmp_path):
    store = SqliteStore(tmp_path)
    ledger_id = store.ledgers.create("billing")
    with file_size_limit(1 << 19):
        entries = append_until(store, ledger_id, StoreError)
    assert len(entries) > 10
    for call in (
        lambda: store.ledgers.append(ledger_id, [b"x"]),
        lambda: store.ledgers.last(ledger_id),
        lambda: store.metadata.get("/a"),
        lambda: store.metadata.put("/a", b"", expected_version=ABSENT),
    ):
        with pytest.raises(StoreError, match=f"{tmp_path}: a write failed .*; close the store and open it again"):
            call()
    store.close()
    with closing(SqliteStore(tmp_path)) as store:
        assert store.ledgers.read(ledger_id, 0, store.ledgers.last(ledger_id) + 1) == entries
        store.ledgers.append(store.ledgers.create("billing"), [b"goes on"])


# Calls at once


def test_two_calls_are_made_at_once_so_that_their_writes_share_a_sync():
    meeting = threading.Barrier(2)
    assert sorted(call_each(lambda _: meeting.wait(timeout=20), "ab")) == [0, 1]
