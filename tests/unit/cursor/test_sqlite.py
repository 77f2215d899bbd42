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
from contextlib import closing
from pathlib import Path

import pytest

from ackstate.errors import AckStateError, CorruptStateError, UnsupportedVersionError
from ackstate.stores import sqlite_database
from ackstate.stores.base import ABSENT, DamagedValueError, StoreError, StoreFullError, StoreLockedError, Versioned
from ackstate.stores.sqlite import SqliteStore
from store_directories import append_until, assert_works, contents_of, hold, names_in, start

DATABASE = "ackstate.sqlite3"
UNFINISHED = "ackstate.sqlite3.new"


# Directories that may be opened


def test_a_missing_directory_is_made_with_its_parents(tmp_path):
    assert_works(tmp_path / "a" / "b ?#%" / "c")


def test_a_relative_path_survives_a_change_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with closing(SqliteStore("store")) as store:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir("elsewhere")
        store.ledgers.append(store.ledgers.create("billing"), [b"x"])
    assert_works(tmp_path / "store")
    assert names_in(tmp_path / "elsewhere") == []


def test_a_closed_store_is_a_lock_a_mark_and_a_database(tmp_path):
    assert_works(tmp_path)
    assert names_in(tmp_path) == ["LOCK", "MADE", DATABASE]


def test_the_database_alone_is_the_whole_of_a_closed_store(tmp_path):
    assert_works(tmp_path / "old")
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "old" / DATABASE, tmp_path / "new")
    assert_works(tmp_path / "new")


@pytest.mark.parametrize("names", [["notes.txt"], ["LOCK", "notes.txt"], [UNFINISHED], [f"{DATABASE}-wal"]])
def test_a_directory_with_other_content_is_refused_and_left_alone(tmp_path, names):
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    before = contents_of(tmp_path)
    with pytest.raises(StoreError, match=f"{tmp_path} is not an ackstate store"):
        SqliteStore(tmp_path)
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize("below", ["file", "file/below"])
def test_a_file_is_refused(tmp_path, below):
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(StoreError, match=f"{tmp_path / below}: cannot open the store: Not a directory") as caught:
        SqliteStore(tmp_path / below)
    assert "\n" not in str(caught.value)
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_directory_that_may_not_be_written_is_refused(tmp_path):
    directory = tmp_path / "shut"
    directory.mkdir(mode=0)
    user = os.geteuid()
    if user == 0:
        # Root may write anywhere, so another user has to try.
        os.seteuid(65534)
    try:
        with pytest.raises(StoreError, match=f"{directory}: cannot open the store: Permission denied"):
            SqliteStore(directory)
    finally:
        os.seteuid(user)
        directory.chmod(0o700)
    assert names_in(directory) == []


@pytest.mark.parametrize(
    ("content", "offset"),
    [
        (b"", 0),
        (b"SQLite format 3\0", 16),
        (b"SQLite format 3\0".ljust(99, b"\0"), 99),
        (b"not a database".ljust(100), 0),
        (b"SQLite format 3\0".ljust(200, b"\0"), 68),
    ],
)
def test_a_file_with_no_header_of_ours_is_corrupt_and_left_alone(tmp_path, content, offset):
    (tmp_path / DATABASE).write_bytes(content)
    with pytest.raises(CorruptStateError, match=str(tmp_path / DATABASE)) as caught:
        SqliteStore(tmp_path)
    assert caught.value.offset == offset
    assert contents_of(tmp_path) == {DATABASE: content}


def test_a_database_of_another_application_is_left_alone(tmp_path):
    with closing(sqlite3.connect(tmp_path / DATABASE)) as foreign:
        foreign.execute("CREATE TABLE theirs (x)")
    before = contents_of(tmp_path)
    with pytest.raises(CorruptStateError, match="application id"):
        SqliteStore(tmp_path)
    assert contents_of(tmp_path) == before


@pytest.mark.parametrize("version", [1, 7])
def test_another_version_is_refused_with_both_versions_and_left_alone(tmp_path, version):
    assert_works(tmp_path)
    overwrite(tmp_path / DATABASE, 60, version.to_bytes(4, "big"))
    (tmp_path / "LOCK").unlink()
    before = contents_of(tmp_path)
    with pytest.raises(
        UnsupportedVersionError, match=f"{tmp_path / DATABASE} has format version {version}; .* reads version 3"
    ):
        SqliteStore(tmp_path)
    assert contents_of(tmp_path) == before


