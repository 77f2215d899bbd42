"""`ackstate fsck` and `ackstate inspect` on real stores: their reports come true, and they change no byte."""

import json
import sqlite3
import struct
import tempfile
from contextlib import closing
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ackstate import CursorConfig, Format, ManagedCursor, Message, Position, Repair, SqliteStore, UnreadableCursorError
from ackstate.cursor.journal import cursor_owner, cursor_path
from ackstate.stores.sqlite import SEAL_BYTES
from ackstate.topic import MessageLog
from ackstate.wire import native
from command_line import assert_one_line, run, run_apart, tree
from pulsar_nodes import CURSOR_RECORD, layout_of, new_nodes
from pulsar_nodes import TOPIC as PULSAR_TOPIC

TOPIC = "persistent://a/b/orders"
NAMES = ("audit", "billing")
FORMATS = {"audit": Format.PULSAR, "billing": Format.NATIVE}
DATABASE = "ackstate.sqlite3"
RECORD = "UPDATE metadata SET data = ? WHERE path = ?"
ENTRY = "UPDATE entries SET data = ? WHERE ledger_id = ? AND last_id = ?"


def fill(store):
    """Publish, and let a cursor of each format persist five times."""
    log = MessageLog.open(store, topic=TOPIC)
    log.publish([Message(b"")] * 100)
    for name in NAMES:
        cursor = opened(store, name)
        for number in range(5):
            cursor.ack_entries(log.ledgers.current_ledger_id, [10 * number + 2, 10 * number + 4], now_ms=0)
            cursor.persist(now_ms=0)
        cursor.mark_delete(Position(log.ledgers.current_ledger_id, 2), now_ms=0, properties={"step": 9})
        cursor.persist(now_ms=0)


def filled(path):
    """Make the store in a directory, and close it."""
    with closing(SqliteStore(path)) as store:
        fill(store)
    return path


def opened(store, name, **options):
    return ManagedCursor.open(
        store,
        topic=TOPIC,
        subscription=name,
        ledgers=MessageLog.open(store, topic=TOPIC).ledgers,
        config=CursorConfig(format=FORMATS[name]),
        now_ms=0,
        **options,
    )


class StoreDamage:
    """Changes a closed store behind its back."""

    def __init__(self, path):
        self.path = path

    def do(self, statement, *values):
        with closing(sqlite3.connect(self.path / DATABASE)) as connection, connection:
            return connection.execute(statement, values).fetchall()

    def journal(self, name="billing"):
        """The ledger's id and its entries."""
        owner = cursor_owner(cursor_path(TOPIC, name))
        ((ledger_id,),) = self.do("SELECT id FROM ledgers WHERE owner = ?", owner)
        rows = self.do("SELECT data FROM entries WHERE ledger_id = ? ORDER BY last_id", ledger_id)
        return ledger_id, [row[8:-SEAL_BYTES] for (row,) in rows]

    def write_entry(self, ledger_id, sequence, data):
        """As the store would have written it: the cursor has to find the damage."""
        key = struct.pack("<cqq", b"E", ledger_id, sequence)
        self.do(ENTRY, self.sealed(key, struct.pack("<II", 1, len(data)) + data), ledger_id, sequence)

    def sealed(self, key, data):
        ((salt,),) = self.do("SELECT salt FROM identity")
        return data + google_crc32c.value(salt + key + data).to_bytes(SEAL_BYTES, "little")

    def flip(self, sequence, *, name="billing", byte=40):
        ledger_id, entries = self.journal(name)
        self.write_entry(ledger_id, sequence, flipped(entries[sequence], byte))

    def flip_row(self, sequence):
        """Behind the back of the store, too."""
        ledger_id, entries = self.journal()
        self.do(ENTRY, bytes(8) + flipped(entries[sequence], 40) + b"seal", ledger_id, sequence)

    def flip_record_row(self):
        ((row,),) = self.do("SELECT data FROM metadata WHERE path = ?", cursor_path(TOPIC, "billing"))
        self.do(RECORD, flipped(row, 9), cursor_path(TOPIC, "billing"))

    def tear(self):
        ledger_id, entries = self.journal()
        self.write_entry(ledger_id, len(entries) - 1, entries[-1][:-9])

    def flip_record(self, name="billing"):
        path = cursor_path(TOPIC, name)
        ((row, version),) = self.do("SELECT data, version FROM metadata WHERE path = ?", path)
        self.do(
            RECORD, self.sealed(struct.pack("<cq", b"V", version) + path.encode(), flipped(row[:-SEAL_BYTES], 9)), path
        )

    def delete_record(self, name="billing"):
        self.do("DELETE FROM metadata WHERE path = ?", cursor_path(TOPIC, name))

    def delete_journal(self, name="billing"):
        ledger_id, _ = self.journal(name)
        self.do("DELETE FROM entries WHERE ledger_id = ?", ledger_id)
        self.do("DELETE FROM ledgers WHERE id = ?", ledger_id)

    def lose_an_entry(self):
        ledger_id, _ = self.journal()
        self.do("DELETE FROM entries WHERE ledger_id = ? AND last_id = 2", ledger_id)


def flipped(data, byte):
    changed = bytearray(data)
    changed[byte % len(data)] ^= 0x21
    return bytes(changed)


def fsck(capsys, path):
    """Check a store, see that it was not touched, and return the status and, by subscription, the findings."""
    before = tree(path)
    outcome = run(capsys, "fsck", path, "--json")
    assert tree(path) == before
    assert outcome.err == ""
    answer = json.loads(outcome.out)
    assert answer["store"] == str(path)
    assert answer["problems"] == sum(len(cursor["problems"]) for cursor in answer["cursors"])
    return outcome.status, {cursor["subscription"]: cursor for cursor in answer["cursors"]}


@pytest.fixture
def path(tmp_path):
    return filled(tmp_path / "store")


COMMANDS = ("fsck", "inspect", "explain")


# --- fsck


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_left_out_of_a_cluster_is_told_and_the_rest_shown(capsys, monkeypatch, command):
    nodes = new_nodes()
    for topic in ("public/default/persistent/t1", "demo/standalone/ns1/persistent/t"):
        nodes.set(f"/managed-ledgers/{topic}/s", b"\x08" + b"\xff" * 9 + b"\x01" + CURSOR_RECORD[2:])
    monkeypatch.setattr(nodes, "close", lambda: None)
    monkeypatch.setattr("ackstate.analysis.cli.store.opened_cluster", lambda *_, **__: layout_of(nodes))
    outcome = run(capsys, command, "pulsar+zk://h:1", "--json")
    assert (outcome.status, outcome.err) == (1, "")
    answer = json.loads(outcome.out)
    assert [(each["topic"], each["status"]) for each in answer["cursors"]] == [(PULSAR_TOPIC, "ok")]
    (missing,) = answer["missing"]
    assert missing["path"] == "/managed-ledgers/demo/standalone/ns1"
    assert f"{missing['path']}: {missing['why']}\n" in run(capsys, command, "pulsar+zk://h:1").out
    if command != "fsck":
        assert run(capsys, command, "pulsar+zk://h:1", "--topic", PULSAR_TOPIC).status == 0


def test_a_sound_store_is_clean_and_stays_as_it_is_and_goes_on_if_it_is_open(path, capsys):
    status, cursors = fsck(capsys, path)
    with closing(SqliteStore(path)) as store:
        assert fsck(capsys, path) == (status, cursors)
        store.ledgers.create("goes on")
    assert status == 0
    assert set(cursors) == set(NAMES)
    for name, cursor in cursors.items():
        assert (cursor["status"], cursor["problems"], cursor["notes"]) == ("ok", [], [])
        assert (cursor["topic"], cursor["format"]) == (TOPIC, FORMATS[name])
        assert (cursor["mark_delete"], cursor["range_count"], cursor["log_end"]) == ("1:2", 9, "1:99")
    assert cursors["billing"]["format_version"] == native.POINTER_VERSION