_TRIGGER = "CREATE TRIGGER {} AFTER INSERT ON metadata BEGIN UPDATE metadata SET path = '/stolen' || path; END"
_AS_IF = "INSERT INTO sqlite_master (type, name, tbl_name, rootpage, sql) "


def forge(database, *statements):
    """Change the schema as only damage or an attacker does."""
    with closing(sqlite3.connect(database, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        for statement in statements:
            connection.execute(statement)


def in_schema(column, new, name):
    return f"UPDATE sqlite_master SET {column} = {new} WHERE name = '{name}'"


OTHER_SCHEMAS = {
    "an index is missing": ["DROP INDEX ledgers_by_owner"],
    "a trigger": [_TRIGGER.format("sqliteX")],
    "a table": ["CREATE TABLE sqlitetable (x)"],
    "another collation": [in_schema("sql", "replace(sql, 'path TEXT', 'path TEXT COLLATE NOCASE')", "metadata")],
    "another name of a column": [in_schema("sql", "replace(sql, ' data BLOB', ' date BLOB')", "entries")],
    "another affinity": [in_schema("sql", "replace(sql, 'owner TEXT', 'owner TEXU')", "ledgers")],
    "one more column": ["ALTER TABLE first_version ADD COLUMN more"],
    "other blanks": [in_schema("sql", "replace(sql, 'owner TEXT', 'owner  TEXT')", "ledgers")],
    "two tables in one place": [
        in_schema("rootpage", "(SELECT rootpage FROM sqlite_master WHERE name = 'identity')", "first_version")
    ],
    "a table listed twice": [f"{_AS_IF} SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master LIMIT 1"],
    "a row that is no object": [f"{_AS_IF} VALUES ('table', 'sqlite_x', 'sqlite_x', 0, NULL)"],
}


@pytest.mark.parametrize("check_pages", [True, False])
@pytest.mark.parametrize("schema", OTHER_SCHEMAS)
def test_our_ids_with_another_schema_are_corrupt(tmp_path, schema, check_pages):
    assert_works(tmp_path)
    forge(tmp_path / DATABASE, *OTHER_SCHEMAS[schema])
    for opening in (SqliteStore, SqliteStore.open_copy):
        with pytest.raises(CorruptStateError, match=r"expected our tables|malformed database schema"):
            opening(tmp_path, check_pages=check_pages)


def test_a_store_that_was_vacuumed_is_still_ours(tmp_path):
    assert_works(tmp_path)
    with closing(sqlite3.connect(tmp_path / DATABASE)) as connection:
        connection.execute("VACUUM")
    assert_works(tmp_path)


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
        for another in (SqliteStore, SqliteStore.open_copy):
            with pytest.raises(StoreError, match=f"{directory / name} must be a plain file, got a symbolic link"):
                another(directory)
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
    SqliteStore(directory).close()
    assert names_in(directory) == ["LOCK", "MADE", DATABASE]
    assert victim.read_bytes() == b"keep me"
    assert_works(directory)


def test_only_the_owner_may_read_what_a_store_creates(tmp_path):
    before = os.umask(0)
    try:
        with closing(SqliteStore(tmp_path / "store")) as store:
            store.metadata.put("/one", bytes(2_000_000), expected_version=ABSENT)
            assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
            modes = {path.name: oct(stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "store").iterdir()}
            assert modes == dict.fromkeys(["LOCK", "MADE", DATABASE, f"{DATABASE}-wal"], "0o600")
        with closing(SqliteStore.open_copy(tmp_path / "store")) as copy:
            assert stat.S_IMODE(copy._path.stat().st_mode) == 0o700
            assert {stat.S_IMODE(path.stat().st_mode) for path in copy._path.iterdir()} == {0o600}
    finally:
        os.umask(before)


def test_the_modes_of_what_is_there_are_left_alone(tmp_path):
    SqliteStore(tmp_path / "store").close()
    (tmp_path / "store").chmod(0o750)
    for path in (tmp_path / "store").iterdir():
        path.chmod(0o640)
    assert_works(tmp_path / "store")
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o750
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "store").iterdir()} == {0o640}