def test_the_keys_of_the_json_are_those_of_the_documentation(path, capsys):
    StoreDamage(path).flip(3)
    StoreDamage(path).tear()
    status, out, err = run(capsys, "fsck", path)
    assert (status, err) == (1, "")
    assert "repair=Repair.DISCARD_DAMAGED_RECORDS: 3 of 7 records, mark-delete 1:-1, 4 ranges, gives up at least" in out
    assert out.endswith("2 cursors, 1 problem\n")
    _, cursors = fsck(capsys, path)
    assert set(cursors["billing"]) == {
        "topic", "subscription", "status", "format", "format_version", "metadata_version", "cursor_ledger_id",
        "record_count", "records_replayed", "mark_delete", "range_count", "log_end", "leftovers", "problems", "notes",
    }  # fmt: skip
    (problem,) = cursors["billing"]["problems"]
    assert set(problem) == {"what", "offset", "expected", "found", "repairs"}
    (inspected_,) = inspected(capsys, path, "--subscription=billing", status=1)
    document = (Path(__file__).parents[4] / "docs" / "json-output.md").read_text(encoding="utf-8")
    assert inspected_["state"] is None
    assert [bool(record["damage"]) for record in inspected_["records"]] == [False] * 3 + [True] + [False] * 2 + [True]
    keys = {*cursors["billing"], *problem, *problem["repairs"][0], *inspected_, *inspected_["records"][0]}
    assert {key for key in keys if f"`{key}`" not in document} == set()
    assert set(problem["repairs"][0]) == {
        "repair", "records_replayed", "record_count", "bytes_discarded", "mark_delete", "range_count",
        "acks_given_up_min", "properties_given_up", "has_unknown_properties", "cursor_properties_given_up",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("damage", "repairs"),
    [
        (lambda d: d.flip(3), ["DISCARD_DAMAGED_RECORDS", "USE_METADATA_SNAPSHOT", "START_ANEW"]),
        (lambda d: d.flip_record(), ["USE_ORPHAN_JOURNAL", "START_ANEW"]),
        (lambda d: d.delete_record("audit"), ["USE_ORPHAN_JOURNAL", "START_ANEW"]),
        (lambda d: d.delete_journal(), ["USE_METADATA_SNAPSHOT", "START_ANEW"]),
        (lambda d: d.lose_an_entry(), ["DISCARD_DAMAGED_RECORDS", "USE_METADATA_SNAPSHOT", "START_ANEW"]),
        (lambda d: d.flip_row(3), ["DISCARD_DAMAGED_RECORDS", "USE_METADATA_SNAPSHOT", "START_ANEW"]),
        (lambda d: d.flip_record_row(), ["USE_ORPHAN_JOURNAL", "START_ANEW"]),
    ],
)
def test_the_repairs_announced_are_offered_and_do_what_they_say(path, tmp_path, capsys, damage, repairs):
    damage(StoreDamage(path))
    status, cursors = fsck(capsys, path)
    ((name, cursor),) = ((name, cursor) for name, cursor in cursors.items() if cursor["problems"])
    assert status == 1
    assert cursor["status"] == "problem"
    (problem,) = cursor["problems"]
    assert str(tmp_path) not in problem["what"]
    assert [outcome["repair"] for outcome in problem["repairs"]] == repairs
    for outcome in problem["repairs"]:
        with closing(SqliteStore.open_copy(path)) as copy:
            with pytest.raises(UnreadableCursorError) as refused:
                opened(copy, name)
            assert [repair.name for repair in refused.value.repairs] == repairs
            report = opened(copy, name, repair=Repair[outcome["repair"]]).recovery_report
        assert outcome["mark_delete"] == str(report.mark_delete)
        for name_of_number in ("range_count", "records_replayed", "bytes_discarded", "acks_given_up_min"):
            assert outcome[name_of_number] == getattr(report, name_of_number)
        assert outcome["properties_given_up"] == report.properties_given_up