def test_a_lost_database_is_told_beside_a_foreign_file_too(tmp_path):
    assert_works(tmp_path)
    (tmp_path / DATABASE).unlink()
    (tmp_path / "notes.txt").write_bytes(b"mine")
    with pytest.raises(CorruptStateError, match="the database of a store that was made"):
        SqliteStore(tmp_path)
    (tmp_path / "MADE").write_bytes(b"mine too")
    with pytest.raises(StoreError, match="is not an ackstate store"):
        SqliteStore(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_that_is_used_up_is_a_full_disk(tmp_path, monkeypatch, number):
    def no_room(_directory):
        raise OSError(number, "no room")

    monkeypatch.setattr(sqlite_database, "_create", no_room)
    with pytest.raises(StoreFullError):
        SqliteStore(tmp_path)


# One process at a time


def test_a_second_opener_in_this_process_is_refused(tmp_path):
    with closing(SqliteStore(tmp_path)) as store:
        ledger_id = store.ledgers.create("billing")
        with pytest.raises(StoreLockedError, match=f"{tmp_path} is open in process {os.getpid()}"):
            SqliteStore(tmp_path)
        # The refused one must not have released the claim of the first one.
        store.ledgers.append(ledger_id, [b"x"])
        with pytest.raises(StoreLockedError):
            SqliteStore(tmp_path)
    assert_works(tmp_path)


def test_the_name_of_the_lock_may_be_removed_and_another_opener_is_still_refused(tmp_path):
    with closing(SqliteStore(tmp_path)) as store:
        ledger_id = store.ledgers.create("billing")
        (tmp_path / "LOCK").unlink()
        with pytest.raises(StoreLockedError, match="is open in process unknown"):
            SqliteStore(tmp_path)
        assert not (tmp_path / "LOCK").exists()
        assert store.ledgers.append(ledger_id, [b"x"]) == 0
    assert_works(tmp_path)


def test_a_link_to_a_directory_is_that_directory_and_open_once(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "store")
    with closing(SqliteStore(tmp_path / "store")), pytest.raises(StoreLockedError):
        SqliteStore(tmp_path / "link")
    with closing(SqliteStore(tmp_path / "link")), pytest.raises(StoreLockedError):
        SqliteStore(tmp_path / "store")
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


def test_threads_share_a_store(tmp_path):
    with closing(SqliteStore(tmp_path)) as store:
        ledger_id = store.ledgers.create("billing")
        ids: list[int] = []

        def append_some():
            ids.extend(store.ledgers.append(ledger_id, [b"x"]) for _ in range(20))

        threads = [threading.Thread(target=append_some) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ids) == list(range(80))


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
    child = os.fork()
    if child == 0:
        lines = itertools.count()

        def trace(frame, event, _):
            if not Path(frame.f_code.co_filename).name.startswith("sqlite"):
                return None
            if event == "line":
                before_line(next(lines))
            return trace

        try:
            sys.settrace(trace)
            SqliteStore(directory)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


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


def kill_at(number):
    return lambda line: line == number and os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_creator_killed_at_any_line_leaves_a_store_or_nothing(tmp_path):
    left: set[tuple[str, ...]] = set()
    numbers = lines_after_changes(tmp_path / "whole")
    # Between two changes, every kill leaves the same files.
    for number in numbers:
        directory = tmp_path / "parent" / str(number)
        assert opened_in_child(directory, kill_at(number)) == signal.SIGKILL
        left.add(tuple(names_in(directory)) if directory.exists() else ())
        assert_works(directory)
        assert names_in(directory) == ["LOCK", "MADE", DATABASE]
    # The kills did hit before, amid and after the making of the database.
    assert {(), ("LOCK",), ("LOCK", UNFINISHED), ("LOCK", DATABASE), ("LOCK", "MADE.new", DATABASE)} <= left


@pytest.mark.parametrize(
    "left",
    [
        {},
        {UNFINISHED: b""},
        {UNFINISHED: b"SQLite format 3\0".ljust(4096, b"\0"), f"{UNFINISHED}-journal": b"half"},
        {UNFINISHED: b"x", f"{UNFINISHED}-wal": b"x", f"{UNFINISHED}-shm": b"x"},
    ],
)
def test_what_a_crash_in_the_making_leaves_is_replaced(tmp_path, left):
    (tmp_path / "LOCK").write_bytes(b"12345\n")
    for name, content in left.items():
        (tmp_path / name).write_bytes(content)
    assert_works(tmp_path)
    assert names_in(tmp_path) == ["LOCK", "MADE", DATABASE]


# Damage


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def fill(store: SqliteStore) -> None:
    """Ledgers, entries and values over some dozens of pages, overflow pages among them."""
    for number in range(4):
        ledger_id = store.ledgers.create(f"owner-{number % 2}")
        for size in range(0, 400, 20):
            store.ledgers.append(ledger_id, [b"%d-%d" % (number, size) * size])
        store.ledgers.append(ledger_id, [bytes(20_000)])
        store.metadata.put(f"/values/{number}", b"value" * 300, expected_version=ABSENT)
    store.ledgers.delete(3)
    store.ledgers.fence(2)


def use_all(store: SqliteStore) -> None:
    """Read all that is there, and write."""
    calls = [lambda name=name: store.metadata.get(f"/values/{name}") for name in range(4)]
    calls += [lambda: store.metadata.children("/"), lambda: store.metadata.children("/values")]
    for ledger_id in range(1, 5):
        calls.append(lambda ledger_id=ledger_id: store.ledgers.read(ledger_id, 0, 21))
        calls.append(lambda ledger_id=ledger_id: store.ledgers.append(ledger_id, [b"more"]))
    calls += [lambda: store.ledgers.owned_by("owner-0"), lambda: store.ledgers.create("owner-0")]
    calls += [
        lambda: store.metadata.delete("/values/1", expected_version=0),
        lambda: store.metadata.put("/values/0", b"changed", expected_version=0),
        lambda: store.ledgers.delete(1),
    ]
    for call in calls:
        with contextlib.suppress(AckStateError):
            call()


def survives(directory: Path) -> bool:
    """Use a damaged store; whatever is raised must be ours. Say whether it opened."""
    try:
        store = SqliteStore(directory)
    except AckStateError:
        return False
    use_all(store)
    store.close()
    return True


@pytest.fixture
def damaged(tmp_path):
    """Put a fresh copy of a store's files in place and return where they are."""
    with closing(SqliteStore(tmp_path / "sound")) as store:
        fill(store)
        # Copied while open: some of the content is in the log only.
        shutil.copytree(tmp_path / "sound", tmp_path / "open")
    shutil.copytree(tmp_path / "sound", tmp_path / "closed")

    def copy(state: str) -> Path:
        shutil.rmtree(tmp_path / "damaged", ignore_errors=True)
        return Path(shutil.copytree(tmp_path / state, tmp_path / "damaged"))

    return copy


@pytest.mark.slow
@pytest.mark.parametrize("flips", [150, pytest.param(2_000, marks=pytest.mark.soak)])
def test_flipped_bits_raise_nothing_but_our_errors(damaged, flips):
    chance = random.Random(0)
    opened = 0
    for _ in range(flips):
        database = damaged("closed") / DATABASE
        content = database.read_bytes()
        # Half of them in the first pages, where the schema and the roots of the tables are.
        offset = chance.randrange(chance.choice([8 * 4096, len(content)]))
        overwrite(database, offset, bytes([content[offset] ^ 1 << chance.randrange(8)]))
        opened += survives(database.parent)
    assert 0 < opened < flips


@pytest.mark.slow
def test_wiped_pages_raise_nothing_but_our_errors(damaged):
    size = (damaged("closed") / DATABASE).stat().st_size
    for offset in range(0, size, 4096):
        for wiped in (bytes(4096), bytes(range(256)) * 16, b"\xff" * 4096):
            database = damaged("closed") / DATABASE
            overwrite(database, offset, wiped)
            survives(database.parent)


@pytest.mark.slow
def test_a_truncated_database_is_refused_when_it_is_opened(damaged):
    size = (damaged("closed") / DATABASE).stat().st_size
    for length in (*range(0, size, 4096), *range(50, size, 4999), size - 1):
        database = damaged("closed") / DATABASE
        os.truncate(database, length)
        with pytest.raises(CorruptStateError, match=DATABASE):
            SqliteStore(database.parent)


@pytest.mark.slow
def test_a_damaged_log_is_refused_unless_it_may_be_a_torn_last_transaction(damaged):
    chance = random.Random(0)
    log = f"{DATABASE}-wal"
    content = (damaged("open") / log).read_bytes()
    refused = 0
    for _ in range(60):
        directory = damaged("open")
        # Half of them in the last transaction: it fences ledger 2, in two pages.
        offset = chance.randrange(chance.choice([0, len(content) - 2 * 4120]), len(content))
        overwrite(directory / log, offset, bytes([content[offset] ^ 1 << chance.randrange(8)]))
        try:
            store = SqliteStore(directory)
        except CorruptStateError:
            refused += 1
            continue
        with closing(store):
            assert len(store.ledgers.read(1, 0, 21)) == 21
            assert store.ledgers.owned_by("owner-0") == [1]
    assert 20 < refused < 60


def test_opening_folds_what_a_crash_left_in_the_log_into_the_database(damaged):
    directory = damaged("open")
    log = directory / f"{DATABASE}-wal"
    assert log.stat().st_size > 0
    with closing(SqliteStore(directory)) as store:
        assert log.stat().st_size == 0
        assert store.ledgers.owned_by("owner-1") == [2, 4]


def test_a_lost_entry_is_noticed(tmp_path):
    with closing(SqliteStore(tmp_path)) as store:
        fill(store)
    with closing(sqlite3.connect(tmp_path / DATABASE, isolation_level=None)) as connection:
        connection.execute("DELETE FROM entries WHERE ledger_id = 1 AND last_id = 20")
        connection.execute("DELETE FROM entries WHERE ledger_id = 2 AND last_id = 5")
    with closing(SqliteStore(tmp_path)) as store:
        for call in (
            store.ledgers.last,
            store.ledgers.fence,
            lambda ledger_id: store.ledgers.append(ledger_id, [b""]),
        ):
            with pytest.raises(CorruptStateError, match="ledger 1 with 21 entries, the last one 19"):
                call(1)
        with pytest.raises(CorruptStateError, match="entries missing in ledger 2"):
            store.ledgers.read(2, 0, 21)
        assert len(store.ledgers.read(4, 0, 21)) == 21


# Damaged pages


def pages_of(directory: Path) -> dict[str, list[int]]:
    """Which pages belong to which table or index, the first at 1."""
    with closing(sqlite3.connect(directory / DATABASE)) as connection:
        roots = dict(connection.execute("SELECT name, rootpage FROM sqlite_master"))
        ((count,),) = connection.execute("PRAGMA page_count")
    content = (directory / DATABASE).read_bytes()
    return {name: list(subtree(content, root)) for name, root in roots.items()} | {"all": list(range(1, count + 1))}


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


@pytest.mark.parametrize("tree", ["entries", "sqlite_autoindex_entries_1", "ledgers", "ledgers_by_owner", "metadata"])
def test_a_damaged_page_is_found_when_the_store_is_opened(damaged, tree):
    directory = damaged("closed")
    for page in pages_of(directory)[tree]:
        database = damaged("closed") / DATABASE
        # The kind of the page and the begin of its list of cells.
        overwrite(database, (page - 1) * 4096 + 1, b"\xff" * 16)
        damage = contents_of(directory)
        with pytest.raises(CorruptStateError, match=f"{database}.*sound pages|{database}.*malformed"):
            SqliteStore(directory)
        assert contents_of(directory)[DATABASE] == damage[DATABASE]


def changed(directory: Path, statement: str) -> SqliteStore:
    """Change a row behind the store's back, and open it: the pages are sound."""
    with closing(sqlite3.connect(directory / DATABASE, isolation_level=None)) as connection:
        connection.execute(statement)
    return SqliteStore(directory)


def test_a_row_that_is_not_as_it_was_written_is_found_when_it_is_read(damaged):
    for statement in (
        "UPDATE entries SET data = CAST(x'00' || substr(data, 2) AS BLOB) WHERE ledger_id = 1 AND last_id = 4",
        "UPDATE entries SET data = x'' WHERE ledger_id = 1 AND last_id = 4",
        "UPDATE entries SET data = (SELECT data FROM entries WHERE ledger_id = 2 AND last_id = 4)"
        " WHERE ledger_id = 1 AND last_id = 4",
    ):
        with closing(changed(damaged("closed"), statement)) as store:
            assert len(store.ledgers.read(1, 0, 4)) == 4
            with pytest.raises(CorruptStateError, match="entry 4 of ledger 1, which is not as it was written"):
                store.ledgers.read(1, 0, 21)
    other = changed(damaged("closed"), "UPDATE identity SET salt = x'0011223344556677'")
    with closing(other), pytest.raises(CorruptStateError, match="entry 0 of ledger 1"):
        other.ledgers.read(1, 0, 1)


def test_an_entry_whose_number_has_become_a_text_is_damage(damaged):
    """A changed bit in a row of the index changes the type of a number."""
    statement = "UPDATE entries SET last_id = 'x' WHERE ledger_id = 1 AND last_id = 4"
    with closing(changed(damaged("closed"), statement)) as store:
        for use in (store.ledgers.last, store.ledgers.fence, lambda ledger_id: store.ledgers.append(ledger_id, [b""])):
            with pytest.raises(CorruptStateError, match="ledger 1 with 21 entries, the last one 'x'"):
                use(1)


def test_a_damaged_value_may_be_replaced_or_deleted_at_the_version_that_it_has(damaged):
    statement = "UPDATE metadata SET data = CAST(x'00' || substr(data, 2) AS BLOB) WHERE path < '/values/2'"
    with closing(changed(damaged("closed"), statement)) as store:
        with pytest.raises(DamagedValueError, match="the value of /values/0, which is not") as caught:
            store.metadata.get("/values/0")
        assert store.metadata.put("/values/0", b"anew", expected_version=caught.value.version) == 1
        assert store.metadata.get("/values/0") == Versioned(b"anew", 1)
        store.metadata.delete("/values/1", expected_version=0)
        assert store.metadata.get("/values/1") is None


def test_an_index_that_disagrees_with_its_table_is_refused(damaged):
    """A changed bit in an index entry: SQLite's quick check passes, and the value looks absent."""
    content = (damaged("closed") / DATABASE).read_bytes()
    (page,) = pages_of(damaged("closed"))["sqlite_autoindex_metadata_1"]
    at = content.index(b"/values/2", (page - 1) * 4096)
    assert at < page * 4096
    directory = damaged("closed")
    overwrite(directory / DATABASE, at, b"/valuer/2")
    with pytest.raises(CorruptStateError, match=r"sound pages.*metadata"):
        SqliteStore(directory)
    with closing(SqliteStore(directory, check_pages=False)) as store:
        assert store.metadata.get("/values/2") is None


def test_a_ledger_that_a_damaged_index_gives_to_another_owner_is_damage(damaged):
    """Its owner would delete it."""
    content = (damaged("closed") / DATABASE).read_bytes()
    (page,) = pages_of(damaged("closed"))["ledgers_by_owner"]
    at = content.index(b"owner-1\x02", (page - 1) * 4096)
    assert at < page * 4096
    directory = damaged("closed")
    overwrite(directory / DATABASE, at, b"owner-0")
    with closing(SqliteStore(directory, check_pages=False)) as store:
        with pytest.raises(CorruptStateError, match="ledger 2 of 'owner-1' where one of owner-0 belongs"):
            store.ledgers.owned_by("owner-0")
        assert store.ledgers.owned_by("owner-1") == [4]


def test_without_the_check_of_pages_damage_is_found_when_it_is_read(damaged):
    page = pages_of(damaged("closed"))["entries"][-1]
    directory = damaged("closed")
    overwrite(directory / DATABASE, (page - 1) * 4096 + 1, b"\xff" * 16)
    with closing(SqliteStore(directory, check_pages=False)) as store:
        assert len(store.ledgers.read(1, 0, 5)) == 5
        with pytest.raises(CorruptStateError):
            store.ledgers.read(4, 0, 21)


@pytest.mark.slow
def test_a_wiped_page_is_found_when_the_store_is_opened_unless_it_holds_but_one_entry(damaged):
    directory = damaged("closed")
    pages = pages_of(directory)
    trees = {page for name, owned in pages.items() if name != "all" for page in owned}
    for page in pages["all"]:
        database = damaged("closed") / DATABASE
        overwrite(database, (page - 1) * 4096, b"\xff" * 4096)
        if page in trees or page == 1:
            with pytest.raises(CorruptStateError):
                SqliteStore(directory)
        else:
            survives(directory)


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