# --- stores that cannot be read


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Where copies go."""
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_store_is_one_line(tmp_path, temporary, capsys, command):
    (tmp_path / "file").write_text("")
    for name in ("empty", "noise"):
        (tmp_path / name).mkdir()
    (tmp_path / "noise" / DATABASE).write_bytes(b"noise" * 50)
    damaged, lost, linked, sparse = (filled(tmp_path / name) for name in ("damaged", "lost", "linked", "sparse"))
    with (damaged / DATABASE).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * 4096)
    for store in (lost, linked):
        (store / DATABASE).unlink()
    (linked / DATABASE).symlink_to(tmp_path / "file")
    before = tree(tmp_path)
    for name, *words in (
        *((tmp_path / name,) for name in ("file", "empty", "noise", "missing")),
        ("",), ("bookkeeper://",), ("bookkeeper://localhost",), ("bookkeeper:///root",), ("bookkeeper://a:b/c",),
        ("bookkeeper://a/b/",),
        (damaged, damaged / DATABASE),
        (lost, lost / DATABASE, "of a store that was made"),
        (linked, f"{linked / DATABASE} must be a plain file, got a symbolic link;"),
    ):  # fmt: skip
        assert_one_line(run(capsys, command, name), *(words or [name]))
    assert tree(tmp_path) == before
    with (sparse / DATABASE).open("ab") as file:
        file.truncate(50 << 30)
    assert_one_line(run(capsys, command, sparse), f"{sparse}: copy_bytes_max", f"got {4 << 30}")
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_store_above_copy_bytes_max_is_refused_in_one_line(path, temporary, capsys, command):
    refused = run(capsys, command, path, "--copy-bytes-max", 1_000)
    assert_one_line(refused, f"{path}: copy_bytes_max (--copy-bytes-max) must be at least", "got 1000")
    size = sum(file.stat().st_size for file in path.iterdir())
    assert run(capsys, command, path, "--copy-bytes-max", size).status == 0
    assert run(capsys, command, path, "--copy-bytes-max", -1).status == 2
    assert not list(temporary.iterdir())


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 30), st.integers(0, 300), st.integers(1, 255))
def test_any_changed_byte_is_told_without_a_traceback(path, capsys, which, at, mask):
    statements = {"SELECT path, data FROM metadata ORDER BY path": RECORD}
    statements["SELECT ledger_id, last_id, data FROM entries WHERE ledger_id > 1 ORDER BY 1, 2"] = ENTRY
    damage = StoreDamage(path)
    rows = [(update, row) for select, update in statements.items() for row in damage.do(select)]
    update, (*key, data) = rows[which % len(rows)]
    changed = bytearray(data)
    changed[at % len(data)] ^= mask
    damage.do(update, bytes(changed), *key)
    try:
        for command in ("fsck", "inspect"):
            outcome = run(capsys, command, path)
            assert outcome.status in {0, 1}
            assert outcome.err == ""
    finally:
        damage.do(update, data, *key)


# --- inspect


def inspected(capsys, *arguments, status=0):
    outcome = run(capsys, "inspect", *arguments, "--json")
    assert (outcome.status, outcome.err) == (status, "")
    return json.loads(outcome.out)["cursors"]


def test_inspect_shows_state_and_journal(path, capsys):
    before = tree(path)
    audit, billing = inspected(capsys, path)
    assert tree(path) == before
    for cursor in (audit, billing):
        assert (cursor["state"]["mark_delete"], cursor["state"]["range_count"]) == ("1:2", 9)
        assert cursor["state"]["ranges"][0] == {"ledger_id": 1, "first": 4, "last": 4}
        assert cursor["state"]["properties"] == {"step": 9}
        assert cursor["journal_bytes"] == sum(record["size_bytes"] for record in cursor["records"])
    assert [record["kind"] for record in billing["records"]] == ["SNAPSHOT"] + ["DELTA"] * 6
    assert [record["entry_count"] for record in billing["records"]] == [0, 2, 2, 2, 2, 2, 0]
    _, entries = StoreDamage(path).journal()
    assert [record["size_bytes"] for record in billing["records"]] == list(map(len, entries))


def test_inspect_prints_the_ranges_as_pulsar_does_and_twenty_unless_asked(path, capsys):
    with closing(SqliteStore(path)) as store:
        cursor = opened(store, "billing")
        cursor.ack_entries(1, range(51, 99, 2), now_ms=0)
        cursor.persist(now_ms=0)
        text, count = str(cursor.deleted), cursor.deleted.range_count
    some = run(capsys, "inspect", path, "--subscription", "billing").out
    every = run(capsys, "inspect", path, "--subscription", "billing", "--all-ranges").out
    assert text in every
    assert text not in some
    assert f"] and {count - 20} more (--all-ranges)" in some
    assert text.startswith(some[some.index("[(") : some.index("] and")])
    assert len(inspected(capsys, path, "--subscription=billing")[0]["state"]["ranges"]) == 20
    assert len(inspected(capsys, path, "--subscription=billing", "--all-ranges")[0]["state"]["ranges"]) == count


def test_inspect_chooses_by_topic_and_subscription(path, capsys):
    assert [cursor["subscription"] for cursor in inspected(capsys, path, "--topic", TOPIC)] == list(NAMES)
    assert [cursor["subscription"] for cursor in inspected(capsys, path, "--subscription=audit")] == ["audit"]
    for arguments in (["--subscription=nope"], ["--topic=nope"], ["--topic=nope", "--subscription=audit"]):
        assert_one_line(run(capsys, "inspect", path, *arguments), "'nope'", "'audit'", "'billing'", TOPIC)


def test_a_batch_and_cursor_properties_are_shown(path, capsys):
    with closing(SqliteStore(path)) as store:
        cursor = opened(store, "billing")
        cursor.ack_batch(Position(1, 60), [0b101], now_ms=0)
        cursor.set_cursor_properties({"owner": "north"})
        cursor.persist(now_ms=0)
    (found,) = inspected(capsys, path, "--subscription=billing")
    assert found["state"]["batches"] == [{"position": "1:60", "unacked_words": [0b101]}]
    assert found["cursor_properties"] == {"owner": "north"}
    out = run(capsys, "inspect", path, "--subscription=billing").out
    assert "1:60: 2 unacked" in out
    assert "owner = north" in out


@pytest.mark.slow
def test_the_command_itself_says_it_by_its_status(path):
    assert run_apart("fsck", path).status == 0
    StoreDamage(path).flip(3)
    outcome = run_apart("fsck", path)
    assert (outcome.status, outcome.err) == (1, "")
